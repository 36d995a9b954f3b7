"""The states of a run, its transitions, and the decision it arrives at. Plain data: no torch, no collectives.

Promise: a :class:`Decision` is made from facts that are the same on every rank, so it is the same on every rank.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass


class State(enum.Enum):
    """Where a run stands.

    Attributes:
        PROBE: the flag is off; no synchronised backward has been seen yet.
        WATCH: the flag is off; every rank used every parameter so far.
        ON: some rank left a parameter without a gradient, so the flag is on.
        FINISH: the same, but the flag stays off, since it cannot serve this graph or the user prefers it so: each step
            is finished in place.
    """

    PROBE = "probe"
    WATCH = "watch"
    ON = "on"
    FINISH = "finish"


class Obstacle(enum.Enum):
    """Why ``find_unused_parameters=True`` cannot serve a graph.

    Attributes:
        SPARSE: it fails on a parameter with sparse gradients that is unused ("Expected sparse gradient to be defined").
        REENTRANT: it fails when a backward inside the backward reaches parameters, as under reentrant activation
            checkpointing ("Expected to mark a variable ready only once").
        POWER_SGD: it exchanges its usage map while the buckets are under way, and PowerSGD starts collectives of its
            own from there, in an order that is not the same on all ranks (a hang, or "collective mismatch").
    """

    SPARSE = "sparse gradients"
    REENTRANT = "reentrant activation checkpointing"
    POWER_SGD = "PowerSGD"


@dataclass(frozen=True)
class UnusedParameter:
    """A parameter that some rank left without a gradient.

    Attributes:
        name: its name in the LightningModule.
        numel: its number of elements.
        missed_by: the number of ranks on which it received none; a rank that sat the step out does not count.
        ranks: those ranks, under ``on_unused="raise"``; empty otherwise, since only numbers are exchanged then.
    """

    name: str
    numel: int
    missed_by: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What the ranks decided together about a run, and from what.

    Attributes:
        state: the state that was decided on.
        step: the optimizer step, counted from 1, whose backward the decision is about.
        world_size: the number of ranks.
        parameters: the number of parameters that DDP reduces.
        elements: their number of elements.
        unused: the parameters that some rank left without a gradient, in the order of the module; empty in WATCH.
        obstacles: in FINISH, why the flag stays off; empty if only the user prefers it so.
    """

    state: State
    step: int
    world_size: int
    parameters: int
    elements: int
    unused: tuple[UnusedParameter, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()

    def __str__(self) -> str:
        # Here, not above: report.py imports this module, and a reader of it needs none of the wording.
        from adaptive_ddp.report import describe

        return describe(self)


def decide(
    *,
    step: int,
    world_size: int,
    names: Sequence[str],
    numels: Sequence[int],
    missed_by: Sequence[int],
    obstacles: Sequence[Obstacle] = (),
    prefers_finish: bool = False,
    missing_by_rank: Sequence[Collection[int]] = (),
) -> Decision:
    """Decide from the usage map of one step.

    Args:
        step: the optimizer step it belongs to, counted from 1.
        world_size: the number of ranks.
        names: the parameters' names.
        numels: their numbers of elements.
        missed_by: for each of them, on how many ranks it received no gradient.
        obstacles: what keeps the flag from serving this graph, on any rank.
        prefers_finish: decide on FINISH where ON would do too.
        missing_by_rank: for each rank, the places of the parameters that received no gradient there; empty if unknown.

    Returns:
        WATCH if every rank used every parameter; otherwise FINISH if there are obstacles or it is preferred, ON if not.
    """
    unused = tuple(
        UnusedParameter(
            name, numel, missed, tuple(rank for rank, missing in enumerate(missing_by_rank) if index in missing)
        )
        for index, (name, numel, missed) in enumerate(zip(names, numels, missed_by, strict=True))
        if missed
    )
    state = State.WATCH
    if unused:
        state = State.FINISH if obstacles or prefers_finish else State.ON
    return Decision(
        state=state,
        step=step,
        world_size=world_size,
        parameters=len(names),
        elements=sum(numels),
        unused=unused,
        obstacles=tuple(obstacles) if unused else (),
    )
