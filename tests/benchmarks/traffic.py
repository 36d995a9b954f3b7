"""The bytes that a rank contributes to our own collectives, step by step, and how long those take at scale.

On groups of two to four ranks every collective that the package starts from Python is recorded, with the size of its
tensor, while a model is trained that uses everything at first and then leaves something out. DDP's own, which are those
of its buckets and, under the flag, a map of one 32-bit integer a parameter in every step, start in C++ and are not
recorded. The sizes turn out not to depend on the world size, so what they cost on more ranks can be written out with
the latencies by which NCCL chooses its algorithms; nobody has run it on that many here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adaptive_ddp import AdaptiveDDPStrategy
from benchmarks.contenders import Contender, finish_strategy
from benchmarks.driver import DirectSeat, quiet, use_one_thread, within_fits
from benchmarks.shapes import NONE, SHAPES, Ranks, Stack, Unused

SHAPE = "300"
CLEAN_STEPS, UNUSED_STEPS = 3, 4
STRATEGIES = {'fallback="find_unused_parameters"': AdaptiveDDPStrategy, 'fallback="finish"': finish_strategy}
WORLD_SIZES_RUN = (2, 3, 4)
WORLD_SIZES_WRITTEN_OUT = (8, 1024, 16384)


@dataclass(frozen=True)
class Sent:
    """What one rank contributed to our collectives.

    Attributes:
        by_step: for each step the bytes of each collective, in their order.
    """

    by_step: list[list[int]]


def record(strategy: str, ranks: Ranks) -> Sent:
    """Train on this rank, and write down what our strategy sends."""
    use_one_thread()
    shape, rank, world_size = SHAPES[SHAPE], dist.get_rank(), dist.get_world_size()
    unused = Unused(0.1, "late", ranks)

    def left_out(step: int) -> frozenset[int]:
        return unused.left_out(shape, rank, world_size, step) if step >= CLEAN_STEPS else NONE

    seat = DirectSeat("traffic", Contender("ours", STRATEGIES[strategy], "some unused"), Stack(shape, left_out))
    by_step: list[list[int]] = []

    def work() -> None:
        for number in range(CLEAN_STEPS + UNUSED_STEPS):
            with _recorded() as sizes:
                seat.step(torch.ones(shape.batch), number)
            by_step.append(sizes)

    with quiet():
        within_fits([seat], work)
    return Sent(by_step)


@contextmanager
def _recorded() -> Iterator[list[int]]:
    """The sizes of what is all-reduced from Python meanwhile; an object gathered or broadcast is an error."""
    sizes: list[int] = []
    # What torch.distributed.all_reduce calls too; the reducer's own all-reduces do not come from Python.
    group: Any = dist.ProcessGroup
    # From the class's dictionary, where it still is a method; asked of the class it is a function without a self.
    method, original = vars(group)["allreduce"], group.allreduce

    def allreduce(self: dist.ProcessGroup, tensors: Tensor | list[Tensor], *args: Any, **kwargs: Any) -> Any:
        one_or_more = [tensors] if isinstance(tensors, Tensor) else tensors
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in one_or_more))
        return original(self, tensors, *args, **kwargs)

    group.allreduce = allreduce
    try:
        yield sizes
    finally:
        group.allreduce = method


def latency_us(world_size: int, ranks_a_node: int = 8) -> dict[str, float]:
    """How long NCCL reckons that an all-reduce of a few bytes takes, in microseconds, by a tree and by a ring.

    The constants and the sums are those of ``ncclTopoTuneModel`` for the LL protocol, NVLink within a node and no
    latency of the switches (NVIDIA/nccl, ``src/graph/tuning.cc``, commit b6475625fbcaa2c3c0e50eed2fa1255d7514d4a2).
    """
    nodes = max(1, world_size // ranks_a_node)
    within_node, tree_hop, ring_hop, overhead = 0.6, 5.0, 2.7, 1.0
    steps, hops = 2 * (world_size - 1), 2 * nodes if nodes > 1 else 0
    return {
        "tree": 6.8 + 2 * ((world_size // nodes - 1) * within_node + math.log2(nodes) * tree_hop),
        "ring": 6.6 + (steps - hops) * (max(within_node, overhead) if nodes > 1 else within_node) + hops * ring_hop,
    }


def table(sent: dict[tuple[str, str, int], Sequence[Sent]]) -> str:
    """What was recorded as tables in Markdown.

    Args:
        sent: for each strategy, kind of unused parameters and world size what the ranks sent.
    """
    names = [f"step {number + 1}" for number in range(CLEAN_STEPS + UNUSED_STEPS)]
    lines = [
        f"Bytes that each rank contributes (something is unused from step {CLEAN_STEPS + 1} on):",
        "",
        "| strategy, who leaves out what, ranks | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for (strategy, ranks, world_size), parts in sent.items():
        cells = [" or ".join(dict.fromkeys(" + ".join(map(str, row)) or "0" for row in rows)) for rows in _rows(parts)]
        lines.append(f"| {strategy}, {ranks}, {world_size} ranks | " + " | ".join(cells) + " |")
    lines += ["", "| ranks | tally, bytes | map, bytes a parameter | tree, µs | ring, µs |", "|---|---|---|---|---|"]
    for world_size in WORLD_SIZES_WRITTEN_OUT:
        latency = latency_us(world_size)
        lines.append(f"| {world_size:,} | 8 | 4 | {latency['tree']:.0f} | {latency['ring']:,.0f} |")
    return "\n".join(lines)


def _rows(parts: Sequence[Sent]) -> Iterator[list[list[int]]]:
    for number in range(len(parts[0].by_step)):
        yield [part.by_step[number] for part in parts]


def depends_on_world_size(sent: dict[tuple[str, str, int], Sequence[Sent]]) -> list[str]:
    """Where some rank of a larger group sent something else than the same rank of the smallest."""
    return [
        f"{strategy}, {ranks}: {world_size} ranks send {parts[0].by_step}"
        for (strategy, ranks, world_size), parts in sent.items()
        if parts[0].by_step != sent[strategy, ranks, WORLD_SIZES_RUN[0]][0].by_step
    ]
