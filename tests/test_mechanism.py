"""Each mechanism is needed: with it taken away, what it is for fails.

The parts that are taken away are this package's own; torch and Lightning stay as they are.
"""

from __future__ import annotations

import gc
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch.distributed as dist
from differential import Case, batches_of_this_rank, make_trainer, run_case
from models import InMicroBatch, LateEverywhere, OnlyOnce, OwnLater, SomeRanks
from package import AdaptiveDDPStrategy, Callback, Trainer
from ranks import RankError, Ranks
from test_sit_out import scaled
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from adaptive_ddp import graph, reducer, strategy, tally, window
from adaptive_ddp import run as run_module
from adaptive_ddp.run import Run
from adaptive_ddp.strategy import AdaptiveDDPMixin

# A group in which ranks wait for each other is killed after this; with everything in place a case takes under a second.
BOUND_S = 5.0


FINISH = {"fallback": "finish"}


def without_finish() -> tuple[Any, str, Any]:
    return reducer.Reduction, "finish", lambda self, is_used: reducer.Finished(frozenset(), {})


def without_waking() -> tuple[Any, str, Any]:
    return reducer.Reduction, "_wake", lambda self: False


def without_tally() -> tuple[Any, str, Any]:
    return tally.PostedTally, "read", lambda self: tally.Count(0, 0, 0)


def without_restore() -> tuple[Any, str, Any]:
    return reducer.Reduction, "restore", lambda self, index, gradient: None


def without_the_window() -> tuple[Any, str, Any]:
    return window.AccumulationWindow, "received", lambda self, index: False


def without_looking_at_the_end_of_the_fit() -> tuple[Any, str, Any]:
    return AdaptiveDDPMixin, "on_train_end", lambda self: None


def without_the_reading_of_the_step_before() -> tuple[Any, str, Any]:
    def settle(self: Any, *args: Any) -> None:
        original_settle(self, *args)
        self._open_step = None

    original_settle = Run._settle
    return Run, "_settle", settle


def without_the_buffers_rhythm() -> tuple[Any, str, Any]:
    def rewrap(self: Any) -> None:
        before = self.model
        original(self)
        if self.model is not before:
            self.model.require_forward_param_sync = True

    original = AdaptiveDDPMixin._rewrap_if_due
    return AdaptiveDDPMixin, "_rewrap_if_due", rewrap


def without_mending() -> tuple[Any, str, Any]:
    return AdaptiveDDPMixin, "_mend", lambda self, run, output: output


def without_unsharing() -> tuple[Any, str, Any]:
    return Run, "_unshare_sparse_gradients", lambda self: []


def without_obstacles() -> tuple[Any, str, Any]:
    original = run_module.decide
    return run_module, "decide", lambda obstacles, **facts: original(**facts)


def without_empty_sparse_gradients() -> tuple[Any, str, Any]:
    return reducer, "empty_sparse_gradient", lambda parameter: None


def without_reducing_outside() -> tuple[Any, str, Any]:
    return Run, "_reduce_outside", lambda self: None


def without_looking_out_for_checkpoints() -> tuple[Any, str, Any]:
    return graph.BlindForwards, "seen", frozenset()


def without_telling_a_backward_from_a_question() -> tuple[Any, str, Any]:
    return reducer._EarlyFiring, "_is_real_backward", lambda self: True


def without_noticing_another_usage() -> tuple[Any, str, Any]:
    calls = []

    def post(self: Any, *, differing: bool, **said: bool) -> Any:
        calls.append(differing)
        return original(self, differing=differing and len(calls) == 1, **said)

    original = tally.Exchange.post
    return tally.Exchange, "post", post


def without_knowing_the_barren() -> tuple[Any, str, Any]:
    class Forgetful(set[int]):
        def update(self, *others: Any) -> None:
            pass

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._barren = Forgetful()

    original = Run.__init__
    return Run, "__init__", begin


def without_keeping_something_for_the_scaler() -> tuple[Any, str, Any]:
    return strategy, "keep_scaler_content", lambda precision, reduction: None


