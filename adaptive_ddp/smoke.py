"""What one rank records in a smoke run (``fast_dev_run``), for the verdict. Torch alone.

Promise: it looks and changes nothing: gradients, reductions and weights are those of a run without it. It asks nothing
of the other ranks; what it holds in the end is exchanged once (``strategy.py``).

Limits: it costs a hook on every parameter and a walk over the autograd graph in each backward, which a smoke run can
afford. A backward that the strategy does not see is not recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adaptive_ddp.decision import Obstacle
from adaptive_ddp.graph import checkpoints_in, reached_parameters, tensors_in
from adaptive_ddp.reducer import backwards_begun, forget_removed_accumulation_hooks
from adaptive_ddp.run import Run
from adaptive_ddp.verdict import BackwardRecord, Finding, RankRecord, StepRecord

_OF_OBSTACLES = {Obstacle.SPARSE: Finding.SPARSE, Obstacle.POWER_SGD: Finding.POWER_SGD}


def is_smoke_run(trainer: Any) -> bool:
    """Whether a Lightning Trainer, of either package, was told to run a few batches only."""
    return bool(trainer.fast_dev_run)


def findings_of_trainer(trainer: Any) -> frozenset[Finding]:
    """What a Lightning Trainer, of either package, is known to do later in a longer fit."""
    # By name, since there are two packages and this file knows neither.
    callbacks = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
    findings = set()
    if "BaseFinetuning" in callbacks:
        findings.add(Finding.FINETUNES)
    if trainer.accumulate_grad_batches > 1 or "GradientAccumulationScheduler" in callbacks:
        findings.add(Finding.ACCUMULATES)
    return frozenset(findings)


def findings_of_run(run: Run) -> frozenset[Finding]:
    """What the wrapper is known to stumble over."""
    return frozenset(_OF_OBSTACLES[obstacle] for obstacle in run.obstacles())


class SmokeRun:
    """Records what the backwards of a smoke run reach on this rank.

    Args:
        parameters: the module's parameters, frozen or not, those that DDP was told to ignore left out.
        is_automatic: whether Lightning runs the backwards; the outcome of ``training_step`` is then what the flag's
            graph walk starts from.
        findings: what is known from the start.
    """

    def __init__(self, parameters: Sequence[Tensor], *, is_automatic: bool, findings: frozenset[Finding]) -> None:
        self._parameters = parameters
        self._place_of = {parameter: place for place, parameter in enumerate(parameters)}
        self._is_automatic = is_automatic
        self._findings = set(findings) if is_automatic else {Finding.MANUAL, *findings}
        self._trainable_at_first = self._trainable()
        self._trained = self._trainable_at_first
        self._steps: list[StepRecord] = []
        self._backwards: list[BackwardRecord] = []
        self._sat_out = False
        # What the graph that the flag would walk reaches, in automatic optimization.
        self._foreseen: frozenset[int] = frozenset()
        # What the current backward reached, and how often; what the current window brought a gradient.
        self._reached: Counter[int] = Counter()
        self._received: set[int] = set()
        # What those before it in the window reached, each by itself.
        self._reached_unsynchronised: list[frozenset[int]] = []
        self._begun = 0
        self._handles = [self._watch(place) for place in range(len(parameters))]

    def _watch(self, place: int) -> RemovableHandle:
        parameter: Any = self._parameters[place]

        def note(parameter: Tensor) -> None:
            self._reached[place] += 1
            # Called with nothing too, after a custom function that returned None; what counts is what counts for the
            # flag (see window.py).
            if parameter.grad is not None:
                self._received.add(place)

        trainable = parameter.requires_grad
        # A frozen parameter takes no hook, but may be unfrozen later.
        parameter.requires_grad_(True)
        # Not a hook on the gradient: torch.autograd.grad calls those too, and leaves the reducer alone.
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)
        parameter.requires_grad_(trainable)
        return handle

    def _trainable(self) -> frozenset[int]:
        return frozenset(place for place, parameter in enumerate(self._parameters) if parameter.requires_grad)

    def note_output(self, output: Any) -> None:
        """After each ``training_step``: what it returned, and with manual optimization the end of a step."""
        self._look_at_set()
        if not self._is_automatic:
            self._end_step()
            return
        returned = list(tensors_in(output))
        if len(returned) > 1:
            self._findings.add(Finding.RETURNS_MORE)
        self._foreseen = frozenset().union(*(self._places_reached(tensor) for tensor in returned))

    def _look_at_set(self) -> None:
        trainable = self._trainable()
        if trainable != self._trainable_at_first:
            self._findings.add(Finding.SET_CHANGED)
        self._trained |= trainable

    def _places_reached(self, loss: Tensor) -> frozenset[int]:
        reached = (self._place_of.get(parameter) for parameter in reached_parameters(loss))
        return frozenset(place for place in reached if place is not None)

    def begin_backward(self) -> None:
        """Right before each backward."""
        self._reached.clear()
        self._begun = backwards_begun()

    def end_backward(self, loss: Tensor, *, synchronised: bool, stands_in: bool) -> None:
        """Right after each backward, before its reduction is finished.

        Args:
            loss: the root of the backward.
            synchronised: it was to be synchronised.
            stands_in: the loss took the place of one that there was not.
        """
        # This backward and the one that the count takes are not inside it.
        inner = backwards_begun() - self._begun - 2
        self._sat_out |= stands_in or not self._reached
        reached = frozenset(self._reached)
        if not synchronised:
            self._reached_unsynchronised.append(reached)
            return
        if any(not reached <= earlier for earlier in self._reached_unsynchronised):
            self._findings.add(Finding.UNEVEN)
        self._reached_unsynchronised.clear()
        in_graph = self._places_reached(loss)
        if inner and reached - in_graph:
            self._findings.add(Finding.REENTRANT)
        # What is in the output and not in the loss is no matter: the flag ties the tensors of the output together
        # (distributed.py, _DDPSink).
        if reached != in_graph or (self._is_automatic and not reached <= self._foreseen):
            self._findings.add(Finding.UNFORESEEN)
        if inner != checkpoints_in(loss):
            self._findings.add(Finding.INNER_BACKWARDS)
        if any(times > 1 for times in self._reached.values()):
            self._findings.add(Finding.REPEATS)
        self._backwards.append(BackwardRecord(reached, frozenset(self._received)))
        self._received.clear()
        if self._is_automatic:
            self._end_step()

    def _end_step(self) -> None:
        self._steps.append(StepRecord(tuple(self._backwards), self._sat_out))
        self._backwards.clear()
        self._sat_out = False

    def record(self, findings: frozenset[Finding]) -> RankRecord:
        """What this rank saw.

        Args:
            findings: what else there is to say of it now.
        """
        self._look_at_set()
        if self._backwards:
            # An error ends a training_step of manual optimization before its time.
            self._end_step()
        if len(self._trained) < len(self._parameters):
            findings |= {Finding.FROZEN}
        return RankRecord(tuple(self._steps), self._trained, findings.union(self._findings))

    def close(self) -> None:
        """Leave no hook behind."""
        for handle, parameter in zip(self._handles, self._parameters, strict=True):
            handle.remove()
            forget_removed_accumulation_hooks(parameter)
        self._handles.clear()
