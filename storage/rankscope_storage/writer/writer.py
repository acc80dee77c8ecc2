"""Appending to one shard, exactly once.

Three numbers in the log do it. `ingest:<shard>` moves by one with every claim and every append, so that of two owners
one is refused. `w:<incarnation>` is the last seq stored of a process: rows at or below it are dropped, so that whatever
a restarted service fetches again is harmless. Both move in the same commit as the rows themselves.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from rankscope_contract.protocol.channel import NOTHING
from rankscope_storage.base.errors import BatchError, ConflictError, ShardLostError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.schema import conform
from rankscope_storage.files.encoding import rounded
from rankscope_storage.files.parquet import DataFile, discard, write_file
from rankscope_storage.files.partitioning import parts
from rankscope_storage.log.checkpoints import Checkpointer
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import watermark_transaction, watermarks_of
from rankscope_storage.log.shard_lock import ShardLock, current_owner, owner_info, shard_transaction
from rankscope_storage.log.translation import Change
from rankscope_storage.maintenance.compaction import CompactionReport, compact
from rankscope_storage.maintenance.vacuum import MaintenanceReport, maintain
from rankscope_storage.writer.watermarks import check_covered, incarnations, newer

_logger = logging.getLogger(__name__)

_RETRIES: Final = 6
_FIRST_PAUSE_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows by dataset, and for each incarnation in them the last seq they contain.

    Rows of an incarnation must hold *everything* of it up to that seq that was not appended before.
    """

    tables: Mapping[str, pa.Table]
    watermarks: Mapping[str, int]
    info: Mapping[str, str] = field(default_factory=dict)  # part of its commit in the log: see `Writer.commit_info`


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What an append stored. `version` shows it; `rows` counts what was new."""

    version: int
    rows: Mapping[str, int]
    files: int
    seconds: float


class Writer:
    """The owner of one shard, until it closes or a newer claim takes over. Calls from several threads take turns."""

    def __init__(
        self,
        log: Log,
        *,
        shard: str,
        owner: str,
        number: int,
        lock: ShardLock,
        sync: Sync,
        mantissa_bits: int | None = None,
    ) -> None:
        self._log = log
        self._mantissa_bits = mantissa_bits
        self._shard = shard
        self._owner = owner
        self._number = number
        self._lock = lock
        self._sync = sync
        self._checkpoints = Checkpointer(log.root, sync)
        self._turn = threading.Lock()
        self._watermarks: dict[str, int] = {}
        self._seen_version = log.version
        self._unsettled: _PendingCommit | None = None  # commit without an answer
        self._committed: dict[
            int, _PendingCommit
        ] = {}  # such commits, found in the log afterwards, by the id of their batch

    @property
    def shard(self) -> str:
        """Return the shard, as in 0/1."""
        return self._shard

    def append(self, batch: Batch) -> Commit:
        """Store what is new in `batch`; durable on return.

        Raises ShardLostError when a newer claim exists (stop: nothing more can be stored here), BatchError for rows
        that do not fit, and StoreError when the disk or the log fail: then the same batch may be appended again.
        """
        started = time.monotonic()
        tables = {name: conform(table, name) for name, table in batch.tables.items()}
        for name, table in tables.items():
            check_covered(table, name, batch.watermarks)
        with self._turn:
            pause = _FIRST_PAUSE_SECONDS
            for _ in range(_RETRIES):
                self._refresh()
                if (committed := self._committed.pop(id(batch), None)) is not None:
                    return _stored(committed, self._log.version, started)
                try:
                    return self._append(batch, tables, started)
                except ConflictError as error:
                    _logger.info("append refused, trying again", extra={"shard": self._shard, "reason": str(error)})
                time.sleep(pause)
                pause *= 2
        raise StoreError(f"append to {self._log.root} was refused {_RETRIES} times: is its schema being changed?")

    def watermark(self, incarnation: str) -> int:
        """Return the last seq stored of `incarnation`, -1 when it is unknown."""
        with self._turn:
            self._refresh()
            return self._known_watermark(incarnation)

    def commit_info(self, key: str, commits: int) -> list[str]:
        """Return what batches said under `key` of their `info`, in the newest `commits` entries that the log has."""
        with self._turn:
            self._refresh()
            return [str(entry[key]) for entry in self._log.history(commits) if key in entry]

    def compact(self) -> CompactionReport:
        """Merge small files where there are many; appends go on meanwhile, rows stay the same."""
        return compact(self._log.root, self._sync)

    def maintain(self) -> MaintenanceReport:
        """Write a checkpoint and remove what nobody needs any more: old log entries, replaced files, leavings."""
        return maintain(self._log.root, self._sync)

    def close(self) -> None:
        """Give the shard up, so that another process on this machine can claim it; idempotent."""
        self._checkpoints.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refresh(self) -> None:
        """Refresh the handle and the watermarks, and make sure that the shard is still ours."""
        self._log.refresh()
        self._resolve_unknown_commit()
        if self._log.version == self._seen_version:
            return
        moved = self._log.changed_transactions(self._seen_version)
        if self._shard_number(moved) != self._number:
            raise ShardLostError(
                f"shard {self._shard} of {self._log.root} was taken over by {current_owner(self._log, self._shard)}: "
                "this service must stop"
            )
        self._log.fsync_to_version()  # another shard may have stored what we are about to acknowledge, and been killed
        if moved is None:
            self._watermarks.clear()
        else:
            self._watermarks.update(watermarks_of(moved))
        self._seen_version = self._log.version

    def _shard_number(self, moved: Mapping[str, int] | None) -> int | None:
        """Return where the shard stands: what just moved says it for less than the whole log, as far as it is known."""
        name = shard_transaction(self._shard)
        return self._log.transaction(name) if moved is None else moved.get(name, self._number)

    def _resolve_unknown_commit(self) -> None:
        """Find out what became of a commit that failed without an answer: it may have been stored all the same."""
        attempt = self._unsettled
        if attempt is None:
            return
        is_stored = self._log.was_committed(self._seen_version, attempt.change)
        if is_stored is None:  # hours went by, and the entry with them
            is_stored = (
                self._log.snapshot().contains([file.path for file in attempt.change.added]) and self._moved_once()
            )
        if is_stored:
            self._log.make_durable()
            self._apply_commit(attempt)
            self._committed[id(attempt.batch)] = attempt  # kept until it comes again: others may append meanwhile
        self._unsettled = None

    def _moved_once(self) -> bool:
        return self._log.transaction(shard_transaction(self._shard)) == self._number + 1

    def _append(self, batch: Batch, tables: Mapping[str, pa.Table], started: float) -> Commit:
        concerned = {*batch.watermarks, *incarnations(tables)}
        known = {incarnation: self._known_watermark(incarnation) for incarnation in concerned}
        fresh = {name: newer(table, known) for name, table in tables.items()}
        forward = {incarnation: seq for incarnation, seq in batch.watermarks.items() if seq > known[incarnation]}
        rows = {name: table.num_rows for name, table in fresh.items() if table.num_rows}
        change = self._change(batch, self._write(fresh), forward)
        attempt = _PendingCommit(batch=batch, change=change, watermarks=forward, rows=rows)
        version = self._commit(attempt) if rows or forward else self._log.version
        return _stored(attempt, version, started)

    def _write(self, tables: Mapping[str, pa.Table]) -> list[DataFile]:
        today = dt.datetime.now(dt.UTC).date()
        files: list[DataFile] = []
        try:
            for dataset, table in tables.items():
                if table.num_rows:
                    kept, bits = rounded(table, dataset, self._mantissa_bits)
                    for part, rows in parts(kept, dataset, today):
                        files.append(write_file(self._log.root, dataset, part, rows, self._sync, mantissa_bits=bits))
        except OSError as error:
            discard(self._log.root, files)
            raise StoreError(f"cannot write to {self._log.root}: {error.strerror or error}") from error
        except pa.ArrowMemoryError as error:  # which says nothing of the rows
            discard(self._log.root, files)
            raise StoreError(f"no memory to write to {self._log.root}: {error}") from error
        except pa.ArrowException as error:
            discard(self._log.root, files)
            raise BatchError(f"rows cannot be written as Parquet: {error}") from error
        return files

    def _change(self, batch: Batch, files: Sequence[DataFile], forward: Mapping[str, int]) -> Change:
        transactions = {shard_transaction(self._shard): self._number + 1}
        transactions |= {watermark_transaction(incarnation): seq for incarnation, seq in forward.items()}
        return Change(
            added=files, transactions=transactions, info={**batch.info, **owner_info(self._shard, self._owner)}
        )

    def _commit(self, attempt: _PendingCommit) -> int:
        self._unsettled = attempt
        try:
            version = self._log.commit(attempt.change)
        except ConflictError:
            self._unsettled = None
            discard(self._log.root, attempt.change.added)
            raise
        self._unsettled = None
        self._apply_commit(attempt)
        self._checkpoints.after_commit(version)
        return version

    def _apply_commit(self, attempt: _PendingCommit) -> None:
        self._number += 1
        self._watermarks.update(attempt.watermarks)

    def _known_watermark(self, incarnation: str) -> int:
        if incarnation not in self._watermarks:
            stored = self._log.transaction(watermark_transaction(incarnation))
            self._watermarks[incarnation] = NOTHING if stored is None else stored
        return self._watermarks[incarnation]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingCommit:
    """One commit on its way."""

    batch: Batch
    change: Change
    watermarks: Mapping[str, int]
    rows: Mapping[str, int]


def _stored(attempt: _PendingCommit, version: int, started: float) -> Commit:
    seconds = time.monotonic() - started
    return Commit(version=version, rows=attempt.rows, files=len(attempt.change.added), seconds=seconds)
