"""The Delta log of a store: the only module that speaks to delta-rs, and the order in which things reach the disk.

A `Log` is one handle on the table. delta-rs checks a commit against what changed *since the handle was refreshed*, and
accepts nearly anything else; so the sequence is always refresh, check, commit, on one handle. Its commits are not
durable by themselves: `commit` returns only after the new entries were synced.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, PostCommitHookProperties, RemoveAction, Transaction

from rankscope_contract import SCHEMA_VERSION
from rankscope_storage.durable import Sync
from rankscope_storage.errors import ConflictError, NotAStoreError, SchemaVersionError, StoreError, TornLogError
from rankscope_storage.parquet import DataFile
from rankscope_storage.schema import PARTITION_COLUMNS, table_schema
from rankscope_storage.snapshot import Snapshot, snapshot_files

_log = logging.getLogger(__name__)

LOG_FOLDER: Final = "_delta_log"
CHECKPOINT_COMMITS: Final = 20
LOG_RETENTION: Final = "interval 4 hours"
REMOVED_FILES_HOURS: Final = 2
"""How long a file that compaction replaced stays readable: longer than any query may take."""

_VERSION_PROPERTY: Final = "rankscope.schema_version"
_CONFIGURATION: Final = {
    "delta.checkpointInterval": str(CHECKPOINT_COMMITS),
    "delta.logRetentionDuration": LOG_RETENTION,
    "delta.deletedFileRetentionDuration": f"interval {REMOVED_FILES_HOURS} hours",
    _VERSION_PROPERTY: str(SCHEMA_VERSION),
}
_MISREAD: Final = re.compile(r"[*?\[\\\x00-\x1f\x7f]|%[0-9A-Fa-f]{2}")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
# Cleaning up lists the whole log folder at every commit: 94 instead of 30 ms at 6,000 entries. maintain() does it.
_HOOKS: Final = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one commit does, all of it or nothing."""

    added: Sequence[DataFile] = ()
    removed: Sequence[DataFile] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    rewrites: bool = False
    """The rows stay the same, only their files change. Then delta-rs does not look for conflicts, and two changes
    that remove the same file would both succeed: `transactions` must hold a mutex that both move."""


