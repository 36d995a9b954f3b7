"""Stepping contenders in turn within one group of ranks, and how long each step took.

In every round each contender takes a step on the same batch, those of a group next to each other. The order is drawn,
the same on all ranks, and balanced: who goes first finds other caches than who follows, so over a few rounds everybody
has every place. A barrier before each step keeps what one rank lags behind out of the next contender's time.
"""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import COMPARISONS, GROUPS, Contender
from benchmarks.driver import DirectSeat, Seat, TrainerSeat, quiet, use_one_thread, within_fits
from benchmarks.shapes import SHAPES, Unused

T = TypeVar("T")

BATCHES = 8
# Tolerance for more than two ranks, where sums depend on the layout of the buckets.
CLOSE = 1e-5


@dataclass(frozen=True)
class Job:
    """One comparison.

    Attributes:
        shape: its name in ``SHAPES``.
        unused: what the steps leave out; None for a model that uses everything.
        groups: the names of the groups in ``GROUPS`` to run.
        only: the contenders to run of them, beside those that they are compared with; all if empty.
        repeats: how often everything is made anew. Where a model lies in memory may cost or spare a percent for as
            long as it lives, so the contenders are made in another order each time.
        steps: the number of counted rounds, over all repeats.
        warm_up: the number of rounds before those in each repeat, in which DDP rebuilds its buckets and our strategy
            decides.
        burst: the number of steps a contender takes in its turn; a time is the mean of them.
        through_trainer: have whole Trainers run, instead of calling the strategies directly.
        seed: for the order and the batches.
        device: "cpu" or "cuda".
    """

    shape: str
    unused: Unused | None
    groups: tuple[str, ...]
    only: tuple[str, ...] = ()
    repeats: int = 4
    steps: int = 200
    warm_up: int = 12
    burst: int = 1
    through_trainer: bool = False
    seed: int = 0
    device: str = "cpu"

    @property
    def rounds(self) -> int:
        """The counted rounds of one repeat."""
        return -(-self.steps // self.repeats)

    def members(self) -> list[tuple[str, Contender]]:
        """The contenders to run, each with its group."""
        wanted = {
            (comparison.group, name)
            for comparison in COMPARISONS
            for name in (comparison.contender, comparison.reference)
            if not self.only or comparison.contender in self.only
        } | {(group, GROUPS[group][0].name) for group in self.groups}
        return [
            (group, contender)
            for group in self.groups
            for contender in GROUPS[group]
            if (group, contender.name) in wanted and contender.is_defined(None if group == "clean" else self.unused)
        ]


@dataclass(frozen=True)
class Timed:
    """A rank's part of a job.

    Attributes:
        wall: for each group and contender the seconds from the start of a step to its end on this rank.
        cpu: the same in seconds of CPU time of all of this rank's threads, the barrier after the step included.
        unequal: in which contenders' weights differ from those they should be equal to.
        parameters: the number of trainable parameters of the model in which some are unused.
        unused_parameters: the number of those that this rank leaves out of the first step.
        unused_bytes: the share of the bytes that they are.
    """

    wall: dict[tuple[str, str], list[float]]
    cpu: dict[tuple[str, str], list[float]]
    unequal: list[str]
    parameters: int
    unused_parameters: int
    unused_bytes: float


def run_job(job: Job, repeat: int) -> Timed:
    """Do one repeat of a job, on every rank of the group."""
    with quiet():
        return _run_job(replace(job, seed=1000 * job.seed + repeat))


def _run_job(job: Job) -> Timed:
    use_one_thread()
    shape, rank, world_size = SHAPES[job.shape], dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(job.seed + rank)
    batches = list(torch.randn(BATCHES, *shape.batch, generator=generator).to(job.device))
    members = job.members()
    random.Random(job.seed).shuffle(members)
    models = [contender.make_model(shape, job.unused, rank, world_size) for _, contender in members]
    clock = _Clock(job, batches)
    seats: Sequence[Seat]
    if job.through_trainer:
        rounds = [batches[number % BATCHES] for number in range((job.warm_up + job.rounds) * job.burst)]
        trainer_seats = [
            TrainerSeat(*member, model, rounds, job.device) for member, model in zip(members, models, strict=True)
        ]
        for seat in trainer_seats:
            seat.start()
        clock.run(seats := trainer_seats)
        for seat in trainer_seats:
            seat.end()
    else:
        direct_seats = [DirectSeat(*member, model, job.device) for member, model in zip(members, models, strict=True)]
        within_fits(direct_seats, lambda: clock.run(direct_seats))
        seats = direct_seats
    model = max(models, key=lambda model: len(model.left_out(0)))
    left_out = {f"blocks.{number}." for number in model.left_out(0)}
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    unused = [numel for name, numel in numels.items() if name.startswith(tuple(left_out))]
    return Timed(
        clock.wall, clock.cpu, unequal(seats, job), len(numels), len(unused), sum(unused) / sum(numels.values())
    )


def balanced_orders(members: Sequence[T], drawn: random.Random) -> Iterator[list[T]]:
    """Shuffled orders without end, of which every ``2 * len(members)`` put each member twice in each place."""
    while True:
        order = drawn.sample(members, len(members))
        for start in range(len(order)):
            rotated = order[start:] + order[:start]
            yield rotated
            yield rotated[::-1]


class _Clock:
    """Runs the rounds of a job and takes the times."""

    def __init__(self, job: Job, batches: list[Tensor]) -> None:
        self._job = job
        self._batches = batches
        self.wall: dict[tuple[str, str], list[float]] = {}
        self.cpu: dict[tuple[str, str], list[float]] = {}

    def run(self, seats: Sequence[Seat]) -> None:
        drawn = random.Random(self._job.seed)
        for seat in seats:
            self.wall[seat.group, seat.contender.name] = []
            self.cpu[seat.group, seat.contender.name] = []
        orders = {
            group: balanced_orders([seat for seat in seats if seat.group == group], drawn) for group in self._job.groups
        }
        for number in range(self._job.warm_up + self._job.rounds):
            if number == self._job.warm_up:
                # What exists by now is no garbage, and need not be looked through again in anybody's step.
                gc.collect()
                gc.freeze()
            for group in drawn.sample(self._job.groups, len(self._job.groups)):
                dist.barrier()
                for seat in next(orders[group]):
                    self._take_turn(seat, number)
        gc.unfreeze()

    def _take_turn(self, seat: Seat, number: int) -> None:
        began = time.process_time()
        seconds = 0.0
        for index in range(number * self._job.burst, (number + 1) * self._job.burst):
            seconds += seat.step(self._batches[index % BATCHES], index)
        # Before the clock of CPU time stops: what the step left to other threads is over by then.
        dist.barrier()
        spent = time.process_time() - began
        if number >= self._job.warm_up:
            self.wall[seat.group, seat.contender.name].append(seconds / self._job.burst)
            self.cpu[seat.group, seat.contender.name].append(spent / self._job.burst)


def unequal(seats: Sequence[Seat], job: Job) -> list[str]:
    """Which contenders did not come to the weights, or the state, that they should have come to.

    In a group all end with the weights of its first contender, a copy of which is always run. What no rank uses stays
    as it was under some and decays under others, which is allowed for. Buffers are each rank's own.
    """
    found = []
    everywhere = job.unused.everywhere(SHAPES[job.shape]) if job.unused else frozenset()
    decaying = tuple(f"blocks.{number}." for number in everywhere)
    references = {seat.group: seat for seat in seats if seat.contender is GROUPS[seat.group][0]}
    for seat in seats:
        name = f"{seat.group}: {seat.contender.name}"
        reference = references[seat.group]
        weights, expected = dict(seat.model.named_parameters()), dict(reference.model.named_parameters())
        decays = seat.contender.name in ("zero trick", "after the backward")
        # Where what goes unused comes back, the rest follows from it.
        comparable = not (decays and job.unused and job.unused.ranks == "changing")
        for key, weight in weights.items() if comparable else ():
            if not (decays and key.startswith(decaying)) and not _same(weight, expected[key]):
                found.append(f"{name}: {key} differs from {reference.contender.name}")
        if not all(weight.isfinite().all() for weight in weights.values()):
            found.append(f"{name}: weights that are not finite")
        digests: list[bytes] = [b""] * dist.get_world_size()
        dist.all_gather_object(digests, _digest(seat.model))
        if len(set(digests)) > 1:
            found.append(f"{name}: ranks differ")
        decision = getattr(seat.trainer.strategy, "decision", None)
        if seat.contender.ends_in is not None and (decision is None or _state(seat) is not seat.contender.ends_in):
            found.append(f"{name}: is not in {seat.contender.ends_in}")
    return found


def _state(seat: Seat) -> object:
    """The state that was measured. After the fit, the decision's, which a strategy that stays off does not follow."""
    strategy = seat.trainer.strategy
    if type(strategy).__name__ == "_StaysOff":
        return seat.contender.ends_in
    return strategy.decision.state  # type: ignore[attr-defined]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) if dist.get_world_size() <= 2 else torch.allclose(a, b, rtol=CLOSE, atol=CLOSE)


def _digest(model: torch.nn.Module) -> bytes:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.digest()
