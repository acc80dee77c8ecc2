"""The Delta log of a store: opening, commits, durability, checkpoints and clean-up. Only this module uses delta-rs.

A `Log` is one handle on the table. delta-rs compares a commit only with changes *since the handle was refreshed* and
accepts nearly all others. Every commit therefore refreshes the handle, checks the transaction numbers in the log, and
commits on the same handle, as the version that follows the handle's version directly. A refusal or another error does
not prove that the entry was not stored: the answer to the request may be lost. `commit` therefore reads the log after
each error, and only its ConflictError permits the deletion of files. delta-rs does not make commits durable: `commit`
fsyncs the new entries before it returns. A commit neither writes checkpoints nor deletes old entries: frequent writers
call `checkpoint` in another thread.

The module translates commits to actions of delta-rs, and its errors to errors of this package. delta-rs distinguishes
kinds of errors only by their text, and formats the causes of an error as a tree.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake import Field as DeltaField
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, PostCommitHookProperties, RemoveAction, Transaction

from rankscope_storage.base.errors import ConflictError, NotAStoreError, SchemaVersionError, StoreError, TornLogError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.base.s3_errors import known_reason
from rankscope_storage.base.schema import PARTITION_COLUMNS, STORE_VERSION, table_schema
from rankscope_storage.files.encoding import DataFile, discard
from rankscope_storage.files.filesystem import filesystem, is_local
from rankscope_storage.log.entries import (
    ACTIONS,
    COMMIT_ID,
    LOG_FOLDER,
    NO_CHECKPOINT,
    Entry,
    checkpoint_files,
    checkpoints,
    entries,
    entry,
    has_entries,
    is_cut,
    newest_checkpoint,
    read_entry,
)
from rankscope_storage.log.snapshot import Snapshot, snapshot_files

_MISREAD: Final = re.compile(r"[*?\[\\\x00-\x1f\x7f]|%[0-9A-Fa-f]{2}")
_TORN_CHECKPOINT: Final = ("Invalid Checkpoint", "Corrupt footer", "less than footer")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def check_path(root: Location) -> None:
    """Raise StoreError if delta-rs or DuckDB would misread the path, for example as a pattern of file names."""
    if is_local(root) and (found := _MISREAD.search(str(root))):
        raise StoreError(
            f"{str(root)!r} contains {found[0]!r}, which delta-rs or DuckDB would misread: "
            "choose a path without * ? [ \\ %41 and control characters"
        )


def torn(root: Location, text: str) -> TornLogError:
    """Return the error for an incomplete entry of the Delta log; its message names the remedy."""
    return TornLogError(
        f"the log of {root} has an incomplete entry ({text}), as after a power failure. If it is the newest file "
        f"in {root / LOG_FOLDER}, move that file away, as `rankscope store repair` does: none of its rows was "
        "acknowledged, and the service reads them again"
    )


def translated(error: Exception, root: Location) -> StoreError:
    """Return the StoreError for an error of delta-rs, with a remedy if the kind of the error is known."""
    text = first_line(error)
    if "Json error" in str(error) or "Invalid JSON in log record" in str(error):
        return torn(root, text)
    if any(words in str(error) for words in _TORN_CHECKPOINT):
        return TornLogError(
            f"a checkpoint in {root / LOG_FOLDER} is incomplete ({text}), as after a power failure: "
            "`rankscope store repair` moves it away; the entries that it replaces still exist"
        )
    if not is_local(root) and (sentence := known_reason(str(error))):
        text = sentence
    return StoreError(f"the log of {root} cannot be read or written: {text}")


def first_line(error: Exception) -> str:
    """Return one line for an error of delta-rs: the first line of its text, and its innermost cause.

    The text of such an error is a coloured tree of causes.
    """
    lines = [_COLOUR.sub("", line).strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.removeprefix("↳").strip() for line in lines if line.startswith("↳")]
    return ": ".join([*lines[:1], *causes[-1:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The content of one commit, which is stored completely or not at all.

    `rewrites` is true if the commit changes only files and no rows: the added files then have no new rows. delta-rs
    accepts two commits that remove the same file. `transactions` must therefore contain a transaction that every
    rewrite increments. `id` identifies the commit in the log.
    """

    added: Sequence[DataFile] = ()
    removed: Sequence[DataFile] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    rewrites: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


