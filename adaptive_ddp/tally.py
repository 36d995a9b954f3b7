"""What the ranks tell each other: the tally, the usage map, and the head count.

Promise: a rank never waits here for anything but what every other rank contributes to in the same backward, and what
crosses the network is at most one integer a step, and one integer a parameter in the few steps in which what is missing
on every rank has changed or a decision is taken. Neither grows with the number of ranks.

Limits: all ranks must post the same tallies in the same order, each after the reduction of its backward has been
finished (``reducer.py``): on the same process group, a collective of ours before that would meet another rank's
bucket. Imports torch.distributed alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# A tally carries three counts in one integer. A sum over fewer than 2**20 ranks does not carry over.
_BITS = 20
_MASK = (1 << _BITS) - 1

# Higher than any time.
_NO_STORE = (1 << 63) - 1


class Count(NamedTuple):
    """A tally, once read: how many ranks said what of themselves in one step.

    Attributes:
        waiting: ranks that read this tally in its own step. When that is all of them, all know it.
        differing: ranks whose unused parameters are not those of the usage map that was exchanged last.
        changed: ranks whose set of trainable parameters is no longer the one that was wrapped.
    """

    waiting: int
    differing: int
    changed: int


class PostedTally:
    """One step's tally on its way.

    Args:
        value: this rank's part, which becomes the sum.
        work: the all-reduce that makes it so.
    """

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
            total = self._wait()
            self._count = Count(total & _MASK, total >> _BITS & _MASK, total >> 2 * _BITS)
        return self._count

    def _wait(self) -> int:
        if self._work is not None:
            self._work.wait()
        return int(self._value.item())


class PostedCudaTally(PostedTally):
    """A tally that is summed up on a GPU, and copied to the host as soon as it is.

    To ask the device for it later would have the host wait for all that has been queued until then: the step that is
    under way. On a stream of its own the copy waits for the all-reduce alone, and its event for the copy.

    Args:
        value: as for :class:`PostedTally`.
        work: as for :class:`PostedTally`.
        stream: that stream.
    """

    def __init__(self, value: Tensor, work: dist.Work, stream: torch.cuda.Stream) -> None:
        super().__init__(value, work)
        self._on_host = torch.empty(1, dtype=value.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            # With NCCL this holds up the stream, not the host.
            work.wait()
            self._on_host.copy_(value, non_blocking=True)
            self._copied = stream.record_event()

    def _wait(self) -> int:
        # A step later the copy is long done, and the host waits for nothing.
        if not self._copied.query():
            self._copied.synchronize()
        return int(self._on_host.item())


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


class HeadCount:
    """How many ranks have something to agree on in a step that ends in no tally.

    It is kept in the process group's store. A rank that has something counts itself before its part of the reduction is
    complete, and reads the count when the reduction is. For that every rank has contributed its part, so all who will
    count themselves have, and all who read the count read the same. The others do nothing and wait for nothing.

    Args:
        store: the process group's store.
        name: of this count; the same on every rank and used for no other in this store.
        device: where the reduction takes place.
    """

    def __init__(self, store: Any, name: str, device: torch.device) -> None:
        self._store = store
        self._name = name
        self._device = device
        # The last step in which this rank counted itself, and the last whose count it read.
        self._joined: int | None = None
        self._read: int | None = None

    def has_joined(self, step: int) -> bool:
        """Whether this rank has counted itself in this step."""
        return self._joined == step

    def join(self, step: int) -> None:
        """Count this rank in, once; before its part of the reduction is complete.

        Args:
            step: the number of the step, which all ranks count alike.

        Raises:
            RuntimeError: if the store cannot be reached.
        """
        if not self.has_joined(step):
            self._joined = step
            self._store.add(self._key(step), 1)

    def read(self, step: int) -> int:
        """The number of ranks that counted themselves; on one that did, after the reduction.

        Raises:
            RuntimeError: if the store cannot be reached.
        """
        if self._device.type != "cpu":
            # The backward has returned when the reduction is queued; now it is to be complete.
            torch.accelerator.synchronize(self._device)
        count: int = self._store.add(self._key(step), 0)
        if self._read is not None:
            # Every rank has contributed to this step, and so is done with earlier ones.
            self._store.delete_key(self._key(self._read))
        self._read = step
        return count

    def _key(self, step: int) -> str:
        return f"{self._name}/{step}"


class Exchange:
    """The channel between the ranks of one wrapper.

    Args:
        group: the wrapper's process group. What is sent is then ordered with the wrapper's buckets on every rank.
        device: the device of the wrapper's buckets, which the group's backend is sure to serve. A group that serves
            the CPU too (Gloo does) is used from there, which needs no device to be waited for.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        serves_cpu = "cpu:" in dist.get_backend_config(group)
        self._device = torch.device("cpu") if serves_cpu else device
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The tally of a step is read before that of the step after the next is posted.
        self._values = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(2)]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._group.size()

    def post(self, *, waiting: bool, differing: bool, changed: bool) -> PostedTally:
        """Contribute this rank's part to the tally of the current step, without waiting for the others.

        The tally before the last must have been read.

        Args:
            waiting: this rank will read the tally before it goes on.
            differing: its unused parameters are not those of the usage map that was exchanged last.
            changed: its set of trainable parameters is no longer the one that was wrapped.
        """
        part = waiting | differing << _BITS | changed << 2 * _BITS
        self._values.reverse()
        value = self._values[0].fill_(part)
        # What torch.distributed.all_reduce calls in the end, in a third less time.
        work = self._group.allreduce(value)
        return PostedTally(value, work) if self._stream is None else PostedCudaTally(value, work, self._stream)

    def open_head_count(self, device: torch.device) -> HeadCount | None:
        """Start a head count. A collective, to be entered by every rank.

        Args:
            device: where the reduction takes place.

        Returns:
            None, on every rank, if some rank has no store to keep it in, or a torch that does not give it out
            (``torch/csrc/distributed/c10d/init.cpp``, ``get_group_store``; run with torch 2.13.0).
        """
        get_store = getattr(self._group, "get_group_store", None)
        store: Any | None = None if get_store is None else get_store()
        # A name that no count of an earlier wrapper had.
        number = self.highest(time.time_ns() if store is not None else _NO_STORE)
        if store is None or number == _NO_STORE:
            return None
        return HeadCount(store, f"adaptive_ddp/{number}", device)

    def highest(self, number: int) -> int:
        """The highest of the ranks' numbers. A collective, to be entered by every rank."""
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return int(value.item())

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
