"""The ratios of a run as a picture: one panel a comparison, one line a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Ratio, Summary

_WALL, _CPU, _BEYOND = "#1f5f99", "#d08a1d", "#f7e3e0"


def draw(results: Sequence[Summary], path: Path) -> None:
    """Draw the medians and their intervals, wall time over CPU time, with the bars that they should stay under.

    Args:
        results: what was measured.
        path: where to write the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    comparisons = list(dict.fromkeys(row.comparison for result in results for row in result.rows))
    found = {
        comparison: [(result.title, row) for result in results for row in result.rows if row.comparison == comparison]
        for comparison in comparisons
    }
    heights = [len(rows) + 0.9 for rows in found.values()]
    figure, panels = plt.subplots(
        len(comparisons),
        figsize=(10, 0.4 * sum(heights) + 1),
        squeeze=False,
        sharex=True,
        height_ratios=heights,
        layout="constrained",
    )
    left, right = _limits([ratio for rows in found.values() for _, row in rows for ratio in (row.wall, row.cpu)])
    for panel, (comparison, rows) in zip(panels.flat, found.items(), strict=True):
        for place, (_, row) in enumerate(rows):
            _draw_ratio(panel, row.wall, place - 0.13, _WALL)
            _draw_ratio(panel, row.cpu, place + 0.13, _CPU)
        panel.set_yticks(
            range(len(rows)), [title.replace(" ranks, ", " ranks,\n", 1) for title, _ in rows], fontsize=7.5
        )
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.axvline(1, color="0.4", linewidth=0.8)
        if comparison.bar is not None:
            panel.axvspan(comparison.bar, right, color=_BEYOND, zorder=0)
        panel.set_xlim(left, right)
        bar = "" if comparison.bar is None else f"   (shaded: beyond the bar, {comparison.bar:.2f})"
        panel.set_title(f"{comparison.contender} / {comparison.reference}{bar}", loc="left", fontsize=10)
        panel.tick_params(axis="x", labelsize=8, labelbottom=True)
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    handles = [Line2D([], [], color=color, marker="o", linewidth=1.4) for color in (_WALL, _CPU)]
    names = ["wall time", "CPU time"]
    title = "median ratio of step times, with its 95 % interval; left of 1 is faster"
    figure.legend(handles, names, title=title, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _limits(ratios: Sequence[Ratio]) -> tuple[float, float]:
    """One scale for all panels: every median and, unless they are very wide, every interval."""
    medians = [ratio.median for ratio in ratios]
    left = max(min(medians) - 0.15, min(ratio.low for ratio in ratios))
    right = min(max(medians) + 0.15, max(ratio.high for ratio in ratios))
    return min(left, 0.95) - 0.01, max(right, 1.05) + 0.01


def _draw_ratio(panel: Any, ratio: Ratio, height: float, color: str) -> None:
    panel.plot([ratio.low, ratio.high], [height, height], color=color, linewidth=1.4)
    panel.plot([ratio.median], [height], color=color, marker="o", markersize=5)
