"""DuckDB instances that outlive a connection, for reuse by the next connection to the same store.

This connection reuses the views of the instance and the Parquet footers that it has read. To create an instance costs
25 ms of CPU time and a view up to 20 ms, more than most queries. When a connection that only read is closed, the pool
therefore keeps its instance for the next connection to the same store. One connection at a time uses an instance,
through its own cursor. An instance of a read-only connection is never reused by a connection that may write, nor by a
connection to another store.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

from rankscope_storage.base.datasets import ROLLUPS
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.base.location import Location
from rankscope_storage.base.schema import sql_type
from rankscope_storage.files.filesystem import filesystem
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import entry
from rankscope_storage.log.snapshot import Snapshot
from rankscope_storage.query import file_facts
from rankscope_storage.query.statements import Definition, definitions
from rankscope_storage.sql.views import empty_view, view_statements

RAW: Final = "rankscope_raw."
DEFINITIONS: Final[Mapping[str, Definition]] = definitions(view_statements(prefix=RAW), prefix=RAW)
"""Public views and macros by name, with definitions that are correct for any files and any statement."""
WITHOUT_FILES: Final = {name: empty_view(name) for name in ROLLUPS.values()}
"""By rollup dataset: the statement that creates its view as an empty view, for a store without files of the dataset.

Without this statement, DuckDB took 30 ms to plan a query of the view of the rollups, although there was no file to
read."""

IDLE: Final = 4
"""Largest number of unused DuckDB instances that are kept, over all stores.

Above it, the instance that was unused for longest is closed."""
FOOTERS: Final = 250
"""Constant term of the limit above which a DuckDB instance is replaced by a new one.

The limit applies to the number of Parquet footers that the instance has read: this term plus 1.25 times the number
of files in the store. DuckDB never drops a footer, and one footer takes 20 to 400 kB. With thousands of footers of
deleted files, the memory of a service with a status page grew by 140 MB per hour."""


@dataclass(slots=True, eq=False)
class DuckDBInstance:
    """One instance of DuckDB, the state of its views, and the facts about files on which the views rely."""

    root: Location
    locked: bool
    single_threaded: bool
    database: duckdb.DuckDBPyConnection
    shapes: dict[str, tuple[bool, str | None]] = field(default_factory=dict)
    """By dataset: whether the view of its raw rows is empty, and the select list of this view.

    The select list is None if the files have different columns."""
    defined: dict[str, str] = field(default_factory=dict)
    """By view or macro: the statement that created the view or macro in this instance."""
    footers: set[str] = field(default_factory=set)
    facts: dict[str, tuple[object, Any]] = field(default_factory=dict)
    """By view or macro: the files and runs that were examined, and the facts that were found about their rows.

    The definition of the view or macro is correct only for rows with these facts."""
    skips_file_validation: bool = False
    """True if DuckDB assumes that a file never changes after it was opened, which is correct for files of a store."""
    log: Log | None = None
    snapshot: Snapshot | None = None
    stamp: tuple[object, ...] | None = None


def acquire(root: Location, *, locked: bool, single_threaded: bool = False) -> DuckDBInstance:
    """Return an unused DuckDB instance for the store at `root` with the given settings, or a new instance."""
    for instance in reversed(tuple(_idle)):
        if (instance.root, instance.locked, instance.single_threaded) == (root, locked, single_threaded):
            with contextlib.suppress(ValueError):  # another thread took it
                _idle.remove(instance)
                return instance
    database = _database(root, locked=locked, single_threaded=single_threaded)
    return DuckDBInstance(root, locked, single_threaded, database, skips_file_validation=locked)


def release(instance: DuckDBInstance) -> None:
    """Keep the DuckDB instance `instance` for the next connection to its store, or close it.

    The instance is closed if it caches too many Parquet footers of deleted files. Statements of users must not have
    modified the instance.
    """
    if is_full(instance):
        instance.database.close()
        return
    _idle.append(instance)
    with contextlib.suppress(IndexError):
        while len(_idle) > IDLE:
            _idle.pop(0).database.close()


def is_full(instance: DuckDBInstance) -> bool:
    """Return whether a new DuckDB instance should replace `instance`.

    This is the case if it caches too many Parquet footers of deleted files, which DuckDB never drops.
    """
    return instance.snapshot is not None and len(instance.footers) > FOOTERS + 1.25 * instance.snapshot.files.num_rows


def replacement(instance: DuckDBInstance) -> DuckDBInstance:
    """Return another DuckDB instance that replaces `instance` and has its handle on the Delta log.

    DuckDB frees the old instance when the last query result of the old instance is freed.
    """
    fresh = acquire(instance.root, locked=instance.locked, single_threaded=instance.single_threaded)
    fresh.log, fresh.snapshot, fresh.stamp = instance.log, instance.snapshot, instance.stamp
    return fresh


def cache_log(instance: DuckDBInstance, log: Log) -> Snapshot:
    """Cache the Delta log handle `log` in `instance`, and return the list of data files at the version of `log`."""
    if log is not instance.log or instance.snapshot is None or instance.snapshot.version != log.version:
        instance.log, instance.snapshot, instance.stamp = log, log.snapshot(), _stamp(log)
    return instance.snapshot


def cached_log(instance: DuckDBInstance) -> Log | None:
    """Return the Delta log handle that `instance` caches; None if it caches none, or if the table was deleted since."""
    log = instance.log
    return log if log is not None and instance.stamp is not None and _stamp(log) == instance.stamp else None


def skip_file_validation(instance: DuckDBInstance, *, skip: bool) -> None:
    """Set whether DuckDB uses cached footers without checking that their files have not changed.

    With `skip`, it does not check. This is correct for files of a store, which never change, but not for other files.
    """
    if skip != instance.skips_file_validation and not instance.locked:
        instance.database.execute(f"SET GLOBAL validate_external_file_cache = '{_VALIDATION[skip]}'")
        instance.skips_file_validation = skip


_VALIDATION: Final = {True: "NO_VALIDATION", False: "VALIDATE_ALL"}


_GROUPS_IN_AN_ARRAY_BITS: Final = 17
"""Largest number of bits of group numbers with which DuckDB aggregates with an array instead of a hash table.

