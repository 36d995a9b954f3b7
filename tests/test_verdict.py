"""The verdict of a smoke run, and what comes of training under the strategy that it advises."""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from differential import CONTENDERS, Case, Tracer, across_ranks, batches_of_this_rank, compare, make_trainer, train
from models import WIDTH, Branches, InMicroBatch, LateEverywhere, OnlyOnce, SomeRanks
from pytorch_lightning import LightningModule, seed_everything
from pytorch_lightning.callbacks import BackboneFinetuning, GradientAccumulationScheduler
from pytorch_lightning.strategies import DDPStrategy
from ranks import Ranks
from torch import Tensor, nn

from adaptive_ddp import AdaptiveDDPStrategy, Advice, Finding, UnusedParametersError, Verdict
from adaptive_ddp.decision import Obstacle
from adaptive_ddp.report import MAX_NAME_LINES
from adaptive_ddp.verdict import BackwardRecord, ParameterUsage, RankRecord, StepRecord, judge, written_arguments

STEPS = 3
BATCHES = 7


class TwoBranches:
    """Every rank uses branches 0 and 2, on every batch."""

    def __call__(self, batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
        return (0, 2)


class OneManualBackward(Branches):
    """Manual optimization with a single optimizer."""

    def __init__(self, usage: models.Usage) -> None:
        super().__init__(usage)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class _Recomputes(torch.autograd.Function):
    """Its backward takes a gradient of something that it computes there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach().square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            (result,) = torch.autograd.grad(x.square(), x, gradient)
        return result


class Recompute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Recomputes.apply(x)


class RecomputesInside(models.CheckpointedBranches):
    """Inside its reentrant checkpoints is a custom function that runs a backward of its own."""

    def __init__(self, usage: models.Usage) -> None:
        super().__init__(usage)
        for branch in self.branches:
            branch.append(Recompute())


class AddsInBackward(Branches):
    """Its own backward adds a term that reaches a branch which the returned loss does not."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.trunk(batch)
        self.term = self.branches[1](hidden.detach()).square().mean()
        return self.loss(self.branches[0](hidden), batch)

    def backward(self, loss: Tensor) -> None:
        (loss + self.term).backward()


class LeavesOut(Branches):
    """Its own backward leaves a branch out that is in the graph of the loss."""

    def backward(self, loss: Tensor) -> None:
        loss.backward(inputs=[p for name, p in self.named_parameters() if not name.startswith("branches.2.")])


class ReturnsDict(models.CheckpointedBranches):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)}


class HasBackbone(Branches):
    """With the name that Lightning's callback asks for."""

    def __init__(self, usage: models.Usage) -> None:
        super().__init__(usage)
        self.backbone = self.trunk

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.125)


@dataclass
class Kind:
    """A model, the verdict that it gets, and what training under the advised strategy has to be equal to."""

    model: Callable[[], LightningModule]
    advice: Advice
    reasons: set[Finding]
    reference: str = "oracle"
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    ours: dict[str, Any] = field(default_factory=dict)
    batches: int = STEPS
    # Of the branches, by the first place of their names: how often each rank used them, where that is not always.
    used_in: dict[str, tuple[int, ...]] = field(default_factory=dict)
    obstacles: tuple[Obstacle, ...] = ()
    sat_out: tuple[int, ...] = (0, 0)


DDP, ADAPTIVE, FLAG, STATIC = Advice.DDP, Advice.ADAPTIVE, Advice.FLAG, Advice.STATIC_GRAPH
REENTRANT = (Obstacle.REENTRANT,)
ACCUMULATED = {"accumulate_grad_batches": 2}
NEVER_2 = {"branches.2.": (0, 0)}


def backbone_finetuning() -> list[Any]:
    return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)]


def accumulation_later() -> list[Any]:
    return [GradientAccumulationScheduler({3: 2})]


