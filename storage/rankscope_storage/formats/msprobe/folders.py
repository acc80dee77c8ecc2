"""Folders of CSV files in msprobe's layout: one folder per rank and attempt, several files per family of statistics.

A file covers a range of steps. Rows are added to an existing file, and no row is written twice. A file is written under
a temporary name in the same folder and then renamed, so that a reader never sees a partly written file.
"""

from __future__ import annotations

import csv
import datetime as dt
import functools
import hashlib
import itertools
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_msprobe.files.csv_layout import (
    CSV_KEYS,
    MICRO_STEP,
    Window,
    continued,
    file_name,
    folder_name,
    window,
)
from rankscope_storage.base.errors import ExportError
from rankscope_storage.formats.common.selection import Selection
from rankscope_storage.formats.msprobe.rows import MsprobeCells

_NO_TIME: Final = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_LATEST: Final = (
    "(step, coalesce(attempt, 0)) IN "
    "(SELECT (step, max(coalesce(attempt, 0))) FROM {relation} WHERE run = $run AND step IS NOT NULL GROUP BY step)"
)


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream: the rows of one rank that are written to one folder.

    They are the rows of one attempt, or if `attempt` is None, the rows of the latest attempt of each step.
    """

    folder: Path
    rank: int
    attempt: int | None

    def only(self, selection: Selection, dataset: str) -> str:
        """Return the SQL predicate for the rows of `dataset` that are written to the folder of this stream.

        Rows without a rank belong to rank 0.
        """
        rank = f"coalesce(rank, 0) = {self.rank}"
        if self.attempt is not None:
            return f"{rank} AND coalesce(attempt, 0) = {self.attempt}"
        relation = selection.connection.relation(dataset, run=selection.run)
        return f"{rank} AND {_LATEST.format(relation=relation)}"


def streams(selection: Selection, target: Path) -> list[Stream]:
    """Return the streams of an export: the rows of each rank and attempt, and their folder below `target`.

    With the option `append_output`, there is one stream per rank.
    """
    found = selection.query(
        f"SELECT DISTINCT coalesce(attempt, 0) AS attempt, coalesce(rank, 0) AS rank FROM "
        f"(SELECT attempt, rank FROM {selection.source('tensor_stats')} "
        f"UNION SELECT attempt, rank FROM {selection.source('features')} "
        f"UNION SELECT attempt, rank FROM {selection.source('scalars')}) ORDER BY ALL"
    ).to_pylist()
    began = _beginnings(selection, {row["attempt"] for row in found})
    own = functools.partial(_own_folder, selection, began)
    if selection.options.append_output is None:
        return [Stream(target / own(**row), **row) for row in found]
    begun = _window(selection.options.append_output)
    latest = {row["rank"]: row["attempt"] for row in found}
    return [
        Stream(
            _continued(target, rank, begun) or target / own(attempt=attempt, rank=rank),
            rank,
            selection.options.attempt,
        )
        for rank, attempt in sorted(latest.items())
    ]


def _own_folder(selection: Selection, began: Mapping[int, dt.datetime], *, attempt: int, rank: int) -> str:
    """Return the folder name of a rank and attempt, which is the same for each export of the run.

    Folder names of one rank sort in the order of its attempts, even if attempts have equal start times.
    """
    digest = hashlib.sha256(selection.run.encode("utf-8", "surrogatepass")).hexdigest()
    return folder_name(began[attempt], rank, f"{attempt & 0xFFFF:04x}{digest[:4]}", selection.options.time_zone)


def _beginnings(selection: Selection, attempts: set[int]) -> dict[int, dt.datetime]:
    """Return the start time of each attempt. A time is never earlier than that of the previous attempt."""
    rows = selection.query(
        "SELECT coalesce(attempt, 0) AS attempt, min(began) AS began FROM ("
        "SELECT attempt, started_at AS began FROM attempts WHERE run = $run UNION ALL "
        f"SELECT attempt, min(ts) FROM {selection.connection.relation('tensor_stats', run=selection.run)} "
        "WHERE run = $run GROUP BY attempt) WHERE began IS NOT NULL GROUP BY ALL"
    ).to_pylist()
    known = {row["attempt"]: row["began"] for row in rows}
    first = min(known.values(), default=_NO_TIME)
    ordered = sorted(attempts)
    moments = itertools.accumulate((known.get(attempt, first) for attempt in ordered), max)
    return dict(zip(ordered, moments, strict=True))


def _window(given: tuple[str, str]) -> Window:
    try:
        return window(given)
    except ValueError as error:
        raise ExportError(str(error)) from error


def _continued(target: Path, rank: int, begun: Window) -> Path | None:
    """Return the latest existing folder of `rank` with a time from the closed range `begun` in its name, or None.

    The export adds rows to this folder.
    """
    names = [path.name for path in target.iterdir() if path.is_dir()] if target.is_dir() else []
    name = continued(names, rank, begun)
    return None if name is None else target / name


_SEPARATOR: Final = "\x1f"  # cells contain no control characters
_MAX_CELL: Final = 1 << 20


class FamilyFiles:
    """Writer of the files of one family of statistics, as a context manager.

    Rows must arrive in the order of their steps. The files get their final names at the end of the context, if no error
    occurred.
    """

    def __init__(self, folder: Path, family: str, columns: Sequence[str], *, steps: int, micro_steps: bool) -> None:
        self.written: list[Path] = []
        self.rows = 0
        self.repeated = 0
        self._folder = folder
        self._family = family
        self._columns = columns
        self._steps = steps
        self._micro_steps = micro_steps
        self._block = -1
        self._file: _OneFile | None = None

    def add(self, cells: MsprobeCells) -> None:
        """Write rows of the family, except rows that a file in the folder already contains."""
        blocks = np.asarray(cells.step) // self._steps
        starts = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(blocks)]
        for start, end in itertools.pairwise(starts):
            if end > start:
                self._turn_to(int(blocks[start]))
                assert self._file is not None  # opened by _turn_to
                new = self._file.add(cells, start, end)
                self.rows += new
                self.repeated += end - start - new

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._turn_to(-1)
        elif self._file:
            self._file.discard()

    def _turn_to(self, block: int) -> None:
        if block == self._block:
            return
        if self._file and self._file.close():
            self.written.append(self._file.path)
        self._block, self._file = block, None
        if block >= 0:
            path = self._folder / file_name(self._family, block, self._steps)
            self._file = _OneFile(path, self._columns, micro_steps=self._micro_steps)


class _OneFile:
    """Writer of one CSV file that is new or that is continued."""

    def __init__(self, path: Path, columns: Sequence[str], *, micro_steps: bool) -> None:
        self.path = path
        self._present: set[int] = set()
        self._new = 0
        self._partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        keys = (*CSV_KEYS, MICRO_STEP) if micro_steps else CSV_KEYS
        self._header = [*keys, *columns]
        if path.exists():
            self._header, self._present = _read(path)
            _check_header(path, self._header, keys)
        self._file = self._open()

    def add(self, cells: MsprobeCells, start: int, end: int) -> int:
        """Write the rows of `cells` from `start` up to `end` that are not in the file yet, and return their number."""
        length = end - start
        texts = {name: column.slice(start, length) for name, column in cells.columns.items()}
        texts |= {
            "vpp_stage": cells.vpp_stage.slice(start, length),
            "name": cells.name.slice(start, length),
            "step": pc.cast(cells.step.slice(start, length), pa.string()),
            MICRO_STEP: cells.micro_step.slice(start, length),
        }
        missing = pa.array(["nan"] * length, pa.string())
        lines = pc.binary_join_element_wise(*(_quoted(texts.get(name, missing)) for name in self._header), ",")
        if self._present:
            lines = lines.filter(pa.array(list(self._absent(texts)), pa.bool_()))
        if len(lines):
            self._file.write(("\n".join(lines.to_pylist()) + "\n").encode())
        self._new += len(lines)
        return len(lines)

    def close(self) -> bool:
        """Rename the temporary file of this writer to its final name if it has new rows; return whether it has any."""
        self._file.close()
        if not self._new:
            self._partial.unlink()
            return False
        self._partial.replace(self.path)
        return True

    def discard(self) -> None:
        """Remove the temporary file of this writer. An earlier file with the final name remains."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _open(self) -> BinaryIO:
        if not self.path.exists():
            new = self._partial.open("wb")
            new.write((",".join(self._header) + "\n").encode())
            return new
        shutil.copyfile(self.path, self._partial)
        file = self._partial.open("r+b")
        file.seek(-1, os.SEEK_END)
        # An incomplete last line of a killed writer remains as a separate line.
        if file.read() != b"\n":
            file.write(b"\n")
        return file

    def _absent(self, texts: dict[str, pa.StringArray]) -> Iterator[bool]:
        names = [name for name in (*CSV_KEYS, MICRO_STEP) if name in self._header]
        keys = pc.binary_join_element_wise(*(texts[name] for name in names), _SEPARATOR)
        for key in keys.to_pylist():
            yield hash(key) not in self._present


