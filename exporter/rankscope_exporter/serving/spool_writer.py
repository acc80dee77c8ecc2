"""The thread that writes the spool, so that a disk that hangs holds up this thread and nobody else for long.

A record is handed over and waited for: it is on disk before anybody hears of it. A disk that does not answer in time
ends the waiting until it does: records then go to the ring at once, a few wait here for the disk, and what passes it by
is counted.
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

PATIENCE_SECONDS: Final = 0.5
"""The most that the publisher waits for a record to be written, and with it all who would hear of it."""

CLOSE_SECONDS: Final = 2.0
"""The most that the end of training waits for a disk."""

BACKLOG_RECORDS: Final = 64
BACKLOG_BYTES: Final = 16 * 1024 * 1024
"""What waits for a disk that hangs: a pause of seconds costs the spool nothing, one of minutes no memory."""

BEHIND: Final = "spool_behind"


class SpoolHangError(Exception):
    """The disk under the spool does not answer."""


class SpoolWriter:
    """Writes to `spool` from a daemon thread that begins with the first record. `keep` is for one thread at a time."""

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
        self._waiting: deque[tuple[int, StepRecord, int]] = deque()  # the first one is being written
        self._bytes = 0
        self._handled = NOTHING  # all up to here is on disk, or was refused by it
        self._committed = self._deleted_to = NOTHING
        self._passed_by: int | None = None  # records since the disk hangs; None while it answers
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def is_hanging(self) -> bool:
        """Return whether records are served without being on disk."""
        return self._passed_by is not None

    def keep(self, seq: int, record: StepRecord, size: int) -> None:
        """Have a record of `size` bytes written and return when it is, or when the disk has been waited for enough."""
        self._begin()
        with self._changed:
            if self._closing:
                self._spool.dropped[FAILED] += 1
                return
            if self._passed_by is not None and not self._has_room(size):
                self.behind += 1
                self._passed_by += 1
                return
            self._waiting.append((seq, record, size))
            self._bytes += size
            self._changed.notify_all()
            if self._passed_by is not None:
                return
            if self._changed.wait_for(lambda: self._handled >= seq, PATIENCE_SECONDS):
                return
            self._passed_by = 0
        hang = f"the disk of {self._spool.folder} has not answered for {PATIENCE_SECONDS} s"
        self._on_fault("spool", SpoolHangError(f"{hang}: until it does, records are served without being on it"))

    def commit(self, seq: int) -> None:
        """Note that a store has everything up to `seq`; what is not needed any more is deleted in time."""
        with self._changed:
            self._committed = max(self._committed, seq)
            self._changed.notify_all()

    def close(self) -> None:
        """Write what waits and close the spool, without waiting long for a disk that hangs."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _has_room(self, size: int) -> bool:
        return len(self._waiting) < BACKLOG_RECORDS and self._bytes + size <= BACKLOG_BYTES

    def _begin(self) -> None:
        """Start with the first record and not at attach: before, there is nothing to keep."""
        if self._thread is not None or self._closing:
            return
        thread = OwnThread(target=self._run, name="rankscope-spool-writer")
        try:
            thread.start()
        except RuntimeError as error:  # no thread is to be had, above all at the end of the interpreter
            self._closing = True
            self._on_fault("spool", error)
        else:
            self._thread = thread

    def _run(self) -> None:
        self._do(self._open)
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
        passed_by = None
        with self._changed:
            self._waiting.popleft()
            self._bytes -= size
            self._handled = seq
            if not self._waiting:
                passed_by, self._passed_by = self._passed_by, None
            self._changed.notify_all()
        if passed_by is not None:
            level = logging.WARNING if passed_by else logging.INFO
            log.log(level, "the disk of %s answers again: %d records are not in it", self._spool.folder, passed_by)

    def _open(self) -> None:
        """Make the folder. One that cannot be used costs the spool alone; each record that is not kept is counted."""
        self._spool.open(self._describe())

    def _do(self, work: Callable[..., None], *facts: object) -> None:
        try:
            work(*facts)
        except Exception as error:  # noqa: BLE001 - whatever the disk or the encoding does, the ring has the record
            self._on_fault("spool", error)
