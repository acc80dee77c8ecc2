"""Read scalars of a run from raw rows without SQL, in a fifth of the time of the queries in `history`.

This is possible if the position of each row is its step: for records that ranks sent, in stores without rollups of the
run. In all other cases, the result is None, and `history` asks the store by SQL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rankscope_contract.model.schema import IMPORT_PREFIX, IMPORTED_FROM
from rankscope_storage.connection import Connection
from rankscope_view.data.history import LOSS, Floats, History, Integers, numbered

_COLUMNS: Final = ("run", "name", "labels", "incarnation", "attempt", "rank", "micro_step", "step", "ts", "value")
_ATTEMPT: Final = 1 << 40
"""Distance of the keys of two attempts, which is larger than any step."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one scalar with one text of labels: arrays of equal length."""

    attempt: Integers
    rank: Integers  # -1: none
    micro_step: Integers  # -1: none
    step: Integers
    time: Floats
    value: Floats


def raw_histories(
    connection: Connection, run: str, names: Collection[str], rank: int | None = None
) -> dict[str, History] | None:
    """Return the main series of the scalars `names` that `run` has, of all ranks or one, or None if SQL is needed."""
    if connection.files("scalar_rollups", run=run):
        return None
    wanted = {LOSS, *names}
    groups = connection.row_groups("scalars", run, {"run": [run], "name": sorted(wanted)})
    parts: dict[str, dict[str, list[_Rows]]] = {}
    for batch in groups.batches(_COLUMNS):
        if not _add(batch, run, wanted, parts):
            return None
    series = {name: min(found.items())[1] for name, found in parts.items()}
    rows = {name: _joined(found, rank) for name, found in series.items()}
    losses = [one for found in parts.get(LOSS, {}).values() for one in found]
    training = _training(losses)
    histories = {}
    for name in names:
        if name not in rows or not len(rows[name].step):
            continue
        columns = _by_step(rows[name])
        if columns is None:
            return None
        labels = min(parts[name]) or None
        histories[name] = numbered(name, columns, labels, training if columns["attempt"].any() else None)
    return histories


def _add(batch: pa.RecordBatch, run: str, names: Collection[str], parts: dict[str, dict[str, list[_Rows]]]) -> bool:
    """Add the rows of a batch by name and labels; return False if a row has a position that is not its step."""
    name, labels = (batch.column(one) for one in ("name", "labels"))
    values = batch.column("value")
    known = name.dictionary.to_pylist()
    is_wanted = np.array([one in names for one in known], bool)[name.indices.to_numpy(zero_copy_only=False)]
    is_wanted &= values.is_valid().to_numpy(zero_copy_only=False)
    runs = batch.column("run")
    if runs.dictionary.to_pylist() != [run]:
        is_wanted &= runs.indices.to_numpy(zero_copy_only=False) == runs.dictionary.index(run).as_py()
    chosen = np.flatnonzero(is_wanted)
    if not len(chosen):
        return True
    sources = batch.column("incarnation")
    codes = np.unique(_filled(sources.indices, -1)[chosen]).tolist()
    if any(code >= 0 and sources.dictionary[code].as_py().startswith(IMPORT_PREFIX) for code in codes):
        return False
    taken = batch if len(chosen) == batch.num_rows else batch.take(pa.array(chosen))
    keys = np.stack([taken.column("name").indices.to_numpy(), _filled(taken.column("labels").indices, -1)])
    begins = np.append(0, np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1)
    for first, last in zip(begins.tolist(), [*begins[1:].tolist(), len(chosen)], strict=True):
        text = None if keys[1, first] < 0 else labels.dictionary[int(keys[1, first])].as_py()
        if text is not None and f'"{IMPORTED_FROM}":' in text:
            continue  # of a log that was imported into a live run
        series = parts.setdefault(known[int(keys[0, first])], {}).setdefault(text or "", [])
        found = _rows(taken.slice(first, last - first))
        if found is not None:
            series.append(found)
    return True


def _rows(batch: pa.RecordBatch) -> _Rows | None:
    """Return the rows of a batch that have a step; None without any."""
    step = batch.column("step")
    if step.null_count:
        batch = batch.filter(step.is_valid())
        if not batch.num_rows:
            return None
    attempt, rank, micro = (
        _filled(batch.column(one), at) for one, at in (("attempt", 0), ("rank", -1), ("micro_step", -1))
    )
    times = batch.column("ts").cast(pa.int64())
    seconds = times.to_numpy(zero_copy_only=False) / 1e6  # null becomes NaN
    return _Rows(
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


def _joined(found: list[_Rows], rank: int | None) -> _Rows:
    arrays = {name: np.concatenate([getattr(one, name) for one in found]) for name in _Rows.__slots__}
    if rank is not None:
        own = arrays["rank"] == rank
        arrays = {name: array[own] for name, array in arrays.items()}
    return _Rows(**arrays)


def _training(losses: list[_Rows]) -> list[tuple[int, int, int]]:
    """Return attempt, first and last step of the loss of each attempt."""
    if not losses:
        return []
    attempt, step = (np.concatenate([getattr(one, name) for one in losses]) for name in ("attempt", "step"))
    found = []
    for number in np.unique(attempt).tolist():
        own = step[attempt == number]
        found.append((number, int(own.min()), int(own.max())))
    return found


def _by_step(rows: _Rows) -> Mapping[str, Any] | None:
    """Return mean, lowest and highest value of each attempt and step; None if a rank logged a step twice."""
    key = rows.attempt * _ATTEMPT + rows.step
    if not (key[1:] > key[:-1]).all():
        order = np.argsort(key, kind="stable")  # fast, because the rows are a few sorted ranges
        rows = _Rows(*(getattr(rows, name)[order] for name in _Rows.__slots__))
        key = key[order]
    begins = np.append(0, np.flatnonzero(key[1:] != key[:-1]) + 1)
    columns = {"attempt": rows.attempt[begins], "position": rows.step[begins], "step": rows.step[begins]}
    if len(begins) == len(key):
        return columns | {"time": rows.time, "value": rows.value, "lowest": rows.value, "highest": rows.value}
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
