"""What the step costs in which something goes unused for the first time: deciding, and wrapping again, once.

Every rank trains the shape of 300 parameters in turn under the flag and under ours. At some step a part of the model
begins to go unused. From there on both do the same work, but for what ours has to decide and to rebuild; the difference
of adjacent steps, added up over the steps until that is over, is the cost of the fallback. It is given in units of an
ordinary step of the same shape under the flag, and measured on fresh models again and again.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from adaptive_ddp import AdaptiveDDPStrategy, State
from benchmarks.contenders import Contender, flag_strategy
from benchmarks.driver import DirectSeat, quiet, use_one_thread, within_fits
from benchmarks.results import Ratio, bootstrap
from benchmarks.shapes import NONE, SHAPES, Ranks, Stack, Unused

SHAPE = "300"
# Where only some ranks miss something, the others learn of it a step later; and one more for what may follow.
STEPS_OF_FALLBACK = 3
STEPS_AFTER = 8


@dataclass(frozen=True)
class Fallbacks:
    """What a rank measured: for each fallback the seconds of our steps and of the flag's, from its first step on."""

    ours: list[list[float]]
    flag: list[list[float]]


def measure_fallbacks(first: int, ranks: Ranks, times: int) -> Fallbacks:
    """On every rank: go through so many fallbacks.

    Args:
        first: the step in which something begins to go unused, counted from zero; at zero, ours is still in PROBE.
        ranks: who leaves what out from then on.
        times: how many fallbacks.
    """
    use_one_thread()
    with quiet():
        rows = [_go_through(first, Unused(0.1, "late", ranks), seed) for seed in range(times)]
    return Fallbacks([row["ours"] for row in rows], [row["flag"] for row in rows])


def _go_through(first: int, unused: Unused, seed: int) -> dict[str, list[float]]:
    shape, rank, world_size = SHAPES[SHAPE], dist.get_rank(), dist.get_world_size()

    def left_out(step: int) -> frozenset[int]:
        return unused.left_out(shape, rank, world_size, step) if step >= first else NONE

    ours = DirectSeat("fallback", Contender("ours", AdaptiveDDPStrategy, "some unused"), Stack(shape, left_out))
    flag = DirectSeat("fallback", Contender("flag", flag_strategy, "some unused"), Stack(shape, left_out))
    drawn = random.Random(seed)
    batch = torch.randn(shape.batch, generator=torch.Generator().manual_seed(rank))
    seconds: dict[str, list[float]] = {"ours": [], "flag": []}

    def work() -> None:
        for number in range(first + STEPS_OF_FALLBACK + STEPS_AFTER):
            for seat in drawn.sample([ours, flag], 2):
                dist.barrier()
                took = seat.step(batch, number)
                if number >= first:
                    seconds[seat.contender.name].append(took)
        dist.barrier()

    within_fits([ours, flag], work)
    decision = ours.trainer.strategy.decision  # type: ignore[attr-defined]
    assert decision.state is State.ON, decision
    for a, b in zip(ours.model.parameters(), flag.model.parameters(), strict=True):
        assert torch.equal(a, b) or world_size > 2, "the fallback did not come to the flag's weights"
    return seconds


@dataclass(frozen=True)
class Cost:
    """What a kind of fallback costs, in ordinary steps under the flag.

    Attributes:
        title: which kind.
        added: what the steps of the fallback took longer than the flag's, together.
        step_ms: an ordinary step, in milliseconds.
    """

    title: str
    added: Ratio
    step_ms: float


def evaluate(title: str, timed: Sequence[Fallbacks]) -> Cost:
    """The cost of a kind of fallback, from what the ranks measured."""
    ours, flag = (
        [
            [max(step) for step in zip(*rows, strict=True)]
            for rows in zip(*(getattr(part, name) for part in timed), strict=True)
        ]
        for name in ("ours", "flag")
    )
    ordinary = statistics.median(seconds for row in flag for seconds in row[STEPS_OF_FALLBACK:])
    added = [
        sum(a - b for a, b in zip(row[:STEPS_OF_FALLBACK], reference[:STEPS_OF_FALLBACK], strict=True)) / ordinary
        for row, reference in zip(ours, flag, strict=True)
    ]
    return Cost(title, bootstrap(added), 1e3 * ordinary)


KINDS: dict[str, tuple[int, Ranks]] = {
    "in the first step, on all ranks": (0, "same"),
    "later, on all ranks": (8, "same"),
    "later, other parameters on each rank": (8, "different"),
    "later, on every other rank": (8, "some"),
}


def table(costs: Sequence[Cost]) -> str:
    """What was measured as a table in Markdown."""
    lines = ["| the fallback, once | added, in ordinary steps | bar |", "|---|---|---|"]
    lines += [f"| {cost.title} | {cost.added} | < 1 |" for cost in costs]
    return "\n".join(lines)
