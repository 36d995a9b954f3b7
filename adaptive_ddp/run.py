"""What happens to one wrapper from its making to its end, whatever trains with it: the mechanism itself.

Promise: between :meth:`Run.before_backward` and the return of :meth:`Run.after_backward`, which stand around each
backward on every rank, the gradients become what ``find_unused_parameters=True`` gives, and what there is to decide
about the wrapper is decided on all ranks in the same step.

Limits: it decides and does not wrap. The caller (``strategy.py``, ``fabric.py``) makes the wrapper, looks at
:attr:`Run.rewrap_with_flag` outside the wrapper's forward, makes the next one and starts a new run on it; it also says
what there is to say to the user. Imports no Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from adaptive_ddp.decision import Decision, Obstacle, State, decide
from adaptive_ddp.graph import BlindForwards, reached_parameters, reaches_any, touch
from adaptive_ddp.reducer import (
    Finished,
    Reduction,
    gradient_or_zeros,
    has_comm_hook,
    sparse_parameters,
    uses_power_sgd,
)
from adaptive_ddp.report import describe_split
from adaptive_ddp.tally import Exchange, HeadCount, PostedMap, PostedTally
from adaptive_ddp.trainable import TrainableSet
from adaptive_ddp.window import AccumulationWindow

T = TypeVar("T")

# The first backwards of a wrapper end in a tally each. Once so many have, one in so many is enough for ranks that use
# everything, since those that do not finish their reductions without being told of each other.
TALLIES_AT_FIRST = 100
BACKWARDS_BETWEEN_TALLIES = 16


@dataclass(frozen=True)
class _Untold:
    """What went unused on this rank since the last tally, and in which step first."""

    number: int
    unused: frozenset[int]
    hides_parameters: bool


@dataclass
class _Step:
    """One synchronised backward, as far as it is known."""

    number: int
    tally: PostedTally
    # The parameters that are unused on this rank, with the gradients they had before: the reducer's index of each.
    unused: dict[int, Tensor | None] = field(default_factory=dict)
    # This rank's backward, where something is missing; the graph is gone with the step, what it hides is not.
    hides_parameters: bool = False
    # Its tally tells whether the usage map exchanged last still holds.
    relies_on_agreement: bool = False

    def tell(self, untold: _Untold) -> None:
        """Let this step stand for those that ended in no tally too."""
        self.number = untold.number
        self.unused = self.unused or dict.fromkeys(untold.unused)
        self.hides_parameters |= untold.hides_parameters


@dataclass(frozen=True)
class _Agreement:
    """What a usage map said: unused on this rank, and unused on every rank."""

    here: frozenset[int]
    everywhere: frozenset[int]


@dataclass(frozen=True)
class Aftermath:
    """What :meth:`Run.after_backward` has for the caller to tell the user, or to act on.

    Attributes:
        sat_out: this rank's backward reached no parameter, or stood in for one that there was not.
        change_seen: this rank trains another set of parameters than the wrapper does, which may be why it reached none.
        decision: what all ranks decided in this step, if they did.
        set_changed: all ranks go on with another set of trainable parameters.
    """

    sat_out: bool = False
    change_seen: bool = False
    decision: Decision | None = None
    set_changed: bool = False


class Run:
    """The mechanism on one wrapper, which has just been made.

    Args:
        ddp: the wrapper.
        state: PROBE for one with the flag off, ON for one with the flag on.
        prefers_finish: decide on FINISH where ON would do too.
        reads_at_once: decide on unused parameters in the step in which they are, on whichever ranks: every rank then
            waits for the tally in every step.
        toggles: the user may freeze parameters for a single backward (manual optimization). Then :meth:`note_frozen` is
            to be called with the set at rest, and what a backward finds frozen is no change of the set.

    Attributes:
        reduction: the wrapper's reducer.
        trainable: the module's parameters, and which of them were trainable when it was wrapped.
        state: the state of the run.
        rewrap_with_flag: the flag of the wrapper that is to take this one's place, on all ranks; None if none is.
        change_seen: seen on this rank since the last synchronised backward: the trainable parameters are not those of
            the wrapper.
        stands_in: the current backward is that of a zero which took the place of a missing loss, on this rank.
        is_within_window: a backward of the next window has been, which the wrapper knows of and its successor would
            not.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        state: State,
        *,
        prefers_finish: bool = False,
        reads_at_once: bool = False,
        toggles: bool = False,
    ) -> None:
        self._ddp = ddp
        self.reduction = Reduction(ddp)
        self.trainable = TrainableSet(ddp.module, ddp.parameters_to_ignore)
        self.state = state
        self._prefers_finish = prefers_finish
        self._reads_at_once = reads_at_once
        self._toggles = toggles
        self.rewrap_with_flag: bool | None = None
        self.change_seen = False
        self.stands_in = False
        self.is_within_window = False
        self._window = AccumulationWindow(self.reduction.parameters)
        self._exchange = Exchange(ddp.process_group, self.reduction.device)
        # The latest step, while some rank has yet to read its tally.
        self._open_step: _Step | None = None
        # What was trainable in some backward since the last synchronised one and is not in the reducer: it may hold a
        # gradient.
        self._unfrozen: set[int] = set()
        # Agreed by all ranks: what has become trainable and is not in the reducer. Reduced here until the rewrap.
        self._outside: list[int] = []
        # A usage map that is known to all, while some rank has had no graph to look for obstacles in.
        self._undecided: tuple[_Step, list[int]] | None = None
        # The usage map that the ranks exchanged last, as far as this rank goes by it.
        self._agreement = _Agreement(frozenset(), frozenset())
        # Reached by the first backward on this rank, and yet without a gradient.
        self._barren: set[int] = set()
        # Missing on this rank in some earlier step, and so perhaps in the next.
        self._expected: set[int] = set()
        self._may_fire_early = False
        self._blind_forwards = BlindForwards(ddp.module)
        # The synchronised backwards so far, the current one left out.
        self._backwards = 0
        # Every one of them ended in a tally.
        self._is_new = True
        # Whether the current one ends in one, on all ranks. If not, there is a head count.
        self._has_tally = True
        self._head_count: HeadCount | None = None
        self._untold: _Untold | None = None
        # Since the last tally the set of trainable parameters changed on this rank, and not on all.
        self._has_split = False
        # What the current call has for its caller.
        self._news: Decision | None = None
        self._set_changed = False
        # What was finished from inside the current backward.
        self._finished: Finished | None = None
        self._sparse_handles = self._unshare_sparse_gradients()

    def _unshare_sparse_gradients(self) -> list[Any]:
        """Give the reducer copies of sparse gradients.

        It divides them in place (``reducer.cpp``, ``mark_variable_ready_sparse``). An additive embedding's gradient
        shares memory with the gradient that flows on to earlier layers, which would be divided with it.
        """
        parameters: list[Any] = self.reduction.parameters
        return [
            parameter.register_hook(torch.clone)
            for parameter, sparse in zip(parameters, self.reduction.expects_sparse, strict=True)
            if sparse
        ]

    def close(self) -> None:
        """End the run, at any time, and leave no hook of its own behind. The wrapper is left as it is."""
        self._window.close()
        self._blind_forwards.close()
        for handle in self._sparse_handles:
            handle.remove()

    # -- before a backward --------------------------------------------------------------------------------------------

    def note_unfrozen(self) -> None:
        """Look for parameters that were unfrozen on this rank; before each backward."""
        if unfrozen := self.trainable.unfrozen():
            self.change_seen = True
            self._unfrozen.update(unfrozen)

    def note_frozen(self) -> None:
        """Look for parameters that were frozen on this rank; with the set at rest, once before each backward.

        Without the flag a frozen parameter is missing, and :meth:`after_backward` sees it. To the flag it is one that
        is unused, whose gradient is right: there it is enough to look at a few parameters a step.
        """
        if self._toggles:
            self.change_seen |= self.trainable.has_changed()
        elif self._ddp.find_unused_parameters:
            self.change_seen |= self.trainable.glance()

    def post_map(self, indices: Iterable[int], size: int) -> PostedMap:
        """Contribute to a map of counts of the caller's, without waiting; on every rank, between backwards."""
        return self._exchange.post_map(indices, size)

    def obstacles(self) -> list[Obstacle]:
        """What keeps the flag from serving the module, as far as it shows without a backward."""
        found = [Obstacle.SPARSE] if any(self.reduction.expects_sparse) else []
        if uses_power_sgd(self._ddp):
            found.append(Obstacle.POWER_SGD)
        return found

    def gather(self, value: T) -> list[T]:
        """Collect a small object of every rank, in rank order; on every rank, between backwards."""
        return self._exchange.gather(value)

    def reaches_nothing(self, loss: Tensor) -> bool:
        """Whether a backward from the loss is impossible, or would have the other ranks wait for ever."""
        if not loss.requires_grad:
            return True
        # With the flag off it shows after the backward, at no cost.
        return self._ddp.find_unused_parameters and not reaches_any(loss, self.reduction.parameter_set)

    def stand_in(self) -> Tensor:
        """A zero for a rank without a loss of its own: its backward contributes zeros to the others' step."""
        self.stands_in = True
        if self._ddp.find_unused_parameters:
            # Under the flag no reduction starts before some hook has fired. What is frozen is left to note_frozen(),
            # which comes to it in the same step on all ranks.
            return touch(self.reduction.parameters)
        self.change_seen |= not self._toggles and self.trainable.has_changed()
        return torch.zeros((), device=self.reduction.device, requires_grad=True)

    def before_backward(self, loss: Tensor) -> bool:
        """Note what the window needs, and prepare for what is expected to be missing; before every backward.

        Args:
            loss: the root of the backward, in which nothing may come between it and this call.

        Returns:
            Whether this backward is to be synchronised; then :meth:`after_backward` must follow it.
        """
        synchronised: bool = self._ddp.require_backward_grad_sync
        self.is_within_window = not synchronised
        if synchronised and (self.change_seen or self._barren):
            self._join_head_count()
        if self._ddp.find_unused_parameters:
            return synchronised
        if self.state is State.PROBE:
            self._window.open(range(len(self.reduction.parameters)))
        elif self._barren or not synchronised:
            self._window.open(self._barren)
        if synchronised:
            self.reduction.look()
            if self.state is State.FINISH and self._expected:
                blind = self._blind_forwards.seen
                expected: Collection[int] = self._expected
                if blind:
                    expected = {index for index in expected if self.reduction.parameters[index] not in blind}
                self.reduction.begin(loss, expected, self._window.received if self._window.is_open else None)
        return synchronised

    def finish_within_backward(self) -> None:
        """Finish the reduction from inside the backward, for :meth:`after_backward` to go on from.

        For a backward that takes in several wrappers; to be called by ``reducer.at_end_of_backward``.
        """
        if self._ddp.find_unused_parameters:
            self.reduction.finish(is_used=lambda index: True, wakes=False, within_backward=True)
        else:
            self._finished = self.reduction.finish(
                is_used=self._window.received, within_backward=True, before_firing=self._join_head_count
            )

    def _join_head_count(self) -> None:
        """Have this rank counted among those that have something to agree on, if no tally will tell."""
        if not self._has_tally:
            assert self._head_count is not None
            self._head_count.join(self._backwards)

    def _has_joined_head_count(self) -> bool:
        return self._head_count is not None and self._head_count.has_joined(self._backwards)

    # -- after it -----------------------------------------------------------------------------------------------------

    def after_backward(self, loss: Tensor, step_number: Callable[[], int]) -> Aftermath | None:
        """Finish the reduction on this rank, and agree with the others on what was unused.

        Every rank runs the same collectives here: the branches depend on tallies that all ranks have read, or, where
        some read one early, on all of them having done so.

        Args:
            loss: the root of this rank's backward.
            step_number: gives the optimizer step that it belongs to, counted from 1, for the decision.

        Returns:
            None if there is nothing to tell and nothing to do, as in nearly every step.

        Raises:
            RuntimeError: on every rank, if the set of trainable parameters changed differently across ranks; or if the
                process group fails.
        """
        self._news = None
        unused, missing = self._finish_reduction()
        aftermath: Aftermath | None = None
        if self._has_tally:
            is_ordinary = not (missing or unused or self.stands_in or self.change_seen or self._outside)
            is_told = self._untold is None and not self._has_split
            if not (is_ordinary and is_told) or self.state is State.PROBE or self._reads_at_once:
                aftermath = self._agree(loss, step_number(), unused, missing)
            else:
                self._open(_Step(step_number(), self._exchange.post(waiting=False, differing=False, changed=False)))
        elif self._has_joined_head_count():
            assert self._head_count is not None
            if self._head_count.read(self._backwards) == self._exchange.world_size:
                aftermath = self._agree(loss, step_number(), unused, missing)
            else:
                aftermath = self._put_off(loss, step_number(), unused, missing)
        else:
            self._open(None)
            if self.stands_in:
                # Under the flag there is nothing to agree on.
                aftermath = Aftermath(sat_out=True)
        if aftermath is None:
            # Nearly every step of nearly every run comes by here.
            if self._undecided is not None:
                self._decide(*self._undecided, loss, missing)
            if self._news is not None:
                aftermath = Aftermath(decision=self._news)
        self._backwards += 1
        self._schedule_tally()
        return aftermath

    def _schedule_tally(self) -> None:
        """Settle whether the next synchronised backward is to end in a tally; from what all ranks know."""
        if self._is_new and self._backwards >= TALLIES_AT_FIRST and self.state in (State.WATCH, State.ON):
            self._is_new = False
            if self._can_do_with_few_tallies():
                self._head_count = self._exchange.open_head_count(self.reduction.device)
        self._has_tally = (
            self._head_count is None
            or self._backwards % BACKWARDS_BETWEEN_TALLIES == 0
            # An agreed set is good for a step only if nobody's differs in it.
            or self.state is State.FINISH
            or self._undecided is not None
            or bool(self._outside)
            or self.rewrap_with_flag is not None
        )

    def _can_do_with_few_tallies(self) -> bool:
        return (
            not self._reads_at_once
            # Its only hook completes the reduction, so that it shows too late that it was missing.
            and len(self.reduction.parameters) > 1
            # A communication hook need not have the ranks wait for each other.
            and not has_comm_hook(self._ddp)
        )

    def _put_off(
        self, loss: Tensor, step_number: int, unused: dict[int, Tensor | None], missing: frozenset[int]
    ) -> Aftermath:
        """Keep for the next tally what some ranks know nothing of. Their gradients are right without it."""
        changed, self.change_seen = self.change_seen, False
        sat_out = self._sits_out(missing)
        self._has_split |= changed
        if unused and not sat_out and self.state is State.WATCH:
            hides = self._hides_parameters(loss, missing)
            untold = self._untold or _Untold(step_number, frozenset(), hides_parameters=False)
            self._untold = _Untold(untold.number, untold.unused.union(unused), untold.hides_parameters or hides)
        self._open(None)
        if self._undecided is not None:
            self._decide(*self._undecided, loss, missing)
        return Aftermath(sat_out=sat_out, change_seen=changed, decision=self._news)

    def _sits_out(self, missing: frozenset[int]) -> bool:
        return self.stands_in or len(missing) == len(self.reduction.parameters)

    def _agree(
        self, loss: Tensor, step_number: int, unused: dict[int, Tensor | None], missing: frozenset[int]
    ) -> Aftermath:
        """Do what there is to do together in a step in which something is out of the ordinary on this rank."""
        self._set_changed = False
        changed, self.change_seen = self.change_seen, False
        sat_out = self._sits_out(missing)
        # After a split, of which all ranks learn from this tally, there is nothing to agree on any more.
        waiting = (bool(unused) or sat_out or changed) and not self._has_split
        relies = self.state is State.FINISH
        # Before a decision, a rank that sits out is no reason to take one.
        differs = unused.keys() != self._agreement.here if relies else bool(unused) and not sat_out
        untold = None
        # A map is of one step, and the one that gradients are given back by is that of the current one.
        if not sat_out and (unused or not waiting):
            untold, self._untold = self._untold, None
        tally = self._exchange.post(
            waiting=waiting, differing=differs or untold is not None, changed=changed or self._has_split
        )
        decides = self.state in (State.PROBE, State.WATCH)
        hides = decides and bool(unused) and self._hides_parameters(loss, missing)
        step = _Step(step_number, tally, unused, hides, relies)
        if untold is not None:
            step.tell(untold)
        self._open(step)
        if self._undecided is not None:
            self._decide(*self._undecided, loss, missing)
        if waiting or self.state is State.PROBE or self._reads_at_once:
            self._settle(step, loss, missing)
        self._reduce_outside()
        return Aftermath(sat_out=sat_out, change_seen=changed, decision=self._news, set_changed=self._set_changed)

    def _finish_reduction(self) -> tuple[dict[int, Tensor | None], frozenset[int]]:
        """Finish the reduction on this rank; return what is unused on it, with what it held, and what was missing."""
        if self._ddp.find_unused_parameters:
            # The flag looks at the graph of the loss. A backward may reach less of it (backward(inputs=...)).
            self.reduction.finish(is_used=lambda index: True, wakes=False)
            return {}, frozenset()
        finished, self._finished = self._finished, None
        if finished is None:
            finished = self.reduction.finish(is_used=self._window.received, before_firing=self._join_head_count)
        unused = finished.unused
        if not self._window.is_open and not finished.missing:
            return unused, finished.missing
        if finished.missing:
            self._look_at_missing(finished.missing)
        # To the reducer a parameter whose hook fired is ready, even if the backward brought it no gradient (a custom
        # autograd function that returned None). The window tells the two apart.
        if self.state is State.PROBE:
            indices = range(len(self.reduction.parameters))
            self._barren.update(i for i in indices if i not in unused and not self._window.received(i))
        unused.update({i: None for i in self._barren if i not in unused and not self._window.received(i)})
        self._window.close()
        return unused, finished.missing

    def _look_at_missing(self, missing: frozenset[int]) -> None:
        """Whether some of these are missing because they are frozen; have them fired early when missing again."""
        # All of them, since what this rank expects to be missing the others may have used until now.
        parameters = self.reduction.parameters
        if not self._toggles and not all(parameters[index].requires_grad for index in missing):
            self.change_seen = True
        if self.state is State.FINISH and self._may_fire_early:
            if added := missing - self._expected:
                self._expected |= added
                self._blind_forwards.watch(parameters[index] for index in added)
            self._blind_forwards.forget()

    def _hides_parameters(self, loss: Tensor, missing: frozenset[int]) -> bool:
        """Whether the backward of a loss reached some of the reducer's parameters outside the graph of that loss."""
        reached = set(reached_parameters(loss))
        return any(p not in reached for index, p in enumerate(self.reduction.parameters) if index not in missing)

    # -- the ranks' agreement -----------------------------------------------------------------------------------------

    def _open(self, step: _Step | None) -> None:
        """Read the tally of the step before, which every rank has read by now or reads here; keep the new one's.

        A rank that used everything reads it in the next step, so that it does not wait for the others in this one.
        """
        step, self._open_step = self._open_step, step
        if step is None:
            return
        count = step.tally.read()
        if count.changed:
            self._raise_split(step)
        if count.differing and self.state is State.WATCH and self._undecided is None:
            self._undecided = step, self._missed_by(step)

    def conclude(self, step_number: int) -> Decision | None:
        """Read the last tally, which no later step will read; on every rank, when there is no later step.

        Args:
            step_number: the last step, counted as in :meth:`after_backward`.

        Returns:
            What was decided from it, if anything was.
        """
        self._news = None
        self._open(None)
        if self._head_count is not None:
            untold, self._untold = self._untold, None
            tally = self._exchange.post(waiting=False, differing=untold is not None, changed=self._has_split)
            step = _Step(step_number, tally)
            if untold is not None:
                step.tell(untold)
            self._open(step)
            self._open(None)
        if self._undecided is not None:
            self._decide(*self._undecided, None, frozenset())
        return self._news

    def _settle(self, step: _Step, loss: Tensor, missing: frozenset[int]) -> None:
        """Read a tally in its own step, and act on it."""
        count = step.tally.read()
        world_size = self._exchange.world_size
        probing = self.state is State.PROBE
        if not (probing or count.waiting == world_size or (self._reads_at_once and count.differing)):
            # The ranks that used everything learn of it in the next step; what there is to decide is decided there.
            return
        self._open_step = None
        missed_by = None
        if count.waiting == world_size:
            # Only now can a parameter be unused everywhere.
            if count.differing or not step.relies_on_agreement:
                missed_by = self._missed_by(step)
            for index in self._agreement.everywhere:
                self.reduction.restore(index, step.unused[index])
        if count.changed:
            self._agree_on_trainable_set(step)
            if self._reads_at_once and missed_by is not None and self.rewrap_with_flag is not None:
                # No later step tells of a parameter that is not frozen and was missing in this one only.
                trainable = (parameter.requires_grad for parameter in self.reduction.parameters)
                self._decide(step, [m * t for m, t in zip(missed_by, trainable, strict=True)], loss, missing)
        elif self.state in (State.PROBE, State.WATCH) and count.differing and self._undecided is None:
            self._decide(step, missed_by or self._missed_by(step), loss, missing)
        elif probing and not count.waiting:
            self._decide(step, [0] * len(self.reduction.parameters), loss, missing)

    def _missed_by(self, step: _Step) -> list[int]:
        """Exchange the usage map of a step, and go by it from now on."""
        missed_by = self._exchange.count(step.unused, len(self.reduction.parameters))
        everywhere = frozenset(index for index in step.unused if missed_by[index] == self._exchange.world_size)
        self._agreement = _Agreement(frozenset(step.unused), everywhere)
        return missed_by

    def _decide(self, step: _Step, missed_by: list[int], loss: Tensor | None, missing: frozenset[int]) -> None:
        """Decide from a usage map, on every rank alike; or put it off while a rank has no graph to look into."""
        obstacles = self.obstacles()
        missing_by_rank: list[frozenset[int]] = []
        if any(missed_by):
            hides = step.hides_parameters or (loss is not None and self._hides_parameters(loss, missing))
            lacks_graph = loss is not None and len(missing) == len(self.reduction.parameters)
            sat_out = len(step.unused) == len(self.reduction.parameters)
            hidden, without_graph, idle = self._exchange.count([0] * hides + [1] * lacks_graph + [2] * sat_out, 3)
            if hidden:
                obstacles.append(Obstacle.REENTRANT)
            elif without_graph and not self._reads_at_once:
                self._undecided = step, missed_by
                return
            # A rank that sat out missed every parameter, and is no reason.
            missed_by = [max(0, missed - idle) for missed in missed_by]
            if self._reads_at_once and any(missed_by):
                missing_by_rank = self._exchange.gather(frozenset() if sat_out else frozenset(step.unused))
        self._undecided = None
        # Once not every step ends in a tally, the step of this rank need not be that in which it began.
        number = step.number if self._head_count is None else -self._exchange.highest(-step.number)
        self._news = decide(
            step=number,
            world_size=self._exchange.world_size,
            names=self.reduction.names,
            numels=[parameter.numel() for parameter in self.reduction.parameters],
            missed_by=missed_by,
            obstacles=obstacles,
            prefers_finish=self._prefers_finish,
            missing_by_rank=missing_by_rank,
        )
        self.state = self._news.state
        if self.state is State.ON:
            self.rewrap_with_flag = True
        if self.state is not State.WATCH:
            self._untold = None
        # A reentrant checkpoint's graph is not in that of the loss, so there is no telling what it will reach.
        self._may_fire_early = Obstacle.REENTRANT not in obstacles

    # -- another set of trainable parameters --------------------------------------------------------------------------

    def _agree_on_trainable_set(self, step: _Step) -> None:
        """Go on with the set of trainable parameters that all ranks have now, or raise if it is not the same."""
        size = len(self.trainable.names)
        world_size = self._exchange.world_size
        now = [index for index, trainable in enumerate(self.trainable.now()) if trainable]
        self._unfrozen.update(self.trainable.unfrozen())
        counts = self._exchange.count([*now, *(size + index for index in self._unfrozen)], 2 * size)
        if step.tally.read().changed < world_size or not set(counts) <= {0, world_size}:
            self._raise_split(step)
        self._outside = sorted(self._unfrozen)
        self.trainable.accept()
        # With nothing left to train there is nothing to wrap; the old wrapper stays until there is.
        self.rewrap_with_flag = False if now else None
        self._set_changed = True

    def _raise_split(self, step: _Step) -> None:
        trainable = frozenset(name for name, now in zip(self.trainable.names, self.trainable.now(), strict=True) if now)
        by_rank = self._exchange.gather(trainable)
        raise RuntimeError(describe_split(step=step.number, names=self.trainable.names, trainable_by_rank=by_rank))

    def _reduce_outside(self) -> None:
        """Reduce the gradients of parameters that became trainable after wrapping, by the reducer's own rule."""
        if not self._outside:
            return
        parameters = [self.trainable.parameters[index] for index in self._outside]
        sparse = sparse_parameters(self._ddp.module)
        used = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
        for parameter, used_by in zip(parameters, self._exchange.count(used, len(parameters)), strict=True):
            if used_by:
                gradient = gradient_or_zeros(parameter, sparse=parameter in sparse)
                parameter.grad = self._exchange.average(gradient)
