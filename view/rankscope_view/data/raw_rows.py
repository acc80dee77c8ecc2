"""Raw rows of scalars of one or many runs, read without SQL.

This takes a fraction of the time of the queries in `history` and `newest`. It is possible for records that ranks sent,
in stores without rollups of the run: the position of each row is then its step. All other runs need SQL.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rankscope_contract.model.schema import IMPORT_PREFIX, IMPORTED_FROM
from rankscope_storage.connection import Connection
from rankscope_view.data.history import Floats, Integers

_COLUMNS: Final = ("run", "name", "labels", "incarnation", "attempt", "rank", "micro_step", "step", "ts", "value")
_ABSENT: Final = {"attempt": 0, "rank": -1, "micro_step": -1}
"""Columns that are often equal in all rows, with the number in place of null."""


@dataclass(frozen=True, slots=True)
class SeriesRows:
    """Rows of one scalar with one text of labels: arrays of equal length."""

    attempt: Integers
    rank: Integers  # -1: none
    micro_step: Integers  # -1: none
    step: Integers
    time: Floats
    value: Floats


@dataclass(slots=True)
class RawRows:
    """Rows by run and name, then by labels. `for_sql` has the runs whose rows are incomplete here."""

    parts: dict[tuple[str, str], dict[str, list[SeriesRows]]] = field(default_factory=dict)
    for_sql: set[str] = field(default_factory=set)
    constants: dict[str, Any] = field(default_factory=dict)  # values of columns that are not read

    def main(self, run: str, name: str, rank: int | None = None) -> SeriesRows | None:
        """Return the rows of the first labels of a scalar, of all ranks or one; None without any."""
        found = self.parts.get((run, name), {})
        parts = found[min(found)] if found else []
        if not parts:
            return None
        arrays = {one: np.concatenate([getattr(part, one) for part in parts]) for one in SeriesRows.__slots__}
        if rank is not None:
            own = arrays["rank"] == rank
            arrays = {one: array[own] for one, array in arrays.items()}
        return SeriesRows(**arrays) if len(arrays["step"]) else None


def read_rows(connection: Connection, runs: Collection[str], names: Collection[str]) -> RawRows:
    """Return the rows of the scalars `names` of `runs`."""
    found = RawRows()
    if connection.files("scalar_rollups"):
        found.for_sql.update(run for run in runs if connection.files("scalar_rollups", run=run))
    wanted = sorted(set(runs) - found.for_sql)
    if wanted:
        groups = connection.row_groups("scalars", wanted, {"run": wanted, "name": sorted(names)}, tuple(_ABSENT))
        found.constants = groups.constants(_ABSENT)
        for batch in groups.batches([one for one in _COLUMNS if one not in found.constants]):
            _add(batch, set(wanted), names, found)
    return found


def _add(batch: pa.RecordBatch, runs: Collection[str], names: Collection[str], found: RawRows) -> None:
    """Add the rows of a batch to `found`."""
    run, name, labels = (batch.column(one) for one in ("run", "name", "labels"))
    is_wanted = batch.column("value").is_valid().to_numpy(zero_copy_only=False)
    for column, wanted in ((run, runs), (name, names)):
        known = np.array([one in wanted for one in column.dictionary.to_pylist()], bool)
        if not known.all():
            is_wanted = is_wanted & known[column.indices.to_numpy(zero_copy_only=False)]
    chosen = np.flatnonzero(is_wanted)
    if not len(chosen):
        return
    taken = batch if len(chosen) == batch.num_rows else batch.take(pa.array(chosen))
    _find_imported(taken, found)
    codes = [_filled(taken.column(one).indices, -1) for one in ("run", "name", "labels")]
    begins = np.flatnonzero(np.logical_or.reduce([np.diff(one, prepend=-2) != 0 for one in codes])).tolist()
    for first, last in itertools.pairwise([*begins, len(chosen)]):
        texts = [None if one[first] < 0 else column.dictionary[int(one[first])].as_py()
                 for one, column in zip(codes, (run, name, labels), strict=True)]  # fmt: skip
        if texts[2] is not None and f'"{IMPORTED_FROM}":' in texts[2]:
            continue  # of a log that was imported into a live run
        series = found.parts.setdefault((texts[0] or "", texts[1] or ""), {}).setdefault(texts[2] or "", [])
        if (rows := _rows(taken.slice(first, last - first), found.constants)) is not None:
            series.append(rows)


def _find_imported(batch: pa.RecordBatch, found: RawRows) -> None:
    sources, runs = batch.column("incarnation"), batch.column("run")
    imported = [at for at, one in enumerate(sources.dictionary.to_pylist()) if one.startswith(IMPORT_PREFIX)]
    if not imported:
        return
    is_imported = np.isin(_filled(sources.indices, -1), imported)
    for code in np.unique(runs.indices.to_numpy(zero_copy_only=False)[is_imported]).tolist():
        found.for_sql.add(runs.dictionary[code].as_py())


def _rows(batch: pa.RecordBatch, constants: Mapping[str, Any]) -> SeriesRows | None:
    """Return the rows of a batch that have a step; None without any."""
    step = batch.column("step")
    if step.null_count:
        batch = batch.filter(step.is_valid())
        if not batch.num_rows:
            return None
    attempt, rank, micro = (
        np.full(batch.num_rows, absent if constants[name] is None else constants[name], np.int64)
        if name in constants
        else _filled(batch.column(name), absent)
        for name, absent in _ABSENT.items()
    )
    times = batch.column("ts").cast(pa.int64())
    seconds = times.to_numpy(zero_copy_only=False) / 1e6  # null becomes NaN
    return SeriesRows(
        attempt,
        rank,
        micro,
        _filled(batch.column("step"), 0),
        seconds,
        batch.column("value").to_numpy(zero_copy_only=False),
    )


def _filled(column: Any, absent: int) -> Integers:
    known = column.fill_null(absent) if column.null_count else column
    found: Integers = known.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return found
