"""Train a case under several strategies in one group of ranks, and compare them step by step and bit by bit."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDTH
from oracle import OracleStrategy
from package import AdaptiveDDPStrategy, Callback, DDPStrategy, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from adaptive_ddp import Decision, UnusedParametersWarning, run

CONTENDERS: dict[str, Callable[..., DDPStrategy]] = {
    "adaptive": AdaptiveDDPStrategy,
    "flag": lambda **kwargs: DDPStrategy(find_unused_parameters=True, **kwargs),
    "plain": DDPStrategy,
    # The oracle takes none of DDP's options but the one that changes what is computed.
    "oracle": lambda broadcast_buffers=True, **kwargs: OracleStrategy(broadcast_buffers),
}


@dataclass
class Case:
    """What to train, and what it has to be equal to."""

    model: Callable[[], LightningModule]
    batches: int = 5
    strategy: dict[str, Any] = field(default_factory=dict)
    # Arguments that the references do not have.
    ours: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    references: tuple[str, ...] = ("flag", "oracle")
    # None: equal bit for bit.
    tolerance: float | None = None
    dyadic: bool = False
    ranks_are_equal: bool = True


@dataclass
class Trace:
    """What one contender did on this rank."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    flags: list[bool] = field(default_factory=list)
    decisions: list[Decision | None] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Tracer(Callback):
    """Writes a trace: gradients where the optimizer takes them, weights after each batch."""

    def __init__(self) -> None:
        self.trace = Trace()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.trace.gradients.append({name: _copy(p.grad) for name, p in pl_module.named_parameters()})
        self.trace.flags.append(getattr(trainer.strategy.model, "find_unused_parameters", None))
        self.trace.decisions.append(getattr(trainer.strategy, "decision", None))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.trace.weights.append({name: tensor.clone() for name, tensor in pl_module.state_dict().items()})


class Flags(Callback):
    """The flag at each optimizer step."""

    def __init__(self) -> None:
        self.flags: list[bool] = []

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        self.flags.append(trainer.strategy.model.find_unused_parameters)


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().to_dense().clone()


def batches_of_this_rank(case: Case) -> DataLoader:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    shape = (case.batches, 8, WIDTH)
    data = (
        torch.randint(-2, 3, shape, generator=generator).double()
        if case.dyadic
        else torch.randn(shape, generator=generator)
    )
    return DataLoader(list(data), batch_size=None)


def shared_directory() -> Path:
    """A new directory, the same on all ranks."""
    name = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(name, 0)
    return Path(name[0])


@contextmanager
def few_tallies(backwards_between: int | None, *, at_first: int = 1) -> Iterator[None]:
    """Have runs of this process go over to fewer tallies early; on all ranks alike."""
    with pytest.MonkeyPatch.context() as patch:
        if backwards_between is not None:
            patch.setattr(run, "TALLIES_AT_FIRST", at_first)
            patch.setattr(run, "BACKWARDS_BETWEEN_TALLIES", backwards_between)
        yield


def make_trainer(strategy: Any, callbacks: list[Callback] | None = None, **kwargs: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        callbacks=callbacks or [],
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "logger": False, "enable_checkpointing": False, **kwargs},
    )


def train(case: Case, contender: str) -> tuple[Trace, Trainer]:
    seed_everything(7, verbose=False)
    tracer = Tracer()
    model = case.model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {**case.strategy, **case.ours} if contender == "adaptive" else case.strategy
        trainer = make_trainer(CONTENDERS[contender](**options), [tracer], **case.trainer)
        trainer.fit(model, batches_of_this_rank(case))
    tracer.trace.warnings = [str(w.message) for w in caught if issubclass(w.category, UnusedParametersWarning)]
    return tracer.trace, trainer


@dataclass
class Outcome:
    """What the parent process gets to see of a case on one rank."""

    differences: list[str]
    flags: list[bool]
    decisions: list[Decision | None]
    final_decision: Decision | None
    warnings: list[str]


def run_case(case: Case) -> Outcome:
    """Train the case under our strategy and its references on this rank; say where they differ."""
    trace, trainer = train(case, "adaptive")
    differences = across_ranks(trace) if case.ranks_are_equal else []
    for reference in case.references:
        expected, _ = train(case, reference)
        differences += [f"{reference}: {text}" for text in compare(trace, expected, case.tolerance)]
    return Outcome(differences, trace.flags, trace.decisions, trainer.strategy.decision, trace.warnings)


def compare(ours: Trace, theirs: Trace, tolerance: float | None) -> list[str]:
    differences = []
    for what in ("gradients", "weights"):
        a, b = getattr(ours, what), getattr(theirs, what)
        if len(a) != len(b):
            differences.append(f"{len(a)} steps of {what} against {len(b)}")
        for step, (row_a, row_b) in enumerate(zip(a, b, strict=False), start=1):
            if row_a.keys() != row_b.keys():
                differences.append(f"{what} at step {step}: other names")
                continue
            for name, x in row_a.items():
                if not _same(x, row_b[name], tolerance):
                    differences.append(f"{what} of {name} at step {step}: {_show(x)} against {_show(row_b[name])}")
    return differences


def across_ranks(trace: Trace) -> list[str]:
    """Where the ranks' parameters differ after training; buffers are each rank's own until the next forward."""
    mine = {name: trace.weights[-1][name] for name in trace.gradients[-1]}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return [
        f"rank {rank} holds another {name}"
        for rank, theirs in enumerate(gathered)
        for name in mine
        if not torch.equal(mine[name], theirs[name])
    ]


def _same(x: Tensor | None, y: Tensor | None, tolerance: float | None) -> bool:
    if x is None or y is None:
        return x is y
    return torch.equal(x, y) if tolerance is None else torch.allclose(x, y, rtol=tolerance, atol=tolerance)


def _show(x: Tensor | None) -> str:
    return "None" if x is None else str(x.flatten()[:4].tolist())