class Log:
    """One handle on the Delta log of the store at `root`. One thread at a time."""

    def __init__(self, root: Path, table: DeltaTable, sync: Sync) -> None:
        self.root = root
        self._table = table
        self._sync = sync

    @classmethod
    def create(cls, root: Path, sync: Sync) -> Log:
        """Make an empty table at `root`; one that another process made at the same moment is opened."""
        _check_path(root)
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
            raise StoreError(f"cannot create a store in {root}: {_first_line(error)}") from error
        log = cls.open(root, sync)
        log.sync_entries(0)
        sync(root)
        return log

    @classmethod
    def open(cls, root: Path, sync: Sync, version: int | None = None) -> Log:
        """Open the store at `root`, at its newest version or at `version`."""
        _check_path(root)
        try:
            table = DeltaTable(str(root), version=version)
        except TableNotFoundError as error:
            raise NotAStoreError(
                f"{root} is not a Rankscope store: it has no log in {LOG_FOLDER}. `rankscope serve` creates one"
            ) from error
        except (DeltaError, OSError) as error:
            raise _translated(error, root) from error
        log = cls(root, table, sync)
        log._check_schema_version()
        return log

    @staticmethod
    def has_entries(root: Path) -> bool:
        """Return whether a table was ever completed at `root`; a full disk may have stopped its creation half way."""
        return any((root / LOG_FOLDER).glob("*.json")) or any((root / LOG_FOLDER).glob("*.parquet"))

    @property
    def version(self) -> int:
        """Version that the handle stands at."""
        return self._table.version()

    def refresh(self) -> None:
        """Advance the handle to the newest version."""
        try:
            self._table.update_incremental()
        except (DeltaError, OSError) as error:
            raise _translated(error, self.root) from error

    def snapshot(self) -> Snapshot:
        """Return the files of the version the handle stands at."""
        try:
            return Snapshot(
                self.root, self.version, snapshot_files(pa.table(self._table.get_add_actions(flatten=True)))
            )
        except (DeltaError, OSError) as error:
            raise _translated(error, self.root) from error

    def transaction(self, name: str) -> int | None:
        """Return the number that `name` stands at, None when it was never committed. About 1 ms: cache it."""
        return self._table.transaction_version(name)

    def commit(self, change: Change) -> int:
        """Commit `change` against the version of the handle; durable on return. The version returned shows it.

        The handle stays where it was: refresh it before the next commit.
        Raises ConflictError when a transaction of `change` moved since the handle was refreshed: nothing was stored.
        After any other StoreError the commit may or may not have been stored.
        """
        before = self.version
        try:
            self._table.create_write_transaction(
                [*_removals(change), *_additions(change)],
                mode="append",
                schema=self._table.schema(),
                partition_by=list(PARTITION_COLUMNS),
                commit_properties=CommitProperties(
                    custom_metadata=dict(change.info),
                    app_transactions=[Transaction(name, number) for name, number in change.transactions.items()],
                ),
                post_commithook_properties=_HOOKS,
            )
        except CommitFailedError as error:
            raise ConflictError(f"commit to {self.root} refused: {_first_line(error)}") from error
        except (DeltaError, OSError) as error:
            raise _translated(error, self.root) from error
        return self.sync_entries(before + 1)

    def changed_transactions(self, since: int) -> dict[str, int] | None:
        """Return the transactions committed after version `since`; None when an entry cannot be read any more."""
        moved: dict[str, int] = {}
        for version in range(since + 1, self.version + 1):
            try:
                lines = self._entry(version).read_bytes().splitlines()
            except FileNotFoundError:
                return None
            for line in lines:
                if line.startswith(b'{"txn"'):
                    transaction = json.loads(line)["txn"]
                    moved[transaction["appId"]] = transaction["version"]
        return moved

    def history(self, limit: int) -> list[dict[str, Any]]:
        """Return the commit information of the newest `limit` commits that are still in the log, newest first."""
        try:
            return self._table.history(limit)
        except (DeltaError, OSError) as error:
            raise _translated(error, self.root) from error

    def add_missing_columns(self) -> list[str]:
        """Give the table the columns that this version of the schema has more; return their names."""
        known = {column.name for column in self._table.schema().fields}
        missing = [column for column in Schema.from_arrow(table_schema()).fields if column.name not in known]
        if missing:
            before = self.version
            try:
                self._table.alter.add_columns(missing, post_commithook_properties=_HOOKS)
                self._table.alter.set_table_properties(
                    {_VERSION_PROPERTY: str(SCHEMA_VERSION)}, raise_if_not_exists=False
                )
            except CommitFailedError as error:
                raise ConflictError(f"adding columns to {self.root} refused: {_first_line(error)}") from error
            except (DeltaError, OSError) as error:
                raise _translated(error, self.root) from error
            self.refresh()
            self.sync_entries(before + 1)
        return [column.name for column in missing]

    def sync_entries(self, first: int) -> int:
        """Bring the entries from version `first` on, and their names, to the disk; return the newest of them."""
        version = first
        try:
            # Asking the disk is 5 ms cheaper than refreshing the handle, and also finds what others have just added.
            while self._entry(version).exists():
                self._sync(self._entry(version))
                version += 1
            self._sync(self.root / LOG_FOLDER)
        except OSError as error:
            raise StoreError(f"cannot bring the log of {self.root} to the disk: {error}") from error
        return version - 1

    def checkpoint(self) -> None:
        """Write a checkpoint, then drop log entries older than the retention: what opening need not read."""
        self.refresh()
        try:
            self._table.create_checkpoint()
            self._table.cleanup_metadata()
        except (DeltaError, OSError) as error:
            raise _translated(error, self.root) from error
        self.sync_entries(self.version + 1)

    def unused_files(self, older_than_hours: int) -> list[Path]:
        """Return data files that no version needs: removed, or never committed, for `older_than_hours` at least."""
        self.refresh()
        try:
            # Only a dry run: delta-rs itself would also delete everything else in the folder that it does not know.
            names = self._table.vacuum(
                retention_hours=older_than_hours, dry_run=True, full=True, enforce_retention_duration=False
            )
        except (DeltaError, OSError) as error:
            raise _translated(error, self.root) from error
        return [self.root / name for name in names if name.startswith("dataset=") and name.endswith(".parquet")]

    def _check_schema_version(self) -> None:
        configuration = self._table.metadata().configuration
        if _VERSION_PROPERTY not in configuration:
            raise NotAStoreError(f"{self.root} is a Delta table, but not a Rankscope store: choose another folder")
        found = int(configuration[_VERSION_PROPERTY])
        if found > SCHEMA_VERSION:
            raise SchemaVersionError(
                f"{self.root} has schema version {found}, and this Rankscope knows up to {SCHEMA_VERSION}: upgrade it"
            )

    def _entry(self, version: int) -> Path:
        return self.root / LOG_FOLDER / f"{version:020d}.json"


def _check_path(root: Path) -> None:
    """Raise StoreError for a path that delta-rs or DuckDB would take for another one, or for a pattern."""
    if found := _MISREAD.search(str(root)):
        raise StoreError(
            f"{str(root)!r} holds {found[0]!r}, which the libraries under the store take for something else: "
            "choose a folder without * ? [ \\ %41 and control characters in its path"
        )


def _additions(change: Change) -> list[AddAction]:
    return [
        AddAction(
            path=file.path,  # plain; delta-rs does the percent-encoding that the protocol asks for
            size=file.size_bytes,
            partition_values={"dataset": file.dataset, "part": file.part},
            modification_time=file.modified_at_ms,
            data_change=not change.rewrites,
            stats=file.statistics,
        )
        for file in change.added
    ]


def _removals(change: Change) -> list[RemoveAction]:
    now = time.time_ns() // 1_000_000
    return [
        RemoveAction(
            path=file.path,
            data_change=not change.rewrites,
            deletion_timestamp=now,
            partition_values={"dataset": file.dataset, "part": file.part},
            size=file.size_bytes,
        )
        for file in change.removed
    ]


def _translated(error: Exception, root: Path) -> StoreError:
    """Return our error for one of delta-rs, which tells kinds apart by their text only."""
    text = _first_line(error)
    if "Json error" in str(error) or "Invalid JSON in log record" in str(error):
        return TornLogError(
            f"the log of {root} has an incomplete entry ({text}), as after a loss of power. If it is the newest file "
            f"in {root / LOG_FOLDER}, move that file away, as `rankscope store repair` does: nothing in it was "
            "acknowledged, the service fetches it again"
        )
    return StoreError(f"the log of {root} cannot be read or written: {text}")


def _first_line(error: Exception) -> str:
    """Return what delta-rs says in one line: its first, and the innermost cause, which it draws as a coloured tree."""
    lines = [_COLOUR.sub("", line).strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.removeprefix("↳").strip() for line in lines if line.startswith("↳")]
    return ": ".join([*lines[:1], *causes[-1:]])
