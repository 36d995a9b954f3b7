"""The strategy's own work in a clean step, in microseconds, by the number of trainable parameters.

A model that does next to nothing per parameter (one addition over all of them) is trained by one rank in turn under
Lightning's ``DDPStrategy`` and under ours. One rank has nobody to wait for, so the difference of two adjacent steps is
what our strategy adds: the check, the tally (sent to nobody, but sent), the look at ``requires_grad``, the calls.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

import adaptive_ddp
from adaptive_ddp import AdaptiveDDPStrategy
from benchmarks.contenders import Contender
from benchmarks.driver import DirectSeat, quiet, use_one_thread, within_fits
from benchmarks.results import Ratio, bootstrap
from benchmarks.shapes import Shape, Stack
from benchmarks.timing import balanced_orders

# What the issue of speed allows: so many microseconds, and so many more for each trainable parameter.
BAR_US, BAR_US_A_PARAMETER = 40.0, 0.1
PARAMETERS = (1, 62, 300, 1200, 5000)
WARM_UP = 10


class _Numbers(Stack):
    """So many parameters of one element each, and a loss that adds them up."""

    def __init__(self, parameters: int) -> None:
        super().__init__(Shape(0, nn.Identity, nn.Identity, nn.Identity, ()))
        self.numbers = nn.ParameterList([torch.zeros(1) for _ in range(parameters)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.cat([*self.numbers]).sum()


@dataclass(frozen=True)
class OwnWork:
    """What was measured for one number of parameters.

    Attributes:
        parameters: that number.
        added_us: what our step takes longer, in microseconds.
        again_us: the same for Lightning's strategy against itself, which shows what the method cannot tell apart.
        added_cpu_us: what it takes more of the calling thread's CPU time; a busy machine blurs this less.
        plain_us: what the other takes.
        profile: the package's functions by the time spent in themselves, each as a line of text.
    """

    parameters: int
    added_us: Ratio
    again_us: Ratio
    added_cpu_us: Ratio
    plain_us: float
    profile: Sequence[str]

    @property
    def bar_us(self) -> float:
        """What it may take."""
        return BAR_US + BAR_US_A_PARAMETER * self.parameters


def measure_own_work(parameters: int, steps: int) -> OwnWork:
    """Measure on a rank that is alone in its group."""
    use_one_thread()
    strategies = {"plain": DDPStrategy, "plain again": DDPStrategy, "watch": AdaptiveDDPStrategy}
    seats = [
        DirectSeat("own work", Contender(name, strategy, "all used"), _Numbers(parameters))
        for name, strategy in strategies.items()
    ]
    seconds: dict[str, list[float]] = {name: [] for name in strategies}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in strategies}
    profile = cProfile.Profile()
    batch = torch.zeros(1)

    def work() -> None:
        orders = balanced_orders(seats, random.Random(0))
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                gc.collect()
                gc.freeze()
            for seat in next(orders):
                began = time.thread_time()
                seconds[seat.contender.name].append(seat.step(batch, number))
                cpu_seconds[seat.contender.name].append(time.thread_time() - began)
        gc.unfreeze()
        for number in range(steps):
            profile.enable()
            seats[-1].step(batch, number)
            profile.disable()

    with quiet():
        within_fits(seats, work)

    def difference(name: str, clock: dict[str, list[float]]) -> Ratio:
        return bootstrap([1e6 * (a - b) for a, b in zip(clock[name], clock["plain"], strict=True)][WARM_UP:])

    added, again = difference("watch", seconds), difference("plain again", seconds)
    plain_us = 1e6 * statistics.median(seconds["plain"][WARM_UP:])
    added_cpu = difference("watch", cpu_seconds)
    return OwnWork(parameters, added, again, added_cpu, plain_us, _own_functions(profile, steps))


def _own_functions(profile: cProfile.Profile, steps: int) -> list[str]:
    """The package's functions; under the profiler everything takes longer, calls above all."""
    package = str(Path(adaptive_ddp.__file__).parent)
    rows = []
    for (file, _, name), (_, calls, own, total, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if file.startswith(package):
            text = f"{Path(file).name}:{name}, {calls / steps:.1f} calls"
            rows.append((own, f"{1e6 * own / steps:7.1f} µs own {1e6 * total / steps:7.1f} µs with callees  {text}"))
    return [text for _, text in sorted(rows, reverse=True)]


def table(rows: Sequence[OwnWork]) -> str:
    """What was measured as a table in Markdown."""
    lines = [
        "| trainable parameters | added, µs | plain again, µs | added CPU time, µs | bar, µs | plain step, µs |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            f"{a.median:.0f} ({a.low:.0f} to {a.high:.0f})" for a in (row.added_us, row.again_us, row.added_cpu_us)
        )
        lines.append(f"| {row.parameters:,} | {' | '.join(cells)} | {row.bar_us:.0f} | {row.plain_us:.0f} |")
    return "\n".join(lines)