def actions_of(change: Change) -> list[AddAction | RemoveAction]:
    """Return the actions of delta-rs that remove and add the files of `change`.

    Removals are always marked as changes of data. delta-rs ignores other removals when it looks for conflicts: OPTIMIZE
    by another tool that began before the commit would add the removed rows once more.
    """
    now = time.time_ns() // 1_000_000
    removals = [
        RemoveAction(
            path=file.path,
            data_change=True,
            deletion_timestamp=now,
            partition_values={"dataset": file.dataset, "part": file.part},
            size=file.size_bytes,
        )
        for file in change.removed
    ]
    additions = [
        AddAction(
            path=file.path,  # delta-rs adds the percent-encoding of the protocol
            size=file.size_bytes,
            partition_values={"dataset": file.dataset, "part": file.part},
            modification_time=file.modified_at_ms,
            data_change=not change.rewrites,
            stats=file.statistics,
        )
        for file in change.added
    ]
    return [*removals, *additions]


_log = logging.getLogger(__name__)

MUTEX: Final = "compact"
"""Name of the transaction that every commit increments if it replaces files of other commits.

Two concurrent rewrites therefore conflict. The name is historical: compaction used the transaction first."""

CHECKPOINT_COMMITS: Final = 10
"""Number of commits between two checkpoints."""
REMOVED_FILES_HOURS: Final = 2
"""Hours for which a file remains on disk after a commit replaced it; longer than any query takes."""
_ENTRIES_HOURS: Final = 1
"""Hours for which entries of the Delta log remain on disk after a checkpoint replaced them.

delta-rs lists the whole folder three times per commit. The 95th percentile of the time of 1,500 commits was 49 ms with
two hours of entries and 47 ms with one hour."""

_TOGETHER: Final = 8
"""Number of entries that are read at the same time from an object store."""

_NEW_SECONDS: Final = 3600.0
"""Age in seconds up to which vacuum has certainly not deleted a file that is not committed yet."""

_COMMIT_TRIES: Final = 20
"""Number of versions on which one commit is tried. Each try takes about 20 ms, so that even a fast appender is met."""

_KNOWN_FEATURES: Final = {"timestampNtz", "vacuumProtocolCheck"}
"""Delta features of readers that do not change how a data file is read."""
_COLUMN_MAPPING_VERSION: Final = 2
"""Version of the Delta protocol for readers that has column mapping, which version 3 lists as a feature."""

_VERSION_PROPERTY: Final = "rankscope.schema_version"
_UPGRADE_PROPERTY: Final = "rankscope.upgrade"
"""Property of a store of an earlier schema version: begun while its files are converted, done afterwards."""
_BEGUN, _DONE = "begun", "done"
_CONFIGURATION: Final = {
    "delta.checkpointInterval": str(CHECKPOINT_COMMITS),
    "delta.logRetentionDuration": f"interval {_ENTRIES_HOURS} hours",
    "delta.deletedFileRetentionDuration": f"interval {REMOVED_FILES_HOURS} hours",
    _VERSION_PROPERTY: str(STORE_VERSION),
}
# Clean-up lists the whole log folder at each commit: 94 instead of 30 ms with 6,000 entries. A checkpoint would take at
# least 20 ms of a commit.
_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