def run_without(take_away: Callable[[], tuple[Any, str, Any]], case: Case) -> bool:
    """Whether the case goes wrong on this rank without the mechanism; it may also hang or raise."""
    owner, name, replacement = take_away()
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        outcome = run_case(case)
    finally:
        setattr(owner, name, original)
    return bool(outcome.differences) or (dist.get_rank() == 0 and outcome.final_decision.unused == ())


def case(usage: models.Usage, **kwargs: Any) -> Case:
    return Case(partial(models.Branches, usage), **kwargs)


TAKEN_AWAY = {
    "finish, all ranks": (without_finish, case(models.never_first)),
    "finish, some ranks": (without_finish, case(SomeRanks(2, 1))),
    "waking": (without_waking, Case(partial(models.OneParameter, SomeRanks(0, 1)), references=("oracle",))),
    "tally, first step": (without_tally, case(models.never_first)),
    "tally, later": (without_tally, case(LateEverywhere(2))),
    "restore, first step": (without_restore, case(models.never_first)),
    "restore, later": (without_restore, case(LateEverywhere(2))),
    "restore of a gradient": (
        without_restore,
        Case(partial(models.LocalGradient, LateEverywhere(2)), ranks_are_equal=False, references=("oracle",)),
    ),
    "the window": (without_the_window, case(InMicroBatch(0, 2, 0, 1), trainer={"accumulate_grad_batches": 2})),
    "the end of the fit": (without_looking_at_the_end_of_the_fit, case(OnlyOnce(4, 0))),
    "reading one step later": (without_the_reading_of_the_step_before, case(OnlyOnce(2, 0))),
    "mending, off": (
        without_mending,
        Case(partial(models.SitsOut, models.all_used, (1,), (0,), "None"), references=("oracle",)),
    ),
    "mending, on": (
        without_mending,
        Case(partial(models.SitsOut, models.never_last, (3,), (0,), "unreached"), references=("oracle",)),
    ),
    "copies of sparse gradients": (
        without_unsharing,
        Case(partial(models.SparseBranches, models.all_used), references=("oracle",)),
    ),
    "empty sparse gradients": (
        without_empty_sparse_gradients,
        Case(partial(models.SparseBranches, models.never_last), references=("oracle",)),
    ),
    "obstacles, reentrant": (
        without_obstacles,
        Case(partial(models.CheckpointedBranches, models.never_last), references=("oracle",)),
    ),
    "obstacles, sparse": (
        without_obstacles,
        Case(partial(models.SparseBranches, models.never_last), references=("oracle",)),
    ),
    "reducing what is outside": (
        without_reducing_outside,
        Case(partial(models.Freezes, models.all_used, {2: {1: True}}, {1: False}), references=("oracle",)),
    ),
    "looking out for checkpoints": (
        without_looking_out_for_checkpoints,
        Case(partial(models.LateCheckpoint, OwnLater()), 9, ours=FINISH, references=("oracle",)),
    ),
    "telling a backward from a question": (
        without_telling_a_backward_from_a_question,
        Case(partial(models.AsksFirst, models.OwnBranch(), False), 9, ours=FINISH),
    ),
    "noticing another usage": (without_noticing_another_usage, case(OwnLater(), batches=9, ours=FINISH)),
    "knowing the barren": (
        without_knowing_the_barren,
        Case(partial(models.BlockedBranch, models.never_last), ours=FINISH),
    ),
    "the buffers' rhythm": (without_the_buffers_rhythm, Case(partial(models.Gan, False), references=("flag",))),
}


@pytest.mark.parametrize("name", TAKEN_AWAY)
def test_it_goes_wrong_without(ranks: Ranks, name: str) -> None:
    take_away, its_case = TAKEN_AWAY[name]
    assert all(outcome.differences == [] for outcome in ranks(2).run(run_case, its_case))
    try:
        wrong = ranks(2).run(run_without, take_away, its_case, bound_s=BOUND_S)
    except RankError:
        return
    assert any(wrong)


