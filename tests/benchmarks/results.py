"""What the times come to: ratios with their uncertainty, a table, a file."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from benchmarks.contenders import COMPARISONS, Comparison
from benchmarks.shapes import Ranks
from benchmarks.timing import Job, Timed

_RANKS: dict[Ranks, str] = {
    "same": "same on all ranks",
    "different": "other ones on each rank",
    "some": "on every other rank",
    "changing": "others at each step",
}


@dataclass(frozen=True)
class Ratio:
    """A median, for example of how one contender's steps compare with another's, and how sure it is.

    Attributes:
        median: of the single steps.
        low: the median's 2.5 % point over bootstrap samples of the steps.
        high: its 97.5 % point.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def bootstrap(values: Sequence[float], samples: int = 2000) -> Ratio:
    """The median of some values, with a percentile interval of 95 %."""
    data = torch.tensor(values, dtype=torch.float64)
    drawn = torch.randint(len(values), (samples, len(values)), generator=torch.Generator().manual_seed(0))
    medians = data[drawn].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Ratio(data.quantile(0.5).item(), low, high)


def _across(timed: Sequence[Timed], clock: str, key: tuple[str, str]) -> list[float]:
    """A contender's steps as the group sees them: wall time until the last rank is done, CPU time of all ranks."""
    rows = zip(*(getattr(part, clock)[key] for part in timed), strict=True)
    return [max(row) if clock == "wall" else sum(row) for row in rows]


@dataclass(frozen=True)
class Row:
    """A ratio that was measured."""

    comparison: Comparison
    wall: Ratio
    cpu: Ratio
    wall_by_repeat: Sequence[float]
    cpu_by_repeat: Sequence[float]


@dataclass(frozen=True)
class Summary:
    """What a job came to, as far as a table and a picture tell.

    Attributes:
        title: what was trained.
        steps: the number of counted steps.
        rows: the ratios.
    """

    title: str
    steps: int
    rows: Sequence[Row]


def load(content: Any) -> list[Summary]:
    """The summaries in a file that :meth:`Result.as_json` went into."""
    return [
        Summary(
            result["title"],
            result["job"]["steps"],
            [
                Row(
                    Comparison(**row["comparison"]),
                    Ratio(**row["wall"]),
                    Ratio(**row["cpu"]),
                    row["wall_by_repeat"],
                    row["cpu_by_repeat"],
                )
                for row in result["rows"]
            ],
        )
        for result in content["results"]
    ]


@dataclass(frozen=True)
class Result:
    """What a job came to.

    Attributes:
        job: the job.
        world_size: the number of ranks.
        repeats: what the ranks sent in each repeat.
        rows: the ratios.
    """

    job: Job
    world_size: int
    repeats: Sequence[Sequence[Timed]]
    rows: Sequence[Row]

    @property
    def unequal(self) -> list[str]:
        """What is wrong with the weights; a benchmark with entries here says nothing."""
        return [
            f"repeat {number}, rank {rank}: {text}"
            for number, timed in enumerate(self.repeats)
            for rank, part in enumerate(timed)
            for text in part.unequal
        ]

    @property
    def title(self) -> str:
        """What was trained."""
        job, first = self.job, self.repeats[0][0]
        shape = "" if job.shape.isdecimal() else f"{job.shape}, "
        text = f"{shape}{first.parameters:,} parameters, {self.world_size} ranks"
        if job.unused is not None:
            text += f", {first.unused_parameters} unused ({first.unused_bytes:.1%} of the bytes), {job.unused.place}"
            text += f", {_RANKS[job.unused.ranks]}"
        return text + (", whole Trainers" if job.through_trainer else "")

    @property
    def summary(self) -> Summary:
        """What there is to show."""
        return Summary(self.title, self.job.steps, self.rows)

    def median_ms(self, group: str, contender: str) -> float:
        """The median wall time of a contender's steps in ms."""
        steps = (_across(timed, "wall", (group, contender)) for timed in self.repeats)
        return 1e3 * statistics.median(chain(*steps))

    def as_json(self) -> dict[str, Any]:
        """Everything but the single times."""
        return {
            "title": self.title,
            "world_size": self.world_size,
            "job": asdict(self.job),
            "parameters": self.repeats[0][0].parameters,
            "unused_parameters": [part.unused_parameters for part in self.repeats[0]],
            "unused_bytes": [part.unused_bytes for part in self.repeats[0]],
            "unequal": self.unequal,
            "rows": [asdict(row) for row in self.rows],
            "median_ms": {f"{group}: {name}": self.median_ms(group, name) for group, name in self.repeats[0][0].wall},
        }


def evaluate(job: Job, repeats: Sequence[Sequence[Timed]]) -> Result:
    """The ratios of a job, from what the ranks sent in each repeat."""
    rows = []
    for comparison in COMPARISONS:
        key, reference = (comparison.group, comparison.contender), (comparison.group, comparison.reference)
        if not (key in repeats[0][0].wall and reference in repeats[0][0].wall):
            continue
        wall, cpu = (
            [
                [a / b for a, b in zip(_across(timed, clock, key), _across(timed, clock, reference), strict=True)]
                for timed in repeats
            ]
            for clock in ("wall", "cpu")
        )
        medians = [[statistics.median(ratios) for ratios in clock] for clock in (wall, cpu)]
        rows.append(Row(comparison, bootstrap([*chain(*wall)]), bootstrap([*chain(*cpu)]), *medians))
    return Result(job, len(repeats[0]), repeats, rows)


def table(summary: Summary) -> str:
    """A result as a table in Markdown."""
    lines = [
        f"**{summary.title}**",
        "",
        f"| {summary.steps} steps | wall time | CPU time | bar |",
        "|---|---|---|---|",
    ]
    for row in summary.rows:
        bar = "" if row.comparison.bar is None else f"≤ {row.comparison.bar:.2f}"
        lines.append(f"| {row.comparison.contender} / {row.comparison.reference} | {row.wall} | {row.cpu} | {bar} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What it was measured on."""
    return {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
