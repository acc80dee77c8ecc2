"""Asking a store in SQL: a DuckDB connection whose views always show the newest version.

Each question first refreshes the handle on the log. Only when the version has moved the lists of files are set anew;
the views follow them. What a question provably does not concern is left off its lists. A view or macro is made when a
question first names it. A file that compaction replaced long ago may be gone when an old list is read: then the
question is asked once more, with a new list. A `Connection` belongs to one thread.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Never, Self, TypeVar

import duckdb
import pyarrow as pa

from rankscope_storage.base.errors import FilesGoneError, QueryError, local_folder
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection.pool import Engine, acquire, is_full, keep_log, kept_log, release, replacement
from rankscope_storage.connection.view_binding import BoundViews
from rankscope_storage.log.delta import Log
from rankscope_storage.log.snapshot import FileFilter, Snapshot
from rankscope_storage.query.statements import check_selects, only_selects
from rankscope_storage.sql.views import files_select

T = TypeVar("T")


def connect(
    path: str | Path, *, locked: bool = False, version: int | None = None, single_threaded: bool = False
) -> Connection:
    """Open the store at `path` for questions. With `locked`, SQL can only select, and can reach nothing but the store.

    With `version`, all questions see that version, as on a `snapshot`. With `single_threaded`, a question takes the
    thread that asks it and no other. Otherwise DuckDB takes all processors through threads of its own, which, half a
    second after each question, also give free memory of the whole process back to the system (where glibc allocates).

    Views: one per dataset (`tensor_stats`, `scalars`, `events`, …); `runs`, `attempts` and `tensors` show the latest
    version of each, `runs_history` and so on all versions; `tensor_global` combines shards.
    """
    root = local_folder(path)
    engine = acquire(root, locked=locked, single_threaded=single_threaded)
    try:
        if version is not None:
            return Connection(engine, Log.open(root, sync_to_disk, version=version).snapshot(), None)
        log = kept_log(engine)
        if log is None:
            log = Log.open(root, sync_to_disk)
        else:
            log.refresh()
        return Connection(engine, keep_log(engine, log), log)
    except BaseException:
        release(engine)
        raise


class Connection:
    """A DuckDB connection with fresh views of a store. Use as a context manager, or `close()` it.

    A copy, also a pickled one, is a closed connection: it has `path` and `version`, and raises QueryError when asked.
    """

    def __init__(self, engine: Engine, snapshot: Snapshot, log: Log | None) -> None:
        """Ask `snapshot`, or without being pinned to it whatever is the newest version of `log`."""
        self._views = BoundViews(engine)
        self._log = log
        self._pinned = log is None
        self._locked = engine.locked
        self._single_threaded = engine.single_threaded
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
        return self._snapshot.paths(FileFilter(dataset, run, steps))

    def files_table(self, dataset: str, *, run: str | None = None, steps: tuple[int, int] | None = None) -> pa.Table:
        """Return the same files as `files`, with part, rows, bytes, and the ranges of run and step in each."""
        self._refresh()
        return self._snapshot.of(FileFilter(dataset, run, steps))

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
        return f"({files_select(dataset, self._snapshot.paths(FileFilter(dataset, run, steps, times)))})"

    def snapshot(self) -> Connection:
        """Return another connection, pinned to the newest version: all its questions see the same rows.

        The files of a version stay for two hours after compaction replaced them.
        """
        self._refresh()
        engine = acquire(self._snapshot.root, locked=self._locked, single_threaded=self._single_threaded)
        return Connection(engine, self._snapshot, None)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[Self]:
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
            release(self._views.engine)
        else:
            self._views.engine.database.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Closed, (self.path, self.version)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _duckdb(self) -> duckdb.DuckDBPyConnection:
        return self._views.cursor

    def _refresh(self) -> None:
        if self._pinned or self._log is None:
            return
        self._log.refresh()
        if self._log.version != self._snapshot.version:
            self._snapshot = keep_log(self._views.engine, self._log)
            if self._reads_only and is_full(self._views.engine):
                self._views = BoundViews(replacement(self._views.engine))

    def _fresh(self, query: str, parameters: object, run: Callable[[], T]) -> T:
        if self._locked:
            check_selects(self._duckdb, query)
        elif self._reads_only:
            self._reads_only = only_selects(self._duckdb, query)
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
        if not self._reads_only or not self._views.bind(query, parameters, self._snapshot):
            self._views.bind_all_files(query, self._snapshot)
        try:
            return run()
        except duckdb.CatalogException:
            if self._views.are_complete:
                raise
            self._views.bind_all_files(None, self._snapshot)
            return run()


class _Closed(Connection):
    """A copy of a connection: DuckDB and the handle on the log belong to one process and one thread."""

    def __init__(self, path: Path, version: int) -> None:
        self._path = path
        self._version = version

    @property
    def path(self) -> Path:
        """Return the folder of the store."""
        return self._path

    @property
    def version(self) -> int:
        """Return the version that the last question saw."""
        return self._version

    def close(self) -> None:
        """Do nothing."""

    def _refresh(self) -> Never:
        raise QueryError(f"a copy of a connection is closed: open another one with connect({str(self._path)!r})")

    def _fresh(self, query: str, parameters: object, run: Callable[[], T]) -> Never:  # noqa: ARG002 - as the base has it
        self._refresh()
