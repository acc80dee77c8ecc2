"""The files that each view of a connection reads, set per statement, and cheaper definitions of some views.

A view lists every file that can have rows for the statement, and few others. A cheaper definition returns the same
rows, by facts about the files that the statement reads. It holds only for a statement that was analysed; all others
use the definition that is right for any files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import duckdb
import pyarrow as pa

from rankscope_storage.base.schema import sql_type
from rankscope_storage.connection.pool import DEFINITIONS, RAW, WITHOUT_FILES, Engine, skip_file_validation
from rankscope_storage.log.snapshot import RowRanges, Snapshot
from rankscope_storage.query import file_facts, loss_facts
from rankscope_storage.query.file_facts import absent_keys
from rankscope_storage.query.pruning import ViewReference, bounds, mentions
from rankscope_storage.query.statements import needed_definitions
from rankscope_storage.sql.scalar_curve import raw_curve, scalar_curve, sole_attempt_curve
from rankscope_storage.sql.scalar_history import LOSS_LOGGED_ONCE, LOSS_OF_SOLE_ATTEMPT
from rankscope_storage.sql.tensor_macros import bucket_deviations, tensor_latest
from rankscope_storage.sql.views import common_columns, raw_select

LATEST: Final = "tensor_latest"
CURVE: Final = "scalar_curve"
BUCKETS: Final = "bucket_deviations"
LOSS: Final = "loss_curve"

_NEWEST: Final = f"  FROM {file_facts.NEWEST_TABLE}\n"
LATEST_OF_KNOWN: Final = tensor_latest(_NEWEST)
LATEST_MEASURED_ONCE: Final = tensor_latest(_NEWEST, measured_once=True)
CURVE_OF_KNOWN: Final = scalar_curve(file_facts.EXTENTS_TABLE)
RAW_CURVE: Final = raw_curve(file_facts.EXTENTS_TABLE)
SOLE_ATTEMPT_CURVE: Final = sole_attempt_curve(file_facts.EXTENTS_TABLE)


class ViewRewrites:
    """What is known in `engine`, and found out through `cursor`."""

    def __init__(self, engine: Engine, cursor: duckdb.DuckDBPyConnection) -> None:
        self._engine = engine
        self._cursor = cursor

    def find_newest_steps(self, wanted: Sequence[RowRanges], snapshot: Snapshot) -> list[RowRanges]:
        """Tell `tensor_latest` the newest steps in the files of `wanted`, and return where their rows lie."""
        files = self._files("tensor_stats", wanted, snapshot)
        found = file_facts.newest_steps(files, self._table)
        lie = file_facts.rows_of(found)
        if files != self._engine.newest_of:
            self._engine.newest_of = None
            self._fill(file_facts.NEWEST_TABLE, found)
            self._engine.measured_once = bool(lie) and file_facts.has_single_record_per_rank(
                found, snapshot.within("tensor_stats", lie), self._table
            )
            self._engine.newest_of = files
        return lie

    def find_extents(self, wanted: Sequence[RowRanges], snapshot: Snapshot) -> None:
        """Tell `scalar_curve` where the scalars of the runs that are `wanted` begin and end."""
        files, runs = self._files("scalars", wanted, snapshot), _runs(wanted)
        if (files, runs) != self._engine.extents_of:
            found = file_facts.scalar_extents(files, runs, self._table)
            self._engine.extents_of = None
            self._fill(file_facts.EXTENTS_TABLE, found)
            self._engine.extents_of = files, runs

    def find_loss_facts(self, wanted: Sequence[RowRanges], snapshot: Snapshot) -> None:
        """Find out how much of its work `loss_curve` can leave out for the runs that are `wanted`."""
        if snapshot.may_hold("scalar_rollups", wanted):
            self._engine.losses, self._engine.losses_of = loss_facts.NOTHING_KNOWN, None
            return
        files, runs = self._files("scalars", wanted, snapshot), _runs(wanted)
        if (files, runs) != self._engine.losses_of:
            self._engine.losses = loss_facts.find_loss_facts(files, runs, self._table)
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
        return LOSS_OF_SOLE_ATTEMPT if self._engine.losses.are_of_attempt_0 else LOSS_LOGGED_ONCE

    def buckets(self, files: Sequence[str]) -> str:
        """Return what makes `bucket_deviations` of these files."""
        return bucket_deviations(absent_keys(files, self._table))

    def _files(self, dataset: str, wanted: Sequence[RowRanges], snapshot: Snapshot) -> list[str]:
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


def _runs(wanted: Sequence[RowRanges]) -> frozenset[str] | None:
    """Return the runs that are wanted, None where it may be any."""
    needed_definitions = [bounds.runs for bounds in wanted if bounds.runs is not None]
    return frozenset().union(*needed_definitions) if len(needed_definitions) == len(wanted) else None


_TREE: Final = "SELECT json_serialize_sql(?, skip_null := true, skip_empty := true, skip_default := true)"
_UNDERSTOOD: Final = 256
"""Statements whose reading is remembered; then it is begun anew."""


class BoundViews:
    """The views in `engine`, as `cursor` sees them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cursor = engine.database.cursor()
        self._shortcuts = ViewRewrites(engine, self.cursor)
        self.files: dict[str, Sequence[str]] = {}
        """By dataset: what its view of raw rows reads."""

    @property
    def are_complete(self) -> bool:
        """Whether every view and macro is made."""
        return len(self.engine.defined) == len(DEFINITIONS)

    def bind(self, query: str, parameters: object, snapshot: Snapshot) -> bool:
        """Make what `query` names, and show it the files of `snapshot` that it needs; False if that is not known."""
        read = self._mentioned(query)
        if read is None:
            return False
        skip_file_validation(self.engine, skip=True)
        self._define(needed_definitions(query, DEFINITIONS), self._wanted(read, parameters, snapshot), snapshot)
        return True

    def bind_all_files(self, query: str | None, snapshot: Snapshot) -> None:
        """Show all files in what `query` names, or without one in all views and macros.

        It may come to what is made already without a word of it, so that shows all files too.
        """
        skip_file_validation(self.engine, skip=False)
        needed = self.engine.defined.keys() | (DEFINITIONS if query is None else needed_definitions(query, DEFINITIONS))
        self._define([name for name in DEFINITIONS if name in needed], None, snapshot)

    def _define(
        self, names: Iterable[str], reading: Mapping[str, Sequence[RowRanges]] | None, snapshot: Snapshot
    ) -> None:
        """Let the views and macros called `names`, which come in order of need, show the files of `reading`."""
        for name in names:
            definition = DEFINITIONS[name]
            for dataset in definition.datasets:
                self._show(dataset, None if reading is None else reading.get(dataset), snapshot)
            statement = self._statement(name, snapshot, is_understood=reading is not None)
            if statement != self.engine.defined.get(name):
                self.cursor.execute(statement)
                self.engine.defined[name] = statement

    def _statement(self, name: str, snapshot: Snapshot, *, is_understood: bool) -> str:
        """Return what makes the view or macro as it is right for the files that are shown."""
        if name in WITHOUT_FILES and not self.files[name]:
            return WITHOUT_FILES[name]
        if is_understood and name == LATEST:
            return self._shortcuts.latest()
        if is_understood and name == CURVE:
            return self._shortcuts.curve(self.files["scalars"], self.files["scalar_rollups"], snapshot)
        if is_understood and name == LOSS:
            return self._shortcuts.loss() or DEFINITIONS[name].statement
        if is_understood and name == BUCKETS:
            return self._shortcuts.buckets(self.files["tensor_stats"])
        return DEFINITIONS[name].statement

    def _show(self, dataset: str, wanted: Sequence[RowRanges] | None, snapshot: Snapshot) -> None:
        """Let the view of raw rows read the files of the snapshot that hold what is `wanted`, or all."""
        files = snapshot.within(dataset, wanted)
        if files == self.files.get(dataset):
            return
        self.cursor.execute(f"SET VARIABLE {_variable(dataset)} = ?::VARCHAR[]", [files])
        self.engine.footers.update(files)
        shape = (not files, common_columns(dataset, files))
        if shape != self.engine.shapes.get(dataset):
            select = raw_select(dataset, f"getvariable('{_variable(dataset)}')", empty=shape[0], columns=shape[1])
            self.cursor.execute(f"CREATE OR REPLACE VIEW {RAW}{dataset} AS {select}")
        self.files[dataset], self.engine.shapes[dataset] = files, shape

    def _wanted(
        self, read: Iterable[ViewReference], parameters: object, snapshot: Snapshot
    ) -> dict[str, list[RowRanges]]:
        """Return by dataset the rows that the mentions of views and macros need of it, one way or another."""
        wanted: dict[str, list[RowRanges]] = {}
        asked: dict[str, list[RowRanges]] = {LATEST: [], CURVE: [], LOSS: []}
        for mention in read:
            needed = bounds(mention, parameters)
            for name in asked.keys() & _closure(mention.name):
                asked[name].append(needed)
            if mention.name != LATEST:
                for dataset in _datasets(mention.name):
                    wanted.setdefault(dataset, []).append(needed)
        if asked[LATEST]:
            wanted.setdefault("tensor_stats", []).extend(self._shortcuts.find_newest_steps(asked[LATEST], snapshot))
        if asked[CURVE]:
            self._shortcuts.find_extents(asked[CURVE], snapshot)
        if asked[LOSS]:
            self._shortcuts.find_loss_facts(asked[LOSS], snapshot)
        return wanted

    def _mentioned(self, query: str) -> tuple[ViewReference, ...] | None:
        """Return what `query` reads of our views and macros, None when it may read anything."""
        remembered = self.engine.understood
        if query not in remembered:
            if len(remembered) >= _UNDERSTOOD:
                remembered.clear()
            [(tree,)] = self.cursor.execute(_TREE, [query]).fetchall()
            remembered[query] = _read(tree)
        return remembered[query]


def _read(tree: str) -> tuple[ViewReference, ...] | None:
    try:
        return mentions(json.loads(tree).get("statements", ()), DEFINITIONS)
    except RecursionError:  # deeper than Python reads, though not than DuckDB does
        return None


@functools.cache
def _closure(name: str) -> frozenset[str]:
    """Return the view or macro called `name` and all that it reads, also through others."""
    return frozenset([name]).union(*map(_closure, DEFINITIONS[name].reads))


@functools.cache
def _datasets(name: str) -> frozenset[str]:
    return frozenset(dataset for read in _closure(name) for dataset in DEFINITIONS[read].datasets)


def _variable(dataset: str) -> str:
    return f"rankscope_files_{dataset}"
