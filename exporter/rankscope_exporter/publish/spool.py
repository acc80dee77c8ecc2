"""Writes each published record to the spool folder, so that a killed process loses no published record.

Each record is one write, without waiting for the storage device: data of a killed process remains in the page cache and
is lost only if the machine loses power. After a disk error the record is still served from the ring, and it is counted
as not spooled.

An unresponsive disk blocks the thread that writes the spool, and the publisher only briefly. The publisher waits for
each record to be on disk before readers can get it, for at most WRITE_SECONDS (0.5 s). After a timeout, records enter
the ring immediately until the disk responds again. Meanwhile a limited backlog waits for the disk, and further records
are counted as not spooled. No method of `SpoolWriter` raises a disk error into the server. Such an error is counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import pyarrow as pa

from rankscope_contract.wire import spool as files
from rankscope_contract.wire.channel import NOTHING, Registration
from rankscope_contract.wire.spool import SpoolError, SpoolReader, SpoolRecords, take_lock
from rankscope_exporter.process.threads import CpuMeter, OwnThread, no_fork
from rankscope_exporter.publish.ring import OPTIONAL, EncodedRecord, schema_of, stream
from rankscope_exporter.publish.serving_config import ServeConfig
from rankscope_exporter.records.plan import NamedPlan

SEGMENT_BYTES: Final = 8 * 1024 * 1024
SEGMENT_INFLATED_BYTES: Final = 64 * 1024 * 1024
"""Maximum size in bytes of a spool file before compression.

A reader decompresses a whole file, and zeros compress well, so a limit on the bytes on disk would not limit the memory
of the files.
"""

KEPT_COLUMNS: Final = 256
"""Number of records for which a column without values remains in the files. A file has the same columns throughout.

