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
from typing import NamedTuple

import torch
import torch.distributed as dist

# A tally carries two counts in one integer: ranks with something missing in the low half, ranks that sat out in the
# high half. A sum over fewer than 2**31 ranks cannot carry over.
_SAT_OUT = 1 << 32


class Count(NamedTuple):
    """A tally, once read.

    Attributes:
        missing: the ranks that left some, but not all, of their parameters without a gradient.
        sat_out: the ranks whose backward reached none of them.
    """

    missing: int
    sat_out: int


class PostedTally:
    """One step's tally on its way."""

    def __init__(self, value: torch.Tensor, work: dist.Work | None) -> None:
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
            self._count = Count(missing=total % _SAT_OUT, sat_out=total // _SAT_OUT)
        return self._count


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

    def post(self, *, missing: bool, sat_out: bool) -> PostedTally:
        """Contribute this rank's part to the tally of the current step, without waiting for the others.

        Args:
            missing: this rank left some of its parameters without a gradient.
            sat_out: its backward reached none of them. At most one of the two holds.
        """
        value = torch.full((1,), int(missing) + int(sat_out) * _SAT_OUT, dtype=torch.int64, device=self._device)
        return PostedTally(value, dist.all_reduce(value, group=self._group, async_op=True))

    def sum_usage(self, missing: Iterable[int], size: int) -> list[int]:
        """Exchange the usage map: how many ranks missed each parameter. A collective, to be entered by every rank.

        Args:
            missing: the indices of the parameters that received no gradient on this rank.
            size: the number of parameters, the same on every rank.

        Returns:
            For each parameter, the number of ranks that missed it.

        Raises:
            RuntimeError: if the process group fails.
        """
        usage = torch.zeros(size, dtype=torch.int32)
        usage[list(missing)] = 1
        usage = usage.to(self._device)
        dist.all_reduce(usage, group=self._group)
        counts: list[int] = usage.tolist()
        return counts