class Log:
    """One handle on the Delta log of the store at `root`. Not thread-safe."""

    def __init__(self, root: Location, table: DeltaTable, sync: Sync, base: int) -> None:
        self.root = root
        self._table = table
        self._sync = sync
        self._options = filesystem(root).delta_options()
        self._base = base  # checkpoint with which the handle was opened, or an older one
        self._synced = NO_CHECKPOINT  # this handle has fsynced the log up to this version

    @classmethod
    def create(cls, root: Location, sync: Sync) -> Log:
        """Create an empty Delta table at `root` and return its log.

        If another process creates the table concurrently, the table of that process is opened.
        """
        check_path(root)
        try:
            cls._try_create(root)
        except (DeltaError, OSError) as error:
            with _delta_errors(root):
                is_created = has_entries(root)
            if not is_created:  # otherwise only the answer was lost, or another process created the table
                raise StoreError(f"cannot create a store in {root}: {first_line(error)}") from error
        log = cls.open(root, sync)
        log.make_durable()
        if is_local(root):
            sync(root)
        return log

    @staticmethod
    def _try_create(root: Location) -> None:
        DeltaTable.create(
            str(root),
            storage_options=filesystem(root).delta_options(),
            schema=Schema.from_arrow(table_schema()),
            partition_by=list(PARTITION_COLUMNS),
            mode="ignore",
            name="rankscope",
            configuration=_CONFIGURATION,
            raise_if_key_not_exists=False,  # Delta does not define our property
        )

    @classmethod
    def open(cls, root: Location, sync: Sync, version: int | None = None, *, may_be_older: bool = False) -> Log:
        """Open the store at `root`, at `version` or at the newest version.

        Raises NotAStoreError if there is no store. Raises SchemaVersionError if a newer Rankscope wrote the store, or
        an older one, unless the caller permits the latter. Raises TornLogError if the newest entry was cut between two
        lines, which delta-rs cannot detect. Raises StoreError for a copy whose entry, its last file, is missing.
        """
        check_path(root)
        base = newest_checkpoint(root)
        with _delta_errors(root):
            try:
                table = _delta_table(root, version)
            except TableNotFoundError as error:
                raise NotAStoreError(
                    f"{root} is not a Rankscope store: it has no log in {LOG_FOLDER}. `rankscope serve` creates one"
                ) from error
        _check_schema_version(table, root)
        _check_features(table, root)
        log = cls(root, table, sync, base)
        if not (may_be_older or log.is_current):
            raise SchemaVersionError(
                f"{root} was written by an earlier release: convert it once, `rankscope store upgrade --store {root}`"
            )
        if version is None:
            newest = read_entry(entry(root, log.version))
            if newest is None and not entries(root):  # delta-rs could read it, but commit nothing
                raise StoreError(
                    f"{root} is an incomplete copy of a store: run `rankscope store copy` to this place again"
                )
            if newest is not None and is_cut(newest.text):
                raise torn(root, "the entry has fewer lines than its first line declares")
        return log

    @property
    def version(self) -> int:
        """Version of the store that the handle shows."""
        return self._table.version()

    @property
    def is_current(self) -> bool:
        """True if the store has the current schema version and no unfinished upgrade."""
        configuration = self._table.metadata().configuration
        return int(configuration[_VERSION_PROPERTY]) == STORE_VERSION and configuration.get(_UPGRADE_PROPERTY) != _BEGUN

    def begin_upgrade(self) -> None:
        """Add the new columns, and raise the schema version of the store, so that earlier releases refuse it."""
        self.add_missing_columns()
        self._set_properties({_VERSION_PROPERTY: str(STORE_VERSION), _UPGRADE_PROPERTY: _BEGUN})

    def end_upgrade(self) -> None:
        """Permit reading the store, whose files are converted."""
        self._set_properties({_UPGRADE_PROPERTY: _DONE})

    def _set_properties(self, properties: Mapping[str, str]) -> None:
        def is_done() -> bool:
            return properties.items() <= self._table.metadata().configuration.items()

        self.refresh()
        self._alter(
            lambda: self._table.alter.set_table_properties(dict(properties), raise_if_not_exists=False), is_done
        )

    def _alter(self, change: Callable[[], None], is_done: Callable[[], bool]) -> None:
        """Commit a change of the metadata of the table. If the answer is lost, `is_done` decides whether it is stored.

        The same change of another process has the same effect.
        """
        try:
            self._try_alter(change)
        except StoreError:
            self.refresh()
            if not is_done():
                raise
        self.refresh()
        self.make_durable()

    def _try_alter(self, change: Callable[[], None]) -> None:
        with _delta_errors(self.root):
            change()

    @property
    def is_newest(self) -> bool:
        """True if no entry follows the version of the handle; takes one request, and a refresh about ten."""
        with _delta_errors(self.root):
            return filesystem(self.root).head(entry(self.root, self.version + 1)) is None

    def refresh(self) -> None:
        """Advance the handle to the newest version of the store.

        Raises StoreError if another tool has enabled a table feature without which the files cannot be read directly.
        """
        with _delta_errors(self.root):
            newest = newest_checkpoint(self.root) if self.version - self._base >= CHECKPOINT_COMMITS else self._base
            options = filesystem(self.root).delta_options()  # with credentials that may have been renewed
            if newest > self._base or options != self._options:
                # Open it again there: a handle keeps all entries since its own checkpoint.
                self._table, self._base, self._options = _delta_table(self.root), newest, options
            else:
                self._table.update_incremental()
        _check_features(self._table, self.root)

    def snapshot(self) -> Snapshot:
        """Return the list of data files at the version of the handle."""
        with _delta_errors(self.root):
            return Snapshot(
                self.root, self.version, snapshot_files(pa.table(self._table.get_add_actions(flatten=True)))
            )

    def transaction(self, name: str) -> int | None:
        """Return the number that the last commit of transaction `name` stored; None if it was never committed.

        A call takes about 1 ms, and about eight requests in a bucket, so that callers should keep the number.
        """
        return self._table.transaction_version(name)

    def transactions(self) -> dict[str, int] | None:
        """Return the number of each transaction, with the requests of one call of `transaction`.

        The numbers are from the checkpoint of the handle and the entries after it. Returns None if one of them no
        longer exists.
        """
        base, stored = self._base, []
        with _delta_errors(self.root):
            if base == NO_CHECKPOINT:  # the file that names it may be lost
                base = max((one for one in checkpoints(self.root) if one <= self.version), default=NO_CHECKPOINT)
            if base != NO_CHECKPOINT:
                checkpoint, _ = checkpoint_files(self.root, base)
                try:
                    content = filesystem(self.root).get(checkpoint)
                except FileNotFoundError:
                    return None
                stored = pq.read_table(pa.BufferReader(content), columns=["txn"])["txn"].drop_null().to_pylist()
            moved = self.changed_transactions(base)
        return None if moved is None else {one["appId"]: one["version"] for one in stored} | moved

    def commit(self, change: Change) -> int:
        """Commit `change` on top of the handle's version; durable on return. Return a version that contains the commit.

        If another process commits first, the handle is refreshed and the commit is tried again with the same files.
        Refresh the handle before the next commit in any case. Raises ConflictError if `change` is certainly not stored:
        another commit since the last refresh increased a transaction of `change` or removed a file that `change`
        removes, or other commits were faster each time. After any other StoreError, the commit may have been stored, or
        may still be stored as the version after that of the handle, if its request is still under way.
        """
        if missing := next(filter(self._is_deleted, change.added), None):
            raise ConflictError(
                f"{missing.path} was deleted before its commit, because the commit took hours: write the file again"
            )
        for tries_left in reversed(range(_COMMIT_TRIES)):
            base = self.version
            try:
                self._try_commit(change)
                break
            except StoreError as error:
                if self._is_stored(base, change, error):
                    break
                if self._is_outdated(base, change):
                    raise ConflictError(
                        f"commit to {self.root} refused: another process has changed the same rows or files"
                    ) from error
                if not tries_left:
                    raise ConflictError(f"commit to {self.root} refused: other commits were faster") from error
        return self.make_durable()

    def _is_deleted(self, file: DataFile) -> bool:
        """Return whether vacuum has deleted `file`. This takes a request to a server, unless the file is new."""
        if not is_local(self.root) and time.time() - file.modified_at_ms / 1000 < _NEW_SECONDS:
            return False
        return filesystem(self.root).head(self.root / file.path) is None

    def _try_commit(self, change: Change) -> None:
        actions = actions_of(change)
        info = {**change.info, COMMIT_ID: change.id, ACTIONS: len(actions) + len(change.transactions)}
        with _delta_errors(self.root):
            self._table.create_write_transaction(
                actions,
                mode="append",
                schema=self._table.schema(),
                partition_by=list(PARTITION_COLUMNS),
                commit_properties=CommitProperties(
                    custom_metadata=info,
                    max_commit_retries=0,  # refuses any version that the handle lacks
                    app_transactions=[Transaction(name, number) for name, number in change.transactions.items()],
                ),
                post_commithook_properties=_HOOKS,
            )

    def _is_stored(self, base: int, change: Change, error: StoreError) -> bool:
        """Refresh the handle, and return whether the try to commit `change` after version `base` stored it.

        The try failed with `error`. It could only store the entry of the next version. If the log has this entry, the
        result is certain. Raises StoreError if the log does not have it, because a request may still be under way.
        """
        try:
            self.refresh()
            is_stored = self.was_committed(base, change)
        except StoreError as unreadable:
            raise StoreError(f"{error} (the log does not show whether the commit was stored: {unreadable})") from error
        if is_stored is None or self.version == base:
            raise StoreError(f"{error} (the log does not show yet whether the commit was stored)") from error
        return is_stored

    def _is_outdated(self, base: int, change: Change) -> bool:
        """Return whether a commit after version `base` conflicts with `change`.

        Such a commit increased a transaction of `change`, or removed a file that `change` removes too.
        """
        moved = self.changed_transactions(base)
        if moved is None or moved.keys() & change.transactions.keys():
            return True
        return bool(change.removed) and not self.snapshot().contains([file.path for file in change.removed])

    def replace_files(
        self, build: Callable[[], Change | None], *, tries: int = 1, reuse_files: bool = False
    ) -> Change | None:
        """Commit the change that `build` returns as a rewrite, and return this change.

        If `build` returns None, nothing is committed. A rewrite replaces files of other commits and increments the
        transaction MUTEX, so that two rewrites conflict. Each try refreshes the handle and calls `build`. `build` must
        not refresh the handle, because the conflict check covers only reads of the handle's version. If a commit is
        refused, the files that the change adds are deleted. Set `reuse_files` for a `build` that adds the same files at
        each try. Raises ConflictError if the last try is refused, and errors of `build`.
        """
        for tries_left in reversed(range(tries)):
            self.refresh()
            number = (self.transaction(MUTEX) or 0) + 1
            change = build()
            if change is None:
                return None
            try:
                self.commit(replace(change, transactions={**change.transactions, MUTEX: number}))
            except ConflictError:
                if not reuse_files:
                    discard(self.root, change.added)
                if not tries_left:
                    raise
            else:
                return change
        return None

    def fsync_to_version(self) -> None:
        """Make the version of the handle durable.

        Call it before rows of this version are acknowledged; see `make_durable`.
        """
        if self._synced < self.version:
            self.make_durable()

    def changed_transactions(self, since: int) -> dict[str, int] | None:
        """Return the transactions committed after version `since`, as name and number.

        Returns None if an entry after that version no longer exists.
        """
        moved: dict[str, int] = {}
        for found in self._entries_after(since):
            if found is None:
                return None
            moved |= found.transactions
        return moved

    def infos(self, since: int) -> list[dict[str, Any]]:
        """Return the commit information of the commits after version `since`, oldest first, without deleted entries."""
        return [found.info for found in self._entries_after(since) if found is not None]

    def was_committed(self, since: int, change: Change) -> bool | None:
        """Return whether an entry of the Delta log after version `since` is the commit of `change`.

        Returns None if an entry after that version no longer exists.
        """
        found = list(self._entries_after(since))
        if any(one is not None and change.id.encode() in one.text for one in found):
            return True
        return None if None in found else False

    def _entries_after(self, since: int) -> Iterator[Entry | None]:
        return self._read_entries(range(since + 1, self.version + 1))

    def _read_entries(self, versions: range) -> Iterator[Entry | None]:
        with _delta_errors(self.root):
            if is_local(self.root) or len(versions) < _TOGETHER:
                yield from (read_entry(entry(self.root, version)) for version in versions)
            else:  # a request takes tens of milliseconds
                with concurrent.futures.ThreadPoolExecutor(_TOGETHER) as pool:
                    yield from list(pool.map(lambda version: read_entry(entry(self.root, version)), versions))

    def history(self, limit: int) -> list[dict[str, Any]]:
        """Return the commit information of the newest `limit` commits that are still in the Delta log, newest first."""
        # Delta-rs would block all threads of Python meanwhile.
        found = self._read_entries(range(self.version, max(-1, self.version - limit), -1))
        return [one.info for one in itertools.takewhile(lambda one: one is not None, found) if one is not None]

    def add_missing_columns(self) -> list[str]:
        """Add the columns of the current schema that the store's Delta table does not have yet; return their names."""

        def missing() -> list[DeltaField]:
            known = {column.name for column in self._table.schema().fields}
            return [column for column in Schema.from_arrow(table_schema()).fields if column.name not in known]

        if added := missing():
            self._alter(
                lambda: self._table.alter.add_columns(added, post_commithook_properties=_HOOKS), lambda: not missing()
            )
        return [column.name for column in added]

    def make_durable(self) -> int:
        """Fsync the entries and the folder of the Delta log of the store at `root`; return the newest version.

        Entries of other processes are fsynced too. A writer that was killed before its fsync leaves an entry that
        readers see but that a power failure can erase. The loss of this entry would invalidate all later commits. On an
        object store, every entry is durable.
        """
        if not is_local(self.root):
            self._synced = self.version
            return self.version
        try:
            # Reading the folder is 5 ms cheaper than refreshing the handle, and finds new entries of other processes.
            version, checkpoint = self._synced, newest_checkpoint(self.root)
            if checkpoint > version:  # it replaces the entries up to its version, which may no longer exist
                for path in checkpoint_files(self.root, checkpoint):
                    self._sync(path)
                version = checkpoint
            files = filesystem(self.root)
            while (found := files.head(path := entry(self.root, version + 1))) or version < self.version:
                version += 1
                if found:  # without its hint file, a log may start at any entry
                    self._sync(path)
            self._sync(self.root / LOG_FOLDER)
        except OSError as error:
            raise StoreError(f"cannot fsync the log of {self.root}: {error}") from error
        self._synced = version
        return version

    def checkpoint(self) -> None:
        """Write a checkpoint of the newest version, which makes opening the store faster. Durable on return."""
        self.refresh()
        with _delta_errors(self.root):
            self._table.create_checkpoint()
            if not is_local(self.root):
                return
            made, hint = checkpoint_files(self.root, self.version)
            # A process killed between the two files leaves a checkpoint without hint, which delta-rs does not repair.
            for path in (made, *([hint] if filesystem(hint).head(hint) else []), self.root / LOG_FOLDER):
                self._sync(path)

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint if CHECKPOINT_COMMITS commits were made since the last one.

        Jobs with many commits call this method, because a job may run while no writer appends and therefore no writer
        writes checkpoints.
        """
        if self.version - newest_checkpoint(self.root) >= CHECKPOINT_COMMITS:
            self.checkpoint()

    def clean_up(self) -> None:
        """Delete Delta log entries and checkpoints that a newer checkpoint replaces and that exceed the retention age.

        Call it only after `checkpoint`, which makes the newer checkpoint durable: a deleted file must not be needed
        after a power failure.
        """
        with _delta_errors(self.root):
            self._table.cleanup_metadata()
        self.make_durable()

    def unused_files(self, older_than_hours: int) -> list[Location]:
        """Return the data files that no version needs and that are at least `older_than_hours` old.

        These files were removed by a commit, or were never committed.
        """
        self.refresh()
        with _delta_errors(self.root):
            # Only a dry run: delta-rs would also delete all files in the folder that it does not know.
            names = self._table.vacuum(
                retention_hours=older_than_hours, dry_run=True, full=True, enforce_retention_duration=False
            )
        return [self.root / name for name in names if name.startswith("dataset=") and name.endswith(".parquet")]


@contextlib.contextmanager
def _delta_errors(root: Location) -> Iterator[None]:
    """Convert errors of delta-rs and of the disk inside the context to errors of this package.

    A refused commit raises ConflictError.
    """
    try:
        yield
    except CommitFailedError as error:
        raise ConflictError(f"commit to {root} refused: {first_line(error)}") from error
    except StoreError:  # a BucketError is an OSError, too
        raise
    except (DeltaError, OSError) as error:
        raise translated(error, root) from error


def _delta_table(root: Location, version: int | None = None) -> DeltaTable:
    return DeltaTable(str(root), version=version, storage_options=filesystem(root).delta_options())


def _check_features(table: DeltaTable, root: Location) -> None:
    """Raise StoreError if files of the table cannot be read without features that only Delta readers know.

    Queries read the Parquet files with DuckDB. With deletion vectors, for example, they would return deleted rows.
    """
    protocol = table.protocol()
    unknown = sorted(set(protocol.reader_features or ()) - _KNOWN_FEATURES)
    if unknown or protocol.min_reader_version == _COLUMN_MAPPING_VERSION:
        raise StoreError(
            f"another tool has enabled {', '.join(unknown) or 'columnMapping'} for the Delta table {root}, with which "
            "its files cannot be read directly: drop this table feature with the same tool"
        )


def _check_schema_version(table: DeltaTable, root: Location) -> None:
    configuration = table.metadata().configuration
    if _VERSION_PROPERTY not in configuration:
        raise NotAStoreError(f"{root} is a Delta table, but not a Rankscope store: choose another folder")
    found = int(configuration[_VERSION_PROPERTY])
    if found > STORE_VERSION:
        raise SchemaVersionError(
            f"{root} has schema version {found}, and this Rankscope supports up to {STORE_VERSION}: upgrade Rankscope"
        )
