"""The data files of one version of a store, and the selection of files that can contain certain rows.

The selection uses the ranges of columns that the Delta log stores for each file. This module does no I/O.
"""

from __future__ import annotations

import datetime as dt
import math
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.base.location import Location

T = TypeVar("T")

_ALL: Final = (-math.inf, math.inf)
LOG_TIME_STEP: Final = dt.timedelta(milliseconds=1)
"""Resolution of times in the Delta log, which are rounded down.

The last row of a file can be later than the stored maximum by this much."""


@dataclass(frozen=True, slots=True)
class RowRanges:
    """Selects rows of `runs` (None: all runs) in the closed ranges `attempts`, `steps` and `times` (None: all times).

    A null attempt, step or time is in every range.
    """

    runs: frozenset[str] | None = None
    attempts: tuple[float, float] = _ALL
    steps: tuple[float, float] = _ALL
    times: tuple[dt.datetime, dt.datetime] | None = None

    @classmethod
    def of(
        cls,
        run: str | None = None,
        steps: tuple[float, float] | None = None,
        times: tuple[dt.datetime, dt.datetime] | None = None,
    ) -> RowRanges:
        """Return the ranges of the rows of `run` in the closed ranges `steps` and `times`; None selects any value."""
        return cls(None if run is None else frozenset([run]), steps=steps or _ALL, times=times)

    def may_hold(self, file: Mapping[str, Any]) -> bool:
        """Return whether `file` can contain a row in these ranges of run, attempt, step and time.

        `file` has the minima and maxima of these columns in one data file.
        """
        low, high = file["run_min"], file["run_max"]
        if self.runs is not None and low is not None and not any(low <= run <= high for run in self.runs):
            return False
        times = self.times and (self.times[0] - LOG_TIME_STEP, self.times[1])
        return (
            _overlaps(file, "attempt", self.attempts)
            and _overlaps(file, "step", self.steps)
            and (times is None or _overlaps(file, "ts", times))
        )


def _overlaps(file: Mapping[str, Any], column: str, range_: tuple[Any, Any]) -> bool:
    low, high = file[f"{column}_min"], file[f"{column}_max"]
    return low is None or (bool(low <= range_[1]) and bool(high >= range_[0]))


_COLUMNS: Final = {
    "path": ("path", pa.string()),
    "dataset": ("partition.dataset", pa.string()),
    "part": ("partition.part", pa.string()),
    "rows": ("num_records", pa.int64()),
    "size_bytes": ("size_bytes", pa.int64()),
    "run_min": ("min.run", pa.string()),
    "run_max": ("max.run", pa.string()),
    "attempt_min": ("min.attempt", pa.int64()),
    "attempt_max": ("max.attempt", pa.int64()),
    "step_min": ("min.step", pa.int64()),
    "step_max": ("max.step", pa.int64()),
    "ts_min": ("min.ts", pa.timestamp("us", tz="UTC")),
    "ts_max": ("max.ts", pa.timestamp("us", tz="UTC")),
}
"""By column of `Snapshot.files`: the name of the column in the actions of delta-rs, and its Arrow type."""

_RANGES: Final = ["path", *(name for name in _COLUMNS if name.endswith(("_min", "_max")))]


def snapshot_files(actions: pa.Table) -> pa.Table:
    """Return the table `Snapshot.files` for the flattened `add` actions of delta-rs."""
    columns = {
        name: actions.column(source).cast(type_) if source in actions.column_names else pa.nulls(len(actions), type_)
        for name, (source, type_) in _COLUMNS.items()
    }
    # Paths in the log are percent-encoded once more than on disk.
    columns["path"] = pa.array([urllib.parse.unquote(path.as_py()) for path in columns["path"]], pa.string())
    return pa.table(columns)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of the store.

    `files` has a row per data file: its path relative to `root`, and its ranges of run, attempt, step and ts.
    """

    root: Location
    version: int
    files: pa.Table
    _by_dataset: dict[str, tuple[pa.Table, list[str], list[dict[str, Any]]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def of(self, dataset: str, wanted: RowRanges) -> pa.Table:
        """Return the rows of the table `files` for data files that can contain rows of `dataset` in `wanted`.

        A file is always returned if the Delta log does not have its minima and maxima.
        """
        files, _, rows = self._files_of(dataset)
        return files.filter(pa.array(map(wanted.may_hold, rows), pa.bool_()))

    def paths(self, dataset: str, wanted: RowRanges) -> list[str]:
        """Return the absolute paths, for DuckDB, of the files that can contain rows of `dataset` in `wanted`."""
        _, paths, rows = self._files_of(dataset)
        return [path for path, row in zip(paths, rows, strict=True) if wanted.may_hold(row)]

    def within(self, dataset: str, wanted: Sequence[RowRanges] | None) -> list[str]:
        """Return the absolute paths of files that can contain rows of `dataset` in one of the ranges `wanted`.

        If `wanted` is None, all files of the dataset are returned. If no file can contain such rows, one file of the
        dataset is returned, because DuckDB takes the columns of a view from a file.
        """
        _, every, rows = self._files_of(dataset)
        if wanted is None:
            return every
        pairs = zip(every, rows, strict=True)
        return [path for path, row in pairs if any(ranges.may_hold(row) for ranges in wanted)] or every[:1]

    def is_of_attempt_0(self, dataset: str, paths: Sequence[str]) -> bool:
        """Return whether the Delta log proves that the files at `paths` contain only rows of attempt 0.

        `paths` are absolute paths that `within` returned.
        """
        rows = dict(zip(*self._files_of(dataset)[1:], strict=True))
        return all((rows[path]["attempt_min"], rows[path]["attempt_max"]) == (0, 0) for path in paths)

    def contains(self, paths: Sequence[str]) -> bool:
        """Return whether all of `paths` are data files of this version of the store."""
        return set(paths) <= set(self.files.column("path").to_pylist())

    def _files_of(self, dataset: str) -> tuple[pa.Table, list[str], list[dict[str, Any]]]:
        """Return the files of `dataset`, their absolute paths and their column ranges. The result is cached."""
        if dataset not in self._by_dataset:
            files = self.files.filter(pc.equal(self.files["dataset"], dataset))
            rows = files.select(_RANGES).to_pylist()
            self._by_dataset[dataset] = files, [f"{self.root}/{row['path']}" for row in rows], rows
        return self._by_dataset[dataset]


def divided(items: Iterable[T], weight: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield `items`, in order, as lists with a total weight of at most `most` each.

    The function `weight` returns the weight of an item. An item with a weight above `most` is a list of its own.
    """
    batch: list[T] = []
    total = 0
    for item in items:
        added = weight(item)
        if batch and total + added > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += added
    if batch:
        yield batch
