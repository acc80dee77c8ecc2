"""Raw rows of scalars of one or many runs, read without SQL.

This takes a fraction of the time of the queries in `history` and `newest`. It is possible for records that ranks sent,
in stores without rollups of the run: the position of each row is then its step. All other runs need SQL.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.schema import IMPORT_PREFIX, IMPORTED_FROM
from rankscope_storage.connection import Connection
from rankscope_storage.query.column_scan import RowGroups
from rankscope_view.data.history import Floats, Integers

_SERIES: Final = ("run", "name", "labels")
_ABSENT: Final = {"attempt": 0, "rank": -1, "micro_step": -1}
"""Columns that are often equal in all rows, with the number in place of null."""

_NUMBERS: Final = ("step", "ts", "value")
_WHOLE_ROWS: Final = 1 << 15
"""Least number of adjacent rows of one series that are read without the columns of names."""


@dataclass(frozen=True, slots=True)
class SeriesRows:
    """Rows of one scalar with one text of labels: arrays of equal length. An array of one value needs no memory."""

    attempt: Integers
    rank: Integers  # -1: none
    micro_step: Integers  # -1: none
    step: Integers
    time: Floats
    value: Floats

    def select(self, chosen: Any) -> SeriesRows:
        """Return the rows that `chosen`, a mask, an array of indices or a slice, selects."""
        return SeriesRows(*(getattr(self, name)[chosen] for name in SeriesRows.__slots__))


@dataclass(slots=True)
class RawRows:
    """Rows by run and name, then by labels. `for_sql` has the runs whose rows are incomplete here."""

    parts: dict[tuple[str, str], dict[str, list[SeriesRows]]] = field(default_factory=dict)
    for_sql: set[str] = field(default_factory=set)

    def main(self, run: str, name: str, rank: int | None = None) -> SeriesRows | None:
        """Return the rows of the first labels of a scalar, of all ranks or one; None without any."""
        found = self.parts.get((run, name), {})
        parts = found[min(found)] if found else []
        if not parts:
            return None
        rows = parts[0]
        if len(parts) > 1:
            rows = SeriesRows(*(_joined([getattr(part, one) for part in parts]) for one in SeriesRows.__slots__))
            parts[:] = [rows]  # the next call needs no copy
        if rank is not None:
            rows = rows.select(rows.rank == rank)
        return rows if len(rows.step) else None

    def add(self, run: str, name: str, labels: str | None, rows: SeriesRows) -> None:
        """Add rows of a series, unless they are of a log that was imported into a live run."""
        if labels is None or f'"{IMPORTED_FROM}":' not in labels:
            self.parts.setdefault((run, name), {}).setdefault(labels or "", []).append(rows)


def is_constant(array: npt.NDArray[Any]) -> bool:
    """Return whether the array is one value that is repeated without memory."""
    return array.strides == (0,)


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if all(is_constant(one) and one[0] == arrays[0][0] for one in arrays):
        return np.broadcast_to(arrays[0][:1].reshape(()), sum(map(len, arrays)))
    return np.concatenate(arrays)


def read_rows(connection: Connection, runs: Collection[str], names: Collection[str]) -> RawRows:
    """Return the rows of the scalars `names` of `runs`."""
    found = RawRows()
    if connection.files("scalar_rollups"):
        found.for_sql.update(run for run in runs if connection.files("scalar_rollups", run=run))
    wanted = sorted(set(runs) - found.for_sql)
    if not wanted:
        return found
    equal = {"run": wanted, "name": sorted(names)}
    groups = connection.row_groups("scalars", wanted, equal, (*_SERIES, *_ABSENT))
    for is_whole, adjacent in itertools.groupby(groups.stretches((*_SERIES, *_ABSENT)), _is_whole):
        if is_whole:
            for constants, own in adjacent:
                _add_whole(constants, own, found)
        else:
            _add_mixed([own for _, own in adjacent], set(wanted), names, found)
    return found


def _is_whole(stretch: tuple[Mapping[str, Any], RowGroups]) -> bool:
    """Return whether all rows of adjacent row groups are of one series and attempt, and are not few."""
    constants, groups = stretch
    return groups.rows >= _WHOLE_ROWS and all(one in constants for one in (*_SERIES, *_ABSENT))


def _add_whole(constants: Mapping[str, Any], groups: RowGroups, found: RawRows) -> None:
    """Add the rows of row groups that contain one series only."""
    step, time, value = np.empty(groups.rows, np.int64), np.empty(groups.rows), np.empty(groups.rows)
    at = 0
    for batch in groups.batches(("incarnation", *_NUMBERS)):
        if _imported(batch).any():
            found.for_sql.add(constants["run"])
            return
        rows = _complete(batch)
        own = slice(at, at + rows.num_rows)
        step[own], value[own] = (rows.column(one).to_numpy(zero_copy_only=False) for one in ("step", "value"))
        np.divide(_microseconds(rows), 1e6, out=time[own])
        at = own.stop
    if at:
        attempt, rank, micro = (_repeated(constants[one], absent, at) for one, absent in _ABSENT.items())
        series = SeriesRows(attempt, rank, micro, step[:at], time[:at], value[:at])
        found.add(constants["run"], constants["name"], constants["labels"], series)


def _complete(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows of a batch that have a step and a value."""
    step, value = batch.column("step"), batch.column("value")
    if not step.null_count and not value.null_count:
        return batch
    return batch.filter(pc.and_(step.is_valid(), value.is_valid()))


