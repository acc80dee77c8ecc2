"""Views and macros that do less for one statement, by what is known of the files it reads: the same rows, sooner.

What a shortcut relies on holds for the rows that one understood statement reads. All others get the definition that is
right whatever they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import duckdb
import pyarrow as pa

from rankscope_storage.asking import extents, losses, newest
from rankscope_storage.asking.engines import Engine
from rankscope_storage.asking.keys import absent_keys
from rankscope_storage.log.bounds import Bounds
from rankscope_storage.log.snapshot import Snapshot
from rankscope_storage.macros.curves import raw_curve, scalar_curve, sole_attempt_curve
from rankscope_storage.macros.deviations import bucket_deviations
from rankscope_storage.macros.histories import LOSS_OF_SOLE_ATTEMPT, LOSS_SAID_ONCE
from rankscope_storage.macros.latest import tensor_latest
from rankscope_storage.sql_types import sql_type

LATEST: Final = "tensor_latest"
CURVE: Final = "scalar_curve"
BUCKETS: Final = "bucket_deviations"
LOSS: Final = "loss_curve"

_NEWEST: Final = f"  FROM {newest.TABLE}\n"
LATEST_OF_KNOWN: Final = tensor_latest(_NEWEST)
LATEST_MEASURED_ONCE: Final = tensor_latest(_NEWEST, measured_once=True)
CURVE_OF_KNOWN: Final = scalar_curve(extents.TABLE)
RAW_CURVE: Final = raw_curve(extents.TABLE)
SOLE_ATTEMPT_CURVE: Final = sole_attempt_curve(extents.TABLE)


class Shortcuts:
    """What is known in `engine`, and found out through `cursor`."""

    def __init__(self, engine: Engine, cursor: duckdb.DuckDBPyConnection) -> None:
        self._engine = engine
        self._cursor = cursor

    def find_newest(self, wanted: Sequence[Bounds], snapshot: Snapshot) -> list[Bounds]:
        """Tell `tensor_latest` the newest steps in the files of `wanted`, and return where their rows lie."""
        files = self._files("tensor_stats", wanted, snapshot)
        found = newest.newest_steps(files, self._table)
        lie = newest.rows_of(found)
        if files != self._engine.newest_of:
            self._engine.newest_of = None
            self._fill(newest.TABLE, found)
            self._engine.measured_once = bool(lie) and newest.measured_once(
                found, snapshot.within("tensor_stats", lie), self._table
            )
            self._engine.newest_of = files
        return lie

    def find_extents(self, wanted: Sequence[Bounds], snapshot: Snapshot) -> None:
        """Tell `scalar_curve` where the scalars of the runs that are `wanted` begin and end."""
        files, runs = self._files("scalars", wanted, snapshot), _runs(wanted)
        if (files, runs) != self._engine.extents_of:
            found = extents.scalar_extents(files, runs, self._table)
            self._engine.extents_of = None
            self._fill(extents.TABLE, found)
            self._engine.extents_of = files, runs

    def look_at_losses(self, wanted: Sequence[Bounds], snapshot: Snapshot) -> None:
        """Find out how much of its work `loss_curve` can leave out for the runs that are `wanted`."""
        if snapshot.may_hold("scalar_rollups", wanted):
            self._engine.losses, self._engine.losses_of = losses.NOTHING_KNOWN, None
            return
        files, runs = self._files("scalars", wanted, snapshot), _runs(wanted)
        if (files, runs) != self._engine.losses_of:
            self._engine.losses = losses.look_at_losses(files, runs, self._table)
            self._engine.losses_of = files, runs

    def latest(self) -> str:
        """Return what makes `tensor_latest`, once its newest steps were found."""
        return LATEST_MEASURED_ONCE if self._engine.measured_once else LATEST_OF_KNOWN

    def curve(self, scalars: Sequence[str], rollups: Sequence[str], snapshot: Snapshot) -> str:
        """Return what makes `scalar_curve` of these files, once the extents in them were found."""
        if rollups:
            return CURVE_OF_KNOWN
        return SOLE_ATTEMPT_CURVE if snapshot.is_of_attempt_0("scalars", scalars) else RAW_CURVE

    def loss(self) -> str | None:
        """Return what makes `loss_curve` with less work, once the losses were looked at; None where nothing does."""
        if not self._engine.losses.are_said_once:
            return None
        return LOSS_OF_SOLE_ATTEMPT if self._engine.losses.are_of_attempt_0 else LOSS_SAID_ONCE

    def buckets(self, files: Sequence[str]) -> str:
        """Return what makes `bucket_deviations` of these files."""
        return bucket_deviations(absent_keys(files, self._table))

    def _files(self, dataset: str, wanted: Sequence[Bounds], snapshot: Snapshot) -> list[str]:
        """Return the files that can hold such rows; their footers will be remembered."""
        files = snapshot.within(dataset, wanted)
        self._engine.footers.update(files)
        return files

    def _fill(self, table: str, rows: pa.Table) -> None:
        columns = ", ".join(f"unnest(?::{sql_type(field.type)}[])" for field in rows.schema)
        self._cursor.execute(f"TRUNCATE {table}")
        self._cursor.execute(f"INSERT INTO {table} SELECT {columns}", [column.to_pylist() for column in rows.columns])

    def _table(self, question: str) -> pa.Table:
        return self._cursor.sql(question).to_arrow_table()


def _runs(wanted: Sequence[Bounds]) -> frozenset[str] | None:
    """Return the runs that are wanted, None where it may be any."""
    named = [bounds.runs for bounds in wanted if bounds.runs is not None]
    return frozenset().union(*named) if len(named) == len(wanted) else None
