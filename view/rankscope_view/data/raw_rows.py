"""Raw rows of scalars of one or many runs, read without SQL.

This takes a fraction of the time of the queries in `history` and `newest`. It is possible for records that ranks sent,
in stores without rollups of the run: the position of each row is then its step. All other runs need SQL.

A history of a scalar from raw rows takes a fifth of the time of the queries in `history`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.base.datasets import IMPORT_PREFIX, IMPORTED_FROM
from rankscope_storage.connection import Connection
from rankscope_storage.query.column_scan import RowGroups
from rankscope_view.data.history import LOSS, Floats, History, Integers, is_constant, numbered

_SERIES: Final = ("run", "name", "labels")
_ABSENT: Final = {"attempt": 0, "rank": -1, "micro_step": -1}
"""Columns that are often equal in all rows, with the number in place of null."""

_CONSTANT: Final = (*_SERIES, "incarnation", *_ABSENT)
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


_WHOLE, _REAL = np.empty(0, np.int64), np.empty(0)
_UNREAD: Final = SeriesRows(_WHOLE, _WHOLE, _WHOLE, _WHOLE, _REAL, _REAL)
"""Stands for row groups that are read after all others."""


@dataclass(slots=True)
class RawRows:
    """Rows by run and name, then by labels. `for_sql` has the runs whose rows are incomplete here."""

    parts: dict[tuple[str, str], dict[str, list[SeriesRows]]] = field(default_factory=dict)
    for_sql: set[str] = field(default_factory=set)

    def main(self, run: str, name: str, rank: int | None = None) -> SeriesRows | None:
        """Return the rows of the first labels of a scalar, of all ranks or one; None without any."""
        return self.series(run, name, min(self.parts.get((run, name), {}), default=""), rank)

    def series(self, run: str, name: str, labels: str, rank: int | None = None) -> SeriesRows | None:
        """Return the rows of a scalar with exactly these labels, of all ranks or one; None without any."""
        parts = self.parts.get((run, name), {}).get(labels)
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
    groups = connection.row_groups("scalars", wanted, equal, _CONSTANT)
    long: dict[tuple[str, str, str | None], list[RowGroups]] = {}
    for is_whole, adjacent in itertools.groupby(groups.stretches(_CONSTANT), _is_whole):
        if is_whole:
            for constants, own in adjacent:
                key = (constants["run"], constants["name"], constants["labels"])
                long.setdefault(key, []).append(own)
                found.add(*key, _UNREAD)
        else:
            _add_mixed([own for _, own in adjacent], set(wanted), names, found)
    _read_long(long, found)
    return found


def _is_whole(stretch: tuple[Mapping[str, Any], RowGroups]) -> bool:
    """Return whether all rows of adjacent row groups are of one series and attempt, and are not few."""
    constants, groups = stretch
    return groups.rows >= _WHOLE_ROWS and all(one in constants for one in (*_SERIES, *_ABSENT))


def _read_long(long: Mapping[tuple[str, str, str | None], Sequence[RowGroups]], found: RawRows) -> None:
    """Read the row groups that contain one series only, each series into arrays of its final length.

    Scalars of one record have the same step and time, so that series often share these arrays.
    """
    before: SeriesRows | None = None
    for (run, name, labels), unread in long.items():
        series = found.parts.get((run, name), {})
        if (labels or "") not in series:  # of a log that was imported into a live run
            continue
        parts, remaining = series.pop(labels or ""), iter(unread)
        pieces = itertools.chain.from_iterable(
            _pieces(next(remaining)) if part is _UNREAD else (part,) for part in parts
        )
        rows = sum(len(part.step) for part in parts) + sum(groups.rows for groups in unread)
        read = _in_one(pieces, rows, before)
        if read is None:
            found.for_sql.add(run)
        elif len(read.step):
            series[labels or ""] = [read]
            before = read
        if not series:
            del found.parts[run, name]


def _in_one(pieces: Iterable[SeriesRows | None], most: int, before: SeriesRows | None) -> SeriesRows | None:
    """Return adjacent pieces of a series with at most `most` rows as one; None if one of them is None.

    Its steps and times are those of `before` as far as they are equal.
    """
    step = _Column(most, np.int64, None if before is None else before.step)
    time = _Column(most, np.float64, None if before is None else before.time)
    value = np.empty(most)
    others: list[list[Integers]] = [[], [], []]  # attempt, rank, micro_step
    at = 0
    for piece in pieces:
        if piece is None:
            return None
        own = slice(at, at + len(piece.step))
        step.put(own, piece.step)
        time.put(own, piece.time)
        value[own] = piece.value
        for columns, column in zip(others, (piece.attempt, piece.rank, piece.micro_step), strict=True):
            columns.append(column)
        at = own.stop
    attempt, rank, micro = (_joined(columns) if at else _WHOLE for columns in others)
    return SeriesRows(attempt, rank, micro, step.get(at), time.get(at), value[:at])


def _pieces(groups: RowGroups) -> Iterator[SeriesRows | None]:
    """Yield the rows of row groups that contain one series only; None, and no further rows, if a log was imported."""
    constants = groups.constants(_CONSTANT)
    source = constants.get("incarnation")
    if source is not None and source.startswith(IMPORT_PREFIX):
        yield None
        return
    for batch in groups.batches(_NUMBERS if "incarnation" in constants else ("incarnation", *_NUMBERS)):
        if "incarnation" not in constants and _imported(batch).any():
            yield None
            return
        yield _rows(_complete(batch), constants)


class _Column:
    """One column of a long series. It is the array of the series before, as long as all values are equal."""

    def __init__(self, rows: int, dtype: Any, earlier: npt.NDArray[Any] | None) -> None:
        self._rows = rows
        self._dtype = dtype
        self._values = earlier
        self._is_shared = earlier is not None

    def put(self, own: slice, values: npt.NDArray[Any]) -> None:
        """Store values at the rows `own`, which follow those of the call before."""
        if self._is_shared and self._values is not None and np.array_equal(self._values[own], values):
            return
        if self._is_shared or self._values is None:
            array = np.empty(self._rows, self._dtype)
            if self._values is not None:
                array[: own.start] = self._values[: own.start]
            self._values, self._is_shared = array, False
        self._values[own] = values

    def get(self, rows: int) -> npt.NDArray[Any]:
        """Return the first `rows` values."""
        return np.empty(0, self._dtype) if self._values is None else self._values[:rows]


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
    imported = _imported(batch)
    if imported.any() and (step := batch.column("step")).null_count:  # these rows only show that the run needs SQL
        place = batch.schema.get_field_index("step")
        batch = batch.set_column(place, "step", pc.if_else(pa.array(imported), step.fill_null(0), step))
    batch = _complete(batch)
    named = [batch.column(one) for one in _SERIES]
    codes = [_filled(column.indices, -1) for column in named]
    texts = [column.dictionary.to_pylist() for column in named]
    changes = np.logical_or.reduce([one[1:] != one[:-1] for one in codes])
    begins = np.append(0, np.flatnonzero(changes) + 1)[: batch.num_rows]
    ends = np.append(begins[1:], batch.num_rows)
    is_wanted = np.ones(len(begins), bool)
    for code, known, wanted in zip(codes, texts, (runs, names), strict=False):
        is_wanted &= np.array([one in wanted for one in known], bool)[code[begins]]
    if not is_wanted.any():
        return
    imported, rows = _imported(batch), _rows(batch, constants)
    for first, last in zip(begins[is_wanted].tolist(), ends[is_wanted].tolist(), strict=True):
        run, name, labels = (
            None if one[first] < 0 else known[one[first]] for one, known in zip(codes, texts, strict=True)
        )
        if imported[first:last].any():
            found.for_sql.add(run or "")
        found.add(run or "", name or "", labels, rows.select(slice(first, last)))


def _imported(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return which rows of a batch are of imported logs; an empty array if none is."""
    sources = batch.column("incarnation")
    imported = [at for at, one in enumerate(sources.dictionary.to_pylist()) if one.startswith(IMPORT_PREFIX)]
    return np.isin(_filled(sources.indices, -1), imported) if imported else np.array([], np.bool_)


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


