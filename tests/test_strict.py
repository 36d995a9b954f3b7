"""``on_unused="raise"``: an error on all ranks in the same step, before the optimizer steps."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import models
import pytest
import torch
from differential import CONTENDERS, Case, Tracer, batches_of_this_rank, make_trainer, run_case, train
from models import InMicroBatch, LateEverywhere, OnlyOnce, SomeRanks
from pytorch_lightning import seed_everything
from ranks import Ranks

from adaptive_ddp import AdaptiveDDPStrategy, UnusedParametersError
from adaptive_ddp.decision import State, decide

RAISE = {"on_unused": "raise"}


def fit(case: Case) -> tuple[UnusedParametersError, int, list[str]]:
    """Train until the error: the error, how often the optimizer stepped, and where the weights are not what they were.

    They are compared with those of a reference that stopped before that step.
    """
    seed_everything(7, verbose=False)
    model, tracer = case.model(), Tracer()
    strategy = AdaptiveDDPStrategy(**RAISE)
    with pytest.raises(UnusedParametersError) as raised:
        make_trainer(strategy, [tracer], **case.trainer).fit(model, batches_of_this_rank(case))
    assert strategy.decision is raised.value.decision
    steps = len(tracer.trace.gradients)
    seed_everything(7, verbose=False)
    reference = case.model()
    if steps:
        make_trainer(CONTENDERS["flag"](), max_steps=steps, **case.trainer).fit(reference, batches_of_this_rank(case))
    expected = reference.state_dict()
    unequal = [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])]
    return raised.value, steps, unequal


USAGES = {
    "all ranks, first step": (models.never_last, 1, {2}),
    "all ranks, later": (LateEverywhere(3), 4, {2}),
    "rank 0, first step": (SomeRanks(0, 0), 1, {1}),
    "rank 1, later": (SomeRanks(2, 1), 3, {1}),
    "rank 0, last step": (OnlyOnce(4, 0), 5, {1}),
    "each rank another": (models.OwnBranch(), 1, {1}),
}


@pytest.mark.parametrize("usage", USAGES)
def test_all_ranks_raise_in_the_step_before_the_optimizer(ranks: Ranks, usage: str) -> None:
    its_usage, step, missed_by = USAGES[usage]
    for error, steps, unequal in ranks(2).run(fit, Case(partial(models.Branches, its_usage))):
        assert error.decision.step == step
        assert steps == step - 1
        assert unequal == []
        assert {parameter.missed_by for parameter in error.decision.unused} == missed_by


def test_three_ranks(ranks: Ranks) -> None:
    for error, steps, _ in ranks(3).run(fit, Case(partial(models.Branches, SomeRanks(2, 1)))):
        assert (error.decision.step, steps) == (3, 2)


@pytest.mark.parametrize("model", [models.CheckpointedBranches, models.SparseBranches])
def test_graphs_that_the_flag_cannot_serve(ranks: Ranks, model: Any) -> None:
    # There is no reference with the flag for these; both ranks stop at the same step.
    for error, steps in ranks(2).run(steps_until_the_error, Case(partial(model, SomeRanks(2, 1)))):
        assert (error.decision.step, steps) == (3, 2)


def steps_until_the_error(case: Case) -> tuple[UnusedParametersError, int]:
    tracer = Tracer()
    with pytest.raises(UnusedParametersError) as raised:
        make_trainer(AdaptiveDDPStrategy(**RAISE), [tracer], **case.trainer).fit(
            case.model(), batches_of_this_rank(case)
        )
    return raised.value, len(tracer.trace.gradients)


def test_a_window_counts_as_a_whole(ranks: Ranks) -> None:
    case = Case(partial(models.Branches, InMicroBatch(0, 2, 0, 1)), batches=6, ours=RAISE)
    case.trainer = {"accumulate_grad_batches": 2}
    for outcome in ranks(2).run(run_case, case):
        assert outcome.differences == []
    case = Case(partial(models.Branches, InMicroBatch(0, 2, 1)), batches=6, trainer=case.trainer)
    for error, steps in ranks(2).run(steps_until_the_error, case):
        assert (error.decision.step, steps) == (1, 0)


@pytest.mark.parametrize(
    "model",
    [
        partial(models.Branches, models.all_used),
        partial(models.SitsOut, models.all_used, (0, 2), (1,), "None"),
        partial(models.SitsOut, models.all_used, (1,), (0, 1), "unreached"),
        partial(models.Freezes, models.all_used, {2: {1: False}, 4: {1: True}}),
    ],
    ids=["clean", "one sits out", "both sit out", "freezing"],
)
def test_what_is_no_error(ranks: Ranks, model: Any) -> None:
    for outcome in ranks(2).run(run_case, Case(model, 6, ours=RAISE, references=("oracle",))):
        assert outcome.differences == []
        assert outcome.final_decision.state is State.WATCH


def an_error_and_another_fit() -> list[str]:
    steps_until_the_error(Case(partial(models.Branches, SomeRanks(2, 1))))
    case = Case(partial(models.Branches, models.never_last))
    return [str(train(case, contender)[0].weights) for contender in ("adaptive", "flag")]


def test_the_ranks_can_train_after_the_error(ranks: Ranks) -> None:
    for ours, flag in ranks(2).run(an_error_and_another_fit):
        assert ours == flag


def test_the_error_says_what_happened_and_what_to_do() -> None:
    decision = decide(step=3, world_size=2, names=["net.weight", "head.weight"], numels=[8, 4], missed_by=[0, 1])
    assert str(UnusedParametersError(decision)).splitlines() == [
        "DDP left 1 of 2 parameters (4 of 12 elements) without a gradient at step 3, which is an error under"
        ' on_unused="raise".',
        "  on 1 of 2 ranks:  head.weight",
        "No optimizer has stepped on this step's gradients, on any rank. If these parameters should be trained, look"
        " for where they drop out of the loss: an output that nothing takes up, a variable that another overwrites, a"
        " branch that is not run.",
        'If not, freeze them (requires_grad=False) or write on_unused="fallback", which trains on with the right'
        " gradients.",
    ]


def test_the_error_survives_pickling() -> None:
    decision = decide(step=3, world_size=2, names=["a"], numels=[8], missed_by=[1])
    copy = pickle.loads(pickle.dumps(UnusedParametersError(decision)))
    assert copy.decision == decision


@pytest.mark.parametrize("argument", ["on_unused", "fallback"])
def test_what_there_is_not_is_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument}='error'.*Write {argument}="):
        AdaptiveDDPStrategy(**{argument: "error"})
