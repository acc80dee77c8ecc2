"""Append rows to one shard, exactly once.

Transaction numbers in the Delta log ensure this. `ingest:<shard>` increases by 1 with every claim and every append, so
that the append of one of two concurrent owners is refused. `w:<incarnation>` is the last stored record number (seq) of
an exporter process. Rows at or below this seq are dropped, so that a restarted service can read records again. Both
numbers change in the commit that adds the rows.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.wire.channel import NOTHING
from rankscope_storage.base.errors import BatchError, ConflictError, RepeatedError, ShardLostError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.base.schema import conform
from rankscope_storage.base.shards import Shard
from rankscope_storage.files.encoding import DataFile, discard, rounded, write_file
from rankscope_storage.files.sorting import parts
from rankscope_storage.log.delta import CHECKPOINT_COMMITS, Change, Log
from rankscope_storage.log.entries import newest_checkpoint, watermark_transaction, watermarks_of
from rankscope_storage.log.services import ADDRESS, MAINTENANCE, SERVICES, Membership, Services
from rankscope_storage.log.shard_lock import HISTORY, ShardLock, current_owner, owner_info, shard_transaction
from rankscope_storage.maintenance.compaction import CompactionReport, compact
from rankscope_storage.maintenance.vacuum import MaintenanceReport, maintain


def incarnations(tables: Mapping[str, pa.Table]) -> set[str]:
    """Return the incarnations of all rows of `tables`. The result may also contain incarnations without rows."""
    return set().union(*(_distinct(table.column("incarnation")) for table in tables.values()))


def _distinct(column: pa.ChunkedArray) -> set[str]:
    if pa.types.is_dictionary(column.type):  # may include incarnations without rows
        values = {value for chunk in column.chunks for value in chunk.dictionary.to_pylist()}
    elif column.null_count == len(column):  # rows of exporters, by the hundred thousand
        return set()
    else:
        values = set(column.unique().to_pylist())
    return values - {None}


def newer(table: pa.Table, stored: Mapping[str, int]) -> pa.Table:
    """Return the rows with a seq above the watermark of their incarnation, and all rows without incarnation or seq.

    `stored` has the watermark of each incarnation.
    """
    if not table.num_rows or set(stored.values()) <= {NOTHING}:
        return table
    lowest = pc.min(table.column("seq")).as_py()
    if lowest is None or lowest > max(stored.values()):
        return table
    old = _numbered(table, stored, pc.less_equal)
    return table.filter(pc.invert(old)) if pc.any(old).as_py() else table


def check_covered(table: pa.Table, dataset: str, watermarks: Mapping[str, int]) -> None:
    """Raise BatchError if rows have a seq above the watermark that the batch declares for their incarnation.

    Such rows would be stored twice if the batch were sent again.
    """
    highest, owners = pc.max(table.column("seq")).as_py(), table.column("incarnation")
    if highest is None:
        return
    is_below_all = highest <= min(watermarks.values(), default=NOTHING) and pa.types.is_dictionary(owners.type)
    if is_below_all and watermarks.keys() >= _distinct(owners):
        return  # no row can be above its watermark: the rows need not be compared
    beyond = pc.sum(_numbered(table, watermarks, pc.greater)).as_py()
    if beyond:
        raise BatchError(
            f"{dataset} has {beyond} rows with a seq above the batch's watermark of their incarnation "
            f"({dict(watermarks)}): the watermark is the last seq that the batch contains"
        )


def _numbered(table: pa.Table, limits: Mapping[str, int], compare: Callable[[Any, Any], Any]) -> pa.BooleanArray:
    """Return a mask of the rows for which `compare` returns true.

    `compare` gets the seq of a row and the limit of its incarnation, which is in `limits`. The mask is False for rows
    without seq or incarnation.
    """
    column = table.column("incarnation")
    if column.null_count == len(column):
        return pa.array(np.zeros(len(column), np.bool_))
    encoded = column.combine_chunks()
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
    by_code = np.array([limits.get(text, NOTHING) for text in encoded.dictionary.to_pylist()] or [NOTHING], np.int64)
    codes = pc.fill_null(encoded.indices, 0).to_numpy(zero_copy_only=False)
    holds = pc.and_kleene(compare(table.column("seq"), pa.array(by_code[codes])), encoded.is_valid())
    return pc.fill_null(holds, fill_value=False)


def receipt_key(receipt: str) -> str:
    """Return the hash in a receipt, which may be followed by a number."""
    return receipt.partition(":")[0]


_logger = logging.getLogger(__name__)

RECEIPTS: Final = "rankscopeWritten"
"""Key in the `info` of a batch: the receipts (hashes of the bodies) of its requests of remote write.

