"""Asking a store in SQL: a DuckDB connection whose views always show the newest version.

Each question first refreshes the handle on the log (about 2 ms). Only when the version has moved the lists of files are
set anew; the views follow them. A view or macro is made when a question first names it. A file that compaction replaced
long ago may be gone when an old list is read: then the question is asked once more, with a new list. A `Connection`
belongs to one thread.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import duckdb
import pyarrow as pa

from rankscope_contract.escaping import sql_string
from rankscope_storage.definitions import definitions, named
from rankscope_storage.durable import sync_to_disk
from rankscope_storage.errors import FilesGoneError, QueryError
from rankscope_storage.log import Log
from rankscope_storage.views import files_select, has_one_shape, raw_select

T = TypeVar("T")

_RAW: Final = "rankscope_raw."
_DEFINITIONS: Final = definitions(prefix=_RAW)
_EXPLAIN: Final = re.compile(r"\s*explain(\s+analyze)?\s", re.IGNORECASE)


def connect(path: str | Path, *, locked: bool = False, version: int | None = None) -> Connection:
    """Open the store at `path` for questions. With `locked`, SQL can only select, and can reach nothing but the store.

    With `version`, all questions see that version, as on a `snapshot`.

    Views: one per dataset (`tensor_stats`, `scalars`, `events`, …); `runs`, `attempts` and `tensors` show the latest
    version of each, `runs_history` and so on all versions; `tensor_global` combines shards.
    """
    log = Log.open(Path(path).absolute(), sync_to_disk, version=version)
    return Connection(log, locked=locked, pinned=version is not None)


class Connection:
    """A DuckDB connection with fresh views of a store. Use as a context manager, or `close()` it."""

    def __init__(self, log: Log, *, locked: bool = False, pinned: bool = False) -> None:
        self._log = log
        self._locked = locked
        self._pinned = pinned
        self._duckdb = duckdb.connect()
        self._files: dict[str, list[str]] = {}
        self._shapes: dict[str, tuple[bool, bool]] = {}  # empty, and of one shape
        self._defined: set[str] = set()
        self._snapshot = log.snapshot()
        self._prepare()

    @property
    def path(self) -> Path:
        """Return the folder of the store."""
        return self._log.root

    @property
    def version(self) -> int:
        """Return the version that the last question saw."""
        return self._snapshot.version

    def sql(self, query: str, params: object = None) -> duckdb.DuckDBPyRelation:
        """Return the relation of `query`, already executed: what it holds does not change any more."""

        def run() -> duckdb.DuckDBPyRelation:
            relation = self._duckdb.sql(query, params=params)
            return relation if relation is None else relation.materialize()

        return self._fresh(query, run)

    def execute(self, query: str, parameters: object = None) -> duckdb.DuckDBPyConnection:
        """Execute `query` as DuckDB's own `execute` does, and return DuckDB's connection to fetch from.

        What is not fetched before the next question is gone.
        """
        return self._fresh(query, lambda: self._duckdb.execute(query, parameters))

    def query(self, query: str, parameters: object = None) -> pa.Table:
        """Return the rows of `query` as an Arrow table."""
        return self._fresh(query, lambda: self._duckdb.sql(query, params=parameters).to_arrow_table())

    def stream(self, query: str, parameters: object = None, *, batch_rows: int = 100_000) -> Iterator[pa.RecordBatch]:
        """Yield the rows of `query` in batches, however many they are; no other question may be asked meanwhile."""
        yield from self._fresh(query, lambda: self._duckdb.sql(query, params=parameters).to_arrow_reader(batch_rows))

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
        log = Log.open(self._log.root, sync_to_disk, version=self._snapshot.version)
        return Connection(log, locked=self._locked, pinned=True)

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
        """Release the files and the memory of DuckDB; idempotent."""
        self._duckdb.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self) -> None:
        self._duckdb.execute("SET TimeZone = 'UTC'; CREATE SCHEMA rankscope_raw")
        if self._locked:
            # The order matters: nothing can be changed after the last line. Writing into the store is still possible
            # for DuckDB, so a locked connection also looks at the kind of every statement.
            folder = str(self._log.root) + "/"
            self._duckdb.execute("SET allowed_directories = [" + sql_string(folder) + "]")
            self._duckdb.execute("SET enable_external_access = false; SET lock_configuration = true")

    def _refresh(self) -> None:
        if self._pinned:
            return
        self._log.refresh()
        if self._log.version != self._snapshot.version:
            self._snapshot = self._log.snapshot()
            for dataset in self._files:
                self._show(dataset)

    def _define(self, names: Iterable[str]) -> None:
        """Make the views and macros called `names`, which come in order of need, where they are not made yet."""
        for name in names:
            if name in self._defined:
                continue
            definition = _DEFINITIONS[name]
            for dataset in definition.datasets:
                self._show(dataset)
            self._duckdb.execute(definition.statement)
            self._defined.add(name)

    def _show(self, dataset: str) -> None:
        """Let the view of raw rows read the files of the snapshot; what has not changed is left as it is."""
        files = self._snapshot.paths(dataset)
        if files == self._files.get(dataset):
            return
        self._duckdb.execute(f"SET VARIABLE {_variable(dataset)} = ?::VARCHAR[]", [files])
        shape = (not files, has_one_shape(dataset, files))
        if shape != self._shapes.get(dataset):
            select = raw_select(dataset, f"getvariable('{_variable(dataset)}')", empty=shape[0], one_shape=shape[1])
            self._duckdb.execute(f"CREATE OR REPLACE VIEW {_RAW}{dataset} AS {select}")
        self._files[dataset], self._shapes[dataset] = files, shape

    def _fresh(self, query: str, run: Callable[[], T]) -> T:
        if self._locked:
            _check_selects(query)
        self._duckdb.abort()  # an answer not fetched to its end would block every other statement
        self._refresh()
        try:
            return self._complete(query, run)
        except duckdb.IOException as error:
            if self._pinned:
                raise FilesGoneError(
                    f"version {self.version} of {self.path} lost files to maintenance: ask again, of a newer version"
                ) from error
            self._refresh()
            return self._complete(query, run)

    def _complete(self, query: str, run: Callable[[], T]) -> T:
        """Run `query` with what it names; once more with all there is when it misses a name, as one in a parameter."""
        self._define(named(query, _DEFINITIONS))
        try:
            return run()
        except duckdb.CatalogException:
            if len(self._defined) == len(_DEFINITIONS):
                raise
            self._define(_DEFINITIONS)
            return run()


def _check_selects(query: str) -> None:
    """Raise QueryError unless `query` is one statement that only reads."""
    try:
        statements = duckdb.extract_statements(_EXPLAIN.sub("", query, count=1) if _EXPLAIN.match(query) else query)
    except duckdb.Error as error:
        raise QueryError(f"DuckDB does not understand the statement: {error}") from error
    kinds = [statement.type for statement in statements]
    if kinds != [duckdb.StatementType.SELECT]:
        names = ", ".join(kind.name for kind in kinds) or "nothing"
        raise QueryError(f"only one SELECT (or EXPLAIN of one) may be asked here, not {names}")


def _variable(dataset: str) -> str:
    return f"rankscope_files_{dataset}"