def scaled_without(take_away: Callable[[], tuple[Any, str, Any]]) -> str:
    owner, name, replacement = take_away()
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        scaled((0, 1), models.all_used)
    except AssertionError as error:
        return str(error)
    finally:
        setattr(owner, name, original)
    return ""


def test_a_scaler_fails_on_a_step_that_all_ranks_sit_out_without_content(ranks: Ranks) -> None:
    for error in ranks(2).run(scaled_without, without_keeping_something_for_the_scaler):
        assert "No inf checks were recorded" in error


class Hooked(Callback):
    """Counts calls of a communication hook that is registered once, at the start."""

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        self.calls = 0

        def hook(state: None, bucket: dist.GradBucket) -> Any:
            self.calls += 1
            return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

        hook.__annotations__ = {}
        trainer.strategy.model.register_comm_hook(None, hook)


def calls_of_a_comm_hook(move: Callable[[Any, Any], None]) -> int:
    original, strategy.move_comm_hooks = strategy.move_comm_hooks, move
    hooked = Hooked()
    try:
        trainer = make_trainer(AdaptiveDDPStrategy(), [hooked])
        trainer.fit(models.Branches(models.never_last), batches_of_this_rank(Case(models.Branches, 3)))
    finally:
        strategy.move_comm_hooks = original
    return hooked.calls


def move_nothing(old: Any, new: Any) -> None:
    pass


def test_a_comm_hook_is_lost_unless_it_is_moved(ranks: Ranks) -> None:
    assert ranks(2).run(calls_of_a_comm_hook, move_nothing) == [1, 1]
    assert ranks(2).run(calls_of_a_comm_hook, reducer.move_comm_hooks) == [3, 3]


class HoldsTheWrapper(Callback):
    """A user's reference to the first wrapper, taken at a time when that was the only one."""

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        self.wrapper = trainer.strategy.model
        self.reducer = weakref.ref(self.wrapper.reducer)


def old_reducer_is_gone(dismantle: Callable[[Any], None]) -> bool:
    original, strategy.dismantle = strategy.dismantle, dismantle
    holder = HoldsTheWrapper()
    try:
        trainer = make_trainer(AdaptiveDDPStrategy(), [holder])
        trainer.fit(models.Branches(models.never_last), batches_of_this_rank(Case(models.Branches, 3)))
    finally:
        strategy.dismantle = original
    gc.collect()
    return holder.reducer() is None


def do_nothing(ddp: Any) -> None:
    pass


def test_the_old_reducer_is_gone_even_if_its_wrapper_is_held(ranks: Ranks) -> None:
    assert ranks(2).run(old_reducer_is_gone, reducer.dismantle) == [True, True]
    assert ranks(2).run(old_reducer_is_gone, do_nothing) == [False, False]


class Witness(Callback):
    """Rank 0 says that its second backward is over; rank 1 does not post its tally before it has heard so."""

    def __init__(self, heard: Path) -> None:
        self.heard = heard
        self.backwards = 0

    def on_after_backward(self, *args: Any) -> None:
        self.backwards += 1
        if dist.get_rank() == 0 and self.backwards == 2:
            self.heard.touch()


def a_clean_rank_does_not_wait() -> bool:
    name = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(name, 0)
    heard = Path(name[0]) / "heard"
    post, posts = tally.Exchange.post, []

    def post_late(self: Any, **kwargs: Any) -> Any:
        posts.append(kwargs)
        if dist.get_rank() == 1 and len(posts) == 2:
            while not heard.exists():
                time.sleep(0.01)
        return post(self, **kwargs)

    tally.Exchange.post = post_late
    try:
        trainer = make_trainer(AdaptiveDDPStrategy(), [Witness(heard)])
        trainer.fit(models.Branches(models.all_used), batches_of_this_rank(Case(models.Branches, 3)))
    finally:
        tally.Exchange.post = post
    return len(posts) == 3


def test_a_clean_rank_does_not_wait_for_the_tally(ranks: Ranks) -> None:
    # It would wait for ever: rank 1 posts only after rank 0 has come out of its backward.
    assert ranks(2).run(a_clean_rank_does_not_wait, bound_s=BOUND_S) == [True, True]
