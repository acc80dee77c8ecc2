"""DuckDB instances that outlive a connection: the next question to the same store finds its views and footers there.

An instance costs 25 ms CPU and a view up to 20, more than most questions. So when a connection that did nothing but
read is closed, its instance waits for the next one to the same store. One connection has it at a time, through a cursor
of its own; a locked one is never lent to a connection that is not, nor to another store.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from rankscope_contract.model.rollups import ROLLUPS
from rankscope_contract.security.escaping import sql_string
from rankscope_storage.base.schema import sql_type
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import entry
from rankscope_storage.log.snapshot import Snapshot
from rankscope_storage.query import file_facts
from rankscope_storage.query.loss_facts import NOTHING_KNOWN, LossFacts
from rankscope_storage.query.pruning import ViewReference
from rankscope_storage.query.statements import Definition, definitions
from rankscope_storage.sql.views import empty_view

RAW: Final = "rankscope_raw."
DEFINITIONS: Final[Mapping[str, Definition]] = definitions(prefix=RAW)
"""Views and macros that are right whatever they read, and for whatever statement."""
WITHOUT_FILES: Final = {name: empty_view(name) for name in ROLLUPS.values()}
"""What makes views of datasets that have no files; to plan sums over nothing took 30 ms."""

IDLE: Final = 4
"""Instances that wait at most, over all stores; the one that has waited longest is closed first."""
FOOTERS: Final = 250
"""Files that are gone whose footers an instance may remember, beyond a quarter of those that are there: DuckDB forgets
none, and one takes 20 to 400 kB. With thousands of them, a service that looks at its store grew by 140 MB an hour."""


@dataclass(slots=True, eq=False)
class Engine:
    """One instance of DuckDB, and what was made in it."""

    root: Path
    locked: bool
    single_threaded: bool
    database: duckdb.DuckDBPyConnection
    shapes: dict[str, tuple[bool, str | None]] = field(default_factory=dict)
    """By dataset: whether its raw view is empty, and what it selects from files of one shape."""
    defined: dict[str, str] = field(default_factory=dict)
    """By view or macro: the statement that made it."""
    understood: dict[str, tuple[ViewReference, ...] | None] = field(default_factory=dict)
    footers: set[str] = field(default_factory=set)
    footers_looked_through: int = 0
    """How many there were when it was last found out how many files are gone."""
    newest_of: Sequence[str] | None = None
    """The files that the table of newest steps was made of."""
    extents_of: tuple[Sequence[str], frozenset[str] | None] | None = None
    """The files and runs that the table of extents was made of."""
    losses_of: tuple[Sequence[str], frozenset[str] | None] | None = None
    """The files and runs that were looked at for what is known of losses."""
    losses: LossFacts = NOTHING_KNOWN
    """What is known of them, on which `loss_curve`, as it is defined, relies."""
    measured_once: bool = False
    """Whether `tensor_latest`, as it is defined, relies on nothing being measured twice at these steps."""
    skips_file_validation: bool = False
    """Whether files count as unchanged since they were first opened, as those of a store are."""
    log: Log | None = None
    snapshot: Snapshot | None = None
    stamp: tuple[int, ...] | None = None


def acquire(root: Path, *, locked: bool, single_threaded: bool = False) -> Engine:
    """Return an instance for the store at `root` that waited, or a new one."""
    for engine in reversed(tuple(_idle)):
        if (engine.root, engine.locked, engine.single_threaded) == (root, locked, single_threaded):
            with contextlib.suppress(ValueError):  # another thread was faster
                _idle.remove(engine)
                return engine
    database = _database(root, locked=locked, single_threaded=single_threaded)
    return Engine(root, locked, single_threaded, database, skips_file_validation=locked)


def release(engine: Engine) -> None:
    """Let `engine`, in which nothing was changed but by us, wait for the next connection."""
    if is_full(engine):
        engine.database.close()
        return
    _idle.append(engine)
    with contextlib.suppress(IndexError):
        while len(_idle) > IDLE:
            _idle.pop(0).database.close()


def is_full(engine: Engine) -> bool:
    """Whether `engine` remembers so many footers of files that are gone that it is better begun anew."""
    known = len(engine.footers)
    if engine.snapshot is None or known < engine.footers_looked_through + FOOTERS // 2:
        return False
    engine.footers_looked_through = known
    there = len(engine.footers.intersection(engine.snapshot.every_path()))
    return known - there > FOOTERS + there // 4


def replacement(engine: Engine) -> Engine:
    """Return another instance in place of `engine`, which lives as long as its last answer."""
    fresh = acquire(engine.root, locked=engine.locked, single_threaded=engine.single_threaded)
    fresh.log, fresh.snapshot, fresh.stamp = engine.log, engine.snapshot, engine.stamp
    return fresh


def keep_log(engine: Engine, log: Log) -> Snapshot:
    """Let `engine` keep `log`, and return the version that it stands at now."""
    if log is not engine.log or engine.snapshot is None or engine.snapshot.version != log.version:
        engine.log, engine.snapshot, engine.stamp = log, log.snapshot(), _stamp(log)
    return engine.snapshot


def kept_log(engine: Engine) -> Log | None:
    """Return the handle on the log that `engine` kept, None when it has none, or of a table that is gone by now."""
    log = engine.log
    return log if log is not None and engine.stamp is not None and _stamp(log) == engine.stamp else None


def skip_file_validation(engine: Engine, *, skip: bool) -> None:
    """Set whether DuckDB trusts its cache of file footers: files of a store never change, others may."""
    if skip != engine.skips_file_validation and not engine.locked:
        engine.database.execute(f"SET GLOBAL validate_external_file_cache = '{_VALIDATION[skip]}'")
        engine.skips_file_validation = skip


_VALIDATION: Final = {True: "NO_VALIDATION", False: "VALIDATE_ALL"}


_GROUPS_IN_AN_ARRAY_BITS: Final = 17
"""Of numbers of 16 bits, or null, like those of the buckets of `scalar_curve`; by itself DuckDB stops at 12."""


def _database(root: Path, *, locked: bool, single_threaded: bool) -> duckdb.DuckDBPyConnection:
    database = duckdb.connect(config={"threads": 1, "async_threads": 0} if single_threaded else {})
    database.execute(
        "SET GLOBAL TimeZone = 'UTC'; SET GLOBAL parquet_metadata_cache = true; "
        f"SET GLOBAL perfect_ht_threshold = {_GROUPS_IN_AN_ARRAY_BITS}; CREATE SCHEMA rankscope_raw; "
        f"CREATE TABLE {file_facts.NEWEST_TABLE} ({_columns(file_facts.NEWEST_SCHEMA, prefix='of_')}); "
        f"CREATE TABLE {file_facts.EXTENTS_TABLE} ({_columns(file_facts.EXTENTS_SCHEMA)})"
    )
    if locked:
        # The order matters: nothing can be changed after the last line. Writing into the store is still possible
        # for DuckDB, so a locked connection also looks at the kind of every statement.
        database.execute(f"SET GLOBAL validate_external_file_cache = '{_VALIDATION[True]}'")
        database.execute(f"SET allowed_directories = [{sql_string(f'{root}/')}]")
        database.execute("SET enable_external_access = false; SET lock_configuration = true")
    return database


def _columns(schema: pa.Schema, *, prefix: str = "") -> str:
    return ", ".join(f"{prefix}{field.name} {sql_type(field.type)}" for field in schema)


def _stamp(log: Log) -> tuple[int, ...] | None:
    """Return what tells the table of `log` from another one at the same place: the entry its version stands in."""
    try:
        status = entry(log.root, log.version).stat()
    except OSError:
        return None
    return log.version, status.st_ino, status.st_mtime_ns, status.st_size


_idle: list[Engine] = []  # no lock: a forked child would inherit it locked; what is done to it is atomic
_inherited: list[Sequence[Engine]] = []


def _forget() -> None:
    """Start with none in a forked child: threads of DuckDB do not come along, and closing would wait for them."""
    _inherited.append(tuple(_idle))
    _idle.clear()


def _close_all() -> None:
    while _idle:
        with contextlib.suppress(duckdb.Error):
            _idle.pop().database.close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close_all)