def _read(path: Path) -> tuple[list[str], set[int]]:
    """Return the column names of an existing CSV file, and a hash of the key columns of each of its rows.

    The key columns (virtual stage, name, step and, if present, micro-step) identify a row.
    """
    limit = csv.field_size_limit(_MAX_CELL)
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            places = [header.index(name) for name in (*CSV_KEYS, MICRO_STEP) if name in header]
            return header, {
                hash(_SEPARATOR.join(row[place] for place in places)) for row in reader if len(row) == len(header)
            }
    except csv.Error as error:
        raise ExportError(f"{path} cannot be continued: {error}: choose another folder") from error
    finally:
        csv.field_size_limit(limit)


def _check_header(path: Path, header: Sequence[str], keys: Sequence[str]) -> None:
    if any(name not in header for name in keys):
        raise ExportError(
            f"{path} has the columns {','.join(header)[:200]}, but {', '.join(keys)} are needed to continue it: "
            "choose another folder"
        )


def _quoted(column: pa.StringArray) -> pa.StringArray:
    """Return the texts as cells of a CSV file; texts with a comma or a quote are enclosed in quotes."""
    needs = pc.match_substring_regex(column, '[,"]')
    if not pc.any(needs).as_py():
        return column
    quoted = pc.binary_join_element_wise(pa.scalar('"'), pc.replace_substring(column, '"', '""'), pa.scalar('"'), "")
    return pc.if_else(needs, quoted, column)