KINDS = {
    "all used": Kind(partial(Branches, models.all_used), DDP, {Finding.ALL_USED}),
    "all used, with options": Kind(
        partial(Branches, models.all_used), DDP, {Finding.ALL_USED}, ours={"gradient_as_bucket_view": True}
    ),
    "all used, accumulated": Kind(
        partial(Branches, models.all_used), DDP, {Finding.ALL_USED}, trainer=ACCUMULATED, batches=6
    ),
    "all used, reentrant": Kind(
        partial(models.CheckpointedBranches, models.all_used), DDP, {Finding.ALL_USED}, obstacles=REENTRANT
    ),
    "all used, manual": Kind(partial(OneManualBackward, models.all_used), DDP, {Finding.ALL_USED}),
    "never": Kind(partial(Branches, models.never_last), FLAG, {Finding.SAME_UNUSED}, used_in=NEVER_2),
    "never, with options": Kind(
        partial(Branches, models.never_last),
        FLAG,
        {Finding.SAME_UNUSED},
        used_in=NEVER_2,
        ours={"gradient_as_bucket_view": True, "fallback": "finish"},
    ),
    "never, one step": Kind(
        partial(Branches, models.never_last), FLAG, {Finding.SAME_UNUSED}, used_in=NEVER_2, batches=1
    ),
    "never, zeroed": Kind(partial(models.KeepsZeros, models.never_last), FLAG, {Finding.SAME_UNUSED}, used_in=NEVER_2),
    "never, evaluated more than once a step": Kind(
        partial(models.LbfgsBranches, models.never_last), FLAG, {Finding.SAME_UNUSED}, used_in=NEVER_2
    ),
    "in the graph, without a gradient": Kind(
        partial(models.BlockedBranch, models.never_last), FLAG, {Finding.SAME_UNUSED}, used_in=NEVER_2
    ),
    "in no last micro-batch": Kind(
        partial(Branches, InMicroBatch(0, 2, 0, 1)), FLAG, {Finding.SAME_UNUSED}, trainer=ACCUMULATED, batches=6
    ),
    "asked for by torch.autograd.grad": Kind(
        partial(models.AsksFirst, models.never_last, True), FLAG, {Finding.SAME_UNUSED}, used_in=NEVER_2
    ),
    "manual GAN": Kind(partial(models.Gan, False), FLAG, {Finding.SAME_UNUSED}, batches=6),
    "manual GAN, toggled": Kind(partial(models.Gan, True), FLAG, {Finding.SAME_UNUSED}, batches=6),
    "on some ranks": Kind(
        partial(Branches, SomeRanks(0, 1)), ADAPTIVE, {Finding.RANKS_DIFFER}, used_in={"branches.1.": (3, 0)}
    ),
    "each rank another, in turn": Kind(
        partial(Branches, models.OwnBranch()),
        ADAPTIVE,
        {Finding.RANKS_DIFFER, Finding.VARIES},
        used_in={"branches.1.": (2, 1), "branches.2.": (1, 2)},
    ),
    "in some steps": Kind(
        partial(Branches, LateEverywhere(2)), ADAPTIVE, {Finding.VARIES}, used_in={"branches.1.": (2, 2)}
    ),
    "missed in the last step": Kind(
        partial(Branches, OnlyOnce(2, 0)),
        ADAPTIVE,
        {Finding.RANKS_DIFFER, Finding.VARIES},
        used_in={"branches.1.": (2, 3)},
    ),
    "sits out": Kind(
        partial(models.SitsOut, models.all_used, (1,), (1,), "None"), ADAPTIVE, {Finding.SAT_OUT}, sat_out=(0, 1)
    ),
    "all sit out": Kind(
        partial(models.SitsOut, models.all_used, (0, 1, 2), (0, 1), "unreached"),
        ADAPTIVE,
        {Finding.SAT_OUT},
        used_in={"": (0, 0)},
        sat_out=(3, 3),
    ),
    "sits out a micro-batch": Kind(
        partial(models.SitsOut, models.all_used, (0,), (1,), "constant"),
        ADAPTIVE,
        {Finding.SAT_OUT},
        trainer=ACCUMULATED,
        batches=6,
        sat_out=(0, 1),
    ),
    "reentrant": Kind(
        partial(models.CheckpointedBranches, models.never_last),
        STATIC,
        {Finding.SAME_UNUSED, Finding.REENTRANT},
        used_in=NEVER_2,
        obstacles=REENTRANT,
    ),
    "reentrant, one step": Kind(
        partial(models.CheckpointedBranches, models.never_last),
        ADAPTIVE,
        {Finding.REENTRANT, Finding.ONE_STEP},
        used_in=NEVER_2,
        obstacles=REENTRANT,
        batches=1,
    ),
    "reentrant, accumulated": Kind(
        partial(models.CheckpointedBranches, models.never_last),
        ADAPTIVE,
        {Finding.REENTRANT, Finding.ACCUMULATES},
        used_in=NEVER_2,
        obstacles=REENTRANT,
        trainer=ACCUMULATED,
        batches=6,
    ),
    "reentrant, to be accumulated": Kind(
        partial(models.CheckpointedBranches, models.never_last),
        ADAPTIVE,
        {Finding.REENTRANT, Finding.ACCUMULATES},
        used_in=NEVER_2,
        obstacles=REENTRANT,
        callbacks=accumulation_later,
    ),
    "reentrant, with a backward inside": Kind(
        partial(RecomputesInside, models.never_last),
        ADAPTIVE,
        {Finding.REENTRANT, Finding.INNER_BACKWARDS},
        used_in=NEVER_2,
        obstacles=REENTRANT,
    ),
    "reentrant, in some steps": Kind(
        partial(models.CheckpointedBranches, LateEverywhere(2)),
        ADAPTIVE,
        {Finding.VARIES},
        used_in={"branches.1.": (2, 2)},
        obstacles=REENTRANT,
    ),
    "sparse, additive": Kind(
        partial(models.SparseBranches, models.all_used), ADAPTIVE, {Finding.SPARSE}, obstacles=(Obstacle.SPARSE,)
    ),
    "sparse, never": Kind(
        partial(models.SparseBranches, models.never_last, bag=True),
        ADAPTIVE,
        {Finding.SPARSE},
        used_in={"tables.2.": (0, 0)},
        obstacles=(Obstacle.SPARSE,),
    ),
    "frozen": Kind(partial(models.Freezes, models.all_used, {}, {1: False}), ADAPTIVE, {Finding.FROZEN}),
    "frozen in the end": Kind(
        partial(models.Freezes, models.all_used, {2: {1: False}}),
        ADAPTIVE,
        {Finding.SET_CHANGED},
        used_in={"branches.1.": (2, 2)},
    ),
    "unfrozen": Kind(
        partial(models.Freezes, models.all_used, {1: {1: True}}, {1: False}),
        ADAPTIVE,
        {Finding.SET_CHANGED},
        used_in={"branches.1.": (2, 2)},
    ),
    "finetuning": Kind(
        partial(HasBackbone, models.all_used),
        ADAPTIVE,
        {Finding.FINETUNES, Finding.FROZEN},
        callbacks=backbone_finetuning,
    ),
    "a dict, unused in it": Kind(
        partial(models.ReturnsMore, TwoBranches()), FLAG, {Finding.SAME_UNUSED}, used_in={"branches.1.": (0, 0)}
    ),
    "a dict, used in it": Kind(
        partial(models.ReturnsMore, models.never_last), FLAG, {Finding.SAME_UNUSED}, used_in=NEVER_2
    ),
    "a dict, reentrant": Kind(
        partial(ReturnsDict, models.never_last),
        ADAPTIVE,
        {Finding.REENTRANT, Finding.RETURNS_MORE},
        used_in=NEVER_2,
        obstacles=REENTRANT,
    ),
    "reentrant, with options": Kind(
        partial(models.CheckpointedBranches, models.never_last),
        ADAPTIVE,
        {Finding.REENTRANT, Finding.ARGUMENTS},
        used_in=NEVER_2,
        obstacles=REENTRANT,
        ours={"bucket_cap_mb": 5, "fallback": "finish"},
    ),
    "a backward that leaves something out": Kind(
        partial(LeavesOut, models.all_used), ADAPTIVE, {Finding.UNFORESEEN}, used_in=NEVER_2
    ),
    "a backward of its own": Kind(
        partial(AddsInBackward, models.all_used),
        ADAPTIVE,
        {Finding.UNFORESEEN},
        used_in=NEVER_2,
    ),
}