def _add_mixed(stretches: Sequence[RowGroups], runs: Collection[str], names: Collection[str], found: RawRows) -> None:
    """Add the rows of row groups that may contain several series."""
    groups = RowGroups(tuple(group for one in stretches for group in one.groups), stretches[0].schema)
    constants = groups.constants(_ABSENT)
    for batch in groups.batches(
        [one for one in (*_SERIES, "incarnation", *_ABSENT, *_NUMBERS) if one not in constants]
    ):
        _add(batch, runs, names, constants, found)


def _add(
    batch: pa.RecordBatch, runs: Collection[str], names: Collection[str], constants: Mapping[str, Any], found: RawRows
) -> None:
    """Add the rows of a batch to `found`."""
    is_wanted = batch.column("value").is_valid().to_numpy(zero_copy_only=False)
    if batch.column("step").null_count:
        is_wanted = is_wanted & batch.column("step").is_valid().to_numpy(zero_copy_only=False)
    for column, wanted in ((batch.column("run"), runs), (batch.column("name"), names)):
        known = np.array([one in wanted for one in column.dictionary.to_pylist()], bool)
        if not known.all():
            is_wanted = is_wanted & known[column.indices.to_numpy(zero_copy_only=False)]
    chosen = np.flatnonzero(is_wanted)
    if not len(chosen):
        return
    taken = batch if len(chosen) == batch.num_rows else batch.take(pa.array(chosen))
    _find_imported(taken, found)
    named = [taken.column(one) for one in ("run", "name", "labels")]
    codes = [column.indices.fill_null(-1).to_numpy(zero_copy_only=False) for column in named]
    known_texts = [column.dictionary.to_pylist() for column in named]
    changes = np.logical_or.reduce([one[1:] != one[:-1] for one in codes])
    begins = [0, *(np.flatnonzero(changes) + 1).tolist()]
    rows = _rows(taken, constants)
    for first, last in itertools.pairwise([*begins, len(chosen)]):
        run, name, labels = (
            None if one[first] < 0 else texts[one[first]] for one, texts in zip(codes, known_texts, strict=True)
        )
        found.add(run or "", name or "", labels, rows.select(slice(first, last)))


def _imported(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return which rows of a batch are of imported logs; an empty array if none is."""
    sources = batch.column("incarnation")
    imported = [at for at, one in enumerate(sources.dictionary.to_pylist()) if one.startswith(IMPORT_PREFIX)]
    return np.isin(_filled(sources.indices, -1), imported) if imported else np.array([], np.bool_)


def _find_imported(batch: pa.RecordBatch, found: RawRows) -> None:
    is_imported, runs = _imported(batch), batch.column("run")
    if is_imported.any():
        for code in np.unique(runs.indices.to_numpy(zero_copy_only=False)[is_imported]).tolist():
            found.for_sql.add(runs.dictionary[code].as_py())


def _rows(batch: pa.RecordBatch, constants: Mapping[str, Any]) -> SeriesRows:
    """Return the rows of a batch, which all have a step and a value."""
    attempt, rank, micro = (
        _repeated(constants[name], absent, batch.num_rows) if name in constants else _filled(batch.column(name), absent)
        for name, absent in _ABSENT.items()
    )
    seconds = _microseconds(batch) / 1e6  # null becomes NaN
    value = batch.column("value").to_numpy(zero_copy_only=False)
    return SeriesRows(attempt, rank, micro, _filled(batch.column("step"), 0), seconds, value)


def _repeated(value: int | None, absent: int, rows: int) -> Integers:
    return np.broadcast_to(np.int64(absent if value is None else value), rows)


def _microseconds(batch: pa.RecordBatch) -> npt.NDArray[Any]:
    """Return the times of a batch, NaN where the time is null."""
    found: npt.NDArray[Any] = batch.column("ts").cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found


def _filled(column: Any, absent: int) -> Integers:
    known = column.fill_null(absent) if column.null_count else column
    found: Integers = known.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return found
