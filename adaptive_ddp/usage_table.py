"""The table that :class:`~adaptive_ddp.monitor.GradientUsageMonitorMixin` writes: one row a recorded backward.

Promise: memory is bounded by a few hundred rows whatever the length of the run; a CSV file is complete up to its last
row at any moment, also after the process is killed; and what one of the two formats holds, the other does too.

Limits: a Parquet file can be read only once it has been closed, which an exception does and a kill does not. Parquet
needs pyarrow. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

TABLE_SUFFIXES = (".csv", ".parquet")

# The columns before those of the parameters.
HEAD = ("step", "backward", "epoch", "global_step", "world_size")

_MOST_BUFFERED_ROWS = 256
_MOST_BUFFERED_CELLS = 500_000


@dataclass(frozen=True)
class Record:
    """One row: what one backward brought.

    Attributes:
        step: the number of the step, from 1: of the accumulation window under automatic optimization, of the batch
            under manual optimization.
        backward: the number of this synchronised backward within the step, from 1.
        epoch: the epoch, from 0.
        global_step: the trainer's ``global_step`` when the backward ended.
        world_size: the number of ranks.
        received: for each parameter, the number of ranks on which it received a gradient; None while it was frozen.
    """

    step: int
    backward: int
    epoch: int
    global_step: int
    world_size: int
    received: Sequence[int | None]

    @property
    def head(self) -> tuple[int, ...]:
        """The values of the columns before those of the parameters."""
        return self.step, self.backward, self.epoch, self.global_step, self.world_size


class TableWriter(Protocol):
    """Writes records to one file."""

    def write(self, record: Record) -> None:
        """Add a row."""

    def close(self) -> None:
        """Write what is buffered, and close the file."""


def require_table_packages(path: Path) -> None:
    """Raise an error if a file of this kind cannot be written.

    Raises:
        ImportError: if the suffix is ``.parquet`` and pyarrow is not installed.
    """
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ImportError(
            f"Writing {path.name} needs pyarrow: pip install adaptive-ddp[parquet]. Or write a .csv file, which needs"
            " nothing."
        )


def create_table(path: Path, names: Sequence[str]) -> TableWriter:
    """Begin a new file, CSV or Parquet by its suffix; an old one is overwritten.

    Args:
        path: the file; its directory is made if need be.
        names: the names of the parameters, one column each.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return _ParquetWriter(path, names) if path.suffix == ".parquet" else _CsvWriter(path, names)


def continue_table(
    path: Path, names: Sequence[str], *, before_step: int, kept: Callable[[Record], None]
) -> TableWriter:
    """Go on with a file of an earlier run, whose rows from a step on are dropped.

    Args:
        path: the file.
        names: the names of the parameters, which have to be those of the file.
        before_step: rows of this step and later ones go: the run that is resumed takes those steps again.
        kept: called with each row that stays.

    Raises:
        ValueError: if the file is not a table of these parameters, or was never closed; it is left as it was.
    """
    if read_names(path) != tuple(names):
        raise ValueError(f"{path} holds other parameters")
    old = path.with_stem(f"{path.stem}-before-resuming")
    os.replace(path, old)
    writer = create_table(path, names)
    for record in read_table(old):
        if record.step < before_step:
            writer.write(record)
            kept(record)
    old.unlink()
    return writer


def read_names(path: Path) -> tuple[str, ...]:
    """The names of the parameters of a table.

    Raises:
        ValueError: if the file is not such a table, or is a Parquet file that was never closed.
    """
    if path.suffix == ".parquet":
        import pyarrow.parquet

        # What pyarrow raises for a file without a footer is a ValueError.
        columns = tuple(pyarrow.parquet.read_schema(path).names)
    else:
        with path.open(newline="", encoding="utf-8") as file:
            columns = tuple(next(csv.reader(file), ()))
    if columns[: len(HEAD)] != HEAD:
        raise ValueError(f"{path} is not a table of gradient usage: its columns should begin with {', '.join(HEAD)}.")
    return columns[len(HEAD) :]


def read_table(path: Path) -> Iterator[Record]:
    """Yield the rows of a table in order; a last row that was cut off is left out."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_MOST_BUFFERED_ROWS):
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    yield _record(row)
        return
    with path.open(newline="", encoding="utf-8") as file:
        # A row that a killed process began has no end of line, and may have its last number cut in two.
        rows = csv.reader(line for line in file if line.endswith("\n"))
        width = len(next(rows, ()))
        for cells in rows:
            if len(cells) == width:
                yield _record([int(cell) if cell else None for cell in cells])


def _record(values: Sequence[Any]) -> Record:
    step, backward, epoch, global_step, world_size, *received = values
    return Record(step, backward, epoch, global_step, world_size, received)


class _CsvWriter:
    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow((*HEAD, *names))
        self._file.flush()

    def write(self, record: Record) -> None:
        # None is written as an empty cell.
        self._writer.writerow((*record.head, *record.received))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _ParquetWriter:
    def __init__(self, path: Path, names: Sequence[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self._pyarrow: Any = pyarrow
        self._schema = pyarrow.schema(
            [*((name, pyarrow.int64()) for name in HEAD), *((name, pyarrow.int32()) for name in names)]
        )
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema)
        self._most_rows = max(1, min(_MOST_BUFFERED_ROWS, _MOST_BUFFERED_CELLS // len(self._schema)))
        self._rows: list[tuple[int | None, ...]] = []

    def write(self, record: Record) -> None:
        self._rows.append((*record.head, *record.received))
        if len(self._rows) >= self._most_rows:
            self._write_rows()

    def close(self) -> None:
        self._write_rows()
        self._writer.close()

    def _write_rows(self) -> None:
        if self._rows:
            columns = [
                self._pyarrow.array(column, type=field.type)
                for column, field in zip(zip(*self._rows, strict=True), self._schema, strict=True)
            ]
            self._writer.write_table(self._pyarrow.Table.from_arrays(columns, schema=self._schema))
            self._rows.clear()