Without it, a dataset with rows in every second record would begin a new file with each record.
"""

_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)

FULL: Final = "spool_full"
FAILED: Final = "spool_error"
BEHIND: Final = "spool_behind"


@dataclass(slots=True)
class _Segment:
    path: Path
    first: int
    last: int
    bytes: int = 0
    inflated: int = 0


class Spool:
    """The spool of this process: files with published records.

    One thread calls the methods that write. Any thread may call the methods that read. No lock is held during a disk
    operation, which may block for minutes, so `holds` never waits for the disk.
    """

    def __init__(
        self, root: str, incarnation: str, *, max_bytes: int, sync: bool = False, service: str | None = None
    ) -> None:
        """`service` is the `service_name` of the only service that may read the spool after a crash.

        With None, any service may read it.
        """
        self.folder = Path(root) / incarnation
        self.dropped = {FULL: 0, FAILED: 0, BEHIND: 0}
        self._max_bytes = max_bytes
        self._segment_bytes = max(1, min(SEGMENT_BYTES, max_bytes // 8))
        self._sync = sync
        self._service = service
        self._changed = threading.Lock()  # protects the fields that other threads read or count
        self._segments: deque[_Segment] = deque()  # while `_file` is open, it is the file of the last segment
        self._bytes = 0
        self._committed = NOTHING
        self._plans: set[str] = set()
        self._columns: frozenset[str] = frozenset()  # columns of the open file
        self._used: dict[str, int] = {}  # the last sequence number with a value, by column
        self._file = -1
        self._lock: BinaryIO | None = None
        self._reader = SpoolReader(self.folder, pa, needed_plans)

    def open(self, registration: Registration) -> None:
        """Create the spool folder. Raises OSError or SpoolError if that fails.

        The folder gets its final name after it is locked and contains the identity file.
        """
        unfinished = self.folder.with_name(files.UNFINISHED_PREFIX + self.folder.name)
        unfinished.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # With `parents`, because another process of the host may remove the empty spool folder at its end.
        unfinished.mkdir(parents=True, mode=0o700)
        (unfinished / files.LOCK_NAME).touch(mode=0o600, exist_ok=False)
        lock = take_lock(unfinished)
        if lock is None:
            raise SpoolError(f"{unfinished}: the new lock file is already locked: another process uses this folder")
        try:
            files.write_identity(unfinished, registration, service=self._service, sync=self._sync)
            unfinished.rename(self.folder)
            if self._sync:
                files.sync_folder(self.folder.parent)
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    @property
    def records(self) -> int:
        """Return the number of records on disk, including committed records in files that also have later records."""
        with self._changed:
            return sum(segment.last + 1 - segment.first for segment in self._segments)

    @property
    def is_open(self) -> bool:
        """Return whether the spool folder was created and is locked by this process, so that records can be written."""
        return self._lock is not None

    def append(self, seq: int, record: EncodedRecord) -> None:
        """Write a record to the spool.

        A record that cannot be written is counted in `dropped`, by reason. Raises OSError if the disk fails; the file
        is then truncated to its complete records.
        """
        if self._lock is None:  # the folder could not be opened, which was reported
            self.drop(FAILED)
            return
        is_written = False
        try:
            is_written = self._append(seq, record)
        except BaseException:
            self.drop(FAILED)
            raise
        finally:
            if not is_written:
                self._close_file()  # the next record begins a new file: within a file no sequence number is missing

    def drop(self, reason: str) -> None:
        """Count a record that is not written to the spool in `dropped`. Any thread may call this method."""
        with self._changed:
            self.dropped[reason] += 1

    def commit(self, seq: int) -> None:
        """Mark records up to `seq` as committed, and delete the files that contain only committed records.

        Raises OSError.
        """
        with self._changed:
            self._committed = max(self._committed, seq)
            done = []
            while self._segments and self._segments[0].last <= self._committed:
                if self._file >= 0 and len(self._segments) == 1:
                    break  # the only segment is open for writing
                done.append(self._remove_oldest())
        for segment in done:
            segment.path.unlink(missing_ok=True)

    def holds(self, seq: int) -> bool:
        """Return whether the record with the sequence number `seq` is on disk."""
        with self._changed:
            return any(segment.first <= seq <= segment.last for segment in self._segments)

    def after(self, cursor: int, max_bytes: int) -> SpoolRecords | None:
        """Return records above `cursor` as an Arrow IPC stream from disk; None if there are none. Raises OSError."""
        with self._changed:
            if not self._segments or self._segments[-1].last <= cursor:
                return None
        return self._reader.after(cursor, max_bytes)

    def plan(self, plan_hash: str) -> str | None:
        return self._reader.plan(plan_hash)

    def close(self) -> None:
        """Release the lock of the spool folder, and delete the folder if all its records are committed.

        Otherwise a service or another process on this host reads the remaining records.
        """
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            self._close_file()
            with self._changed:
                done = not self._segments or self._segments[-1].last <= self._committed
            if done:
                files.remove_folder(self.folder)
                if self.folder.parent.name == files.DEFAULT_SPOOL_DIR:
                    with contextlib.suppress(OSError):  # another process has records there
                        self.folder.parent.rmdir()
        finally:
            lock.close()

    def abandon(self) -> None:
        """Close the inherited files in a forked child and change nothing on disk. The parent keeps the lock."""
        lock, self._lock = self._lock, None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if lock is not None:
            lock.close()

    def _append(self, seq: int, record: EncodedRecord) -> bool:
        statistics = record.record.statistics
        if statistics is not None and statistics.plan.hash not in self._plans:
            self._write_plan(statistics.plan)
        self._used.update(dict.fromkeys(OPTIONAL.intersection(record.columns), seq))
        for name, last in tuple(self._used.items()):
            if seq - last >= KEPT_COLUMNS:
                del self._used[name]
        if self._used.keys() != self._columns:
            self._close_file()
            self._columns = frozenset(self._used)
        schema = schema_message(self._columns)
        message = memoryview(stream(seq, [record], self._columns))[len(schema) : -len(files.END_OF_STREAM)]
        if not self._make_room(len(schema) + len(message)):
            self.drop(FULL)
            return False
        segment = self._segment(seq, len(message), record.size)
        self._write(segment, message)
        with self._changed:
            segment.last = seq
        return True

    def _write_plan(self, plan: NamedPlan) -> None:
        files.write_whole(self.folder / files.plan_name(plan.hash), plan.json, sync=self._sync)
        if self._sync:
            files.sync_folder(self.folder)
        self._plans.add(plan.hash)

    def _make_room(self, size: int) -> bool:
        """Delete the oldest files until `size` more bytes fit into the spool.

        The newest records are kept, because they explain a crash.
        """
        if size > self._max_bytes:
            return False
        while self._bytes + size > self._max_bytes and self._segments:
            if len(self._segments) == 1:
                self._close_file()
            with self._changed:
                if not self._segments:  # committed since the check above
                    break
                oldest = self._remove_oldest()
                self.dropped[FULL] += max(0, oldest.last - max(oldest.first - 1, self._committed))
            oldest.path.unlink(missing_ok=True)
        return True

    def _segment(self, seq: int, size: int, inflated: int) -> _Segment:
        """Return the file for the record with the sequence number `seq`.

        A new file begins if the current one is full or closed, or does not end with the previous sequence number.
        """
        if self._file >= 0:
            segment = self._segments[-1]
            fits = segment.last + 1 == seq and segment.bytes + size <= self._segment_bytes
            if fits and segment.inflated + inflated <= SEGMENT_INFLATED_BYTES:
                segment.inflated += inflated
                return segment
            self._close_file()
        path = self.folder / files.segment_name(seq)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        segment = _Segment(path, first=seq, last=seq - 1, inflated=inflated)
        with self._changed:
            self._segments.append(segment)
        self._write(segment, memoryview(schema_message(self._columns)))
        if self._sync:
            files.sync_folder(self.folder)
        return segment

    def _write(self, segment: _Segment, data: memoryview) -> None:
        """Append all of `data` to the open spool file; if the disk is full, append nothing and raise OSError."""
        written = 0
        if not os.fstat(self._file).st_nlink:
            raise FileNotFoundError("the folder was removed")
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
            if self._sync:
                os.fdatasync(self._file)
        except BaseException:
            os.ftruncate(self._file, segment.bytes)
            raise
        segment.bytes += len(data)
        with self._changed:
            self._bytes += len(data)

    def _close_file(self) -> None:
        descriptor, self._file = self._file, -1
        if descriptor < 0:
            return
        os.close(descriptor)
        empty = None
        with self._changed:
            if self._segments and self._segments[-1].last < self._segments[-1].first:
                empty = self._segments.pop()
                self._bytes -= empty.bytes
        if empty is not None:
            empty.path.unlink(missing_ok=True)

    def _remove_oldest(self) -> _Segment:
        segment = self._segments.popleft()
        self._bytes -= segment.bytes
        return segment


@lru_cache
def schema_message(columns: frozenset[str]) -> bytes:
    """Return the Arrow schema message with which a file of records that has `columns` begins."""
    message: bytes = schema_of(columns).serialize().to_pybytes()
    return message


@no_fork()
def needed_plans(stream: bytes) -> list[str] | None:
    """Return the hashes of the plans that the records of `stream` use; None if Arrow cannot read the whole stream."""
    try:
        with pa.ipc.open_stream(stream, options=_OPTIONS) as opened:
            table = opened.read_all()
        table.validate(full=True)
        return [plan for plan in table["plan"].unique().to_pylist() if plan is not None]
    except (pa.ArrowException, ArithmeticError, LookupError, OSError, ValueError):
        return None


T = TypeVar("T")

log = logging.getLogger(__name__)

WRITE_SECONDS: Final = 0.5
"""Maximum seconds for which the publisher waits until a record is written to the spool.

