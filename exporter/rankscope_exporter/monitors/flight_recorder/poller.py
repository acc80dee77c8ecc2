"""The thread that reads the flight record from time to time and publishes each collective as a row.

Training notes when a step begins and ends, and wakes the thread when a reading is due: two clock readings a step, and
no lock. Rows go straight to the channel: torch asks the device when it writes the record, and a device may not answer.

A reading holds the interpreter lock, and so the step of this rank, and of all that wait for it. Ranks that read at the
same step are late together, once; so a reading is due at steps that a power of two divides, the same on ranks whose
readings cost about the same.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.flight_recorder.entry import is_over
from rankscope_exporter.monitors.flight_recorder.step_assignment import MOST_STEPS, AssignedEntries, StepAssignment
from rankscope_exporter.monitors.flight_recorder.torch_api import (
    has_groups,
    prepare_stacks,
    ranks_by_group,
    read_with_stacks,
    read_without_stacks,
)
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.records.pending_step import PendingStep, now_microseconds
from rankscope_exporter.records.step_events import StepObserver
from rankscope_exporter.records.step_record import StepRecord

MOST_APART: Final = 8192
"""Steps: a reading that may come comes at the latest then, on all ranks."""


class PollSchedule:
    """Keeps readings at `share` of the time, by what the last one took. Times are monotonic seconds."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._apart = 1
        self._not_before = -math.inf

    def is_due(self, step: int | None, now: float) -> bool:
        """Return whether the end of `step` is the moment to read."""
        return self._share > 0 and (step or 0) % self._apart == 0 and now >= self._not_before

    def took(self, seconds: float, step_seconds: float, now: float) -> None:
        """Note what a reading took that ended now, and how long a step lasts."""
        pause = seconds / self._share
        self._not_before = now + pause
        steps = max(1.0, pause / step_seconds) if step_seconds > 0 else 1.0
        self._apart = min(MOST_APART, 1 << math.ceil(math.log2(steps)))


MOST_OPS: Final = 64
"""Operations with a count of their own; there are some thirty in torch."""

OTHER: Final = "_other"


class CollectiveCounters:
    """Added to by one thread and read by those that answer scrapes."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count `rows` of the dataset `collectives`."""
        with self._lock:
            for row in rows:
                op = row["op"]
                if op not in self._counts and len(self._counts) >= MOST_OPS:
                    op = OTHER
                calls, total = self._counts.get(op, (0, 0))
                self._counts[op] = calls + 1, total + (row["bytes"] or 0)

    def by_op(self) -> Mapping[str, tuple[int, int]]:
        """Return calls and bytes by operation."""
        with self._lock:
            return dict(self._counts)


MOST_WITH_STACKS: Final = 4096
"""Entries: torch holds the interpreter lock while it writes stacks, and for more entries that is too long at once."""

RETIRE_SECONDS: Final = 0.2
"""A thread of torch's own notes that an entry is over, a moment after it is."""

_read_before: Final[dict[str, int]] = {}
"""The last entry of each recorder that an earlier monitor of this process has read: its rows are not told twice."""


def read_before() -> dict[str, int]:
    """Return the last entry of each recorder that an earlier monitor of this process has read."""
    return dict(_read_before)


class FlightRecorderPoller(StepObserver):
    """Reads for at most about `share` of one core's time; 0 never reads."""

    def __init__(self, share: float, publish: Callable[[StepRecord], object], boundary: ErrorBoundary) -> None:
        self._share = share
        self._pace = PollSchedule(share)
        self._publish = publish
        self._boundary = boundary
        self._timeline = StepAssignment(_read_before)
        self._began_us = 0
        # Steps that the timeline does not know yet: number, beginning, end.
        self._ended: deque[tuple[int | None, int, int]] = deque(maxlen=MOST_STEPS)
        self._ranks: dict[str, tuple[int, ...]] = {}  # of groups that were destroyed too: their calls may be unread
        self._last_reading: float | None = None
        self._entries = 0
        self._wake = threading.Event()
        self._is_last = False
        self._thread: threading.Thread | None = None
        self.totals = CollectiveCounters()
        """Calls and bytes of each operation that were read so far."""
        self.overwritten = 0
        """Entries that torch had overwritten before they were read."""
        self.cpu_seconds = 0.0
        """CPU time of the thread so far."""

    def on_step_begin(self, step: int) -> None:  # noqa: ARG002 - the number may still change
        """Note the time."""
        self._began_us = now_microseconds()

    def on_step_end(self, pending_step: PendingStep) -> None:
        """Note the step, and wake the thread when it is time."""
        if self._share <= 0:
            return
        self._ended.append((pending_step.step, self._began_us, now_microseconds()))
        if self._thread is None and not self._start():
            self._ended.clear()  # a process that has joined no group: there is nothing to read
        elif self._pace.is_due(pending_step.step, time.monotonic()):
            self._wake.set()

    def stop(self, seconds: float) -> None:
        """Read for the last time; what takes longer than so many seconds is left to itself."""
        if self._thread is not None:
            self._is_last = True
            self._wake.set()
            self._thread.join(seconds)
            _read_before.update(self._timeline.last_id)

    def _start(self) -> bool:
        if not has_groups():
            return False
        self._thread = OwnThread(target=self._run, name="rankscope-collectives")
        self._thread.start()
        return True

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_last
            self._boundary.call("reading the flight record", functools.partial(self._read, is_last=is_last))
            self.cpu_seconds = time.thread_time()
            if is_last:
                return

    def _read(self, *, is_last: bool) -> None:
        has_stacks = self._entries <= MOST_WITH_STACKS and prepare_stacks()
        began, began_cpu = time.monotonic(), time.thread_time()
        steps = 0
        while self._ended:
            self._timeline.step_ended(*self._ended.popleft())
            steps += 1
        read = functools.partial(read_with_stacks if has_stacks else read_without_stacks, self._boundary.report)
        readings = read()
        if is_last and any(not is_over(entry) for entries in readings.values() for entry in entries):
            time.sleep(RETIRE_SECONDS)
            readings = read()
        self._entries = sum(map(len, readings.values()))
        self._ranks |= ranks_by_group(self._boundary.report)
        taken = self._timeline.take(readings, self._ranks, is_last=is_last)
        self._tell(taken)
        now = time.monotonic()
        since = 0.0 if self._last_reading is None else began - self._last_reading
        self._last_reading = began
        # The lock is held through most of it, so what counts is what it takes, not how long it waits for its turn.
        self._pace.took(time.thread_time() - began_cpu, since / max(1, steps), now)

    def _tell(self, taken: AssignedEntries) -> None:
        self.totals.add(taken.rows)
        self.overwritten += taken.overwritten
        events = (_overwritten(taken.overwritten),) if taken.overwritten else ()
        if taken.rows or events:
            self._publish(StepRecord(ts=now_microseconds(), collectives=tuple(taken.rows), events=events))

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Return calls and bytes by operation."""
        return self.totals.by_op()


def _overwritten(count: int) -> Event:
    return Event(
        type=EventType.NOTE,
        severity=Severity.INFO,
        op="collectives_overrun",
        value=float(count),
        message=f"{count:,} collectives have no row: torch overwrote them before they were read "
        "(TORCH_FR_BUFFER_SIZE, collectives_share)",
    )
