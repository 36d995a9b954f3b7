"""What the ranks tell each other: the tally and the usage map.

Promise: a rank never waits here for anything but what every other rank contributes to in the same backward, and what
crosses the network is one integer a step, and one integer a parameter in the few steps in which something is missing
on every rank or a decision is taken. Neither grows with the number of ranks.

Limits: all ranks must post the same tallies in the same order, each after the reduction of its backward has been
finished (``reducer.py``): on the same process group, a collective of ours before that would meet another rank's
bucket. Imports torch.distributed alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# A tally carries three counts in one integer. A sum over fewer than 2**20 ranks does not carry over.
_BITS = 20
_MASK = (1 << _BITS) - 1


class Count(NamedTuple):
    """A tally, once read: how many ranks said what of themselves in one step.

    Attributes:
        waiting: ranks that read this tally in its own step. When that is all of them, all know it.
        missing: ranks that left a parameter without a gradient, and did not sit the step out.
        changed: ranks whose set of trainable parameters is no longer the one that was wrapped.
    """

    waiting: int
    missing: int
    changed: int


class PostedTally:
    """One step's tally on its way."""

    def __init__(self, value: Tensor, work: dist.Work | None) -> None:
        self._value = value
        self._work = work
        self._count: Count | None = None

    def read(self) -> Count:
        """Wait for the tally and return it; the same on every rank.

        Returns at once when it has been read before. Otherwise it returns when every rank has posted the same tally.

        Raises:
            RuntimeError: if the process group fails.
        """
        if self._count is None:
            if self._work is not None:
                self._work.wait()
            total = int(self._value.item())
            self._count = Count(total & _MASK, total >> _BITS & _MASK, total >> 2 * _BITS)
        return self._count


class PostedMap:
    """A map of counts on its way."""

    def __init__(self, counts: Tensor, work: dist.Work | None) -> None:
        self._counts = counts
        self._work = work

    def read(self) -> list[int]:
        """Wait for the map and return it; the same on every rank.

        Raises:
            RuntimeError: if the process group fails.
        """
        if self._work is not None:
            self._work.wait()
        result: list[int] = self._counts.tolist()
        return result


class Exchange:
    """The channel between the ranks of one wrapper.

    Args:
        group: the wrapper's process group. What is sent is then ordered with the wrapper's buckets on every rank.
        device: the device of the wrapper's buckets, which the group's backend is sure to serve.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._group.size()

    def post(self, *, waiting: bool, missing: bool, changed: bool) -> PostedTally:
        """Contribute this rank's part to the tally of the current step, without waiting for the others.

        Args:
            waiting: this rank will read the tally before it goes on.
            missing: it left a parameter without a gradient, and did not sit the step out.
            changed: its set of trainable parameters is no longer the one that was wrapped.
        """
        part = waiting | missing << _BITS | changed << 2 * _BITS
        value = torch.full((1,), part, dtype=torch.int64, device=self._device)
        return PostedTally(value, dist.all_reduce(value, group=self._group, async_op=True))

    def count(self, indices: Iterable[int], size: int) -> list[int]:
        """Exchange a map of one count a parameter. A collective, to be entered by every rank.

        Args:
            indices: the parameters that this rank counts: those it missed, for the usage map.
            size: the length of the map, the same on every rank.

        Returns:
            For each parameter, the number of ranks that counted it.

        Raises:
            RuntimeError: if the process group fails.
        """
        return self.post_map(indices, size).read()

    def post_map(self, indices: Iterable[int], size: int) -> PostedMap:
        """Contribute this rank's part to a map of counts, without waiting for the others; as :meth:`count`."""
        part = [0] * size
        for index in indices:
            part[index] = 1
        counts = torch.tensor(part, dtype=torch.int32, device=self._device)
        return PostedMap(counts, dist.all_reduce(counts, group=self._group, async_op=True))

    def average(self, gradient: Tensor) -> Tensor:
        """The mean of a gradient, dense or sparse, over the ranks, by DDP's rule: divided first, then added up.

        A collective, to be entered by every rank.
        """
        mean = gradient / self.world_size
        dist.all_reduce(mean, group=self._group)
        return mean

    def gather(self, value: T) -> list[T]:
        """Collect a small object of every rank, in rank order. A collective, to be entered by every rank.

        What it sends grows with the number of ranks: for errors, not for steps.
        """
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered
