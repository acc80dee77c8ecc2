"""The files of one version of a store, and which of them a question can concern. Pure but for the values it holds."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rankscope_storage.log.file_filter import Bounds, FileFilter

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
"""Our name of a column: what delta-rs calls it, and its type."""

_RANGES: Final = ["path", "run_min", "run_max", "attempt_min", "attempt_max", "step_min", "step_max"]


def snapshot_files(actions: pa.Table) -> pa.Table:
    """Return the flattened `add` actions of delta-rs as the table of files of a Snapshot."""
    columns = {
        name: actions.column(theirs).cast(type_) if theirs in actions.column_names else pa.nulls(len(actions), type_)
        for name, (theirs, type_) in _COLUMNS.items()
    }
    # The log holds paths percent-encoded once more than they are on disk.
    columns["path"] = pa.array([urllib.parse.unquote(path.as_py()) for path in columns["path"]], pa.string())
    return pa.table(columns)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version: `files` has a row per file, with paths relative to `root` and the ranges of run and step in it."""

    root: Path
    version: int
    files: pa.Table
    _rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict, compare=False, repr=False)
    _lists: dict[str, list[str]] = field(default_factory=dict, compare=False, repr=False)

    def of(self, wanted: FileFilter) -> pa.Table:
        """Return the files that can hold rows that are `wanted`. A file without statistics is always among them."""
        return self.files.filter(wanted.expression())

    def paths(self, wanted: FileFilter) -> list[str]:
        """Return the absolute paths of `of`, as DuckDB takes them."""
        return self._absolute(self.of(wanted))

    def within(self, dataset: str, wanted: Sequence[Bounds] | None) -> list[str]:
        """Return the absolute paths of files that can hold rows of `dataset` in one of the bounds, or of all files.

        Where there is none it is one file all the same, if the dataset has any: only no file at all has no columns.
        """
        rows = self._rows_of(dataset)
        every = self._lists[dataset]
        if wanted is None:
            return every
        pairs = zip(every, rows, strict=True)
        return [path for path, row in pairs if any(bounds.may_hold(row) for bounds in wanted)] or every[:1]

    def may_hold(self, dataset: str, wanted: Sequence[Bounds]) -> bool:
        """Whether any file can hold a row of `dataset` in one of the bounds."""
        return any(bounds.may_hold(row) for row in self._rows_of(dataset) for bounds in wanted)

    def is_of_attempt_0(self, dataset: str, paths: Sequence[str]) -> bool:
        """Whether the log tells that no row in these files of `within` is of another attempt; of none is one of 0."""
        rows = dict(zip(self._lists[dataset], self._rows[dataset], strict=True))
        return all((rows[path]["attempt_min"], rows[path]["attempt_max"]) == (0, 0) for path in paths)

    def contains(self, paths: Sequence[str]) -> bool:
        """Whether all of `paths` are files of this version."""
        return set(paths) <= set(self.files.column("path").to_pylist())

    def every_path(self) -> list[str]:
        """Return the absolute paths of all files."""
        return self._absolute(self.files)

    def _absolute(self, files: pa.Table) -> list[str]:
        return [f"{self.root}/{path}" for path in files.column("path").to_pylist()]

    def _rows_of(self, dataset: str) -> list[dict[str, Any]]:
        if dataset not in self._rows:
            self._rows[dataset] = self.of(FileFilter(dataset)).select(_RANGES).to_pylist()
            self._lists[dataset] = [f"{self.root}/{row['path']}" for row in self._rows[dataset]]
        return self._rows[dataset]
