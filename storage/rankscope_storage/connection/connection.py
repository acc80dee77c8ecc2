"""A DuckDB connection to a store, whose views show the newest version in each query.

Each query first refreshes the handle on the Delta log. If the version has changed, the views get new lists of files.
Files that a query provably does not need are omitted. A view or macro is created when a query first names it. After a
list was made, compaction may replace a file in it, and vacuum may delete this file hours later. A query that does not
find a file is repeated once with a new list. A `Connection` belongs to one thread.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import duckdb
import pyarrow as pa

from rankscope_storage.base.errors import FilesGoneError, QueryError, damage, damaged_file
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.location import Location, located
from rankscope_storage.connection.pool import (
    DuckDBInstance,
    acquire,
    cache_log,
    cached_log,
    is_full,
    release,
    replacement,
)
from rankscope_storage.connection.view_binding import BoundViews
from rankscope_storage.files.filesystem import duckdb_errors, source
from rankscope_storage.log.delta import Log
from rankscope_storage.log.snapshot import RowRanges, Snapshot
from rankscope_storage.query.column_scan import RowGroups, row_groups
from rankscope_storage.query.statements import check_selects, only_selects
from rankscope_storage.sql.views import files_select

if TYPE_CHECKING:
    from rankscope_storage.connection.spark import SparkConnection

T = TypeVar("T")


@overload
def connect(
    path: str | Location, *, locked: bool = ..., version: int | None = ..., single_threaded: bool = ...
) -> Connection: ...


@overload
def connect(
    path: str | Location,
    *,
    engine: Literal["spark"],
    version: int | None = ...,
    master: str | None = ...,
    jars: Path | None = ...,
) -> SparkConnection: ...


def connect(
    path: str | Location,
    *,
    engine: Literal["duckdb", "spark"] = "duckdb",
    locked: bool = False,
    version: int | None = None,
    single_threaded: bool = False,
    master: str | None = None,
    jars: Path | None = None,
) -> Connection | SparkConnection:
    """Open the store at `path` for queries.

    With the engine "spark", queries run on the cluster `master`, such as local[2]; by default, on the one that Spark is
    configured for. `jars` is a folder with the jars of Delta Lake; by default, Spark fetches them from Maven Central.
    The remaining text is about DuckDB.

    With `locked`, SQL can only select, and only from the store. With `version`, all queries read this version. With
    `single_threaded`, a query runs only on the calling thread. Otherwise DuckDB uses all processors with its own
    threads. Half a second after each query, these threads return free memory of the whole process to the system (with
    glibc).

    There is one view per dataset (`tensor_stats`, `scalars`, `events`, …). `runs`, `attempts` and `tensors` show the
    latest version of each row; `runs_history`, `attempts_history` and `tensors_history` show all versions.
    `tensor_global` combines the shards of each tensor.
    """
    root = located(path)
    if engine == "spark":
        return _connect_spark(root, version, master, jars)
    instance = acquire(root, locked=locked, single_threaded=single_threaded)
    try:
        if version is not None:
            return Connection(instance, Log.open(root, sync_to_disk, version=version).snapshot(), None)
        log = cached_log(instance)
        if log is None:
            log = Log.open(root, sync_to_disk)
        else:
            log.refresh()
        return Connection(instance, cache_log(instance, log), log)
    except BaseException:
        release(instance)
        raise


def _connect_spark(root: Location, version: int | None, master: str | None, jars: Path | None) -> SparkConnection:
    try:
        from rankscope_storage.connection.spark import SparkConnection  # noqa: PLC0415 - needs the extra spark
    except ModuleNotFoundError as error:
        raise QueryError("queries with Spark need pyspark: run pip install 'rankscope[spark]'") from error
    Log.open(root, sync_to_disk, version=version)  # raises NotAStoreError
    return SparkConnection(root, version, master, jars)


class Connection(contextlib.AbstractContextManager["Connection"]):
    """A DuckDB connection with up-to-date views of a store. Use it as a context manager, or call `close`.

    A copy, also one made by pickle, is a closed connection: it has `path` and `version`, and raises QueryError for
    queries.
    """

    def __init__(self, instance: DuckDBInstance, snapshot: Snapshot, log: Log | None) -> None:
        """Make all queries read the newest version in the Delta log `log`; if `log` is None, the version `snapshot`."""
        self._views = BoundViews(instance)
        self._log = log
        self._pinned = log is None
        self._snapshot = snapshot
        self._reads_only = True
        self._is_closed = False

    @property
    def path(self) -> Location:
        """Return the location of the store."""
        return self._snapshot.root

    @property
    def version(self) -> int:
        """Return the version of the store that the last query of this connection read."""
        return self._snapshot.version

    def restrict(self, runs: Collection[str] = (), *, without: str | None = None) -> None:
        """Make all later queries read this version of the store, and of it only a part of the files.

        These are the files that can contain rows of `runs`, if there are any, and not the one at the path `without`. A
        damaged file that is left out cannot make a query of other rows fail.
        """
        wanted = RowRanges(frozenset(runs) or None)
        files = [
            file
            for file in self._snapshot.files.to_pylist()
            if wanted.may_hold(file) and f"{self.path}/{file['path']}" != without
        ]
        kept = pa.Table.from_pylist(files, self._snapshot.files.schema)
        self._snapshot, self._pinned = Snapshot(self.path, self.version, kept), True

    def undamaged(self, read: Callable[[], T], runs: Collection[str] = ()) -> tuple[T, list[str]]:
        """Return the result of `read`, which queries this connection, and a message about each damaged data file.

        Damaged files are left out, in later queries, too. If `read` is about `runs`, only the files of other runs are
        left out, and a damaged file with rows of `runs` raises the error of DuckDB or Arrow.
        """
        damaged: dict[str, str] = {}
        while True:
            try:
                return read(), list(damaged.values())
            except (duckdb.Error, pa.ArrowInvalid) as error:
                path = damaged_file(error)
                if path is None or path in damaged:
                    raise
                damaged[path] = str(damage(error))
                self.restrict(runs, without=None if runs else path)

    def sql(self, query: str, params: object = None) -> duckdb.DuckDBPyRelation:
        """Execute `query` and return its result as a DuckDB relation.

        Later commits do not change the rows of the relation.
        """

        def run() -> duckdb.DuckDBPyRelation:
            relation = self._views.cursor.sql(query, params=params)
            return relation if relation is None else relation.materialize()

        return self._fresh(query, params, run)

    def execute(self, query: str, parameters: object = None) -> duckdb.DuckDBPyConnection:
        """Execute `query` as DuckDB's `execute` does, and return the DuckDB connection from which to fetch the rows.

        Rows that are not fetched before the next query are lost.
        """
        return self._fresh(query, parameters, lambda: self._views.cursor.execute(query, parameters))

    def query(self, query: str, parameters: object = None) -> pa.Table:
        """Return the rows of `query` as an Arrow table."""
        return self._fresh(query, parameters, lambda: self._views.cursor.sql(query, params=parameters).to_arrow_table())

    def stream(self, query: str, parameters: object = None, *, batch_rows: int = 100_000) -> Iterator[pa.RecordBatch]:
        """Yield the rows of `query` in batches of about `batch_rows` rows.

        Do not run another query on this connection before the last batch.
        """
        yield from self._fresh(
            query, parameters, lambda: self._views.cursor.sql(query, params=parameters).to_arrow_reader(batch_rows)
        )

    def files(self, dataset: str, *, run: str | None = None, steps: tuple[int, int] | None = None) -> list[str]:
        """Return the paths of Parquet files that can contain rows of `dataset`, `run` and the closed range `steps`."""
        self._refresh()
        return self._snapshot.paths(dataset, RowRanges.of(run, steps))

    def files_table(self, dataset: str, *, run: str | None = None, steps: tuple[int, int] | None = None) -> pa.Table:
        """Return a table of the data files that can contain rows of `dataset`, `run` and the closed range `steps`.

        The columns are the partition (`part`), the numbers of rows and bytes, and the lowest and highest run and step
        of each file.
        """
        self._refresh()
        return self._snapshot.of(dataset, RowRanges.of(run, steps))

    def relation(
        self,
        dataset: str,
        *,
        run: str | None = None,
        steps: tuple[int, int] | None = None,
        times: tuple[dt.datetime, dt.datetime] | None = None,
    ) -> str:
        """Return an SQL expression for FROM that reads `dataset` only from files that can have the requested rows.

        These are the rows of `run` within the closed ranges `steps` and `times`; None does not restrict the rows. The
        expression is faster than the view if there are many files, because DuckDB opens the footers of all files of a
        view. The statement still needs conditions in its WHERE clause, because the files also contain other rows.
        """
        self._refresh()
        return f"({files_select(dataset, self._snapshot.paths(dataset, RowRanges.of(run, steps, times)))})"

    def row_groups(
        self, dataset: str, runs: Sequence[str], equal: Mapping[str, Sequence[Any]], others: Collection[str] = ()
    ) -> RowGroups:
        """Return the row groups of `dataset` that can contain rows of `runs` with one of the values in `equal`.

        Their columns are read without SQL, see `rankscope_storage.query.column_scan`.
        """
        self._refresh()
        paths = self._snapshot.within(dataset, [RowRanges(runs=frozenset(runs))])
        return row_groups(list(map(source, paths)), dataset, equal, others)

    def snapshot(self) -> Connection:
        """Return another connection that is pinned to the newest version, so that all its queries read the same rows.

        The files of a version remain on disk for two hours after compaction replaced them.
        """
        self._refresh()
        instance = acquire(
            self._snapshot.root,
            locked=self._views.instance.locked,
            single_threaded=self._views.instance.single_threaded,
        )
        return Connection(instance, self._snapshot, None)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[Self]:
        """Make all queries in the context read the version of the store that is newest at the start of the context.

        This is cheaper than a second connection, which `snapshot` opens.
        """
        self._refresh()
        pinned, self._pinned = self._pinned, True
        try:
            yield self
        finally:
            self._pinned = pinned

    def close(self) -> None:
        """Close the connection. May be called repeatedly.

        The DuckDB instance of the connection is kept for later connections if no statement modified the instance.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._views.cursor.close()
        if self._reads_only:
            release(self._views.instance)
        else:
            self._views.instance.database.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _closed_copy, (self.path, self.version)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _refresh(self) -> None:
        if self._is_closed:
            raise QueryError(f"the connection is closed: open another one with connect({str(self.path)!r})")
        if self._pinned or self._log is None:
            return
        self._log.refresh()
        if self._log.version != self._snapshot.version:
            self._snapshot = cache_log(self._views.instance, self._log)
            if self._reads_only and is_full(self._views.instance):
                self._views = BoundViews(replacement(self._views.instance))

    def _fresh(self, query: str, parameters: object, run: Callable[[], T]) -> T:
        self._refresh()
        if self._views.instance.locked:
            check_selects(self._views.cursor, query)
        elif self._reads_only:
            self._reads_only = only_selects(self._views.cursor, query)
        self._views.cursor.abort()  # a result that was not fetched completely would block all other statements
        try:
            return self._complete(query, parameters, run)
        except duckdb.IOException as error:
            if self._pinned:
                raise FilesGoneError(
                    f"version {self.version} of {self.path} lost files to vacuum: query a newer version"
                ) from error
            self._refresh()
            return self._complete(query, parameters, run)

    def _complete(self, query: str, parameters: object, run: Callable[[], T]) -> T:
        """Create the views that `query` names, call `run`, which executes the query, and return its result.

        If DuckDB reports that a view does not exist, create all views and call `run` again. This happens, for example,
        if the name of a view is the value of a parameter.
        """
        with duckdb_errors():
            if not self._reads_only or not self._views.bind(query, parameters, self._snapshot):
                self._views.bind_all_files(query, self._snapshot)
            try:
                return run()
            except duckdb.CatalogException:
                if self._views.are_complete:
                    raise
                self._views.bind_all_files(None, self._snapshot)
                return run()


def _closed_copy(path: Location, version: int) -> Connection:
    """Return a closed connection: a DuckDB connection and a log handle belong to one process and thread."""
    copied = Connection.__new__(Connection)
    copied.__dict__.update(_snapshot=Snapshot(path, version, pa.table({})), _is_closed=True)
    return copied
