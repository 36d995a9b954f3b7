"""Graphs that the flag cannot serve: each step is finished in place, and equals the oracle."""

from __future__ import annotations

from functools import partial
from typing import Any

import models
import pytest
from differential import Case, Outcome, run_case
from models import LateEverywhere, OnlyOnce, SomeRanks
from ranks import RankError, Ranks

from adaptive_ddp.decision import Obstacle, State

USAGES = [models.never_last, models.never_first, LateEverywhere(2), SomeRanks(0, 1), SomeRanks(2, 0), OnlyOnce(2, 1)]


def run(ranks: Ranks, case: Case) -> list[Outcome]:
    outcomes = ranks(2).run(run_case, case)
    for outcome in outcomes:
        assert outcome.differences == []
    assert [len(outcome.warnings) for outcome in outcomes] == [1, 0]
    return outcomes


@pytest.mark.parametrize("usage", USAGES, ids=repr)
@pytest.mark.parametrize(
    "model",
    [
        models.CheckpointedBranches,
        partial(models.CheckpointedBranches, plain_branch=2),
        partial(models.CheckpointedBranches, plain_branch=1),
        models.PartlyCheckpointed,
    ],
    ids=["all checkpointed", "branch 2 outside", "branch 1 outside", "one checkpoint around all"],
)
def test_reentrant_checkpointing_with_unused_parameters(ranks: Ranks, model: Any, usage: models.Usage) -> None:
    for outcome in run(ranks, Case(partial(model, usage), references=("oracle",))):
        assert outcome.final_decision.state is State.FINISH
        assert outcome.final_decision.obstacles == (Obstacle.REENTRANT,)
        assert outcome.flags == [False] * 5
    assert "cannot serve reentrant activation checkpointing" in str(outcome.final_decision)


def test_an_obstacle_is_seen_in_a_miss_of_the_last_step(ranks: Ranks) -> None:
    case = Case(partial(models.CheckpointedBranches, OnlyOnce(4, 1)), references=("oracle",))
    for outcome in run(ranks, case):
        assert outcome.final_decision.state is State.FINISH
        assert outcome.final_decision.step == 5


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("usage", USAGES, ids=repr)
def test_sparse_gradients_with_unused_parameters(ranks: Ranks, usage: models.Usage, bag: bool) -> None:
    for outcome in run(ranks, Case(partial(models.SparseBranches, usage, bag), references=("oracle",))):
        assert outcome.final_decision.state is State.FINISH
        assert outcome.final_decision.obstacles == (Obstacle.SPARSE,)


@pytest.mark.parametrize("model", [models.CheckpointedBranches, models.SparseBranches])
@pytest.mark.parametrize("usage", [models.never_last, LateEverywhere(3), SomeRanks(0, 1)], ids=repr)
def test_accumulation_in_finish(ranks: Ranks, model: Any, usage: models.Usage) -> None:
    run(ranks, Case(partial(model, usage), batches=8, trainer={"accumulate_grad_batches": 2}, references=("oracle",)))


@pytest.mark.parametrize("usage", [models.never_last, LateEverywhere(3), SomeRanks(0, 1)], ids=repr)
def test_bucket_views_in_finish(ranks: Ranks, usage: models.Usage) -> None:
    case = Case(partial(models.CheckpointedBranches, usage), strategy={"gradient_as_bucket_view": True})
    # The oracle takes no DDP options; the argument is the wrapper's alone.
    case.references = ("oracle",)
    run(ranks, case)


@pytest.mark.parametrize("bag", [False, True])
def test_an_additive_embedding_does_not_halve_the_gradients_of_earlier_layers(ranks: Ranks, bag: bool) -> None:
    case = Case(partial(models.SparseBranches, models.all_used, bag), references=("oracle",))
    for outcome in ranks(2).run(run_case, case):
        assert outcome.differences == []
        assert outcome.flags == [False] * 5


def under_the_flag_or_plain(contender: str, case: Case) -> bool:
    from differential import compare, train

    expected, _ = train(case, "oracle")
    trace, _ = train(case, contender)
    return bool(compare(trace, expected, None))


@pytest.mark.parametrize(
    "model",
    [partial(models.CheckpointedBranches, models.never_last), partial(models.SparseBranches, models.never_last)],
    ids=["checkpointing", "sparse"],
)
def test_the_flag_fails_on_these(ranks: Ranks, model: Any) -> None:
    # The reason for FINISH. It fails when torch mends this.
    with pytest.raises(RankError, match=r"mark a variable ready only once|sparse gradient to be defined"):
        ranks(2).run(under_the_flag_or_plain, "flag", Case(model))


def test_plain_ddp_gets_the_additive_embedding_wrong(ranks: Ranks) -> None:
    case = Case(partial(models.SparseBranches, models.all_used))
    assert ranks(2).run(under_the_flag_or_plain, "plain", case) == [True, True]
