"""Graphs that the flag cannot serve: each step is finished in place, and equals the oracle."""

from __future__ import annotations

from functools import partial
from typing import Any

import models
import pytest
import test_strategy
from differential import Case, Outcome, batches_of_this_rank, make_trainer, run_case
from models import LateEverywhere, OnlyOnce, OwnBranch, OwnLater, SomeRanks
from package import AdaptiveDDPStrategy, Callback
from ranks import RankError, Ranks

from adaptive_ddp.decision import Obstacle, State
from adaptive_ddp.reducer import Reduction
from adaptive_ddp.tally import Exchange

USAGES = [models.never_last, models.never_first, LateEverywhere(2), SomeRanks(0, 1), SomeRanks(2, 0), OnlyOnce(2, 1)]


def run(ranks: Ranks, case: Case) -> list[Outcome]:
    outcomes = ranks(2).run(run_case, case)
    for outcome in outcomes:
        assert outcome.differences == []
    assert [len(outcome.warnings) for outcome in outcomes] == [1, 0]
    return outcomes


@pytest.mark.parametrize("usage", USAGES, ids=models.usage_id)
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
@pytest.mark.parametrize("usage", USAGES, ids=models.usage_id)
def test_sparse_gradients_with_unused_parameters(ranks: Ranks, usage: models.Usage, bag: bool) -> None:
    for outcome in run(ranks, Case(partial(models.SparseBranches, usage, bag), references=("oracle",))):
        assert outcome.final_decision.state is State.FINISH
        assert outcome.final_decision.obstacles == (Obstacle.SPARSE,)


@pytest.mark.parametrize("model", [models.CheckpointedBranches, models.SparseBranches])
@pytest.mark.parametrize("usage", [models.never_last, LateEverywhere(3), SomeRanks(0, 1)], ids=models.usage_id)
def test_accumulation_in_finish(ranks: Ranks, model: Any, usage: models.Usage) -> None:
    run(ranks, Case(partial(model, usage), batches=8, trainer={"accumulate_grad_batches": 2}, references=("oracle",)))


@pytest.mark.parametrize("usage", [models.never_last, LateEverywhere(3), SomeRanks(0, 1)], ids=models.usage_id)
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


FINISH = {"fallback": "finish"}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("usage", test_strategy.USAGES)
def test_finish_as_the_fallback_equals_both_references(ranks: Ranks, usage: str, world_size: int) -> None:
    case = test_strategy.branches(test_strategy.USAGES[usage](world_size - 1), world_size, batches=7, ours=FINISH)
    for outcome in test_strategy.run(ranks, world_size, case):
        assert outcome.final_decision.state is State.FINISH
        assert outcome.final_decision.obstacles == ()
        assert not any(outcome.flags)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}], ids=str)
@pytest.mark.parametrize("model", [models.Branches, models.KeepsZeros, models.NeverZeroes, models.BlockedBranch])
@pytest.mark.parametrize("usage", [models.never_last, OwnLater(), SomeRanks(4, 1), OwnBranch()], ids=models.usage_id)
def test_finish_as_the_fallback_with_gradients_from_before(
    ranks: Ranks, model: Any, accumulate: int, strategy: dict[str, Any], usage: models.Usage
) -> None:
    trainer = {"accumulate_grad_batches": accumulate}
    test_strategy.run(ranks, 2, Case(partial(model, usage), 9, strategy, FINISH, trainer, references=("flag",)))


@pytest.mark.parametrize("usage", [OwnLater(), LateEverywhere(2), OwnBranch()], ids=models.usage_id)
def test_a_checkpoint_that_comes_later_is_not_finished_too_early(ranks: Ranks, usage: models.Usage) -> None:
    test_strategy.run(ranks, 2, Case(partial(models.LateCheckpoint, usage), 9, ours=FINISH, references=("oracle",)))


@pytest.mark.parametrize("by_parameter", [False, True])
@pytest.mark.parametrize("usage", [models.never_last, OwnLater(), OwnBranch()], ids=models.usage_id)
def test_a_backward_that_asks_for_gradients_first(ranks: Ranks, usage: models.Usage, by_parameter: bool) -> None:
    test_strategy.run(ranks, 2, Case(partial(models.AsksFirst, usage, by_parameter), 9, ours=FINISH))


def hooks_fired(usage: models.Usage) -> tuple[list[int], list[int], list[int]]:
    """For each step: the hooks fired at the start of the backward, those fired after it, and the usage maps."""
    counts: dict[str, list[int]] = {"early": [], "late": [], "maps": []}

    def counting(name: str, original: Any, number: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name][-1] += number(*args)
            return original(*args, **kwargs)

        return counted

    class Steps(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            for row in counts.values():
                row.append(0)

    case = Case(partial(models.Branches, usage), 8)
    strategy = AdaptiveDDPStrategy(fallback="finish")
    with pytest.MonkeyPatch.context() as patch:
        mark, fire, count = Reduction.mark_ready, Reduction._fire, Exchange.count
        patch.setattr(Reduction, "mark_ready", counting("early", mark, lambda self, indices: len(indices)))
        patch.setattr(Reduction, "_fire", counting("late", fire, lambda self, indices: len(indices)))
        patch.setattr(Exchange, "count", counting("maps", count, lambda self, indices, size: size > 3))
        make_trainer(strategy, [Steps()]).fit(case.model(), batches_of_this_rank(case))
    return counts["early"], counts["late"], counts["maps"]


def test_what_was_missing_before_is_fired_at_the_start_and_no_map_is_exchanged(ranks: Ranks) -> None:
    for early, late, maps in ranks(2).run(hooks_fired, models.never_last):
        assert late == [4, 4, 0, 0, 0, 0, 0, 0]
        assert early == [0, 0, 4, 4, 4, 4, 4, 4]
        assert maps == [1, 0, 0, 0, 0, 0, 0, 0]


def test_maps_are_exchanged_when_what_all_ranks_miss_may_have_changed(ranks: Ranks) -> None:
    (early, late, maps), others = ranks(2).run(hooks_fired, OwnLater())
    # Branch 2 is used by rank 0 alone, then nothing but it.
    assert early == [0, 0, 4, 0, 0, 0, 0, 8]
    assert late == [4, 4, 0, 0, 0, 0, 8, 0]
    assert maps == others[2] == [1, 0, 0, 0, 0, 0, 1, 0]
    assert others[:2] == ([0, 0, 4, 4, 4, 4, 4, 4], [4, 4, 0, 0, 0, 0, 0, 0])


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