_ATTEMPT: Final = 1 << 40
"""Distance of the keys of two attempts, which is larger than any step."""


def raw_histories(
    connection: Connection, run: str, names: Collection[str], rank: int | None = None, rows: RawRows | None = None
) -> dict[str, History] | None:
    """Return the main series of the scalars `names` that `run` has, of all ranks or one, or None if SQL is needed.

    `rows` has the rows of the loss and of `names`, if they were read before.
    """
    rows = rows or read_rows(connection, [run], {LOSS, *names})
    main = {name: min(rows.parts.get((run, name), {}), default="") for name in names}
    found = raw_series(connection, run, list(main.items()), rank, rows)
    return None if found is None else {name: history for (name, _), history in found.items()}


def raw_series(
    connection: Connection,
    run: str,
    series: Collection[tuple[str, str]],
    rank: int | None = None,
    rows: RawRows | None = None,
) -> dict[tuple[str, str], History] | None:
    """Return the series of `run` by name and labels, of all ranks or one, or None if SQL is needed.

    Labels are empty for a scalar without labels. `rows` has the rows of the loss and of all names, if they are known.
    """
    rows = rows or read_rows(connection, [run], {LOSS, *(name for name, _ in series)})
    if run in rows.for_sql:
        return None
    training = _training([one for found in rows.parts.get((run, LOSS), {}).values() for one in found])
    histories = {}
    for name, labels in series:
        found = rows.series(run, name, labels, rank)
        if found is None:
            continue
        columns = by_step(found)
        if columns is None:
            return None
        own = training if columns["attempt"].any() else None
        histories[name, labels] = numbered(name, columns, labels or None, own)
    return histories


