"""Both Lightning packages: which is registered when, and the strategy under the Trainer of ``lightning``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankGroup, Ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from adaptive_ddp import Decision
from adaptive_ddp.decision import State


def run_program(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names_are_registered_with_a_package_that_is_imported_already() -> None:
    run_program(
        """
import lightning.pytorch
import adaptive_ddp, pytorch_lightning
from adaptive_ddp.lightning import AdaptiveDDPStrategy
strategies = {pytorch_lightning: adaptive_ddp.AdaptiveDDPStrategy, lightning.pytorch: AdaptiveDDPStrategy}
for package, strategy in strategies.items():
    trainer = package.Trainer(accelerator="cpu", devices=2, strategy="ddp_adaptive", logger=False)
    assert type(trainer.strategy) is strategy
"""
    )


def test_lightning_is_imported_and_registered_only_when_asked_for() -> None:
    run_program(
        """
import sys
import adaptive_ddp
assert "lightning" not in sys.modules
import adaptive_ddp.lightning
from lightning.pytorch.strategies import StrategyRegistry
assert {"ddp_adaptive", "ddp_adaptive_spawn", "ddp_adaptive_fork", "ddp_adaptive_notebook"} <= set(StrategyRegistry)
"""
    )


def test_without_lightning_it_says_what_to_install() -> None:
    out = run_program(
        """
import sys
sys.modules["lightning"] = None
import adaptive_ddp
try:
    import adaptive_ddp.lightning
except ImportError as error:
    print(error)
"""
    )
    assert "adaptive-ddp[lightning]" in out


def trained_with() -> tuple[str, str]:
    import package

    return package.Trainer.__module__, package.AdaptiveDDPStrategy.__mro__[2].__module__


@pytest.mark.parametrize(
    ("name", "module"), [("pytorch_lightning", "pytorch_lightning"), ("lightning", "lightning.pytorch")]
)
def test_a_group_of_ranks_trains_with_the_package_it_was_told(name: str, module: str) -> None:
    group = RankGroup(1, name)
    try:
        assert group.run(trained_with) == [(f"{module}.trainer.trainer", f"{module}.strategies.ddp")]
    finally:
        group.kill()


def train(fallback: str | None, unused_from: int, ranks: tuple[int, ...]) -> tuple[list[Tensor], Decision | None]:
    """Train under ``lightning``'s Trainer, with our strategy or, without a fallback, under the flag."""
    import lightning.pytorch as package
    from lightning.pytorch.strategies import DDPStrategy

    from adaptive_ddp.lightning import AdaptiveDDPStrategy

    class Model(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            skips = batch_idx >= unused_from and dist.get_rank() in ranks
            x = self.layers[0](batch)
            return (self.layers[2](x if skips else self.layers[1](x)) - batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)

    package.seed_everything(7, verbose=False)
    model: Any = Model()
    strategy: Any = AdaptiveDDPStrategy(fallback=fallback) if fallback else DDPStrategy(find_unused_parameters=True)
    trainer = package.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    trainer.fit(model, DataLoader(list(torch.randn((6, 8, 4), generator=generator)), batch_size=None))
    return list(model.state_dict().values()), getattr(strategy, "decision", None)


def compare(fallback: str, unused_from: int, ranks: tuple[int, ...]) -> tuple[bool, Decision | None]:
    ours, decision = train(fallback, unused_from, ranks)
    flag, _ = train(None, unused_from, ranks)
    return all(map(torch.equal, ours, flag)), decision


@pytest.mark.parametrize("ranks_that_skip", [(0, 1), (1,)])
@pytest.mark.parametrize("unused_from", [0, 3])
@pytest.mark.parametrize(("fallback", "state"), [("find_unused_parameters", State.ON), ("finish", State.FINISH)])
def test_under_lightning_weights_equal_those_of_the_flag(
    ranks: Ranks, fallback: str, state: State, unused_from: int, ranks_that_skip: tuple[int, ...]
) -> None:
    for equal, decision in ranks(2).run(compare, fallback, unused_from, ranks_that_skip):
        assert equal
        assert decision is not None
        assert (decision.state, decision.step) == (state, unused_from + 1)
