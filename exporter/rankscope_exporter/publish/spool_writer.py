"""The thread that writes the spool of this rank.

An unresponsive disk blocks the spool thread, and the publisher only briefly. The publisher waits for each record to be
on disk before readers can get it, for at most WRITE_SECONDS (0.5 s). After a timeout, records enter the ring
immediately until the disk responds again. Meanwhile a limited backlog waits for the disk, and further records are
counted as not spooled. No method raises a disk error into the server. Such an error is counted, and the record is
served from the ring.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from rankscope_contract.wire.channel import NOTHING, Registration
from rankscope_contract.wire.spool import SpoolError, SpoolRecords
from rankscope_contract.wire.spool.reader import service_name
from rankscope_exporter.process.threads import CpuMeter, OwnThread
from rankscope_exporter.publish.serving_config import ServeConfig
from rankscope_exporter.publish.spool import FAILED, Spool
from rankscope_exporter.publish.wire_encoder import EncodedRecord

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
    """The spool of a rank. A daemon thread, which starts with the first record, writes it.

    One thread at a time calls `write`; any thread may call the other methods.
    """

    def __init__(
        self,
        spool: Spool,
        describe: Callable[[], Registration],
        *,
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
    ) -> None:
        self.root = str(spool.folder.parent)
        """Path of the folder with the spools of all ranks."""
        self._behind = 0
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
    def folder(self) -> str | None:
        """The folder that has all uncommitted records after the process exits; None if some of them may be missing."""
        is_complete = self._spool.is_open and self._skipped is None
        return str(self._spool.folder) if is_complete else None

    @property
    def records(self) -> int:
        return self._spool.records

    @property
    def dropped(self) -> Mapping[str, int]:
        return {**self._spool.dropped, BEHIND: self._behind}

    def write(self, seq: int, record: EncodedRecord) -> None:
        """Write a record to the spool, before it enters the ring.

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
                self._behind += 1
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
        """The number of records that are not on disk, although they were published."""
        return self._behind + len(self._waiting) + sum(self._spool.dropped.values())

    def holds(self, seq: int) -> bool:
        return self._spool.holds(seq)

    def after(self, cursor: int, max_bytes: int, first_in_ring: int) -> SpoolRecords | None:
        """Return records above `cursor` on disk and no longer in the ring; None if there are none or the disk fails."""
        if cursor + 1 >= first_in_ring:
            return None
        records = self._do(self._spool.after, cursor, max_bytes)
        return records if records is not None and records.first < first_in_ring else None

    def plan(self, plan_hash: str) -> str | None:
        return self._spool.plan(plan_hash)

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
                self._behind += 1
        self._thread.join(CLOSE_SECONDS)

    def abandon(self) -> None:
        self._spool.abandon()

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
        self._do(lambda: self._spool.open(self._describe()))
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                committed = self._committed
                entry = self._waiting[0] if self._waiting else None
            if committed > self._deleted_to:
                self._deleted_to = committed
                self._do(self._spool.commit, committed)
            if entry is not None:
                self._write(*entry)
            elif self._closing:
                break
            self._meter.lap("spool")
        self._do(self._spool.close)

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._closing or self._committed > self._deleted_to

    def _write(self, seq: int, record: EncodedRecord) -> None:
        self._do(self._spool.append, seq, record)
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

    def _do(self, work: Callable[..., T], *args: object) -> T | None:
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
        log.warning(
            "records are not written to disk, because the working directory was removed or cannot be read: set "
            "RANKSCOPE_SPOOL_DIR to the full path of a folder"
        )
        return None
    service = None if config.ingest_url is None else service_name(config.ingest_url)
    spool = Spool(root, incarnation, max_bytes=config.spool_bytes, sync=config.spool_sync, service=service)
    return SpoolWriter(spool, describe, on_fault=on_fault, meter=meter)
