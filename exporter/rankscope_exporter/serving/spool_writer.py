"""Thread that writes the spool, so that an unresponsive disk blocks this thread and the publisher only briefly.

The publisher waits for each record to be on disk before readers can get it, at most WRITE_SECONDS. After a timeout,
records enter the ring immediately until the disk responds again. Meanwhile a limited backlog waits here for the disk,
and further records are counted as not spooled.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from rankscope_contract.protocol.channel import NOTHING, Registration
from rankscope_exporter.process.threads import CpuMeter, OwnThread
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.serving.spool import FAILED, Spool

log = logging.getLogger(__name__)

WRITE_SECONDS: Final = 0.5
"""Longest wait of the publisher for a record to be written. Readers get the record after that."""

CLOSE_SECONDS: Final = 2.0
"""Longest wait for the disk at the end of training."""

BACKLOG_RECORDS: Final = 64
BACKLOG_BYTES: Final = 16 * 1024 * 1024
"""Limits of the backlog for an unresponsive disk: after a pause of seconds all records are spooled, and a pause of
minutes does not exhaust the memory."""

BEHIND: Final = "spool_behind"


class SpoolHangError(Exception):
    """The disk of the spool does not respond."""


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
        self._waiting: deque[tuple[int, StepRecord, int]] = deque()  # the first entry is being written
        self._bytes = 0
        self._handled = NOTHING  # all records up to this one were written or have failed
        self._committed = self._deleted_to = NOTHING
        self._skipped: int | None = None  # records skipped since the disk stopped responding; None while it responds
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def is_hanging(self) -> bool:
        """Return whether the disk does not respond, so that records are served before they are on disk."""
        return self._skipped is not None

    def write(self, seq: int, record: StepRecord, size: int) -> None:
        """Write a record of `size` bytes; return when it is on disk, or after WRITE_SECONDS, or if the disk hangs."""
        if self._thread is None and not self._closing:
            self._start()
        with self._changed:
            if self._closing:
                self._spool.dropped[FAILED] += 1
                return
            has_room = len(self._waiting) < BACKLOG_RECORDS and self._bytes + size <= BACKLOG_BYTES
            if self._skipped is not None and not has_room:
                self.behind += 1
                self._skipped += 1
                return
            self._waiting.append((seq, record, size))
            self._bytes += size
            self._changed.notify_all()
            if self._skipped is not None:
                return
            if self._changed.wait_for(lambda: self._handled >= seq, WRITE_SECONDS):
                return
            self._skipped = 0
        hang = f"writing to {self._spool.folder} timed out after {WRITE_SECONDS} s"
        self._on_fault("spool", SpoolHangError(f"{hang}: until the disk responds, records are served without it"))

    def commit(self, seq: int) -> None:
        """Note that a store contains all records up to `seq`; the thread then deletes the files of these records."""
        with self._changed:
            self._committed = max(self._committed, seq)
            self._changed.notify_all()

    def close(self) -> None:
        """Write the backlog and close the spool; wait for the disk at most CLOSE_SECONDS."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _start(self) -> None:
        thread = OwnThread(target=self._run, name="rankscope-spool-writer")
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

    def _write(self, seq: int, record: StepRecord, size: int) -> None:
        self._do(self._spool.append, seq, record)
        skipped = None
        with self._changed:
            self._waiting.popleft()
            self._bytes -= size
            self._handled = seq
            if not self._waiting:
                skipped, self._skipped = self._skipped, None
            self._changed.notify_all()
        if skipped is not None:
            level = logging.WARNING if skipped else logging.INFO
            log.log(level, "the disk of %s responds again: %d records were not spooled", self._spool.folder, skipped)

    def _do(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001 - disk and encoding errors are reported; the ring has the record
            self._on_fault("spool", error)
