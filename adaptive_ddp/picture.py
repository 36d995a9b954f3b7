"""A heat map of which parameters received a gradient: modules down, steps across, colour for the share of ranks.

Promise: memory and the size of the picture are bounded whatever the length of the run and the number of parameters; a
cell's colour is the mean of what it stands for; and the title says the main finding in words. Pure: data in, a figure
out. Needs matplotlib, which is imported when a figure is drawn.

To draw the picture of a table, also while it is being written: ``python -m adaptive_ddp.picture table.csv``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adaptive_ddp.report import braces
from adaptive_ddp.usage_table import Record, read_names, read_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")

LEGEND = "share of ranks on which the parameter received a gradient"

# Backwards of a step that get a panel of their own; later ones share the last.
MOST_PANELS = 3

_MOST_COLUMNS = 240
_FEWEST_COLUMNS = 40
_MOST_CELLS = 2_000_000
_LONGEST_LABEL = 48
# What is written beside each line of the picture, and the parameters it stands for.
_Lines = Sequence[tuple[str, tuple[int, ...]]]


def require_matplotlib() -> None:
    """Raise an error if no picture can be drawn.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ImportError(
            "Drawing the picture needs matplotlib: pip install adaptive-ddp[plot]. Or write"
            " GradientUsageMonitor(picture=None) for the table alone."
        )


