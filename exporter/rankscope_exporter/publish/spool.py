"""Writes each published record to the spool folder, so that a killed process loses no published record.

Each record is one write, without waiting for the storage device: data of a killed process remains in the page cache and
is lost only if the machine loses power. After a disk error the record is still served from the ring, and it is counted
as not spooled.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import pyarrow as pa

from rankscope_contract.wire.channel import NOTHING, Registration
from rankscope_contract.wire.spool import FolderLock, SpoolReader, SpoolRecords
from rankscope_contract.wire.spool.orphan import remove_folder
from rankscope_contract.wire.spool.reader import (
    DEFAULT_SPOOL_DIR,
    END_OF_STREAM,
    UNFINISHED_PREFIX,
    plan_name,
    segment_name,
    sync_folder,
    write_identity,
    write_whole,
)
from rankscope_exporter.process.threads import no_fork
from rankscope_exporter.publish.wire_encoder import OPTIONAL, EncodedRecord, schema_of, stream
from rankscope_exporter.records.plan import NamedPlan

SEGMENT_BYTES: Final = 8 * 1024 * 1024
SEGMENT_INFLATED_BYTES: Final = 64 * 1024 * 1024
"""Maximum size in bytes of a spool file before compression.

A reader decompresses a whole file, and zeros compress well, so a limit on the bytes on disk would not limit the memory
of the reader.
"""

KEPT_COLUMNS: Final = 256
"""Number of records for which a column without values remains in the files. A file has the same columns throughout.

Without it, a dataset with rows in every second record would begin a new file with each record.
"""

_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)

FULL: Final = "spool_full"
FAILED: Final = "spool_error"


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
        self.dropped = {FULL: 0, FAILED: 0}
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
        self._lock: FolderLock | None = None
        self._reader = SpoolReader(self.folder, needed_plans)

    def open(self, registration: Registration) -> None:
        """Create the spool folder. Raises OSError or SpoolError if that fails.

        The folder gets its final name after it is locked and contains the identity file.
        """
        unfinished = self.folder.with_name(UNFINISHED_PREFIX + self.folder.name)
        _make_folder(unfinished)
        lock = FolderLock.create(unfinished)
        try:
            write_identity(unfinished, registration, service=self._service, sync=self._sync)
            unfinished.rename(self.folder)
            if self._sync:
                sync_folder(self.folder.parent)
        except BaseException:
            lock.release()
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
        is_written = False
        try:
            is_written = self._append(seq, record)
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
                remove_folder(self.folder)
                if self.folder.parent.name == DEFAULT_SPOOL_DIR:
                    with contextlib.suppress(OSError):  # another process has records there
                        self.folder.parent.rmdir()
        finally:
            lock.release()

    def abandon(self) -> None:
        """Close the inherited files in a forked child and change nothing on disk. The parent keeps the lock."""
        lock, self._lock = self._lock, None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if lock is not None:
            lock.forget()

    def _append(self, seq: int, record: EncodedRecord) -> bool:
        if self._lock is None:  # the folder could not be opened, which was reported
            self.drop(FAILED)
            return False
        try:
            if record.record.statistics is not None:
                self._write_plan(record.record.statistics.plan)
            self._used.update(dict.fromkeys(OPTIONAL.intersection(record.columns), seq))
            columns = frozenset(name for name, last in self._used.items() if seq - last < KEPT_COLUMNS)
            if columns != self._columns:
                self._close_file()
                self._columns = columns
            schema = schema_message(columns)
            message = memoryview(stream(seq, [record], columns))[len(schema) : -len(END_OF_STREAM)]
            if not self._make_room(len(schema) + len(message)):
                self.drop(FULL)
                return False
            segment = self._segment(seq, len(message), record.size)
            self._write(segment, message)
        except BaseException:
            self.drop(FAILED)
            raise
        with self._changed:
            segment.last = seq
        return True

    def _write_plan(self, plan: NamedPlan) -> None:
        if plan.hash not in self._plans:
            write_whole(self.folder / plan_name(plan.hash), plan.json, sync=self._sync)
            if self._sync:
                sync_folder(self.folder)
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
        path = self.folder / segment_name(seq)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        segment = _Segment(path, first=seq, last=seq - 1, inflated=inflated)
        with self._changed:
            self._segments.append(segment)
        self._write(segment, memoryview(schema_message(self._columns)))
        if self._sync:
            sync_folder(self.folder)
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


def _make_folder(path: Path) -> None:
    """Create a folder in a spool folder, which is created too. Raises OSError."""
    for is_last in (False, True):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            path.mkdir(mode=0o700)
        except FileNotFoundError:  # another process of the host removed the empty spool folder at its end
            if is_last:
                raise
        else:
            return


@lru_cache
def schema_message(columns: frozenset[str]) -> bytes:
    """Return the Arrow schema message with which a file of records that has `columns` begins."""
    message: bytes = schema_of(columns).serialize().to_pybytes()
    return message


@no_fork()
def needed_plans(stream: bytes) -> list[str] | None:
    """Return the hashes of the plans that the records of `stream` use; None if Arrow cannot read the whole stream."""
    try:
        with pa.ipc.open_stream(stream, options=_OPTIONS) as reader:
            table = reader.read_all()
        table.validate(full=True)
        return [plan for plan in table["plan"].unique().to_pylist() if plan is not None]
    except (pa.ArrowException, ArithmeticError, LookupError, OSError, ValueError):
        return None
