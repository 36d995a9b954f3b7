"""Once not every step ends in a tally: what ranks do together they still do in the step that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from differential import Case, Outcome, batches_of_this_rank, few_tallies, make_trainer, run_case
from models import LateEverywhere, OnlyOnce, OwnLater, SomeRanks
from package import AdaptiveDDPStrategy, Callback, Trainer
from ranks import RankError, Ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from adaptive_ddp import tally
from adaptive_ddp.run import BACKWARDS_BETWEEN_TALLIES, TALLIES_AT_FIRST
from adaptive_ddp.tally import Exchange, HeadCount

# The backwards 0, 4 and 8 end in a tally; those between them do not.
BETWEEN = 4
BATCHES = 10
BOUND_S = 10.0


def with_few(function: Callable[..., Any], *args: Any, between: int = BETWEEN, at_first: int = 1) -> Any:
    with few_tallies(between, at_first=at_first):
        return function(*args)


# -- when the ranks decide --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "step", "flag_from"),
    [
        # Every rank has something missing, and so all know of it: the step in which it is.
        (LateEverywhere(2), 3, 2),
        (SomeRanks(2, 0, 1), 3, 2),
        (OnlyOnce(6, 0, 1), 7, 6),
        (OwnLater(), None, None),
        # One rank alone: the step after the next tally. The report names that in which it began.
        (SomeRanks(2, 1), 3, 5),
        (SomeRanks(2, 0), 3, 5),
        (OnlyOnce(2, 1), 3, 5),
        (OnlyOnce(3, 0), 4, 5),
        (OnlyOnce(4, 1), 5, 5),
        (OnlyOnce(5, 1), 6, 9),
        # No tally comes any more: the end of the fit.
        (OnlyOnce(9, 1), 10, None),
    ],
    ids=lambda value: models.usage_id(value) if callable(value) else None,
)
def test_gradients_are_right_and_all_ranks_decide_the_same(
    ranks: Ranks, usage: models.Usage, step: int | None, flag_from: int | None
) -> None:
    outcomes = ranks(2).run(with_few, run_case, Case(partial(models.Branches, usage), BATCHES))
    assert [outcome.differences for outcome in outcomes] == [[], []]
    assert outcomes[0].final_decision == outcomes[1].final_decision
    assert outcomes[0].flags == outcomes[1].flags
    decision = outcomes[0].final_decision
    assert decision is not None
    assert decision.unused
    if step is not None:
        assert decision.step == step
        first = BATCHES if flag_from is None else flag_from
        assert outcomes[0].flags == [batch >= first for batch in range(BATCHES)]


def test_what_two_ranks_missed_in_different_steps_is_one_decision(ranks: Ranks) -> None:
    # On three ranks a sum depends on the layout of the buckets.
    case = Case(partial(models.Branches, first_one_then_another), BATCHES, tolerance=1e-5)
    outcomes = ranks(3).run(with_few, run_case, case)
    for outcome in outcomes:
        assert outcome.differences == []
        assert outcome.final_decision is not None
        assert outcome.final_decision.step == 2
        missing = {unused.name.split(".")[1]: unused.missed_by for unused in outcome.final_decision.unused}
        assert missing == {"1": 1, "2": 1}


def first_one_then_another(batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
    """Rank 2 leaves out branch 2 in one step, and rank 0 branch 1 in the next."""
    return {(1, 2): (0, 1), (2, 0): (0, 2)}.get((batch_idx, rank), (0, 1, 2))


@pytest.mark.parametrize("fallback", ["find_unused_parameters", "finish"])
def test_windows_checkpoints_and_sitting_out(ranks: Ranks, fallback: Any) -> None:
    ours = {"fallback": fallback}
    cases = [
        Case(partial(models.Branches, LateEverywhere(4)), 20, ours=ours, trainer={"accumulate_grad_batches": 2}),
        Case(
            partial(models.SitsOut, models.all_used, (2, 3), (0,), "None"), BATCHES, ours=ours, references=("oracle",)
        ),
        Case(partial(models.CheckpointedBranches, SomeRanks(2, 1)), BATCHES, ours=ours, references=("oracle",)),
        Case(partial(models.SparseBranches, LateEverywhere(2)), BATCHES, ours=ours, references=("oracle",)),
    ]
    for case in cases:
        for outcome in ranks(2).run(with_few, run_case, case):
            assert outcome.differences == []


# -- the set of trainable parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "at_first"), [({2: {1: False}}, {}), ({2: {1: True}}, {1: False})])
def test_a_changed_set_is_reduced_from_the_step_on(
    ranks: Ranks, schedule: dict[int, dict[int, bool]], at_first: dict[int, bool]
) -> None:
    freezes = partial(models.Freezes, models.all_used, schedule, at_first)
    for outcome in ranks(2).run(with_few, run_case, Case(freezes, BATCHES, references=("oracle",))):
        assert outcome.differences == []


def split(changes_at: int) -> tuple[str, int]:
    model = models.Freezes(models.all_used, {changes_at: {1: False}}, ranks=(1,))
    trainer = make_trainer(AdaptiveDDPStrategy())
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(model, batches_of_this_rank(Case(models.Branches, BATCHES)))
    return str(raised.value), trainer.global_step


@pytest.mark.parametrize(("changes_at", "steps"), [(2, 5), (4, 5), (5, 9), (9, 10)])
def test_a_split_is_an_error_after_the_next_tally(ranks: Ranks, changes_at: int, steps: int) -> None:
    for error, global_step in ranks(2).run(with_few, split, changes_at):
        assert "did not change in the same way on all ranks" in error
        assert global_step == steps


# -- what a step costs ------------------------------------------------------------------------------------------------


@contextmanager
def posts_counted() -> Iterator[list[int]]:
    """The tallies that this rank posts, by the backward that they are of."""
    posted: list[int] = [0]
    original = Exchange.post

    def post(self: Any, **said: bool) -> Any:
        posted[-1] += 1
        return original(self, **said)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "post", post)
        yield posted


class NextBatch(Callback):
    def __init__(self, posted: list[int]) -> None:
        self.posted = posted

    def on_train_batch_end(self, *args: Any) -> None:
        self.posted.append(0)


class Hooked(Callback):
    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        trainer.strategy.model.register_comm_hook(None, default_hooks.allreduce_hook)


def posts(model: Callable[[], Any], options: dict[str, Any], hooked: bool, batches: int = BATCHES) -> list[int]:
    with posts_counted() as posted:
        callbacks = [NextBatch(posted), *([Hooked()] if hooked else [])]
        trainer = make_trainer(AdaptiveDDPStrategy(**options), callbacks)
        trainer.fit(model(), batches_of_this_rank(Case(models.Branches, batches)))
    return posted


CLEAN = partial(models.Branches, models.all_used)


def test_few_steps_end_in_a_tally(ranks: Ranks) -> None:
    # The last entry is the end of the fit, which asks once more.
    every_fourth = [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 1]
    assert ranks(2).run(with_few, posts, CLEAN, {}, False) == [every_fourth] * 2
    # A decision in the first step: a new wrapper, whose first backward is the second.
    unused = partial(models.Branches, models.never_last)
    assert ranks(2).run(with_few, posts, unused, {}, False) == [[1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 1]] * 2


@pytest.mark.parametrize(
    ("model", "options", "hooked"),
    [
        (CLEAN, {"on_unused": "raise"}, False),
        (CLEAN, {}, True),
        (partial(models.OneParameter, models.all_used), {}, False),
        (partial(models.Branches, models.never_last), {"fallback": "finish"}, False),
    ],
    ids=["raise", "communication hook", "one parameter", "finish"],
)
def test_every_step_ends_in_a_tally_where_one_is_needed(
    ranks: Ranks, model: Callable[[], Any], options: dict[str, Any], hooked: bool
) -> None:
    for posted in ranks(2).run(with_few, posts, model, options, hooked):
        assert posted == [1] * BATCHES + [0]


def test_the_first_hundred_steps_end_in_a_tally_and_one_in_sixteen_later(ranks: Ranks) -> None:
    batches = 140
    expected = [int(b < TALLIES_AT_FIRST or b % BACKWARDS_BETWEEN_TALLIES == 0) for b in range(batches)]
    assert (TALLIES_AT_FIRST, BACKWARDS_BETWEEN_TALLIES) == (100, 16)
    assert ranks(2).run(posts, CLEAN, {}, False, batches) == [[*expected, 1]] * 2


# -- the head count ---------------------------------------------------------------------------------------------------


def head_count() -> tuple[list[int], int]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(dist.group.WORLD, torch.device("cpu"))
    store: Any = dist.group.WORLD.get_group_store()
    first, second = (exchange.open_head_count(torch.device("cpu")) for _ in range(2))
    assert first is not None
    assert second is not None
    keys = store.num_keys()
    read = []
    for step in range(20):
        joins = step % 3 == 0 or rank == step % world_size
        if joins:
            first.join(step)
            first.join(step)
        assert first.has_joined(step) == joins
        assert not second.has_joined(step)
        # In the place of the reduction.
        dist.barrier()
        if joins:
            read.append(first.read(step))
    second.join(0)
    dist.barrier()
    assert second.read(0) == world_size
    dist.barrier()
    return read, store.num_keys() - keys


def test_all_who_count_themselves_read_the_same(ranks: Ranks) -> None:
    for rank, (read, keys_left) in enumerate(ranks(3).run(head_count)):
        steps = [step for step in range(20) if step % 3 == 0 or step % 3 == rank]
        assert read == [3 if step % 3 == 0 else 1 for step in steps]
        # Keys are deleted as later ones are read.
        assert keys_left <= 8


def without_head_count(case: Case) -> Outcome:
    with pytest.MonkeyPatch.context() as patch, few_tallies(BETWEEN):
        patch.setattr(HeadCount, "read", lambda self, step: 0)
        return run_case(case)


def test_gradients_are_wrong_without_the_head_count(ranks: Ranks) -> None:
    for outcome in ranks(2).run(without_head_count, Case(partial(models.Branches, LateEverywhere(2)), BATCHES)):
        assert any("gradients of branches.1" in difference for difference in outcome.differences)


def dies_at_the_head_count(before: bool) -> None:
    original = tally.HeadCount.join

    def join(self: Any, step: int) -> None:
        if not before:
            original(self, step)
        if dist.get_rank() == 1:
            raise SystemExit("gone")
        original(self, step)

    with pytest.MonkeyPatch.context() as patch, few_tallies(BETWEEN):
        patch.setattr(tally.HeadCount, "join", join)
        run_case(Case(partial(models.Branches, LateEverywhere(2)), BATCHES))


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_dies_at_the_head_count_takes_the_others_down(ranks: Ranks, before: bool) -> None:
    with pytest.raises(RankError):
        ranks(2).run(dies_at_the_head_count, before, bound_s=30.0)