17 bits are enough for nullable 16-bit numbers, such as the buckets of `scalar_curve`. DuckDB's default is 12."""


def _database(root: Location, *, locked: bool, single_threaded: bool) -> duckdb.DuckDBPyConnection:
    database = duckdb.connect(config={"threads": 1, "async_threads": 0} if single_threaded else {})
    database.execute(
        "SET GLOBAL TimeZone = 'UTC'; SET GLOBAL parquet_metadata_cache = true; "
        f"SET GLOBAL perfect_ht_threshold = {_GROUPS_IN_AN_ARRAY_BITS}; CREATE SCHEMA rankscope_raw; "
        f"CREATE TABLE {file_facts.NEWEST_TABLE} ({_columns(file_facts.NEWEST_SCHEMA, prefix='of_')}); "
        f"CREATE TABLE {file_facts.EXTENTS_TABLE} ({_columns(file_facts.EXTENTS_SCHEMA)})"
    )
    filesystem(root).attach(database)
    if not _has_working_directory():
        database.execute("SET temp_directory = ''")  # the default is a folder in the working directory
    if locked:
        # The order matters: no setting can change after the last line. DuckDB could still write into the store, so a
        # locked connection also checks the kind of every statement.
        database.execute(f"SET GLOBAL validate_external_file_cache = '{_VALIDATION[True]}'")
        database.execute(f"SET allowed_directories = [{sql_string(f'{root}/')}]")
        database.execute("SET enable_external_access = false; SET lock_configuration = true")
    return database


def _has_working_directory() -> bool:
    try:
        return bool(Path.cwd())
    except OSError:  # it was removed
        return False


def _columns(schema: pa.Schema, *, prefix: str = "") -> str:
    return ", ".join(f"{prefix}{field.name} {sql_type(field.type)}" for field in schema)


def _stamp(log: Log) -> tuple[object, ...] | None:
    """Return values that distinguish the table of `log` from a later table at the same path.

    The values are the version and the file attributes of the newest log entry. Returns None if the table was deleted.
    """
    try:
        status = filesystem(log.root).head(entry(log.root, log.version))
    except OSError:
        return None
    return None if status is None else (log.version, *status.identity)


_idle: list[DuckDBInstance] = []  # no lock, which a forked child could inherit locked: all operations on it are atomic
_inherited: list[Sequence[DuckDBInstance]] = []


def _forget() -> None:
    """Forget all unused DuckDB instances in a forked child process, without closing them.

    DuckDB's threads do not exist in the child, and closing an instance would wait for them.
    """
    _inherited.append(tuple(_idle))
    _idle.clear()


def _close_all() -> None:
    while _idle:
        with contextlib.suppress(duckdb.Error):
            _idle.pop().database.close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close_all)