def smoke_run(kind: Kind, **trainer: Any) -> tuple[Verdict | None, str, Tracer]:
    """The verdict on this rank, what this rank printed, and the trace."""
    seed_everything(7, verbose=False)
    tracer, printed = Tracer(), io.StringIO()
    strategy = AdaptiveDDPStrategy(**kind.ours)
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(strategy, [tracer, *kind.callbacks()], **kind.trainer, **trainer).fit(
            kind.model(), batches_of_this_rank(Case(kind.model, kind.batches))
        )
    return strategy.verdict, printed.getvalue(), tracer


def train_as_advised(kind: Kind, verdict: Verdict) -> list[str]:
    """Train under the line that was printed, for longer; say where that differs from the reference."""
    strategies = {"DDPStrategy": DDPStrategy, "AdaptiveDDPStrategy": AdaptiveDDPStrategy}
    seed_everything(7, verbose=False)
    tracer = Tracer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(eval(verdict.line, strategies), [tracer, *kind.callbacks()], **kind.trainer).fit(
            kind.model(), batches_of_this_rank(Case(kind.model, BATCHES))
        )
        reference = Tracer()
        seed_everything(7, verbose=False)
        make_trainer(CONTENDERS[kind.reference](), [reference, *kind.callbacks()], **kind.trainer).fit(
            kind.model(), batches_of_this_rank(Case(kind.model, BATCHES))
        )
    return across_ranks(tracer.trace) + compare(tracer.trace, reference.trace, None)


