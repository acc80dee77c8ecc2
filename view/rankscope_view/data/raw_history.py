"""Histories of scalars from raw rows, in a fifth of the time of the queries in `history`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from rankscope_storage.connection import Connection
from rankscope_view.data.history import LOSS, History, is_constant, numbered
from rankscope_view.data.raw_rows import RawRows, SeriesRows, read_rows

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
