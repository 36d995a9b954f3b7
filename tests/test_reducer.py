"""Finishing a reduction on a bare wrapper, in a hand-written loop."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, Branches, OnlyOnce, SomeRanks, Usage, WideBranches, all_used, never_first, never_last
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import adaptive_ddp.reducer
from adaptive_ddp import finish_reduction
from adaptive_ddp.reducer import Reduction, dismantle


def bare_loop(model_class: type[Branches], usage: Usage, options: dict[str, Any]) -> tuple[list[list[str]], list[str]]:
    """Train a bare wrapper for three steps; return what was missing, and where the gradients are not the mean."""
    torch.manual_seed(0)
    module = model_class(usage)
    module.forward = module.training_step
    ddp = DistributedDataParallel(module, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    missing, wrong = [], []
    for step in range(3):
        batch = torch.randn(8, WIDTH, generator=generator)
        local = torch.autograd.grad(
            module.training_step(batch, step), list(module.parameters()), allow_unused=True, retain_graph=False
        )
        ddp(batch, step).backward()
        missing.append(finish_reduction(ddp))
        for (name, parameter), gradient in zip(module.named_parameters(), local, strict=True):
            mean = torch.zeros_like(parameter) if gradient is None else gradient / dist.get_world_size()
            dist.all_reduce(mean)
            if not torch.equal(mean, parameter.grad):
                wrong.append(f"{name} at step {step}")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    return missing, wrong


BRANCH_1 = [f"branches.1.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}], ids=str)
@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (all_used, {0: [[], [], []], 1: [[], [], []]}),
        (SomeRanks(1, 1), {0: [[], [], []], 1: [[], BRANCH_1, BRANCH_1]}),
        (OnlyOnce(0, 0), {0: [BRANCH_1, [], []], 1: [[], [], []]}),
    ],
    ids=["all used", "some ranks", "once"],
)
def test_the_gradients_are_the_mean_and_the_missing_are_named(
    ranks: Ranks, usage: Usage, expected: dict[int, list[list[str]]], options: dict[str, Any]
) -> None:
    for rank, (missing, wrong) in enumerate(ranks(2).run(bare_loop, Branches, usage, options)):
        assert missing == expected[rank]
        assert wrong == []


@pytest.mark.parametrize("usage", [never_first, never_last])
def test_more_than_a_hundred_missing_parameters_are_all_named(ranks: Ranks, usage: Usage) -> None:
    for missing, wrong in ranks(2).run(bare_loop, WideBranches, usage, {}):
        assert [len(names) for names in missing] == [120] * 3
        assert wrong == []


def silent_rank(parameters: int, options: dict[str, Any], stale: bool) -> tuple[list[str], list[float]]:
    """Rank 0's loss reaches nothing."""
    module = nn.Module()
    for index in range(parameters):
        module.register_parameter(str(index), nn.Parameter(torch.ones(2)))
    module.forward = lambda: sum(p.sum() for p in module.parameters())
    ddp = DistributedDataParallel(module, **options)
    missing = []
    for _ in range(3):
        if not stale:
            ddp.zero_grad()
        loss = ddp()
        (torch.zeros((), requires_grad=True) * 1 if dist.get_rank() == 0 else loss).backward()
        missing = finish_reduction(ddp)
    return missing, [float(parameter.grad[0]) for parameter in module.parameters()]


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}], ids=str)
@pytest.mark.parametrize("parameters", [1, 2, 5])
def test_a_rank_whose_loss_reaches_nothing(ranks: Ranks, parameters: int, options: dict[str, Any], stale: bool) -> None:
    silent, other = ranks(2).run(silent_rank, parameters, options, stale)
    assert silent == ([str(index) for index in range(parameters)], [1.5 if stale else 0.5] * parameters)
    assert other == ([], [1.5 if stale else 0.5] * parameters)


def dismantled() -> tuple[bool, bool, bool]:
    module = nn.Linear(WIDTH, WIDTH)
    old = DistributedDataParallel(module, gradient_as_bucket_view=True)
    reducer = weakref.ref(old.reducer)
    old(torch.ones(1, WIDTH)).sum().backward()
    bucket = weakref.ref(module.weight.grad.untyped_storage())
    dismantle(old)
    module.zero_grad()
    gc.collect()
    freed = reducer() is None and bucket() is None
    new = DistributedDataParallel(module, find_unused_parameters=True, init_sync=False)
    new(torch.ones(1, WIDTH)).sum().backward()
    return freed, torch.equal(module.bias.grad, torch.ones(WIDTH)), hasattr(old, "reducer")


def test_a_dismantled_wrapper_leaves_nothing_behind(ranks: Ranks) -> None:
    assert ranks(2).run(dismantled) == [(True, True, False)] * 2


def hooks_of_mixed_precision() -> tuple[int, int]:
    policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = sum(len(part._forward_pre_hooks) for part in module.modules())
    ddp = DistributedDataParallel(module, mixed_precision=policy)
    wrapped = sum(len(part._forward_pre_hooks) for part in module.modules())
    dismantle(ddp)
    return wrapped - before, sum(len(part._forward_pre_hooks) for part in module.modules()) - before


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a CUDA build of torch without a GPU cannot make the stream of that precision",
)
def test_dismantling_takes_the_hooks_of_ddps_mixed_precision_off(ranks: Ranks) -> None:
    # That precision runs on an accelerator only; its hooks are there anyway.
    assert ranks(1).run(hooks_of_mixed_precision) == [(4, 0)]


def names_of(module: nn.Module) -> list[str]:
    return Reduction(DistributedDataParallel(module)).names


def names_of_shared_and_frozen() -> list[str]:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    module[2].weight = module[0].weight
    module[1].weight.requires_grad_(False)
    return names_of(module)


def test_names_follow_the_reducer(ranks: Ranks) -> None:
    assert ranks(1).run(names_of_shared_and_frozen) == [["0.weight", "0.bias", "1.bias", "2.bias"]]


def test_reducer_imports_torch_alone() -> None:
    tree = ast.parse(Path(adaptive_ddp.reducer.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"torch"}


# DETAIL words it like INFO, but torch 2.13.0's CPU build crashes on it when a wrapper is constructed.
@pytest.mark.parametrize("level", ["OFF", "INFO"])
def test_the_missing_are_told_from_torchs_message_at_every_debug_level(level: str) -> None:
    # The level is read when torch is imported, so this takes a process of its own. The names hold numbers on purpose.
    program = (
        "import torch, torch.distributed as dist, tempfile\n"
        "from torch import nn\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "from adaptive_ddp import finish_reduction\n"
        "dist.init_process_group('gloo', init_method='file://' + tempfile.mktemp(), rank=0, world_size=1)\n"
        "module = nn.ModuleDict({f'rank 0: {n} 7': nn.Linear(2, 2) for n in range(70)})\n"
        "module.forward = lambda x: module['rank 0: 3 7'](x)\n"
        "ddp = DDP(module)\n"
        "ddp(torch.ones(1, 2)).sum().backward()\n"
        "assert len(finish_reduction(ddp)) == 138\n"
    )
    environment = {"TORCH_DISTRIBUTED_DEBUG": level, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