def run_kind(kind: Kind) -> tuple[Verdict | None, str, list[str]]:
    verdict, printed, tracer = smoke_run(kind, fast_dev_run=kind.batches)
    # A smoke run ends after as many optimizer steps, of which manual optimization takes several at once.
    none, nothing, without = smoke_run(kind, max_steps=kind.batches)
    assert (none, nothing) == (None, "")
    assert tracer.trace.flags == without.trace.flags
    differences = [f"without a verdict: {text}" for text in compare(tracer.trace, without.trace, None)]
    return verdict, printed, differences + train_as_advised(kind, verdict)


@pytest.mark.parametrize("name", KINDS)
def test_the_advice_is_right_and_trains_to_the_same_bits(ranks: Ranks, name: str) -> None:
    kind = KINDS[name]
    (verdict, printed, differences), *others = ranks(2).run(run_kind, kind)
    assert verdict is not None
    assert (verdict.advice, set(verdict.reasons)) == (kind.advice, kind.reasons)
    assert (verdict.world_size, verdict.sat_out, verdict.obstacles) == (2, kind.sat_out, kind.obstacles)
    for parameter in verdict.parameters:
        special = [used_in for prefix, used_in in kind.used_in.items() if parameter.name.startswith(prefix)]
        attended = tuple(verdict.steps - sat_out for sat_out in kind.sat_out)
        assert parameter.used_in == (special[0] if special else attended), parameter.name
    assert printed == f"{verdict}\n"
    assert differences == []
    for theirs, nothing, differences_there in others:
        assert (theirs, nothing, differences_there) == (verdict, "", [])
