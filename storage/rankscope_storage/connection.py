"""Asking a store in SQL: a DuckDB connection whose views always show the newest version.

Each question first refreshes the handle on the log. Only when the version has moved the lists of files are set anew;
the views follow them. What a question provably does not concern is left off its lists. A view or macro is made when a
question first names it. A file that compaction replaced long ago may be gone when an old list is read: then the
question is asked once more, with a new list. A `Connection` belongs to one thread.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import duckdb
import pyarrow as pa

from rankscope_storage.definitions import named
from rankscope_storage.durable import sync_to_disk
from rankscope_storage.engines import (
    DEFINITIONS,
    LATEST,
    LATEST_MEASURED_ONCE,
    RAW,
    Engine,
    log_of,
    put_back,
    start,
    trust,
)
from rankscope_storage.errors import FilesGoneError, QueryError
from rankscope_storage.log import Log
from rankscope_storage.newest import TABLE, measured_once, newest_steps, rows_of
from rankscope_storage.questions import Bounds, Mention, bounds, mentions
from rankscope_storage.snapshot import Snapshot
from rankscope_storage.views import files_select, has_one_shape, raw_select

T = TypeVar("T")

_EXPLAIN: Final = re.compile(r"\s*explain(\s+analyze)?\s", re.IGNORECASE)
_TREE: Final = "SELECT json_serialize_sql(?, skip_null := true, skip_empty := true, skip_default := true)"
_UNDERSTOOD: Final = 256
"""Statements whose reading is remembered; then it is begun anew."""


def connect(path: str | Path, *, locked: bool = False, version: int | None = None) -> Connection:
    """Open the store at `path` for questions. With `locked`, SQL can only select, and can reach nothing but the store.

    With `version`, all questions see that version, as on a `snapshot`.

    Views: one per dataset (`tensor_stats`, `scalars`, `events`, …); `runs`, `attempts` and `tensors` show the latest
    version of each, `runs_history` and so on all versions; `tensor_global` combines shards.
    """
    root = Path(path).absolute()
    engine = start(root, locked=locked)
    try:
        if version is not None:
            return Connection(engine, Log.open(root, sync_to_disk, version=version).snapshot(), None)
        log = log_of(engine)
        if log is None:
            log, engine.snapshot = Log.open(root, sync_to_disk), None
        else:
            log.refresh()
        engine.log = log
        if engine.snapshot is None or engine.snapshot.version != log.version:
            engine.snapshot = log.snapshot()
        return Connection(engine, engine.snapshot, log)
    except BaseException:
        put_back(engine)
        raise


class Connection:
    """A DuckDB connection with fresh views of a store. Use as a context manager, or `close()` it."""

    def __init__(self, engine: Engine, snapshot: Snapshot, log: Log | None) -> None:
        """Ask `snapshot`, or without being pinned to it whatever is the newest version of `log`."""
        self._engine = engine
        self._log = log
        self._pinned = log is None
        self._locked = engine.locked
        self._duckdb = engine.database.cursor()
        self._files: dict[str, Sequence[str]] = {}
        self._snapshot = snapshot
        self._reads_only = True
        self._closed = False

    @property
    def path(self) -> Path:
        """Return the folder of the store."""
        return self._snapshot.root

    @property
    def version(self) -> int:
        """Return the version that the last question saw."""
        return self._snapshot.version

    def sql(self, query: str, params: object = None) -> duckdb.DuckDBPyRelation:
        """Return the relation of `query`, already executed: what it holds does not change any more."""

        def run() -> duckdb.DuckDBPyRelation:
            relation = self._duckdb.sql(query, params=params)
            return relation if relation is None else relation.materialize()

        return self._fresh(query, params, run)

    def execute(self, query: str, parameters: object = None) -> duckdb.DuckDBPyConnection:
        """Execute `query` as DuckDB's own `execute` does, and return DuckDB's connection to fetch from.

        What is not fetched before the next question is gone.
        """
        return self._fresh(query, parameters, lambda: self._duckdb.execute(query, parameters))

    def query(self, query: str, parameters: object = None) -> pa.Table:
        """Return the rows of `query` as an Arrow table."""
        return self._fresh(query, parameters, lambda: self._duckdb.sql(query, params=parameters).to_arrow_table())

    def stream(self, query: str, parameters: object = None, *, batch_rows: int = 100_000) -> Iterator[pa.RecordBatch]:
        """Yield the rows of `query` in batches, however many they are; no other question may be asked meanwhile."""
        yield from self._fresh(
            query, parameters, lambda: self._duckdb.sql(query, params=parameters).to_arrow_reader(batch_rows)
        )

    def files(self, dataset: str, *, run: str | None = None, steps: tuple[int, int] | None = None) -> list[str]:
        """Return the Parquet files that can hold rows of `dataset`, of `run`, of the closed range `steps`."""
        self._refresh()
        return self._snapshot.paths(dataset, run=run, steps=steps)

    def files_table(self, dataset: str, *, run: str | None = None, steps: tuple[int, int] | None = None) -> pa.Table:
        """Return the same files as `files`, with part, rows, bytes, and the ranges of run and step in each."""
        self._refresh()
        return self._snapshot.of(dataset, run=run, steps=steps)

    def relation(
        self,
        dataset: str,
        *,
        run: str | None = None,
        steps: tuple[int, int] | None = None,
        times: tuple[dt.datetime, dt.datetime] | None = None,
    ) -> str:
        """Return an SQL expression for FROM: `dataset` from only those files that `run`, `steps` and `times` can be in.

        Worth it where there are many files: unlike the view, DuckDB then does not open the footer of each of them.
        The rows still need their WHERE.
        """
        self._refresh()
        return f"({files_select(dataset, self._snapshot.paths(dataset, run=run, steps=steps, times=times))})"

    def snapshot(self) -> Connection:
        """Return another connection, pinned to the newest version: all its questions see the same rows.

        The files of a version stay for two hours after compaction replaced them.
        """
        self._refresh()
        return Connection(start(self._snapshot.root, locked=self._locked), self._snapshot, None)

    @contextlib.contextmanager
    def steady(self) -> Iterator[Self]:
        """Let all questions inside see one version, the newest of now; for a few questions cheaper than `snapshot`."""
        self._refresh()
        pinned, self._pinned = self._pinned, True
        try:
            yield self
        finally:
            self._pinned = pinned

    def close(self) -> None:
        """Let go of the store; idempotent. A DuckDB that did nothing but read waits for the next connection."""
        if self._closed:
            return
        self._closed = True
        self._duckdb.close()
        if self._reads_only:
            put_back(self._engine)
        else:
            self._engine.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refresh(self) -> None:
        if self._pinned or self._log is None:
            return
        self._log.refresh()
        if self._log.version != self._snapshot.version:
            self._snapshot = self._engine.snapshot = self._log.snapshot()

    def _define(self, names: Iterable[str], reading: Mapping[str, Sequence[Bounds]] | None) -> None:
        """Let the views and macros called `names`, which come in order of need, show the files of `reading`."""
        for name in names:
            definition = DEFINITIONS[name]
            for dataset in definition.datasets:
                self._show(dataset, None if reading is None else reading.get(dataset))
            if name not in self._engine.defined:
                once = name == LATEST and self._engine.measured_once
                self._duckdb.execute(LATEST_MEASURED_ONCE if once else definition.statement)
                self._engine.defined.add(name)

    def _show(self, dataset: str, wanted: Sequence[Bounds] | None) -> None:
        """Let the view of raw rows read the files of the snapshot that hold what is `wanted`, or all."""
        files = self._snapshot.within(dataset, wanted)
        if files == self._files.get(dataset):
            return
        self._duckdb.execute(f"SET VARIABLE {_variable(dataset)} = ?::VARCHAR[]", [files])
        self._engine.footers.update(files)
        shape = (not files, has_one_shape(dataset, files))
        if shape != self._engine.shapes.get(dataset):
            select = raw_select(dataset, f"getvariable('{_variable(dataset)}')", empty=shape[0], one_shape=shape[1])
            self._duckdb.execute(f"CREATE OR REPLACE VIEW {RAW}{dataset} AS {select}")
        self._files[dataset], self._engine.shapes[dataset] = files, shape

    def _fresh(self, query: str, parameters: object, run: Callable[[], T]) -> T:
        if self._locked:
            self._check_selects(query)
        elif self._reads_only:
            self._reads_only = self._only_selects(query)
        self._duckdb.abort()  # an answer not fetched to its end would block every other statement
        self._refresh()
        try:
            return self._complete(query, parameters, run)
        except duckdb.IOException as error:
            if self._pinned:
                raise FilesGoneError(
                    f"version {self.version} of {self.path} lost files to maintenance: ask again, of a newer version"
                ) from error
            self._refresh()
            return self._complete(query, parameters, run)

    def _complete(self, query: str, parameters: object, run: Callable[[], T]) -> T:
        """Run `query` with what it names; once more with all there is when it misses a name, as one in a parameter."""
        read = self._mentioned(query) if self._reads_only else None
        trust(self._engine, trusting=read is not None)
        if read is None:
            # It may come to what is defined without a word of it, so all of that has to show all files.
            needed = self._engine.defined.union(named(query, DEFINITIONS))
            if LATEST in needed:
                self._find_newest(None)
            self._define([name for name in DEFINITIONS if name in needed], None)
        else:
            self._define(named(query, DEFINITIONS), self._wanted(read, parameters))
        try:
            return run()
        except duckdb.CatalogException:
            if len(self._engine.defined) == len(DEFINITIONS):
                raise
            self._find_newest(None)
            self._define(DEFINITIONS, None)
            return run()

    def _wanted(self, read: Iterable[Mention], parameters: object) -> dict[str, list[Bounds]]:
        """Return by dataset the rows that the mentions of views and macros need of it, one way or another."""
        wanted: dict[str, list[Bounds]] = {}
        latest: list[Bounds] = []
        for mention in read:
            needed = bounds(mention, parameters)
            if mention.name == LATEST:
                latest.append(needed)
            else:
                for dataset in _datasets(mention.name):
                    wanted.setdefault(dataset, []).append(needed)
        if latest:
            wanted.setdefault("tensor_stats", []).extend(self._find_newest(latest))
        return wanted

    def _find_newest(self, wanted: Sequence[Bounds] | None) -> list[Bounds]:
        """Tell `tensor_latest` the newest steps in the files of `wanted`, and return where their rows lie."""
        files = self._snapshot.within("tensor_stats", wanted)
        found = newest_steps(files, self._table)
        lie = rows_of(found)
        if files != self._engine.newest_of:
            self._engine.newest_of = None
            self._duckdb.execute(f"TRUNCATE {TABLE}")
            self._duckdb.execute(
                f"INSERT INTO {TABLE} SELECT unnest(?::VARCHAR[]), unnest(?::INT[]), unnest(?::INT[]), "
                "unnest(?::VARCHAR[]), unnest(?::BIGINT[])",
                [column.to_pylist() for column in found.columns],
            )
            once = bool(lie) and measured_once(found, self._snapshot.within("tensor_stats", lie), self._table)
            if once != self._engine.measured_once:
                self._engine.defined.discard(LATEST)
            self._engine.newest_of, self._engine.measured_once = files, once
        return lie

    def _table(self, question: str) -> pa.Table:
        return self._duckdb.sql(question).to_arrow_table()

    def _mentioned(self, query: str) -> tuple[Mention, ...] | None:
        """Return what `query` reads of our views and macros, None when it may read anything."""
        remembered = self._engine.understood
        if query not in remembered:
            if len(remembered) >= _UNDERSTOOD:
                remembered.clear()
            [(tree,)] = self._duckdb.execute(_TREE, [query]).fetchall()
            remembered[query] = mentions(json.loads(tree).get("statements", ()), DEFINITIONS)
        return remembered[query]

    def _only_selects(self, query: str) -> bool:
        """Whether `query` leaves DuckDB as it is; what is not understood does nothing."""
        try:
            return all(kind == duckdb.StatementType.SELECT for kind in self._kinds(query))
        except duckdb.Error:
            return True

    def _kinds(self, query: str) -> list[duckdb.StatementType]:
        return [statement.type for statement in self._duckdb.extract_statements(query)]

    def _check_selects(self, query: str) -> None:
        """Raise QueryError unless `query` is one statement that only reads."""
        try:
            kinds = self._kinds(_EXPLAIN.sub("", query, count=1) if _EXPLAIN.match(query) else query)
        except duckdb.Error as error:
            raise QueryError(f"DuckDB does not understand the statement: {error}") from error
        if kinds != [duckdb.StatementType.SELECT]:
            names = ", ".join(kind.name for kind in kinds) or "nothing"
            raise QueryError(f"only one SELECT (or EXPLAIN of one) may be asked here, not {names}")


@functools.cache
def _datasets(name: str) -> frozenset[str]:
    """Return the datasets that the view or macro called `name` reads, also through others."""
    definition = DEFINITIONS[name]
    return frozenset(definition.datasets).union(*map(_datasets, definition.reads))


def _variable(dataset: str) -> str:
    return f"rankscope_files_{dataset}"
