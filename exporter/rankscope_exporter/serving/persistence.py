"""Records on disk: the thread that writes the spool of this rank, and the spools of dead processes that it serves.

An unresponsive disk blocks the spool thread, and the publisher only briefly. The publisher waits for each record to be
on disk before readers can get it, for at most WRITE_SECONDS (0.5 s). After a timeout, records enter the ring
immediately until the disk responds again. Meanwhile a limited backlog waits for the disk, and further records are
counted as not spooled. No method raises a disk error into the server. Such an error is counted, and the record is
served from the ring.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from rankscope_contract.protocol.channel import NOTHING, Registration
from rankscope_contract.spool import Orphan, SpoolError, Stretch
from rankscope_contract.spool.reader import service_name
from rankscope_exporter.process.threads import CpuMeter, OwnThread
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.serving.orphan_recovery import OrphanRecovery
from rankscope_exporter.serving.registration import ServiceClient
from rankscope_exporter.serving.spool import FAILED, Spool
from rankscope_exporter.serving.wire_encoder import EncodedRecord

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

BEHIND: Final = "spool_behind"


class SpoolWriter:
    """Writes to `spool` from a daemon thread that starts with the first record. One thread at a time calls `write`."""

    def __init__(
        self,
        spool: Spool,
        describe: Callable[[], Registration],
        *,
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
    ) -> None:
        self.behind = 0
        self._spool = spool
        self._describe = describe
        self._on_fault = on_fault
        self._meter = meter
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
    def is_hanging(self) -> bool:
        """Return whether the disk does not respond. The ring then serves records before they are on disk."""
        return self._skipped is not None

    def write(self, seq: int, record: EncodedRecord) -> None:
        """Write a record to the spool.

        Return when the record is on disk, or after WRITE_SECONDS (0.5 s). Return immediately if the disk does not
        respond.
        """
        if self._thread is None and not self._closing:
            self._start()
        with self._changed:
            if self._closing:
                self._spool.drop(FAILED)
                return
            has_room = len(self._waiting) < BACKLOG_RECORDS and self._bytes + record.size <= BACKLOG_BYTES
            if self._skipped is not None and not has_room:
                self.behind += 1
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
        log.log(level, text, self._spool.folder, WRITE_SECONDS)

    def commit(self, seq: int) -> None:
        """Mark all records up to `seq` as committed by a store; the spool thread then deletes their files."""
        with self._changed:
            self._committed = max(self._committed, seq)
            self._changed.notify_all()

    @property
    def unwritten(self) -> int:
        """Return the number of records that are not on disk, although they were published."""
        return self.behind + len(self._waiting)

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
                self.behind += 1
        self._thread.join(CLOSE_SECONDS)

    def _start(self) -> None:
        thread = OwnThread(target=self._run, name="rankscope-spool-writer", on_fault=self._on_fault)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started, for example while the interpreter exits
            self._closing = True
            self._on_fault("spool", error)
        else:
            self._thread = thread

    def _run(self) -> None:
        # If the folder cannot be used, only the spool is missing; each record that is not spooled is counted.
        self.do(lambda: self._spool.open(self._describe()))
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                committed = self._committed
                entry = self._waiting[0] if self._waiting else None
            if committed > self._deleted_to:
                self._deleted_to = committed
                self.do(self._spool.commit, committed)
            if entry is not None:
                self._write(*entry)
            elif self._closing:
                break
            self._meter.lap("spool")
        self.do(self._spool.close)

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._closing or self._committed > self._deleted_to

    def _write(self, seq: int, record: EncodedRecord) -> None:
        self.do(self._spool.append, seq, record)
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
            log.log(level, "the disk of %s responds again: %d records were not spooled", self._spool.folder, skipped)

    def do(self, work: Callable[..., T], *args: object) -> T | None:
        """Return `work(*args)`, or report its error and return None: the ring has the record."""
        try:
            return work(*args)
        except Exception as error:  # noqa: BLE001 - errors of the disk and of the encoding
            if isinstance(error, OSError):
                reason = f"{self._spool.folder}: {error.strerror or error}; a service still gets them"
                remedy = "set RANKSCOPE_SPOOL_DIR to a writable folder with space on a local disk, or to off"
                error = SpoolError(f"records cannot be written to {reason}; {remedy}")
            self._on_fault("spool", error)
            return None


OLDER_LAUNCHES_SECONDS = 2.0
"""Maximum seconds for which this rank delays its registration until spools of dead processes are registered.