Services that share a store commit a request once, also if its sender repeats it at another service."""
MAX_RECEIPTS: Final = 8_192

_RETRIES: Final = 6
_FIRST_PAUSE_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows by dataset, and a watermark for each of their incarnations.

    An incarnation is one exporter process; its watermark is the last record number (seq) in the batch. The rows of an
    incarnation must include *all* records up to its watermark that were not appended before. `info` becomes part of the
    commit information in the Delta log: see `Writer.commit_info`.
    """

    tables: Mapping[str, pa.Table]
    watermarks: Mapping[str, int]
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The result of an append: a version of the store with the batch, and the number of new rows by dataset."""

    version: int
    rows: Mapping[str, int]
    files: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PendingCommit:
    """One commit of a batch that is being written, or that failed without showing whether it was stored.

    If it is stored, its version is above `since`. A later version of another commit proves that it is not stored if
    that version is above `tried`.
    """

    batch: Batch
    change: Change
    watermarks: Mapping[str, int]
    rows: Mapping[str, int]
    since: int
    tried: int

    def result(self, version: int, started: float) -> Commit:
        seconds = time.monotonic() - started
        return Commit(version=version, rows=self.rows, files=len(self.change.added), seconds=seconds)


class Checkpointer:
    """Writer of checkpoints every CHECKPOINT_COMMITS commits, in a background thread. Not thread-safe.

    A delta-rs table handle keeps all entries of the Delta log since the checkpoint it was opened with. It reads them
    again at each refresh and each commit: 0.7 ms of CPU time per entry. Commits of all writers count towards the
    interval. Appends do not wait for a checkpoint. If a checkpoint is missing, the store is still correct, but slower.
    """

    def __init__(self, root: Location, sync: Sync, write: Callable[[Location, Sync], None] | None = None) -> None:
        self._root = root
        self._sync = sync
        self._write = write or write_checkpoint
        self._newest = newest_checkpoint(root)
        self._thread: threading.Thread | None = None

    def after_commit(self, version: int) -> None:
        """Start writing a checkpoint in a thread if CHECKPOINT_COMMITS commits were made since the last one.

        `version` is the newest version. After a failure, the next attempt is made CHECKPOINT_COMMITS commits later.
        """
        if version - self._newest < CHECKPOINT_COMMITS or (self._thread is not None and self._thread.is_alive()):
            return
        # The writer of another shard may have written one.
        self._newest = max(self._newest, newest_checkpoint(self._root))
        if version - self._newest >= CHECKPOINT_COMMITS:
            self._newest = version
            self._thread = threading.Thread(target=self._work, name="rankscope-checkpoint")
            self._thread.start()

    def close(self) -> None:
        """Wait until the checkpoint that is being written is complete. May be called repeatedly."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        try:
            self._write(self._root, self._sync)
        except StoreError as error:
            _logger.warning("cannot write a checkpoint, retrying after %d commits: %s", CHECKPOINT_COMMITS, error)
        except Exception:
            _logger.exception(
                "unexpected error in the checkpoint thread, retrying after %d commits", CHECKPOINT_COMMITS
            )


def write_checkpoint(root: Location, sync: Sync) -> None:
    """Write a checkpoint of the newest version of the store at `root`. The checkpoint is durable on return."""
    Log.open(root, sync).checkpoint()