class UsageHistory:
    """What a picture is drawn from: counts by parameter and column, a column being a bin of steps.

    When the columns are used up, neighbours are added together and each stands for twice as many steps.

    Args:
        names: the names of the parameters, in the order of the module.
        steps_a_column: how many steps a column stands for at first: the distance between two recorded steps.
    """

    def __init__(self, names: Sequence[str], steps_a_column: int = 1) -> None:
        self.names = tuple(names)
        self.recorded_every = steps_a_column
        self.steps_a_column = steps_a_column
        self.first_step = 0
        self.last_step = 0
        self.world_size = 1
        columns = min(_MOST_COLUMNS, max(_FEWEST_COLUMNS, _MOST_CELLS // max(1, len(self.names))))
        # An even number, so that all columns have a neighbour.
        self._shape = (len(self.names), columns - columns % 2)
        # For each parameter, whether in some backward it received a gradient on no rank.
        self.missed_everywhere = torch.zeros(len(self.names), dtype=torch.bool)
        # Of each panel.
        self._received: list[Tensor] = []
        self._possible: list[Tensor] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been added."""
        return not self._received

    def add(self, record: Record) -> None:
        """Add a row of the table.

        Args:
            record: of a step that is not before the first one added.
        """
        if self.is_empty:
            self.first_step = record.step
        self.last_step = max(self.last_step, record.step)
        self.world_size = max(self.world_size, record.world_size)
        panel = min(record.backward, MOST_PANELS) - 1
        while len(self._received) <= panel:
            self._received.append(torch.zeros(self._shape, dtype=torch.int64))
            self._possible.append(torch.zeros(self._shape, dtype=torch.int64))
        while (column := (record.step - self.first_step) // self.steps_a_column) >= self._shape[1]:
            self._halve()
        self._received[panel][:, column] += torch.tensor([count or 0 for count in record.received])
        self._possible[panel][:, column] += torch.tensor(
            [0 if count is None else record.world_size for count in record.received]
        )
        self.missed_everywhere |= torch.tensor([count == 0 for count in record.received])

    def counts(self) -> tuple[Tensor, Tensor]:
        """Where gradients were received, and where they could have been.

        Returns:
            Two integer tensors of shape (panels, parameters, columns): ranks times steps. Panels of backwards that
            never differed from each other are given once.
        """
        columns = (self.last_step - self.first_step) // self.steps_a_column + 1
        received = torch.stack(self._received)[:, :, :columns]
        possible = torch.stack(self._possible)[:, :, :columns]
        are_alike = bool(((received * possible[:1]) == (received[:1] * possible)).all())
        if are_alike:
            return received.sum(dim=0, keepdim=True), possible.sum(dim=0, keepdim=True)
        return received, possible

    def _halve(self) -> None:
        for grids in (self._received, self._possible):
            for index, grid in enumerate(grids):
                halved = torch.zeros_like(grid)
                halved[:, : grid.shape[1] // 2] = grid[:, 0::2] + grid[:, 1::2]
                grids[index] = halved
        self.steps_a_column *= 2


# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the picture: parameters that are shown together.

    Attributes:
        label: what is common to their names.
        members: the indices of the parameters.
    """

    label: str
    members: tuple[int, ...]


@dataclass(frozen=True)
class Folded:
    """The rows of a picture.

    Attributes:
        rows: first what never received a gradient, then the rest, each in the order of the module.
        always: the parameters that received a gradient on every rank in every step, which share one quiet row.
        frozen: the parameters that were frozen throughout, which are not shown.
    """

    rows: tuple[Row, ...]
    always: tuple[int, ...]
    frozen: tuple[int, ...]


@dataclass(frozen=True)
class _Group:
    """Parameters below some children of one module, the path to which is ``prefix``."""

    prefix: tuple[str, ...]
    components: tuple[str, ...]
    members: tuple[int, ...]


def fold(names: Sequence[str], received: Tensor, possible: Tensor, most_rows: int) -> Folded:
    """Group parameters into few rows, so that what behaved alike is together.

    Modules whose parameters differ are opened, level by level, until none differ or the rows are used up. Children of a
    module that behaved alike share a row. Where there are more children than rows, neighbours share one.

    Args:
        names: the names of the parameters.
        received: as :meth:`UsageHistory.counts` gives it.
        possible: likewise.
        most_rows: the most rows, that of the parameters that are always used included.
    """
    recorded = (possible.amax(dim=1, keepdim=True) > 0).expand_as(possible)
    is_frozen = (possible == 0).all(dim=2).all(dim=0)
    is_always = ((received == possible) & ((possible > 0) | ~recorded)).all(dim=2).all(dim=0) & ~is_frozen
    is_never = (received == 0).all(dim=2).all(dim=0) & ~is_frozen
    # A gap differs from both ends of the scale.
    shares = torch.where(possible > 0, received / possible.clamp(min=1), -1.0)
    shares = shares.permute(1, 0, 2).flatten(start_dim=1)
    room = most_rows - bool(is_always.any())
    never = _indices(is_never)
    at_times = _indices(~(is_frozen | is_always | is_never))
    # What the title speaks of has to be found, so it is not left to be folded into something else.
    groups = list(_joined(_children(names, (), never), max(1, room // 3))) if never else []
    rows = [*groups, *_opened(names, shares, at_times, max(1, room - len(groups)))]
    everything = _indices(~is_frozen)
    return Folded(
        tuple(Row(_label(names, group, everything), group.members) for group in rows),
        _indices(is_always),
        _indices(is_frozen),
    )


def _opened(names: Sequence[str], shares: Tensor, members: tuple[int, ...], most: int) -> list[_Group]:
    """The groups for those parameters that received a gradient at times; at most ``most``."""
    groups = [_Group((), _components(names, members, 0), members)] if members else []
    while differing := [group for group in groups if not _are_alike(shares, group.members)]:
        each = (most - len(groups) + len(differing)) // len(differing)
        if each < 2:
            break
        opened: list[_Group] = []
        for group in groups:
            opened += _joined(_split(names, shares, group), each) if group in differing else [group]
        groups = opened
    return sorted(groups, key=lambda group: group.members)


def _indices(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())


def _are_alike(shares: Tensor, members: Sequence[int]) -> bool:
    part = shares[list(members)]
    return bool((part == part[:1]).all())


def _components(names: Sequence[str], members: Sequence[int], depth: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names[index].split(".")[depth] for index in members))


def _children(names: Sequence[str], prefix: tuple[str, ...], members: Sequence[int]) -> list[_Group]:
    """One group for each child of a module."""
    found: dict[str, list[int]] = {}
    for index in members:
        found.setdefault(names[index].split(".")[len(prefix)], []).append(index)
    return [_Group(prefix, (component,), tuple(indices)) for component, indices in found.items()]


def _split(names: Sequence[str], shares: Tensor, group: _Group) -> list[_Group]:
    """Open a group: its children one by one, or those of its only child; children that are alike stay together."""
    prefix = group.prefix
    children = _children(names, prefix, group.members)
    while len(children) == 1:
        prefix = (*prefix, *children[0].components)
        children = _children(names, prefix, group.members)
    alike: dict[Any, list[_Group]] = {}
    for child in children:
        key = shares[child.members[0]].numpy().tobytes() if _are_alike(shares, child.members) else child
        alike.setdefault(key, []).append(child)
    return [_join(found) for found in alike.values()]


def _join(groups: Sequence[_Group]) -> _Group:
    components = tuple(component for group in groups for component in group.components)
    members = tuple(sorted(index for group in groups for index in group.members))
    return _Group(groups[0].prefix, components, members)


def _joined(groups: Sequence[_Group], most: int) -> Iterator[_Group]:
    """Neighbours joined, the same number of them everywhere, so that there are at most ``most``."""
    size = -(-len(groups) // most)
    for first in range(0, len(groups), size):
        yield _join(groups[first : first + size])


def _label(names: Sequence[str], group: _Group, everything: Sequence[int]) -> str:
    """The path to a group, and a level deeper than it goes where it does not hold all there is below."""
    prefix, components = group.prefix, group.components
    while len(components) == 1:
        path = (*prefix, *components)
        below = [index for index in everything if names[index].split(".")[: len(path)] == list(path)]
        if len(below) == len(group.members):
            break
        prefix, components = path, _components(names, group.members, len(path))
    label = ".".join((*prefix, braces(components)))
    if len(label) <= _LONGEST_LABEL:
        return label
    kept = (_LONGEST_LABEL - 1) // 2
    return f"{label[:kept]}…{label[-kept:]}"


# -- words ------------------------------------------------------------------------------------------------------------


def describe_finding(received: Tensor, possible: Tensor, missed_everywhere: Tensor) -> str:
    """The main finding in words.

    Args:
        received: as :meth:`UsageHistory.counts` gives it.
        possible: likewise.
        missed_everywhere: for each parameter, whether in some backward no rank's received a gradient.
    """
    could = possible.sum(dim=2) > 0
    number = int(could.any(dim=0).sum())
    if number == 0:
        return "Every parameter was frozen"
    not_always = int((received < possible).any(dim=2).any(dim=0).sum())
    if not_always == 0:
        return f"{_all(number)} received a gradient on every rank in every recorded step"
    never_in = (received.sum(dim=2) == 0) & could
    if never := int(((received.sum(dim=(0, 2)) == 0) & could.any(dim=0)).sum()):
        rest = not_always - never
        more = f"; {rest:,} more missed one at times" if rest else ""
        return f"{_some(never, number)} never received a gradient{more}"
    if bool(never_in.any()):
        found = [(panel, int(never_in[panel].sum())) for panel in range(len(never_in)) if never_in[panel].any()]
        first, *others = (
            f"the {_backward(panel)} {'miss' if panel == MOST_PANELS - 1 else 'misses'} {count:,}"
            for panel, count in found
        )
        return ", ".join((f"In each step {first} of {number:,} parameters", *others))
    everywhere = int(missed_everywhere.sum())
    at_once = {0: ", on some ranks only", not_always: ", on all ranks at once"}.get(
        everywhere, f", {everywhere:,} of them on all ranks at once"
    )
    return f"{_some(not_always, number)} missed a gradient at times{at_once}"


def _all(number: int) -> str:
    return "The only parameter" if number == 1 else f"All {number:,} parameters"


def _some(count: int, number: int) -> str:
    return f"{count:,} of {number:,} parameter{'' if number == 1 else 's'}"


def _backward(panel: int) -> str:
    return "3rd and later backwards" if panel == MOST_PANELS - 1 else f"{('1st', '2nd')[panel]} backward"


def _circumstances(history: UsageHistory, folded: Folded) -> str:
    ranks = f"{history.world_size} rank{'' if history.world_size == 1 else 's'}"
    every = f", every {history.recorded_every}th recorded" if history.recorded_every > 1 else ""
    text = f"{ranks}; steps {history.first_step} to {history.last_step}{every}"
    if history.steps_a_column > history.recorded_every:
        text += f"; a column is the mean over {history.steps_a_column} steps"
    if folded.frozen:
        text += f"; {len(folded.frozen)} frozen throughout, not shown"
    return text


# -- the figure -------------------------------------------------------------------------------------------------------


def draw(history: UsageHistory, *, most_rows: int = 40) -> Figure:
    """Draw the heat map.

    Args:
        history: what to draw; not empty.
        most_rows: the most rows; modules are folded until they fit.

    Returns:
        A figure that belongs to no window and no pyplot state; save it with ``figure.savefig(path)``.

    Raises:
        ValueError: if nothing has been recorded.
        ImportError: if matplotlib is not installed.
    """
    require_matplotlib()
    if history.is_empty:
        raise ValueError("There is nothing to draw: the history has no records.")
    import matplotlib
    from matplotlib.figure import Figure

    received, possible = history.counts()
    folded = fold(history.names, received, possible, most_rows)
    lines = [(row.label, row.members) for row in folded.rows]
    if folded.always:
        lines.append(("everything else" if lines else "all parameters", folded.always))
    title = fill(describe_finding(received, possible, history.missed_everywhere), width=88)
    # In inches, from the top: the title, each panel below a line of text, the axis, the legend.
    panels = received.shape[0]
    line = 0.235 if len(lines) > 4 else 0.34
    top = 0.25 + 0.23 * title.count("\n")
    panel_height = line * max(1, len(lines))
    left = 0.25 + 0.069 * max((len(label) for label, _ in lines), default=0)
    width, height = left + 9.3, top + panels * (0.42 + panel_height) + 1.25
    figure = Figure(figsize=(width, height), dpi=110)
    figure.text(0.1 / width, 1 - 0.1 / height, title, ha="left", va="top", fontsize=12, weight="bold")
    # Light where all is well, so that what is missing stands out; its lightness falls steadily, in grey too.
    colours = matplotlib.colormaps["YlGnBu_r"].with_extremes(bad=(0, 0, 0, 0))
    for panel in range(panels):
        bottom = height - top - (panel + 1) * (0.42 + panel_height)
        ax = figure.add_axes((left / width, bottom / height, 7.7 / width, panel_height / height))
        image = _draw_panel(ax, history, lines, (received[panel], possible[panel]), colours)
        texts = [f"{_backward(panel)} of each step"] if panels > 1 else []
        texts += [_circumstances(history, folded)] if panel == 0 else []
        ax.set_title("; ".join(texts), loc="left", fontsize=9, color="0.3", pad=5)
        ax.tick_params(axis="x", labelbottom=panel == panels - 1)
    ax.set_xlabel("step", fontsize=9, loc="right", labelpad=1)
    _draw_legend(figure, image, history.world_size, (left / width, 0.5 / height, 3.9 / width, 0.13 / height))
    if _has_gaps(lines, possible):
        _draw_gap_legend(figure, ((left + 4.9) / width, 0.4 / height))
    return figure


def _draw_legend(figure: Figure, image: Any, ranks: int, place: tuple[float, float, float, float]) -> None:
    bar = figure.colorbar(image, cax=figure.add_axes(place), orientation="horizontal")
    steps = ranks if ranks <= 8 else 4
    bar.set_ticks(
        [count / steps for count in range(steps + 1)],
        labels=[f"{count} of {ranks}" if ranks <= 8 else f"{100 * count // steps} %" for count in range(steps + 1)],
    )
    bar.ax.set_title(LEGEND, fontsize=9, loc="left", pad=4)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_edgecolor("0.6")


def _draw_gap_legend(figure: Figure, place: tuple[float, float]) -> None:
    from matplotlib.patches import Patch

    gap = Patch(facecolor="white", edgecolor="0.6", hatch="////", label="frozen, or not recorded")
    figure.legend(handles=[gap], loc="lower left", bbox_to_anchor=place, fontsize=9, frameon=False, borderpad=0)


def _has_gaps(lines: _Lines, possible: Tensor) -> bool:
    return any(bool((possible[:, list(members)].sum(dim=1) == 0).any()) for _, members in lines)


def _draw_panel(ax: Axes, history: UsageHistory, lines: _Lines, counts: tuple[Tensor, Tensor], colours: Any) -> Any:
    from matplotlib.ticker import MaxNLocator

    columns = counts[0].shape[1]
    had, could = (
        torch.stack([count[list(members)].sum(dim=0) for _, members in lines] or [torch.zeros(columns)])
        for count in counts
    )
    left = history.first_step - 0.5
    ax.patch.set(facecolor="white", edgecolor="0.75", hatch="////")
    image = ax.imshow(
        torch.where(could > 0, had / could.clamp(min=1), torch.nan).numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        vmin=0,
        vmax=1,
        extent=(left, left + columns * history.steps_a_column, len(had) - 0.5, -0.5),
    )
    for boundary in range(1, len(lines)):
        ax.axhline(boundary - 0.5, color="white", linewidth=1.5)
    ax.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=8)
    if lines and lines[-1][0] == "everything else":
        ax.get_yticklabels()[-1].set(style="italic", color="0.4")
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[:].set_visible(False)
    sizes = [f"{len(members):,}" for _, members in lines]
    for offset, header, texts in ((62, "parameters", sizes), (108, "mean", _percentages(had, could))):
        note: dict[str, Any] = {
            "textcoords": "offset points",
            "ha": "right",
            "fontsize": 8,
            "color": "0.3",
            "annotation_clip": False,
        }
        ax.annotate(header, xy=(1, 1), xycoords="axes fraction", xytext=(offset, 6), va="bottom", **note)
        for row, text in enumerate(texts):
            place = ("axes fraction", "data")
            ax.annotate(text, xy=(1, row), xycoords=place, xytext=(offset, 0), va="center", **note)
    return image


def _percentages(had: Tensor, could: Tensor) -> list[str]:
    texts = []
    for numerator, denominator in zip(had.sum(dim=1).tolist(), could.sum(dim=1).tolist(), strict=True):
        if not denominator:
            texts.append("")
            continue
        # Neither end is given to what only comes near it.
        percent = round(100 * numerator / denominator)
        percent = min(percent, 99) if numerator < denominator else percent
        texts.append(f"{max(percent, 1) if numerator else percent} %")
    return texts


# -- from a table -----------------------------------------------------------------------------------------------------


def history_of(table: Path) -> UsageHistory:
    """Read a table that the monitor wrote, or is writing.

    Raises:
        ValueError: if the file is not such a table.
    """
    names = read_names(table)
    steps: list[int] = []
    for record in read_table(table):
        if not steps or steps[-1] != record.step:
            steps.append(record.step)
    distance = min((after - before for before, after in pairwise(steps)), default=1)
    history = UsageHistory(names, distance)
    for record in read_table(table):
        history.add(record)
    return history


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: a table in, a picture out."""
    parser = argparse.ArgumentParser(prog="python -m adaptive_ddp.picture", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("table", type=Path, help="the .csv or .parquet file of GradientUsageMonitor")
    parser.add_argument("-o", "--output", type=Path, help="the picture; the table's name with .png if left out")
    parser.add_argument("--most-rows", type=int, default=40, help="fold modules into at most so many rows")
    options = parser.parse_args(arguments)
    output = options.output or options.table.with_suffix(".png")
    if output.suffix not in PICTURE_SUFFIXES:
        parser.error(f"--output {output}: write a name that ends in {', '.join(PICTURE_SUFFIXES)}")
    try:
        history = history_of(options.table)
        draw(history, most_rows=options.most_rows).savefig(output)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    print(output)


if __name__ == "__main__":
    main()