The service numbers the attempts of a run in the order in which they register, so earlier attempts must register first.
"""


class Persistence:
    """Storage of a rank without a spool folder: it writes nothing to disk.

    It is used if the setting `spool_dir` is "off", or if it names a folder in a working directory that was removed;
    otherwise `SpoolPersistence` is used.
    """

    @property
    def root(self) -> str | None:
        """Return the absolute path of the folder with the spools of all ranks; None if nothing is written to disk."""
        return None

    @property
    def folder(self) -> str | None:
        """Return the folder that contains all uncommitted records after the process exits.

        Return None if some of them may be missing in it.
        """
        return None

    @property
    def records(self) -> int:
        """Return the number of records on disk."""
        return 0

    @property
    def dropped(self) -> Mapping[str, int]:
        """Return the number of records that were not spooled, by reason."""
        return {}

    def serve_orphans(self, client: ServiceClient, url: Callable[[], str | None]) -> None:
        """Start to search for spools of dead processes, and register each one with the service."""

    def wait_for_older_launches(self) -> None:
        """Wait until the spools that were found so far are registered with the service, for at most 2 s."""

    def write(self, seq: int, record: EncodedRecord) -> None:
        """Write `record` to the spool before it enters the ring, and wait at most 0.5 s for the disk.

        A record on disk survives this process. If the write takes longer, the record is published before it is on disk,
        and later calls return immediately until the disk has written the backlog. Only one thread at a time may call
        this method.
        """

    def flush(self, timeout_seconds: float) -> None:
        """Wait at most `timeout_seconds` until all published records are on disk."""

    @property
    def unwritten(self) -> int | None:
        """Return the number of published records that are not on disk; None if nothing is written to disk."""
        return None

    def commit(self, seq: int) -> None:
        """Mark all records up to `seq` as committed by a store."""

    def holds(self, seq: int) -> bool:  # noqa: ARG002 - the signature of the spool
        """Return whether the record with the sequence number `seq` is on disk."""
        return False

    def after(self, cursor: int, max_bytes: int, first_in_ring: int) -> Stretch | None:  # noqa: ARG002 - as above
        """Return the records above `cursor` that are on disk and no longer in the ring.

        Return None if there are no such records.
        """
        return None

    def plan(self, plan_hash: str) -> str | None:  # noqa: ARG002 - as above
        """Return the JSON text of the plan with the hash `plan_hash`; None if no record on disk uses this plan."""
        return None

    def orphan(self, incarnation: str) -> Orphan | None:  # noqa: ARG002 - as above
        """Return the spool of the dead process `incarnation`; None if this rank does not serve it."""
        return None

    def finished(self, orphan: Orphan) -> None:
        """Delete the spool of a dead process.

        Call this method after the client that polls the spool has received the answer that all its records are
        committed.
        """

    def close(self) -> None:
        """Stop the threads that write and serve spools.

        Uncommitted records remain on disk for another process on this host or a service.
        """

    def abandon(self) -> None:
        """Close the inherited files of the spools in a forked child. Changes nothing on disk."""


class SpoolPersistence(Persistence):
    """Writes each record to the spool folder, and serves the spools that dead processes left in the same folder."""

    def __init__(
        self,
        root: str,
        config: ServeConfig,
        incarnation: str,
        describe: Callable[[], Registration],
        *,
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
    ) -> None:
        self._root = root
        self._service = None if config.ingest_url is None else service_name(config.ingest_url)
        self._incarnation = incarnation
        self._on_fault = on_fault
        self._orphans: OrphanRecovery | None = None
        self._spool = Spool(
            root, incarnation, max_bytes=config.spool_bytes, sync=config.spool_sync, service=self._service
        )
        self._writer = SpoolWriter(self._spool, describe, on_fault=on_fault, meter=meter)

    @property
    def root(self) -> str | None:
        """Return the absolute path of the folder with the spools of all ranks."""
        return self._root

    @property
    def folder(self) -> str | None:
        """Return the folder of the spool; None while the spool is not open or the disk does not respond."""
        return str(self._spool.folder) if self._spool.is_open and not self._writer.is_hanging else None

    @property
    def records(self) -> int:
        """Return the number of records on disk."""
        return self._spool.records

    @property
    def dropped(self) -> Mapping[str, int]:
        """Return the number of records that were not spooled, by reason."""
        return {**self._spool.dropped, BEHIND: self._writer.behind}

    def serve_orphans(self, client: ServiceClient, url: Callable[[], str | None]) -> None:
        """Start the thread that searches for spools of dead processes and registers each one with the service."""
        self._orphans = OrphanRecovery(
            self._root, self._incarnation, client, url, service=self._service, on_fault=self._on_fault
        )
        self._orphans.start()

    def wait_for_older_launches(self) -> None:
        """Wait until the spools that the first search has found are registered with the service, for at most 2 s."""
        if self._orphans is not None:
            self._orphans.wait_searched(OLDER_LAUNCHES_SECONDS)

    def write(self, seq: int, record: EncodedRecord) -> None:
        """Write `record` to the spool before it enters the ring; see `Persistence.write`."""
        self._writer.write(seq, record)

    def flush(self, timeout_seconds: float) -> None:
        """Wait at most `timeout_seconds` until all published records are on disk."""
        self._writer.flush(timeout_seconds)

    @property
    def unwritten(self) -> int | None:
        """Return the number of published records that are not on disk."""
        return self._writer.unwritten + sum(self._spool.dropped.values())

    def commit(self, seq: int) -> None:
        """Mark all records up to `seq` as committed by a store; the spool thread deletes their files."""
        self._writer.commit(seq)

    def holds(self, seq: int) -> bool:
        """Return whether the record with the sequence number `seq` is on disk."""
        return self._spool.holds(seq)

    def after(self, cursor: int, max_bytes: int, first_in_ring: int) -> Stretch | None:
        """Return the records above `cursor` that are on disk and no longer in the ring.

        Return None if there are none or the disk fails.
        """
        if cursor + 1 >= first_in_ring:
            return None
        stretch = self._writer.do(self._spool.after, cursor, max_bytes)
        return stretch if stretch is not None and stretch.first < first_in_ring else None

    def plan(self, plan_hash: str) -> str | None:
        """Return the JSON text of the plan with the hash `plan_hash`, if a record on disk uses this plan.

        Records of dead processes are included. Return None if no record uses the plan.
        """
        text = self._spool.plan(plan_hash)
        return self._orphans.plan(plan_hash) if text is None and self._orphans is not None else text

    def orphan(self, incarnation: str) -> Orphan | None:
        """Return the spool of the dead process `incarnation`; None if this rank does not serve it."""
        return None if self._orphans is None else self._orphans.get(incarnation)

    def finished(self, orphan: Orphan) -> None:
        """Delete the spool of a dead process.

        Call this method after the client that polls the spool has received the answer that all its records are
        committed.
        """
        if self._orphans is not None:
            self._orphans.finished(orphan)

    def close(self) -> None:
        """Stop the threads that write and serve spools.

        Uncommitted records remain on disk for another process on this host or a service.
        """
        with contextlib.ExitStack() as stack:  # closes both in reverse order, then raises the first error
            stack.callback(self._writer.close)
            if self._orphans is not None:
                stack.callback(self._orphans.stop)

    def abandon(self) -> None:
        """Close the inherited files of the spools in a forked child. Changes nothing on disk."""
        with contextlib.ExitStack() as stack:  # as in close()
            stack.callback(self._spool.abandon)
            if self._orphans is not None:
                stack.callback(self._orphans.abandon)


def persistence_of(
    config: ServeConfig,
    incarnation: str,
    describe: Callable[[], Registration],
    *,
    on_fault: Callable[[str, BaseException], None],
    meter: CpuMeter,
) -> Persistence:
    """Return the storage that `config` selects: a spool in `spool_dir`; without it, one that writes nothing to disk.

    A relative folder belongs to the present working directory, although the script may change it later. If this
    directory was removed or cannot be read, the rank writes nothing to disk, and logs a warning.
    """
    if config.spool_dir is None:
        return Persistence()
    try:
        root = str(Path(config.spool_dir).absolute())
    except OSError:
        log.warning(
            "records are not written to disk, because the working directory was removed or cannot be read: set "
            "RANKSCOPE_SPOOL_DIR to the full path of a folder"
        )
        return Persistence()
    return SpoolPersistence(root, config, incarnation, describe, on_fault=on_fault, meter=meter)
