"""The public surface: names, arguments, and what is refused with which words."""

from __future__ import annotations

import inspect
import subprocess
import sys
from datetime import timedelta

import pytest
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

import adaptive_ddp
from adaptive_ddp import AdaptiveDDPStrategy, UnusedParametersWarning
from adaptive_ddp.reducer import _PRIVATE_CALLS


@pytest.mark.parametrize(
    ("name", "start_method"),
    [
        ("ddp_adaptive", "popen"),
        ("ddp_adaptive_spawn", "spawn"),
        ("ddp_adaptive_fork", "fork"),
        ("ddp_adaptive_notebook", "fork"),
    ],
)
def test_a_trainer_takes_the_name(name: str, start_method: str) -> None:
    assert name in StrategyRegistry
    strategy = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert type(strategy) is AdaptiveDDPStrategy
    assert strategy._start_method == start_method


def test_it_is_a_ddp_strategy() -> None:
    assert isinstance(AdaptiveDDPStrategy(), DDPStrategy)


def test_it_takes_ddps_arguments_positionally_and_by_keyword() -> None:
    parameters = [name for name in inspect.signature(DDPStrategy.__init__).parameters if name not in ("self", "kwargs")]
    values = dict.fromkeys(parameters)
    values |= {"process_group_backend": "gloo", "timeout": timedelta(seconds=9), "start_method": "spawn"}
    for strategy in (
        AdaptiveDDPStrategy(*values.values(), bucket_cap_mb=3, gradient_as_bucket_view=True),
        AdaptiveDDPStrategy(**values, bucket_cap_mb=3, gradient_as_bucket_view=True),
    ):
        assert strategy._timeout == timedelta(seconds=9)
        assert strategy.process_group_backend == "gloo"
        assert strategy._start_method == "spawn"
        assert strategy._ddp_kwargs == {"bucket_cap_mb": 3, "gradient_as_bucket_view": True}


def test_a_decision_is_none_before_the_first_backward() -> None:
    assert AdaptiveDDPStrategy().decision is None


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("find_unused_parameters", 'strategy="ddp_find_unused_parameters_true"'),
        ("static_graph", "strategy=DDPStrategy(static_graph=True)"),
        (
            "skip_all_reduce_unused_params",
            "DDPStrategy(find_unused_parameters=True, skip_all_reduce_unused_params=True)",
        ),
    ],
)
def test_what_the_strategy_decides_itself_is_refused(argument: str, instead: str, value: bool) -> None:
    with pytest.raises(ValueError, match=f"{argument}={value}") as refused:
        AdaptiveDDPStrategy(**{argument: value})
    assert instead in str(refused.value)
    assert "Leave the argument out" in str(refused.value)


def test_a_torch_without_a_private_call_is_refused_by_version() -> None:
    # In a process of its own, since what is taken away from torch may stay away.
    program = """
import torch, torch.distributed, torch.nn.parallel
import adaptive_ddp
from adaptive_ddp.reducer import _PRIVATE_CALLS
for owner, path in _PRIVATE_CALLS:
    *classes, call = path.split(".")
    for name in classes:
        owner = getattr(owner, name)
    if owner is torch.Tensor:
        # Inherited from a class in C, which lets nobody take anything away.
        continue
    taken_away = getattr(owner, call)
    delattr(owner, call)
    try:
        adaptive_ddp.AdaptiveDDPStrategy()
    except RuntimeError as error:
        print(call, "|", error)
    setattr(owner, call, taken_away)
adaptive_ddp.AdaptiveDDPStrategy()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    refused = [line.split(" | ") for line in done.stdout.splitlines()]
    assert len(refused) == len(_PRIVATE_CALLS) - 1
    for call, error in refused:
        assert error.startswith("torch 2.")
        assert call in error
        assert "2.13.0" in error


def test_the_warning_is_a_user_warning() -> None:
    assert issubclass(UnusedParametersWarning, UserWarning)


def test_everything_in_all_is_there() -> None:
    assert all(hasattr(adaptive_ddp, name) for name in adaptive_ddp.__all__)