class Writer(contextlib.AbstractContextManager["Writer"]):
    """The writer of `shard`, and its owner until the writer is closed or a newer claim takes the shard over.

    Thread-safe: calls are serialised.

    `number` is the shard's transaction number after the claim. `mantissa_bits` is the precision to which statistics are
    rounded; None keeps all bits.
    """

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
        is_service: bool = False,
    ) -> None:
        self.shard = shard
        self._log = log
        self._mantissa_bits = mantissa_bits
        self._info = owner_info(shard, owner) | ({ADDRESS: ""} if is_service else {})
        self._transaction = shard_transaction(shard)
        self._number = number
        self._lock = lock
        self._sync = sync
        self._checkpoints = Checkpointer(log.root, sync)
        self._turn = threading.Lock()
        self._watermarks: dict[str, int] = {}
        self._has_all_watermarks = False
        self._seen_version = log.version
        self._unknown: list[_PendingCommit] = []  # commits that failed without a result
        self._found: dict[int, _PendingCommit] = {}  # such commits that are in the log after all, by id of their batch
        self._service = Shard.parse(shard) if is_service else None
        self._receipts: dict[str, None] = {}  # of requests that a service of the store has stored, the oldest first
        self._services: Services | None = None  # of a store that several services share, or that has no locks
        if self._service is not None and (self._service.count > 1 or not lock.is_held):
            self._services = Services(self._service)
            self._maintainer = log.transaction(MAINTENANCE)  # a call takes several requests in a bucket
            self._see(reversed(log.history(HISTORY)))

    def append(self, batch: Batch) -> Commit:
        """Store the new rows of `batch`; durable on return.

        Raises ShardLostError if a newer claim exists. The service must stop after this error, because this writer can
        store nothing more. Raises BatchError for rows that do not fit the schema or the watermarks. Raises StoreError
        if the disk or the Delta log fails; the same batch may then be appended again.
        """
        started = time.monotonic()
        tables = {name: conform(table, name) for name, table in batch.tables.items()}
        for name, table in tables.items():
            check_covered(table, name, batch.watermarks)
        with self._turn:
            pause = _FIRST_PAUSE_SECONDS
            for _ in range(_RETRIES):
                self._refresh()
                if (committed := self._found.pop(id(batch), None)) is not None:
                    return committed.result(self._log.version, started)
                try:
                    unknown = next((pending for pending in self._unknown if pending.batch is batch), None)
                    if unknown is not None:  # its request may be under way: only the same commit is stored once
                        return unknown.result(self._commit(unknown), started)
                    return self._append(batch, tables, started)
                except ConflictError as error:
                    _logger.info(
                        "append to the store was refused, retrying", extra={"shard": self.shard, "reason": str(error)}
                    )
                time.sleep(pause)
                pause *= 2
        raise StoreError(
            f"append to {self._log.root} was refused {_RETRIES} times, because other processes changed the store: "
            "append the batch again later"
        )

    def watermark(self, incarnation: str, *, refresh: bool = True) -> int:
        """Return the last stored seq of `incarnation`, or -1 for an incarnation without stored rows.

        Without `refresh`, a commit of another process since the last refresh is not seen. This takes less time, and no
        row is stored twice because of it: `append` compares the rows with the newest watermarks.
        """
        with self._turn:
            if refresh:
                self._refresh_if_newer()
            return self._known_watermark(incarnation)

    def commit_info(self, key: str, commits: int) -> list[str]:
        """Return the values of `key` in the `info` of batches, from the newest `commits` entries of the Delta log."""
        with self._turn:
            self._refresh()
            return [str(entry[key]) for entry in self._log.history(commits) if key in entry]

    def compact(self) -> CompactionReport:
        """Merge small files of the store into larger ones. Rows do not change, and appends continue meanwhile."""
        return compact(self._log.root, self._sync)

    def maintain(self) -> MaintenanceReport:
        """Write a checkpoint; delete old Delta log entries, replaced files, and files that killed processes left."""
        return maintain(self._log.root, self._sync)

    def join(self, url: str) -> None:
        """Name the address of this service in all further commits. An import, which is no service, has none."""
        with self._turn:
            self._info |= {ADDRESS: url} if self._service is not None else {}

    @property
    def is_renewed(self) -> bool:
        """True for a service that commits while it is idle: it has no lock, or shares the store."""
        return self._services is not None

    def renew(self) -> Membership:
        """Return the services that share the store, after a commit with the address of this one if it is due.

        The commit also takes over the maintenance of the store, if the service that had it is dead. Raises
        ShardLostError if another service owns the shard.
        """
        with self._turn:
            self._refresh_if_newer()
            if self._services is None:
                return Membership(addresses={}, is_maintaining=True, version=self._log.version)
            number = self._services.next_maintainer(self._maintainer)
            if number is not None or self._services.must_renew(self._info[ADDRESS]):
                changes = {} if number is None else {MAINTENANCE: number}
                try:
                    self._append(Batch(tables={}, watermarks={}), {}, time.monotonic(), changes)
                    self._services.see([self._info])
                    self._maintainer = self._maintainer if number is None else number
                except ConflictError as error:
                    _logger.info("renewal of the service was refused, retrying", extra={"reason": str(error)})
            return Membership(
                addresses=self._services.addresses(),
                is_maintaining=self._services.maintains(self._maintainer),
                version=self._log.version,
            )

    def close(self) -> None:
        """Release the shard, so that another process on this machine can claim it. May be called repeatedly."""
        self._checkpoints.close()
        self._lock.release()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _refresh_if_newer(self) -> None:
        """Refresh if the log has a new entry; without one, this takes one request in a bucket."""
        if self._unknown or self._log.version != self._seen_version or not self._log.is_newest:
            self._refresh()

    def _refresh(self) -> None:
        """Refresh the handle on the Delta log and the watermarks.

        Raises ShardLostError if another service owns the shard.
        """
        self._log.refresh()
        self._resolve_unknown_commits()
        if self._log.version == self._seen_version:
            return
        moved = self._log.changed_transactions(self._seen_version)
        if moved is None:  # the entries are gone: read the numbers from the whole log, which takes longer
            number, services = self._log.transaction(self._transaction), self._log.transaction(SERVICES)
        else:
            number, services = moved.get(self._transaction, self._number), moved.get(SERVICES)
        if number != self._number:
            raise ShardLostError(
                f"shard {self.shard} of {self._log.root} was taken over by {current_owner(self._log, self.shard)}: "
                "this service must stop"
            )
        if self._service is not None and services not in {None, self._service.count}:
            raise ShardLostError(
                f"the services of {self._log.root} were started with N = {services}, and this one with "
                f"N = {self._service.count}: this service must stop"
            )
        if self._services is not None:
            numbers = {MAINTENANCE: self._log.transaction(MAINTENANCE)} if moved is None else moved
            self._maintainer = numbers.get(MAINTENANCE, self._maintainer)
            self._see(self._log.infos(self._seen_version))
        self._log.fsync_to_version()  # a killed writer of another shard may have stored rows that we acknowledge now
        if moved is None:
            self._watermarks.clear()
            self._has_all_watermarks = False
        else:
            self._watermarks.update(watermarks_of(moved))
        self._seen_version = self._log.version

    def _see(self, infos: Iterable[Mapping[str, Any]]) -> None:
        """Note the services and the receipts of commits, the oldest first, in a store that several services share."""
        assert self._services is not None
        commits = list(infos)
        self._services.see(commits)
        for info in commits:
            self._receipts |= dict.fromkeys(map(receipt_key, str(info.get(RECEIPTS, "")).split()))
        for old in list(self._receipts)[: max(0, len(self._receipts) - MAX_RECEIPTS)]:
            del self._receipts[old]

    def _check_receipts(self, batch: Batch) -> dict[str, int]:
        """Return the transaction that makes commits with receipts of two services conflict; empty without receipts.

        Raises RepeatedError if another commit has a receipt of `batch`.
        """
        receipts = batch.info.get(RECEIPTS, "").split()
        if self._services is None or not receipts:
            return {}
        if any(receipt_key(receipt) in self._receipts for receipt in receipts):
            raise RepeatedError("another service has stored a request of this batch")
        return {RECEIPTS: (self._log.transaction(RECEIPTS) or 0) + 1}

    def _resolve_unknown_commits(self) -> None:
        """Find out whether commits that failed without a result were stored after all."""
        for pending in tuple(self._unknown):
            is_stored = self._log.was_committed(pending.since, pending.change)
            if is_stored is None:  # hours later, its entry may have been cleaned up
                is_stored = bool(
                    pending.change.added
                    and self._log.snapshot().contains([file.path for file in pending.change.added])
                    and self._log.transaction(self._transaction) == self._number + 1
                )
            elif not is_stored and self._log.version <= pending.tried:
                continue  # its request may still be under way
            elif not is_stored:
                discard(self._log.root, pending.change.added)
            self._unknown.remove(pending)
            if is_stored:
                self._log.make_durable()
                self._apply_commit(pending)
                self._found[id(pending.batch)] = pending  # other batches may be appended before this one is retried

    def _append(
        self,
        batch: Batch,
        tables: Mapping[str, pa.Table],
        started: float,
        transactions: Mapping[str, int] | None = None,
    ) -> Commit:
        """Commit the new rows of `batch`. With `transactions`, commit them even if there are no new rows."""
        receipts = self._check_receipts(batch)
        concerned = {*batch.watermarks, *incarnations(tables)}
        known = {incarnation: self._known_watermark(incarnation) for incarnation in concerned}
        fresh = {name: newer(table, known) for name, table in tables.items()}
        forward = {incarnation: seq for incarnation, seq in batch.watermarks.items() if seq > known[incarnation]}
        change = Change(
            added=self._write(fresh),
            transactions={self._transaction: self._number + 1}
            | {watermark_transaction(incarnation): seq for incarnation, seq in forward.items()}
            | receipts
            | dict(transactions or {}),
            info={**batch.info, **self._info},
        )
        rows = {name: table.num_rows for name, table in fresh.items() if table.num_rows}
        since = self._log.version
        pending = _PendingCommit(batch=batch, change=change, watermarks=forward, rows=rows, since=since, tried=since)
        is_due = rows or forward or transactions is not None
        version = self._commit(pending) if is_due else self._log.version
        return pending.result(version, started)

    def _write(self, tables: Mapping[str, pa.Table]) -> list[DataFile]:
        root, today = self._log.root, dt.datetime.now(dt.UTC).date()
        files: list[DataFile] = []
        try:
            for dataset, table in tables.items():
                if table.num_rows:
                    kept, bits = rounded(table, dataset, self._mantissa_bits)
                    for part, rows in parts(kept, dataset, today):
                        files.append(write_file(root, dataset, part, rows, self._sync, mantissa_bits=bits))
        except (OSError, pa.ArrowException) as error:
            discard(root, files)
            if isinstance(error, pa.ArrowMemoryError):  # unrelated to the content of the rows
                raise StoreError(f"not enough memory to write to {root}: {error}") from error
            if isinstance(error, OSError):
                raise StoreError(f"cannot write to {root}: {error.strerror or error}") from error
            raise BatchError(f"rows cannot be written as Parquet: {error}") from error
        return files

    def _commit(self, pending: _PendingCommit) -> int:
        if pending in self._unknown:
            self._unknown.remove(pending)
        try:
            version = self._log.commit(pending.change)
        except ConflictError:  # any other error leaves open whether the files are part of a commit
            discard(self._log.root, pending.change.added)
            raise
        except BaseException:
            self._unknown.append(replace(pending, tried=self._log.version))
            raise
        self._apply_commit(pending)
        self._checkpoints.after_commit(version)
        return version

    def _apply_commit(self, pending: _PendingCommit) -> None:
        self._number += 1
        self._watermarks.update(pending.watermarks)

    def _known_watermark(self, incarnation: str) -> int:
        if incarnation not in self._watermarks and not self._has_all_watermarks:
            found = self._log.transactions()
            self._has_all_watermarks = found is not None
            self._watermarks = watermarks_of(found or {}) | self._watermarks  # it has commits that the handle lacks
        if incarnation not in self._watermarks and not self._has_all_watermarks:
            stored = self._log.transaction(watermark_transaction(incarnation))
            self._watermarks[incarnation] = NOTHING if stored is None else stored
        return self._watermarks.get(incarnation, NOTHING)
