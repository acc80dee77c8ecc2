"""Create the views that a statement needs, over the files that it can need, with cheaper definitions of some views.

A view reads every file that can have rows for the statement, and few others. A cheaper definition returns the same
rows, using facts about the files that the statement reads. It is used only for statements that `pruning` can analyse.
All other statements use the definition that is correct for any files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from rankscope_storage.base.schema import sql_type
from rankscope_storage.connection.pool import DEFINITIONS, RAW, WITHOUT_FILES, DuckDBInstance, skip_file_validation
from rankscope_storage.log.snapshot import RowRanges, Snapshot
from rankscope_storage.query import file_facts
from rankscope_storage.query.pruning import ViewReference, row_ranges, view_references
from rankscope_storage.query.statements import StatementCache, needed_definitions
from rankscope_storage.sql.scalar_history import LOSS_OF_SOLE_ATTEMPT, scalar_curve, sole_attempt_curve
from rankscope_storage.sql.views import bucket_deviations, common_columns, has_positions, raw_select, tensor_latest

LATEST: Final = "tensor_latest"
CURVE: Final = "scalar_curve"
BUCKETS: Final = "bucket_deviations"
LOSS: Final = "loss_curve"

_NEWEST: Final = f"  FROM {file_facts.NEWEST_TABLE}\n"
LATEST_OF_KNOWN: Final = tensor_latest(_NEWEST)
LATEST_MEASURED_ONCE: Final = tensor_latest(_NEWEST, measured_once=True)
CURVE_OF_KNOWN: Final = scalar_curve(file_facts.EXTENTS_TABLE).statement()
SOLE_ATTEMPT_CURVE: Final = sole_attempt_curve(file_facts.EXTENTS_TABLE).statement()

_TREE: Final = "SELECT json_serialize_sql(?, skip_null := true, skip_empty := true, skip_default := true)"
_references: Final[StatementCache[tuple[ViewReference, ...] | None]] = StatementCache()


class BoundViews:
    """The views and macros of one DuckDB instance, and a cursor that uses them."""

    def __init__(self, instance: DuckDBInstance) -> None:
        self.instance = instance
        self.cursor = instance.database.cursor()
        self.files: dict[str, Sequence[str]] = {}
        """By dataset: the files that the view of its raw rows reads."""

    @property
    def are_complete(self) -> bool:
        """Return whether all public views and macros exist in the DuckDB instance."""
        return len(self.instance.defined) == len(DEFINITIONS)

    def bind(self, query: str, parameters: object, snapshot: Snapshot) -> bool:
        """Create the views that `query` names, over the files that it needs.

        Returns False, and creates nothing, if the query could not be analysed.
        """
        references = self._references(query)
        if references is None:
            return False
        skip_file_validation(self.instance, skip=True)
        needed = self._needed_rows(references, parameters, snapshot)
        self._define(needed_definitions(query, DEFINITIONS), needed, snapshot)
        return True

    def bind_all_files(self, query: str | None, snapshot: Snapshot) -> None:
        """Create the views and macros that `query` names over all files; if `query` is None, create all of them.

        A statement may use existing views without naming them. All existing views therefore get all files too.
        """
        skip_file_validation(self.instance, skip=False)
        named = DEFINITIONS if query is None else needed_definitions(query, DEFINITIONS)
        needed = self.instance.defined.keys() | named
        self._define([name for name in DEFINITIONS if name in needed], None, snapshot)

    def _references(self, query: str) -> tuple[ViewReference, ...] | None:
        """Return the references of `query` to public views and macros; None if it may read anything else."""

        def analyse() -> tuple[ViewReference, ...] | None:
            [(tree,)] = self.cursor.execute(_TREE, [query]).fetchall()
            try:
                return view_references(json.loads(tree).get("statements", ()), DEFINITIONS)
            except RecursionError:  # DuckDB parses deeper statements than Python
                return None

        return _references.find(query, analyse)

    def _needed_rows(
        self, references: Iterable[ViewReference], parameters: object, snapshot: Snapshot
    ) -> dict[str, list[RowRanges]]:
        """Return, by dataset, the ranges of rows that the views in `references` need.

        Rows that a view needs through other views are included. The facts about files, on which the cheaper
        definitions of these views rely, are computed and stored.
        """
        needed: dict[str, list[RowRanges]] = {}
        rewritten: dict[str, list[RowRanges]] = {LATEST: [], CURVE: [], LOSS: []}
        for reference in references:
            ranges = row_ranges(reference, parameters)
            for name in rewritten.keys() & _closure(reference.name):
                rewritten[name].append(ranges)
            if reference.name != LATEST:
                for dataset in _datasets(reference.name):
                    needed.setdefault(dataset, []).append(ranges)
        if rewritten[LATEST]:
            needed.setdefault("tensor_stats", []).extend(self._find_newest_steps(rewritten[LATEST], snapshot))
        if rewritten[CURVE]:
            files, runs = self._files("scalars", rewritten[CURVE], snapshot), _runs(rewritten[CURVE])
            self._find(CURVE, (files, runs), lambda: self._fill_extents(files, runs))
        if rewritten[LOSS]:
            files, runs = self._files("scalars", rewritten[LOSS], snapshot), _runs(rewritten[LOSS])
            self._find(LOSS, (files, runs), lambda: file_facts.are_logged_once(files, runs, self._table))
        return needed

    def _find(self, name: str, key: object, find: Callable[[], Any]) -> None:
        """Store the facts of view `name`, unless they are already stored for `key`.

        The function `find` computes the facts. `key` has the files and runs that the facts describe.
        """
        facts = self.instance.facts
        if name not in facts or facts[name][0] != key:
            facts.pop(name, None)  # `find` may fail after it has changed a table
            facts[name] = key, find()

    def _fact(self, name: str) -> Any:
        return self.instance.facts.get(name, (None, None))[1]

    def _find_newest_steps(self, wanted: Sequence[RowRanges], snapshot: Snapshot) -> list[RowRanges]:
        """Write the newest step of each rank and kind to the table NEWEST_TABLE.

        Return the ranges of run and step that contain the rows of these newest steps. Store in addition a fact for the
        view `tensor_latest`: whether each rank measured each of these steps only once.
        """
        files = self._files("tensor_stats", wanted, snapshot)
        newest = file_facts.newest_steps(files, self._table)
        ranges = file_facts.rows_at(newest)

        def fill() -> bool:
            self._fill(file_facts.NEWEST_TABLE, newest)
            return bool(ranges) and file_facts.has_single_record_per_rank(
                newest, snapshot.within("tensor_stats", ranges), self._table
            )

        self._find(LATEST, files, fill)
        return ranges

    def _fill_extents(self, files: Sequence[str], runs: frozenset[str] | None) -> None:
        self._fill(file_facts.EXTENTS_TABLE, file_facts.scalar_extents(files, runs, self._table))

    def _define(
        self, names: Iterable[str], reading: Mapping[str, Sequence[RowRanges]] | None, snapshot: Snapshot
    ) -> None:
        """Create the views and macros `names`, in this order.

        The views read only files that can contain rows which a statement needs. `reading` has the ranges of these rows
        by dataset. If `reading` is None, the views read all files.
        """
        for name in names:
            for dataset in DEFINITIONS[name].datasets:
                self._show(dataset, None if reading is None else reading.get(dataset), snapshot)
            statement = self._statement(name, snapshot, is_analysed=reading is not None)
            if statement != self.instance.defined.get(name):
                self.cursor.execute(statement)
                self.instance.defined[name] = statement

    def _statement(self, name: str, snapshot: Snapshot, *, is_analysed: bool) -> str:
        """Return the cheapest statement that creates the view or macro `name`.

        It must be correct for the files that the view reads.
        """
        if name in WITHOUT_FILES and not self.files[name]:
            return WITHOUT_FILES[name]
        general = DEFINITIONS[name].statement
        if not is_analysed:
            return general
        if name == LATEST:
            return LATEST_MEASURED_ONCE if self._fact(LATEST) else LATEST_OF_KNOWN
        if name in {CURVE, LOSS} and has_positions(self.files["scalars"]):
            return general
        if name in {CURVE, LOSS}:
            is_sole = not self.files["scalar_rollups"] and snapshot.is_of_attempt_0("scalars", self.files["scalars"])
            if name == LOSS:
                return LOSS_OF_SOLE_ATTEMPT if is_sole and self._fact(LOSS) else general
            return SOLE_ATTEMPT_CURVE if is_sole else CURVE_OF_KNOWN
        if name == BUCKETS:
            return bucket_deviations(file_facts.absent_keys(self.files["tensor_stats"], self._table)).statement()
        return general

    def _show(self, dataset: str, wanted: Sequence[RowRanges] | None, snapshot: Snapshot) -> None:
        """Make the view of raw rows of `dataset` read the files that can contain the rows `wanted`.

        If `wanted` is None, the view reads all files.
        """
        if snapshot.within(dataset, wanted) == self.files.get(dataset):
            return
        files = self._files(dataset, wanted, snapshot)
        variable = f"rankscope_files_{dataset}"
        self.cursor.execute(f"SET VARIABLE {variable} = ?::VARCHAR[]", [files])
        shape = (not files, common_columns(dataset, files))
        if shape != self.instance.shapes.get(dataset):
            select = raw_select(dataset, f"getvariable('{variable}')", empty=shape[0], columns=shape[1])
            self.cursor.execute(f"CREATE OR REPLACE VIEW {RAW}{dataset} AS {select}")
        self.files[dataset], self.instance.shapes[dataset] = files, shape

    def _files(self, dataset: str, wanted: Sequence[RowRanges] | None, snapshot: Snapshot) -> list[str]:
        """Return the files of `dataset` that can contain the rows `wanted`.

        Record that DuckDB will cache their footers.
        """
        files = snapshot.within(dataset, wanted)
        self.instance.footers.update(files)
        return files

    def _fill(self, table: str, rows: pa.Table) -> None:
        columns = ", ".join(f"unnest(?::{sql_type(field.type)}[])" for field in rows.schema)
        self.cursor.execute(f"TRUNCATE {table}")
        self.cursor.execute(f"INSERT INTO {table} SELECT {columns}", [column.to_pylist() for column in rows.columns])

    def _table(self, query: str) -> pa.Table:
        return self.cursor.sql(query).to_arrow_table()


def _runs(wanted: Sequence[RowRanges]) -> frozenset[str] | None:
    """Return the names of the runs that `wanted` selects; None if it selects all runs."""
    runs = [ranges.runs for ranges in wanted if ranges.runs is not None]
    return frozenset().union(*runs) if len(runs) == len(wanted) else None


@functools.cache
def _closure(name: str) -> frozenset[str]:
    """Return `name`, the name of a view or macro, and the names of all views that it reads directly or indirectly."""
    return frozenset([name]).union(*map(_closure, DEFINITIONS[name].reads))


@functools.cache
def _datasets(name: str) -> frozenset[str]:
    return frozenset(dataset for read in _closure(name) for dataset in DEFINITIONS[read].datasets)
