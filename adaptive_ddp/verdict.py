"""The verdict of a smoke run: which strategy the model can be trained under, and why. Plain data, no torch.

Promise: :func:`judge` sees what all ranks recorded, so the verdict is the same on every rank. It advises nothing under
which the steps that were seen would have failed, hung or come out wrong; where it cannot tell, it advises the adaptive
strategy.

Limits: it knows the steps that were seen and no others.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from adaptive_ddp.decision import Obstacle


class Advice(enum.Enum):
    """What to write in ``Trainer(strategy=...)``."""

    DDP = '"ddp"'
    ADAPTIVE = '"ddp_adaptive"'
    FLAG = '"ddp_find_unused_parameters_true"'
    STATIC_GRAPH = "DDPStrategy(static_graph=True)"


class Finding(enum.Enum):
    """What was seen in a smoke run that speaks for one advice or against another.

    The value completes the sentence "It is advised because ...".
    """

    ALL_USED = "every rank used every parameter in every backward"
    SAME_UNUSED = "each step left out the same parameters, in the same backwards, on every rank"
    UNEVEN = (
        "every rank used every parameter in every step, but not in each of its micro-batches, so a shorter accumulation"
        " window, as at the end of an epoch, leaves some out"
    )
    NO_STEP = "there was no step to judge from"
    SAT_OUT = "a rank sat a step out, which DDP ends with an error or a hang"
    SET_CHANGED = "the set of trainable parameters changed, and DDP never reduces what is unfrozen"
    FINETUNES = "a callback freezes and unfreezes parameters, and DDP never reduces what is unfrozen"
    FROZEN = "some parameters are frozen, and if they are ever unfrozen, DDP does not reduce them and says nothing"
    REPEATS = "a parameter's gradient came more than once in a backward, which DDP is not made for"
    SPARSE = "DDP divides sparse gradients in place, which may halve those of other layers, and the flag fails on them"
    POWER_SGD = "PowerSGD and find_unused_parameters=True run into each other"
    RANKS_DIFFER = (
        "the ranks did not use the same parameters; find_unused_parameters=True serves that until the loss of a rank"
        " reaches none of them, and then hangs"
    )
    VARIES = "not every step used the same parameters, so later steps may do what these did not"
    REENTRANT = "find_unused_parameters=True cannot serve reentrant activation checkpointing"
    UNFORESEEN = (
        "a backward did not reach the parameters that are in the graph of the loss, by which"
        " find_unused_parameters=True goes"
    )
    ONE_STEP = "static_graph=True needs steps that are alike, and a single one was seen"
    MANUAL = "static_graph=True has not been tried with manual optimization"
    ACCUMULATES = "static_graph=True fails with accumulate_grad_batches > 1"
    RETURNS_MORE = "static_graph=True may fail where training_step returns more tensors than the loss"
    INNER_BACKWARDS = (
        "a backward runs inside the backward or just before it (torch.autograd.grad) that is not of a checkpoint in the"
        " graph of the loss, with which static_graph=True may leave the ranks with different weights and say nothing"
    )
    ARGUMENTS = "static_graph=True has not been tried with the arguments that were given"


# Each of them leaves the adaptive strategy alone.
_AGAINST_DDP = (
    Finding.SAT_OUT,
    Finding.SET_CHANGED,
    Finding.FINETUNES,
    Finding.FROZEN,
    Finding.REPEATS,
    Finding.SPARSE,
    Finding.POWER_SGD,
)
_AGAINST_STATIC_GRAPH = (
    Finding.ONE_STEP,
    Finding.MANUAL,
    Finding.ACCUMULATES,
    Finding.RETURNS_MORE,
    Finding.INNER_BACKWARDS,
    Finding.ARGUMENTS,
)
_OBSTACLES = {
    Finding.REENTRANT: Obstacle.REENTRANT,
    Finding.SPARSE: Obstacle.SPARSE,
    Finding.POWER_SGD: Obstacle.POWER_SGD,
}


@dataclass(frozen=True)
class BackwardRecord:
    """A synchronised backward on one rank; parameters by their places.

    Attributes:
        reached: those whose gradient this backward accumulated.
        received: those that received a gradient in the accumulation window that it ends.
    """

    reached: frozenset[int]
    received: frozenset[int]


@dataclass(frozen=True)
class StepRecord:
    """An accumulation window on one rank, or under manual optimization a ``training_step``.

    Attributes:
        backwards: its synchronised backwards, in order.
        sat_out: in some backward of it this rank had nothing to contribute.
    """

    backwards: tuple[BackwardRecord, ...]
    sat_out: bool = False

    @property
    def received(self) -> frozenset[int]:
        """The parameters that received a gradient in it."""
        return frozenset[int]().union(*(backward.received for backward in self.backwards))


@dataclass(frozen=True)
class RankRecord:
    """What one rank saw in a smoke run.

    Attributes:
        steps: the steps, in order.
        trained: the places of the parameters that were trainable at some time.
        findings: what else it saw.
    """

    steps: tuple[StepRecord, ...]
    trained: frozenset[int]
    findings: frozenset[Finding] = frozenset()


@dataclass(frozen=True)
class ParameterUsage:
    """How often a parameter received a gradient in a smoke run.

    Attributes:
        name: its name in the LightningModule.
        numel: its number of elements.
        used_in: for each rank, the number of steps in which it received one there. The steps that the rank sat out do
            not count.
    """

    name: str
    numel: int
    used_in: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """What a smoke run says about how to train the model; the same on every rank.

    Attributes:
        advice: what to train it under.
        reasons: why, and what speaks against the others.
        steps: the number of steps that were seen: accumulation windows, or under manual optimization calls of
            ``training_step``.
        world_size: the number of ranks.
        parameters: the parameters that were trainable at some time, in the order of the module.
        frozen: the names of those that never were.
        sat_out: for each rank, the number of steps that it sat out, or a part of them.
        obstacles: what keeps ``find_unused_parameters=True`` from serving this graph.
        arguments: the arguments of ``DDPStrategy`` that were given, as one writes them.
        own_arguments: those of ``AdaptiveDDPStrategy`` alone.
    """

    advice: Advice
    reasons: tuple[Finding, ...]
    steps: int
    world_size: int
    parameters: tuple[ParameterUsage, ...] = ()
    frozen: tuple[str, ...] = ()
    sat_out: tuple[int, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()
    arguments: tuple[str, ...] = ()
    own_arguments: tuple[str, ...] = ()

    @property
    def used(self) -> tuple[ParameterUsage, ...]:
        """The parameters that every rank used in every step that it did not sit out."""
        return tuple(parameter for parameter in self.parameters if self._is_used(parameter))

    @property
    def unused(self) -> tuple[ParameterUsage, ...]:
        """The parameters that no rank used in any step."""
        return tuple(parameter for parameter in self.parameters if not any(parameter.used_in))

    @property
    def partly_used(self) -> tuple[ParameterUsage, ...]:
        """The parameters that some ranks used, or all in some steps."""
        return tuple(
            parameter for parameter in self.parameters if any(parameter.used_in) and not self._is_used(parameter)
        )

    def _is_used(self, parameter: ParameterUsage) -> bool:
        took_part = [self.steps - sat_out for sat_out in self.sat_out]
        return any(parameter.used_in) and list(parameter.used_in) == took_part

    @property
    def line(self) -> str:
        """What to write in ``Trainer(strategy=...)``, with the arguments that were given.

        An argument that is more than a number or a text is written as ``name=...``.
        """
        without_arguments: str = self.advice.value
        if self.advice is Advice.ADAPTIVE:
            arguments = (*self.own_arguments, *self.arguments)
            return f"AdaptiveDDPStrategy({', '.join(arguments)})" if arguments else without_arguments
        if not self.arguments:
            return without_arguments
        flag = {
            Advice.FLAG: ["find_unused_parameters=True"],
            Advice.STATIC_GRAPH: ["static_graph=True"],
        }.get(self.advice, [])
        return f"DDPStrategy({', '.join([*flag, *self.arguments])})"

    def __str__(self) -> str:
        # Here, not above, as in decision.py.
        from adaptive_ddp.report import describe_verdict

        return describe_verdict(self)


def judge(
    records: Sequence[RankRecord],
    *,
    names: Sequence[str],
    numels: Sequence[int],
    arguments: tuple[str, ...] = (),
    own_arguments: tuple[str, ...] = (),
) -> Verdict:
    """Judge a smoke run.

    Args:
        records: what each rank saw, in rank order.
        names: the names of the module's parameters, those that DDP was told to ignore left out.
        numels: their numbers of elements.
        arguments: as for :class:`Verdict`.
        own_arguments: as for :class:`Verdict`.
    """
    findings = frozenset[Finding]().union(*(record.findings for record in records))
    if arguments:
        findings |= {Finding.ARGUMENTS}
    trained = frozenset[int]().union(*(record.trained for record in records))
    advice, reasons = _advise(records, findings, trained)
    return Verdict(
        advice=advice,
        reasons=reasons,
        steps=max(len(record.steps) for record in records),
        world_size=len(records),
        parameters=tuple(
            ParameterUsage(name, numel, tuple(_times_used(record, place) for record in records))
            for place, (name, numel) in enumerate(zip(names, numels, strict=True))
            if place in trained
        ),
        frozen=tuple(name for place, name in enumerate(names) if place not in trained),
        sat_out=tuple(sum(step.sat_out for step in record.steps) for record in records),
        obstacles=tuple(obstacle for finding, obstacle in _OBSTACLES.items() if finding in findings),
        arguments=arguments,
        own_arguments=own_arguments,
    )


def _times_used(record: RankRecord, place: int) -> int:
    return sum(place in step.received for step in record.steps if not step.sat_out)


def _advise(
    records: Sequence[RankRecord], findings: frozenset[Finding], trained: frozenset[int]
) -> tuple[Advice, tuple[Finding, ...]]:
    """The advice and its reasons: the first that nothing speaks against, from the cheapest to the one that is safe."""
    if not any(step.backwards for record in records for step in record.steps):
        return Advice.ADAPTIVE, (Finding.NO_STEP,)
    if any(step.sat_out for record in records for step in record.steps):
        findings |= {Finding.SAT_OUT}
    if against := tuple(finding for finding in _AGAINST_DDP if finding in findings):
        return Advice.ADAPTIVE, against
    backwards = [backward for record in records for step in record.steps for backward in step.backwards]
    all_used = all(trained == backward.reached == backward.received for backward in backwards)
    if all_used and Finding.UNEVEN not in findings:
        return Advice.DDP, (Finding.ALL_USED,)
    received = [[[backward.received for backward in step.backwards] for step in record.steps] for record in records]
    if against := tuple(_differences(received)):
        return Advice.ADAPTIVE, against
    return _advise_on_unused(records, findings, Finding.UNEVEN if all_used else Finding.SAME_UNUSED)


def _advise_on_unused(
    records: Sequence[RankRecord], findings: frozenset[Finding], reason: Finding
) -> tuple[Advice, tuple[Finding, ...]]:
    """The advice where every rank left out the same parameters in every step, or in its micro-batches."""
    if not findings & {Finding.REENTRANT, Finding.UNFORESEEN}:
        return Advice.FLAG, (reason,)
    if Finding.REENTRANT not in findings:
        return Advice.ADAPTIVE, (Finding.UNFORESEEN,)
    if len(records[0].steps) < 2:
        findings |= {Finding.ONE_STEP}
    # Whether a backward brings a gradient is not the same as whether it comes by, which is what must not change here.
    if against := tuple(_differences([record.steps for record in records])):
        return Advice.ADAPTIVE, (Finding.REENTRANT, *against)
    if against := tuple(finding for finding in _AGAINST_STATIC_GRAPH if finding in findings):
        return Advice.ADAPTIVE, (Finding.REENTRANT, *against)
    return Advice.STATIC_GRAPH, (reason, Finding.REENTRANT)


def _differences(steps_by_rank: Sequence[Sequence[object]]) -> Iterable[Finding]:
    if any(steps != steps_by_rank[0] for steps in steps_by_rank):
        yield Finding.RANKS_DIFFER
    if any(step != steps[0] for steps in steps_by_rank for step in steps):
        yield Finding.VARIES


def written_arguments(given: Mapping[str, Any], *takers: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments that are not the default, as one writes them; ``name=...`` where that would be long.

    Args:
        given: the arguments.
        takers: what takes them, whose signatures have the defaults.
    """
    defaults: dict[str, Any] = {}
    for taker in takers:
        for name, parameter in inspect.signature(taker).parameters.items():
            defaults.setdefault(name, parameter.default)
    return tuple(
        f"{name}={_written(value)}"
        for name, value in given.items()
        if not (name in defaults and _same(value, defaults[name]))
    )


def _same(value: object, default: object) -> bool:
    # Only simple values: an array compares to an array.
    return value is default or ((_is_simple(value) or isinstance(value, timedelta)) and bool(value == default))


def _is_simple(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _written(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value) if _is_simple(value) else "..."