def _training(losses: list[SeriesRows]) -> list[tuple[int, int, int]]:
    """Return attempt, first and last step of the loss of each attempt."""
    if not losses or not any(one.attempt.any() for one in losses):
        return []  # no restart
    attempt, step = (np.concatenate([getattr(one, name) for one in losses]) for name in ("attempt", "step"))
    found = []
    for number in range(int(attempt.min()), int(attempt.max()) + 1):
        own = step[attempt == number]
        if not len(own):
            continue
        found.append((number, int(own.min()), int(own.max())))
    return found


def by_step(rows: SeriesRows) -> Mapping[str, Any] | None:
    """Return mean, lowest and highest value of each attempt and step; None if a rank logged a step twice."""
    is_single = all(is_constant(one) for one in (rows.attempt, rows.rank, rows.micro_step))
    if is_single and (rows.step[1:] > rows.step[:-1]).all():
        return _alone(rows, {"attempt": rows.attempt, "position": rows.step, "step": rows.step})
    key = rows.attempt * _ATTEMPT + rows.step
    if not (key[1:] > key[:-1]).all():
        order = np.argsort(key, kind="stable")  # fast, because the rows are a few sorted ranges
        rows = rows.select(order)
        key = key[order]
    begins = np.append(0, np.flatnonzero(key[1:] != key[:-1]) + 1)
    columns = {"attempt": rows.attempt[begins], "position": rows.step[begins], "step": rows.step[begins]}
    if len(begins) == len(key):
        return _alone(rows, columns)
    counts = np.diff(np.append(begins, len(key)))
    parts = len(np.unique(rows.rank)) * len(np.unique(rows.micro_step))
    if counts.max() > parts:
        return None
    return columns | {
        "time": np.fmax.reduceat(rows.time, begins),
        "value": np.add.reduceat(rows.value, begins) / counts,
        "lowest": np.minimum.reduceat(rows.value, begins),
        "highest": np.maximum.reduceat(rows.value, begins),
    }


def _alone(rows: SeriesRows, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns of rows of which each has an attempt and step of its own."""
    return {**columns, "time": rows.time, "value": rows.value, "lowest": rows.value, "highest": rows.value}
