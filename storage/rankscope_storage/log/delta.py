"""The Delta log of a store: the only module that speaks to delta-rs, and the order in which things reach the disk.

A `Log` is one handle on the table. delta-rs checks a commit against what changed *since the handle was refreshed*, and
accepts nearly anything else; so the sequence is always refresh, check, commit, on one handle. Its commits are not
durable by themselves: `commit` returns only after the new entries were synced. Neither checkpoints nor clean-up happen
in a commit: see `checkpoint`, which whoever commits often calls from another thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import CommitProperties, PostCommitHookProperties, Transaction

from rankscope_contract import SCHEMA_VERSION
from rankscope_storage.base.errors import ConflictError, NotAStoreError, SchemaVersionError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.schema import PARTITION_COLUMNS, table_schema
from rankscope_storage.files.parquet import discard
from rankscope_storage.log.entries import (
    ACTIONS,
    LOG_FOLDER,
    NO_CHECKPOINT,
    checkpoint_files,
    entry,
    is_between,
    is_cut,
    newest_checkpoint,
    read_entry,
    transactions_between,
)
from rankscope_storage.log.snapshot import Snapshot, snapshot_files
from rankscope_storage.log.translation import Change, actions_of, check_path, first_line, torn, translated

_log = logging.getLogger(__name__)

MUTEX: Final = "compact"
"""Transaction that every commit moves which replaces files of other commits. Its name is that of its first user."""

CHECKPOINT_COMMITS: Final = 10
"""So many commits after the newest checkpoint the next one is due."""
REMOVED_FILES_HOURS: Final = 2
"""How long a file that compaction replaced stays readable: longer than any query takes."""
_ENTRIES_HOURS: Final = 1
"""How long entries of the log stay that a checkpoint stands for: delta-rs lists the whole folder three times in a
commit, and of 1,500 commits the slowest twentieth took 49 ms and more with two hours of them, 47 with one."""

_VERSION_PROPERTY: Final = "rankscope.schema_version"
_CONFIGURATION: Final = {
    "delta.checkpointInterval": str(CHECKPOINT_COMMITS),
    "delta.logRetentionDuration": f"interval {_ENTRIES_HOURS} hours",
    "delta.deletedFileRetentionDuration": f"interval {REMOVED_FILES_HOURS} hours",
    _VERSION_PROPERTY: str(SCHEMA_VERSION),
}
# Cleaning up lists the whole log folder at every commit: 94 instead of 30 ms at 6,000 entries. A checkpoint takes 20 ms
# and more, of every 20th commit.
_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


class Log:
    """One handle on the Delta log of the store at `root`. One thread at a time."""

    def __init__(self, root: Path, table: DeltaTable, sync: Sync, base: int) -> None:
        self.root = root
        self._table = table
        self._sync = sync
        self._base = base  # checkpoint that the handle was opened with, or an older one
        self._synced = NO_CHECKPOINT  # what this handle itself knows to be on the disk: the log up to this version

    @classmethod
    def create(cls, root: Path, sync: Sync) -> Log:
        """Make an empty table at `root`; one that another process made at the same moment is opened."""
        check_path(root)
        try:
            DeltaTable.create(
                str(root),
                schema=Schema.from_arrow(table_schema()),
                partition_by=list(PARTITION_COLUMNS),
                mode="ignore",
                name="rankscope",
                configuration=_CONFIGURATION,
                raise_if_key_not_exists=False,  # our own property is not one of Delta's
            )
        except (DeltaError, OSError) as error:
            raise StoreError(f"cannot create a store in {root}: {first_line(error)}") from error
        log = cls.open(root, sync)
        log.make_durable()
        sync(root)
        return log

    @classmethod
    def open(cls, root: Path, sync: Sync, version: int | None = None) -> Log:
        """Open the store at `root`, at its newest version or at `version`."""
        check_path(root)
        base = newest_checkpoint(root)
        try:
            table = DeltaTable(str(root), version=version)
        except TableNotFoundError as error:
            raise NotAStoreError(
                f"{root} is not a Rankscope store: it has no log in {LOG_FOLDER}. `rankscope serve` creates one"
            ) from error
        except (DeltaError, OSError) as error:
            raise translated(error, root) from error
        _check_schema_version(table, root)
        log = cls(root, table, sync, base)
        if version is None:
            log._check_newest_entry()
        return log

    @property
    def version(self) -> int:
        """Version that the handle stands at."""
        return self._table.version()

    def refresh(self) -> None:
        """Advance the handle to the newest version."""
        try:
            newest = newest_checkpoint(self.root) if self.version - self._base >= CHECKPOINT_COMMITS else self._base
            if newest > self._base:  # begin again at it: a handle keeps every entry since its own
                self._table, self._base = DeltaTable(str(self.root)), newest
            else:
                self._table.update_incremental()
        except (DeltaError, OSError) as error:
            raise translated(error, self.root) from error

    def snapshot(self) -> Snapshot:
        """Return the files of the version the handle stands at."""
        try:
            return Snapshot(
                self.root, self.version, snapshot_files(pa.table(self._table.get_add_actions(flatten=True)))
            )
        except (DeltaError, OSError) as error:
            raise translated(error, self.root) from error

    def transaction(self, name: str) -> int | None:
        """Return the number that `name` stands at, None when it was never committed. About 1 ms: cache it."""
        return self._table.transaction_version(name)

    def commit(self, change: Change) -> int:
        """Commit `change` against the version of the handle; durable on return. The version returned shows it.

        The handle stays where it was: refresh it before the next commit.
        Raises ConflictError when a transaction of `change` moved since the handle was refreshed: nothing was stored.
        After any other StoreError the commit may or may not have been stored.
        """
        if gone := [file.path for file in change.added if not (self.root / file.path).exists()]:
            raise ConflictError(f"{gone[0]} has gone: it lay there for hours without a commit")
        actions = actions_of(change)
        try:
            self._table.create_write_transaction(
                actions,
                mode="append",
                schema=self._table.schema(),
                partition_by=list(PARTITION_COLUMNS),
                commit_properties=CommitProperties(
                    custom_metadata={**change.info, ACTIONS: len(actions) + len(change.transactions)},
                    app_transactions=[Transaction(name, number) for name, number in change.transactions.items()],
                ),
                post_commithook_properties=_HOOKS,
            )
        except CommitFailedError as error:
            raise ConflictError(f"commit to {self.root} refused: {first_line(error)}") from error
        except (DeltaError, OSError) as error:
            raise translated(error, self.root) from error
        return self.make_durable()

    def replace_files(
        self, build: Callable[[], Change | None], *, tries: int = 1, reuse_files: bool = False
    ) -> Change | None:
        """Commit the change that `build` returns, which no other call of this method can overlap; return it.

        Each try refreshes the handle and calls `build`, which must not refresh it: only so does the mutex in the log
        cover what `build` reads. None from `build` commits nothing. A commit that is refused deletes the files that
        the change adds, except with `reuse_files`, where each call of `build` adds the same ones.

        Raises ConflictError when the last try is refused, and whatever `build` raises.
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
        """Have what the handle shows on the disk, before anybody is told of it: see `make_durable`."""
        if self._synced < self.version:
            self.make_durable()

    def changed_transactions(self, since: int) -> dict[str, int] | None:
        """Return the transactions committed after version `since`; None when an entry cannot be read any more."""
        return transactions_between(self.root, since, self.version)

    def was_committed(self, since: int, change: Change) -> bool | None:
        """Whether one entry after version `since` holds all of `change`; None when one cannot be read any more."""
        paths = [file.path for file in change.added]
        return is_between(self.root, since, self.version, change.transactions, paths)

    def history(self, limit: int) -> list[dict[str, Any]]:
        """Return the commit information of the newest `limit` commits that are still in the log, newest first."""
        try:
            return self._table.history(limit)
        except (DeltaError, OSError) as error:
            raise translated(error, self.root) from error

    def add_missing_columns(self) -> list[str]:
        """Give the table the columns that this version of the schema has more; return their names."""
        known = {column.name for column in self._table.schema().fields}
        missing = [column for column in Schema.from_arrow(table_schema()).fields if column.name not in known]
        if missing:
            try:
                self._table.alter.add_columns(missing, post_commithook_properties=_HOOKS)
                self._table.alter.set_table_properties(
                    {_VERSION_PROPERTY: str(SCHEMA_VERSION)}, raise_if_not_exists=False
                )
            except CommitFailedError as error:
                raise ConflictError(f"adding columns to {self.root} refused: {first_line(error)}") from error
            except (DeltaError, OSError) as error:
                raise translated(error, self.root) from error
            self.refresh()
            self.make_durable()
        return [column.name for column in missing]

    def make_durable(self) -> int:
        """Bring the log, and the names in it, to the disk; return its newest version.

        Entries that others wrote are synced again: who was killed between writing one and syncing it leaves an entry
        that everybody sees and a loss of power takes away, and with it the sense of all that were committed behind it.
        """
        try:
            # Asking the disk is 5 ms cheaper than refreshing the handle, and also finds what others have just added.
            version, checkpoint = self._synced, newest_checkpoint(self.root)
            if checkpoint > version:  # it stands for the entries up to its own, which may be gone by now
                for path in checkpoint_files(self.root, checkpoint):
                    self._sync(path)
                version = checkpoint
            while (path := entry(self.root, version + 1)).exists() or version < self.version:
                version += 1
                if path.exists():  # a log whose hint was lost may have entries from anywhere on
                    self._sync(path)
            self._sync(self.root / LOG_FOLDER)
        except OSError as error:
            raise StoreError(f"cannot bring the log of {self.root} to the disk: {error}") from error
        self._synced = version
        return version

    def checkpoint(self) -> None:
        """Write a checkpoint of the newest version: what opening need not read. Durable on return."""
        self.refresh()
        try:
            self._table.create_checkpoint()
            made, hint = checkpoint_files(self.root, self.version)
            # Who was killed between the two files leaves a checkpoint that nothing names, and delta-rs leaves it so.
            for path in (made, *([hint] if hint.exists() else []), self.root / LOG_FOLDER):
                self._sync(path)
        except (DeltaError, OSError) as error:
            raise translated(error, self.root) from error

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint if one is due, between the commits of a work that makes many: nobody may append beside."""
        if self.version - newest_checkpoint(self.root) >= CHECKPOINT_COMMITS:
            self.checkpoint()

    def clean_up(self) -> None:
        """Drop log entries and checkpoints that are older than the retention and that a newer checkpoint covers.

        Only behind `checkpoint`: what is dropped here must not be needed again after a loss of power.
        """
        try:
            self._table.cleanup_metadata()
        except (DeltaError, OSError) as error:
            raise translated(error, self.root) from error
        self.make_durable()

    def unused_files(self, older_than_hours: int) -> list[Path]:
        """Return data files that no version needs: removed, or never committed, for `older_than_hours` at least."""
        self.refresh()
        try:
            # Only a dry run: delta-rs itself would also delete everything else in the folder that it does not know.
            names = self._table.vacuum(
                retention_hours=older_than_hours, dry_run=True, full=True, enforce_retention_duration=False
            )
        except (DeltaError, OSError) as error:
            raise translated(error, self.root) from error
        return [self.root / name for name in names if name.startswith("dataset=") and name.endswith(".parquet")]

    def _check_newest_entry(self) -> None:
        """Raise TornLogError when a loss of power cut the newest entry where a line ends, which delta-rs cannot see."""
        newest = read_entry(entry(self.root, self.version))
        if newest is not None and is_cut(newest.text):
            raise torn(self.root, "it has fewer lines than it says")


def _check_schema_version(table: DeltaTable, root: Path) -> None:
    configuration = table.metadata().configuration
    if _VERSION_PROPERTY not in configuration:
        raise NotAStoreError(f"{root} is a Delta table, but not a Rankscope store: choose another folder")
    found = int(configuration[_VERSION_PROPERTY])
    if found > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{root} has schema version {found}, and this Rankscope knows up to {SCHEMA_VERSION}: upgrade it"
        )
