"""The verdict of a smoke run, and what comes of training under the strategy that it advises."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import models
import pytest
import torch
from differential import CONTENDERS, Case, Tracer, across_ranks, batches_of_this_rank, compare, make_trainer
from models import Branches, InMicroBatch, LateEverywhere, OnlyOnce, SomeRanks
from package import (
    AdaptiveDDPStrategy,
    BackboneFinetuning,
    Callback,
    DDPStrategy,
    GradientAccumulationScheduler,
    LightningModule,
    Trainer,
    seed_everything,
)
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from adaptive_ddp import Advice, Finding, UnusedParametersError, Verdict
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


class RecomputesOutside(models.CheckpointedBranches):
    """The same, outside of the checkpoints."""

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return super().loss(Recompute()(output), batch)


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


class OnlyAsks(LeavesOut):
    """It asks for the gradient of what it leaves out, and accumulates none."""

    def backward(self, loss: Tensor) -> None:
        torch.autograd.grad(loss, list(self.branches[2].parameters()), retain_graph=True)
        super().backward(loss)


class ReturnsDict(models.CheckpointedBranches):
    """Returns its loss in a dictionary, alone or with another tensor."""

    def __init__(self, usage: models.Usage, more: bool = False) -> None:
        super().__init__(usage)
        self.more = more

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "hidden": self.trunk(batch)} if self.more else {"loss": loss}


class AsksFirst(models.CheckpointedBranches):
    """Its own backward first takes the gradient of the part behind the checkpoints."""

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        self.output = output
        return super().loss(output, batch)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.grad(loss, self.output, retain_graph=True)
        loss.backward()


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
    "in the last micro-batch only": Kind(
        partial(Branches, InMicroBatch(1, 2, 0, 1)), FLAG, {Finding.UNEVEN}, trainer=ACCUMULATED, batches=6
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
    "reentrant, with a backward after": Kind(
        partial(RecomputesOutside, models.never_last),
        ADAPTIVE,
        {Finding.REENTRANT, Finding.INNER_BACKWARDS},
        used_in=NEVER_2,
        obstacles=REENTRANT,
    ),
    "reentrant, asked for something first": Kind(
        partial(AsksFirst, models.never_last),
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
        STATIC,
        {Finding.SAME_UNUSED, Finding.REENTRANT},
        used_in=NEVER_2,
        obstacles=REENTRANT,
    ),
    "a dict of more, reentrant": Kind(
        partial(ReturnsDict, models.never_last, more=True),
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


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", ["all used", "never", "reentrant"])
def test_other_numbers_of_ranks(ranks: Ranks, name: str, world_size: int) -> None:
    verdicts = [verdict for verdict, _, _ in ranks(world_size).run(smoke_run_of, name)]
    assert {verdict.advice for verdict in verdicts} == {KINDS[name].advice}
    assert {verdict.world_size for verdict in verdicts} == {world_size}
    if world_size == 1:
        ((_, _, differences),) = ranks(1).run(run_kind, KINDS[name])
        assert differences == []


def smoke_run_of(name: str) -> tuple[Verdict | None, str, None]:
    verdict, printed, _ = smoke_run(KINDS[name], fast_dev_run=STEPS)
    return verdict, printed, None


def verdict_and_error(kind: Kind) -> tuple[Verdict | None, str, str]:
    printed, message = io.StringIO(), ""
    strategy = AdaptiveDDPStrategy(on_unused="raise", **kind.ours)
    with contextlib.redirect_stdout(printed), pytest.raises(UnusedParametersError) as raised:
        make_trainer(strategy, fast_dev_run=5).fit(kind.model(), batches_of_this_rank(Case(kind.model)))
    message = str(raised.value)
    return strategy.verdict, printed.getvalue(), message


@pytest.mark.parametrize(
    ("model", "advice", "steps"),
    [
        (partial(Branches, models.never_last), FLAG, 1),
        (partial(Branches, SomeRanks(2, 1)), ADAPTIVE, 3),
        (partial(models.Gan, False), FLAG, 1),
    ],
    ids=["at once", "later", "manual"],
)
def test_strict_mode_ends_with_the_verdict_of_what_was_seen(
    ranks: Ranks, model: Any, advice: Advice, steps: int
) -> None:
    (verdict, printed, message), (theirs, nothing, _) = ranks(2).run(verdict_and_error, Kind(model, advice, set()))
    assert verdict is not None
    assert (theirs, nothing) == (verdict, "")
    assert (verdict.advice, verdict.steps, printed) == (advice, steps, f"{verdict}\n")
    assert "is an error" in message


class RegistersPowerSgd(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.model.register_comm_hook(PowerSGDState(None), powerSGD_hook)


def test_power_sgd(ranks: Ranks) -> None:
    kind = Kind(partial(Branches, models.never_last), ADAPTIVE, set(), callbacks=power_sgd)
    for verdict, *_ in ranks(2).run(verdict_of, kind):
        assert (verdict.advice, verdict.reasons) == (ADAPTIVE, (Finding.POWER_SGD,))
        assert verdict.obstacles == (Obstacle.POWER_SGD,)


def power_sgd() -> list[Any]:
    return [RegistersPowerSgd()]


def verdict_of(kind: Kind) -> tuple[Verdict | None]:
    return (smoke_run(kind, fast_dev_run=STEPS)[0],)


def test_what_torch_autograd_grad_is_asked_for_is_not_used(ranks: Ranks) -> None:
    for (verdict,) in ranks(2).run(verdict_of, Kind(partial(OnlyAsks, models.all_used), ADAPTIVE, set())):
        assert verdict.advice is ADAPTIVE
        assert {parameter.name[:11] for parameter in verdict.unused} == {"branches.2."}


def two_fits() -> tuple[list[Verdict | None], list[list[str]]]:
    """A smoke run and one that fails: after each, the verdict and which parameters still have hooks."""
    model, verdicts, hooked = Branches(models.all_used), [], []
    with contextlib.redirect_stdout(io.StringIO()):
        for callbacks in ([], [Fails()]):
            trainer = make_trainer(AdaptiveDDPStrategy(), callbacks, fast_dev_run=2)
            with pytest.raises(ZeroDivisionError) if callbacks else contextlib.nullcontext():
                trainer.fit(model, batches_of_this_rank(Case(lambda: model)))
            verdicts.append(trainer.strategy.verdict)
            hooked.append([name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks is not None])
    return verdicts, hooked


class Fails(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ZeroDivisionError


def test_nothing_is_left_of_it(ranks: Ranks) -> None:
    for (first, second), hooked in ranks(2).run(two_fits):
        assert first is not None
        assert second is None
        assert hooked == [[], []]


def made_verdict(**other: Any) -> Verdict:
    facts: dict[str, Any] = {
        "advice": ADAPTIVE,
        "reasons": (Finding.SAT_OUT, Finding.RANKS_DIFFER),
        "steps": 3,
        "world_size": 2,
        "parameters": (
            ParameterUsage("net.0.weight", 4000, (3, 2)),
            ParameterUsage("net.0.bias", 100, (3, 2)),
            ParameterUsage("net.1.weight", 100, (3, 0)),
            ParameterUsage("net.2.weight", 100, (1, 0)),
            ParameterUsage("net.3.weight", 100, (2, 1)),
            ParameterUsage("head.weight", 10, (0, 0)),
        ),
        "frozen": ("stem.weight", "stem.bias"),
        "sat_out": (0, 1),
        "obstacles": (Obstacle.REENTRANT,),
    }
    return Verdict(**{**facts, **other})


def test_the_text() -> None:
    assert str(made_verdict()).splitlines() == [
        "Smoke run: 3 steps on 2 ranks; 6 trainable parameters (4.4 k elements).",
        "  used by every rank in every step:       net.0.{weight,bias}",
        "  used by rank 0:                         net.1.weight",
        "  used by rank 0, not in every step:      net.2.weight",
        "  used by every rank, not in every step:  net.3.weight",
        "  used by no rank:                        head.weight",
        "  frozen:                                 stem.{weight,bias}",
        "Rank 1 sat out 1 of 3 steps, or a part of them.",
        "find_unused_parameters=True cannot serve reentrant activation checkpointing.",
        'Advice: Trainer(strategy="ddp_adaptive")',
        "  because a rank sat a step out, which DDP ends with an error or a hang;",
        "  because the ranks did not use the same parameters; find_unused_parameters=True serves that until the loss"
        " of a rank reaches none of them, and then hangs.",
        "This is what 3 steps on 2 ranks showed. Nothing needs to be changed in what you have written.",
    ]


@pytest.mark.parametrize("advice", [DDP, FLAG, STATIC])
def test_the_text_says_how_much_was_seen_and_what_to_keep(advice: Advice) -> None:
    text = str(made_verdict(advice=advice, steps=1, sat_out=(0, 0)))
    assert "This is what 1 step on 2 ranks showed" in text
    assert 'keep strategy="ddp_adaptive"' in text


def test_the_text_is_short_whatever_the_model() -> None:
    parameters = tuple(ParameterUsage(f"a{n}.b{n}", 1, (n % 4, 1)) for n in range(400))
    lines = str(made_verdict(parameters=parameters, sat_out=(0,) * 400)).splitlines()
    assert sum(line.startswith("  ") for line in lines) <= MAX_NAME_LINES + 2
    assert any("more; strategy.verdict has all of them." in line for line in lines)


@pytest.mark.parametrize(
    ("advice", "arguments", "own", "line"),
    [
        (DDP, {}, {}, '"ddp"'),
        (DDP, {"start_method": "spawn"}, {"fallback": "finish"}, 'DDPStrategy(start_method="spawn")'),
        (FLAG, {"bucket_cap_mb": 5}, {}, "DDPStrategy(find_unused_parameters=True, bucket_cap_mb=5)"),
        (FLAG, {"start_method": "popen", "bucket_cap_mb": None}, {}, '"ddp_find_unused_parameters_true"'),
        (STATIC, {"ddp_comm_hook": print}, {}, "DDPStrategy(static_graph=True, ddp_comm_hook=...)"),
        (ADAPTIVE, {}, {"on_unused": "fallback"}, '"ddp_adaptive"'),
        (ADAPTIVE, {}, {"on_unused": "raise"}, 'AdaptiveDDPStrategy(on_unused="raise")'),
    ],
)
def test_the_line_keeps_the_arguments(
    advice: Advice, arguments: dict[str, Any], own: dict[str, Any], line: str
) -> None:
    strategy = AdaptiveDDPStrategy(**arguments, **own)
    its_own = written_arguments(own, AdaptiveDDPStrategy.__init__)
    assert made_verdict(advice=advice, arguments=strategy._written, own_arguments=its_own).line == line


def step(*received: int, reached: tuple[int, ...] | None = None) -> StepRecord:
    return StepRecord((BackwardRecord(frozenset(received if reached is None else reached), frozenset(received)),))


BOTH = frozenset({0, 1})


@pytest.mark.parametrize(
    ("steps_by_rank", "findings", "advice"),
    [
        ([[], []], set(), ADAPTIVE),
        ([[StepRecord(())], [StepRecord(())]], set(), ADAPTIVE),
        ([[step(0, 1)], [step(0, 1)]], set(), DDP),
        ([[step(0, 1, reached=(0,))], [step(0, 1)]], set(), FLAG),
        ([[step(0), step(0)], [step(0)]], set(), ADAPTIVE),
        ([[step(0)] * 2] * 2, {Finding.REENTRANT, Finding.UNFORESEEN}, STATIC),
        ([[step(0), step(0, reached=(0, 1))]] * 2, {Finding.REENTRANT, Finding.UNFORESEEN}, ADAPTIVE),
        ([[step(0, 1)], [step(0, 1)]], {Finding.REPEATS}, ADAPTIVE),
        ([[step(0, 1)], [step(0, 1)]], {Finding.INNER_BACKWARDS, Finding.MANUAL, Finding.REENTRANT}, DDP),
    ],
)
def test_the_judgement(steps_by_rank: list[list[StepRecord]], findings: set[Finding], advice: Advice) -> None:
    records = [RankRecord(tuple(steps), BOTH, frozenset(findings)) for steps in steps_by_rank]
    assert judge(records, names=["a", "b"], numels=[1, 1]).advice is advice


@pytest.mark.parametrize("finding", [f for f in Finding if f not in (Finding.ALL_USED, Finding.SAME_UNUSED)])
def test_what_one_rank_finds_counts(finding: Finding) -> None:
    # No finding makes an advice bolder than it is without.
    bold = [ADAPTIVE, STATIC, FLAG, DDP]
    for seen in (step(0), step(0, 1)):
        without, found = (
            judge([RankRecord((seen,) * 2, BOTH), RankRecord((seen,) * 2, BOTH, with_it)], names="ab", numels=[1, 1])
            for with_it in (frozenset(), frozenset({finding}))
        )
        assert bold.index(found.advice) <= bold.index(without.advice)