Afterwards readers get the record from the ring, although it may not be on disk.
"""

CLOSE_SECONDS: Final = 2.0
"""Maximum seconds for which the end of training waits for the disk."""

STALL_SECONDS: Final = 5.0
"""Time in seconds without a written record after which `flush` no longer waits for the disk."""

BACKLOG_RECORDS: Final = 64
BACKLOG_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of the backlog of records that wait for an unresponsive disk.

It is large enough for a pause of some seconds, and small enough that a pause of minutes does not exhaust the memory.
"""


@dataclass(eq=False)
class SpoolWriter:
    """The spool of a rank. A daemon thread, which starts with the first record, writes it.

    One thread at a time calls `write`; any thread may call the other methods.
    """

    files: Spool
    describe: Callable[[], Registration]
    on_fault: Callable[[str, BaseException], None]
    meter: CpuMeter

    def __post_init__(self) -> None:
        self.root = str(self.files.folder.parent)
        """Path of the folder with the spools of all ranks."""
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, EncodedRecord]] = deque()  # the first entry is being written
        self._bytes = 0
        self._handled = NOTHING  # all records up to this one were written or have failed
        self._committed = self._deleted_to = NOTHING
        self._skipped: int | None = None  # records skipped since the disk stopped responding; None while it responds
        self._slow_level = logging.WARNING
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def folder(self) -> str | None:
        """The folder that has all uncommitted records after the process exits; None if some of them may be missing."""
        is_complete = self.files.is_open and self._skipped is None
        return str(self.files.folder) if is_complete else None

    def write(self, seq: int, record: EncodedRecord) -> None:
        """Write a record to the spool, before it enters the ring.

        Return when the record is on disk, or after WRITE_SECONDS (0.5 s). Return immediately if the disk does not
        respond.
        """
        if self._thread is None and not self._closing:
            self._start()
        with self._changed:
            if self._closing:
                self.files.drop(FAILED)
                return
            has_room = len(self._waiting) < BACKLOG_RECORDS and self._bytes + record.size <= BACKLOG_BYTES
            if self._skipped is not None and not has_room:
                self.files.drop(BEHIND)
                self._skipped += 1
                return
            self._waiting.append((seq, record))
            self._bytes += record.size
            self._changed.notify_all()
            if self._skipped is not None:
                return
            if self._changed.wait_for(lambda: self._handled >= seq, WRITE_SECONDS):
                return
            self._skipped = 0
        level, self._slow_level = self._slow_level, logging.DEBUG  # a busy disk is slow again and again
        text = "the disk of %s is slow: a record was not written after %g s; until it is, records are only in memory"
        log.log(level, text, self.files.folder, WRITE_SECONDS)

    def commit(self, seq: int) -> None:
        """Mark all records up to `seq` as committed by a store; the spool thread then deletes their files."""
        with self._changed:
            self._committed = max(self._committed, seq)
            self._changed.notify_all()

    @property
    def unwritten(self) -> int:
        """The number of records that are not on disk, although they were published."""
        return len(self._waiting) + sum(self.files.dropped.values())

    def after(self, cursor: int, max_bytes: int, first_in_ring: int) -> SpoolRecords | None:
        """Return records above `cursor` on disk and no longer in the ring; None if there are none or the disk fails."""
        if cursor + 1 >= first_in_ring:
            return None
        records = self._do(self.files.after, cursor, max_bytes)
        return records if records is not None and records.first < first_in_ring else None

    def plan(self, plan_hash: str) -> str | None:
        return self.files.plan(plan_hash)

    def flush(self, timeout_seconds: float) -> None:
        """Wait until the backlog is on disk, at most `timeout_seconds`.

        Return earlier if the disk has written no record for STALL_SECONDS (5 s).
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._waiting and (left := deadline - time.monotonic()) > 0:
                handled = self._handled
                if not self._changed.wait_for(lambda: self._handled != handled, min(left, STALL_SECONDS)):  # noqa: B023 - called at once
                    break

    def close(self) -> None:
        """Write the backlog and close the spool; wait for the disk at most CLOSE_SECONDS (2 s).

        Afterwards only the last record of the backlog is written, which is the exit report of the rank. The others
        count as not spooled.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(CLOSE_SECONDS)
        with self._changed:
            while len(self._waiting) > 2:  # the one that is being written, and the last
                del self._waiting[1]
                self.files.drop(BEHIND)
        self._thread.join(CLOSE_SECONDS)

    def abandon(self) -> None:
        self.files.abandon()

    def _start(self) -> None:
        thread = OwnThread(target=self._run, name="rankscope-spool-writer", on_fault=self.on_fault)
        self._do(thread.start)
        if thread.is_alive():
            self._thread = thread
        else:  # no thread can be started, for example while the interpreter exits
            self._closing = True

    def _run(self) -> None:
        # If the folder cannot be used, only the spool is missing; each record that is not spooled is counted.
        self._do(lambda: self.files.open(self.describe()))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing or self._committed > self._deleted_to)
                committed = self._committed
                entry = self._waiting[0] if self._waiting else None
            if committed > self._deleted_to:
                self._deleted_to = committed
                self._do(self.files.commit, committed)
            if entry is not None:
                self._write(*entry)
            elif self._closing:
                break
            self.meter.lap("spool")
        self._do(self.files.close)

    def _write(self, seq: int, record: EncodedRecord) -> None:
        self._do(self.files.append, seq, record)
        skipped = None
        with self._changed:
            self._waiting.popleft()
            self._bytes -= record.size
            self._handled = seq
            if not self._waiting:
                skipped, self._skipped = self._skipped, None
            self._changed.notify_all()
        if skipped is not None:
            level = logging.WARNING if skipped else logging.INFO
            log.log(level, "the disk of %s responds again: %d records were not spooled", self.files.folder, skipped)

    def _do(self, work: Callable[..., T], *args: object) -> T | None:
        """Return `work(*args)`, or report its error and return None: the ring has the record."""
        try:
            return work(*args)
        except Exception as error:  # noqa: BLE001 - errors of the disk and of the encoding
            if isinstance(error, OSError):
                reason = f"{self.files.folder}: {error.strerror or error}; a service still gets them"
                remedy = "set RANKSCOPE_SPOOL_DIR to a writable folder with space on a local disk, or to off"
                error = SpoolError(f"records cannot be written to {reason}; {remedy}")
            self.on_fault("spool", error)
            return None


def spool_of(
    config: ServeConfig,
    incarnation: str,
    describe: Callable[[], Registration],
    *,
    on_fault: Callable[[str, BaseException], None],
    meter: CpuMeter,
) -> SpoolWriter | None:
    """Return the spool in the folder `spool_dir` of `config`; None without one: the rank then writes nothing to disk.

    A relative folder belongs to the present working directory, although the script may change it later. If this
    directory was removed or cannot be read, the rank writes nothing to disk, and logs a warning.
    """
    if config.spool_dir is None:
        return None
    try:
        root = str(Path(config.spool_dir).absolute())
    except OSError:
        remedy = "set RANKSCOPE_SPOOL_DIR to the full path of a folder"
        why = "because the working directory was removed or cannot be read"
        log.warning("records are not written to disk, %s: %s", why, remedy)
        return None
    service = None if config.ingest_url is None else files.service_name(config.ingest_url)
    spool = Spool(root, incarnation, max_bytes=config.spool_bytes, sync=config.spool_sync, service=service)
    return SpoolWriter(spool, describe, on_fault=on_fault, meter=meter)
