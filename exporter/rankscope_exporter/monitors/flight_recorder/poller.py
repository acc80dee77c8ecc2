"""Thread that reads torch's flight recorder periodically and publishes each collective as a row.

The training thread stores the start and end of each step and wakes the reading thread when a reading is due. This costs
two clock reads per step and no lock. Rows are published directly, without the publisher thread, because torch queries
the device when it writes the record, and the device may not respond.

A reading holds the GIL. It delays this rank and all ranks that wait for this rank in a collective. If all ranks read at
the same step, the job is delayed only once. Readings are therefore due at steps divisible by a power of two. Ranks
whose readings take a similar time choose the same power without communication.

`StepAssignment` assigns entries of the flight record to steps, and counts entries that torch overwrote before they were
read.

An entry belongs to the last step that began before the entry was created. It becomes a row of the dataset `collectives`
when its step has ended and its collective is finished on this rank, or when torch has overwritten the entry.
"""

from __future__ import annotations

import bisect
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.adapters.process_group import has_groups
from rankscope_exporter.monitors.flight_recorder.entry import Entry, is_over
from rankscope_exporter.monitors.flight_recorder.torch_api import (
    Raw,
    prepare_stacks,
    ranks_by_group,
    read_with_stacks,
    read_without_stacks,
)
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.records.record import StepObserver, StepRecord, now_microseconds

MOST_STEPS: Final = 16_384
"""Number of recent steps with a stored start time. torch has overwritten the entries of older steps."""

_AT_THE_END: Final = 1 << 62


@dataclass(slots=True)
class AssignedEntries:
    """Result of one reading of the flight record.

    It has complete rows of the dataset `collectives`, and the number of entries that torch overwrote before they were
    read.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    overwritten: int = 0


@dataclass(slots=True)
class _Held:
    """An entry of the flight record that is not a row of the dataset `collectives` yet.

    `call_seq` is the position of the entry among all collectives of its step.
    """

    entry: Entry
    has_step: bool = False
    step: int | None = None
    call_seq: int | None = None
    is_kept: bool = True  # torch has not overwritten it
    is_behind_gap: bool = False  # the entries just before it were overwritten


class StepAssignment:
    """Assigns the entries of repeated readings to steps.

    Each reading contains the complete record of each recorder of this process.
    """

    def __init__(self, after: Mapping[str, int] | None = None) -> None:
        """`after` maps the name of each flight recorder to the `record_id` of the last entry that was already read.

        By default, no entry was read before.
        """
        self._begins: deque[tuple[int, int | None]] = deque(maxlen=MOST_STEPS)
        self._ended_us = 0
        self.last_id: dict[str, int] = dict(after or {})
        self._held: dict[tuple[str, int], _Held] = {}
        self._counts: dict[int | None, int] = {}
        self._incomplete: set[int | None] = set()  # steps without `call_seq`: some entries were overwritten

    def step_ended(self, step: int | None, began_us: int, ended_us: int) -> None:
        """Store the start and the end of a step.

        Call this method in the order of the steps, and before entries of the step are passed to the method `take`.
        """
        self._begins.append((began_us, step))
        self._ended_us = max(self._ended_us, ended_us)

    def take(
        self, readings: Mapping[str, Sequence[Raw]], ranks: Mapping[str, tuple[int, ...]], *, is_last: bool = False
    ) -> AssignedEntries:
        """Return the rows of the dataset `collectives` that are complete, in the order of the collectives.

        The entries in `readings` are sorted by `record_id`.
        """
        taken = AssignedEntries()
        for recorder, raws in readings.items():
            taken.overwritten += self._read(recorder, raws, ranks)
        until = _AT_THE_END if is_last else self._ended_us
        begins = list(self._begins)
        found = [held for held in self._held.values() if held.entry.created_us < until and not held.has_step]
        for held in sorted(found, key=_order):
            self._assign(held, begins)
        done = [
            (key, held)
            for key, held in self._held.items()
            if held.has_step and (held.entry.is_over or not held.is_kept or is_last)
        ]
        for key, _ in done:
            del self._held[key]
        rows = sorted((held for _, held in done), key=_order)
        taken.rows = [held.entry.row(held.step, held.call_seq, is_kept=held.is_kept) for held in rows]
        # Counts of the last step are kept, because it may have calls after its end.
        last = self._begins[-1][1] if self._begins else None
        self._counts = {step: count for step, count in self._counts.items() if step == last}
        self._incomplete &= {last}
        return taken

    def _read(self, recorder: str, raws: Sequence[Raw], ranks: Mapping[str, tuple[int, ...]]) -> int:
        """Store the new entries in `raws`, and update the stored entries that are not rows yet.

        Return the number of entries that torch overwrote before they were read.
        """
        last = self.last_id.get(recorder, -1)
        if raws and int(raws[-1]["record_id"]) < last:
            self._renumber(recorder)
            last = -1
        for key, held in self._held.items():
            held.is_kept = held.is_kept and key[0] != recorder
        missed = 0
        for raw in raws:
            number = int(raw["record_id"])
            if number > last:
                self._held[recorder, number] = _Held(Entry.of(raw, ranks), is_behind_gap=number > last + 1)
                missed += number - last - 1
                last = number
            elif (known := self._held.get((recorder, number))) is not None:
                known.entry, known.is_kept = known.entry.updated(raw), True
        self.last_id[recorder] = last
        return missed

    def _renumber(self, recorder: str) -> None:
        """Give stored entries of `recorder` negative numbers: it has restarted and counts entries from 0 again."""
        for key in [key for key in self._held if key[0] == recorder and key[1] >= 0]:
            self._held[recorder, -1 - key[1]] = self._held.pop(key)

    def _assign(self, held: _Held, begins: Sequence[tuple[int, int | None]]) -> None:
        position = bisect.bisect_right(begins, held.entry.created_us, key=lambda begin: begin[0]) - 1
        step = held.step = None if position < 0 else begins[position][1]
        held.has_step = True
        if held.is_behind_gap:
            self._incomplete.add(step)
        if step not in self._incomplete:
            held.call_seq = self._counts.get(step, 0)
            self._counts[step] = held.call_seq + 1


def _order(held: _Held) -> tuple[int, int]:
    return held.entry.created_us, held.entry.record_id


MOST_STEPS_BETWEEN: Final = 8192
"""Largest number of steps between two readings, a power of two.

Because of this limit, the readings of all ranks can be due at the same steps: those divisible by this number.
"""


class PollSchedule:
    """Schedules readings of the flight record so that they take at most the share `share` of the elapsed time.

    The schedule uses the duration of the last reading. All times are monotonic seconds.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._interval = 1  # steps, a power of two
        self._not_before = -math.inf

    def is_due(self, step: int | None, now: float) -> bool:
        """Return whether the flight record must be read at the end of `step`, which is at the time `now`."""
        return self._share > 0 and (step or 0) % self._interval == 0 and now >= self._not_before

    def took(self, seconds: float, step_seconds: float, now: float) -> None:
        """Compute the time of the next reading of the flight record.

        The last reading took `seconds` and ended at `now`. `step_seconds` is the duration of a training step.
        """
        pause = seconds / self._share
        self._not_before = now + pause
        steps = max(1.0, pause / step_seconds) if step_seconds > 0 else 1.0
        self._interval = min(MOST_STEPS_BETWEEN, 1 << math.ceil(math.log2(steps)))


MOST_OPS: Final = 64
"""Maximum number of collective operations with separate counters. torch has about thirty.

Further operations are counted together.
"""

OTHER: Final = "_other"


class CollectiveCounters:
    """Counters of calls and bytes for each collective operation. One thread adds; threads that answer scrapes read."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the calls and bytes of `rows`, which are rows of the dataset `collectives`."""
        with self._lock:
            for row in rows:
                op = row["op"]
                if op not in self._counts and len(self._counts) >= MOST_OPS:
                    op = OTHER
                calls, total = self._counts.get(op, (0, 0))
                self._counts[op] = calls + 1, total + (row["bytes"] or 0)

    def by_op(self) -> Mapping[str, tuple[int, int]]:
        """Return the number of calls and of bytes of each collective operation, by its name."""
        with self._lock:
            return dict(self._counts)


MOST_WITH_STACKS: Final = 4096
"""Maximum number of entries for a reading with stacks.

Longer records are read without stacks, because torch holds the GIL while it writes stacks.
"""

RETIRE_SECONDS: Final = 0.2
"""Seconds that the last reading waits for unfinished entries.

A thread of torch marks an entry as finished with a delay.
"""

_read_before: Final[dict[str, int]] = {}
"""The `record_id` of the last entry that an earlier monitor of this process read, by name of the flight recorder.

This entry and older entries are not published again.
"""


def read_before() -> dict[str, int]:
    """Return the `record_id` of the last entry that an earlier monitor of this process read, by recorder name."""
    return dict(_read_before)


class FlightRecorderPoller(StepObserver):
    """Reads the flight record on a separate thread.

    Readings take at most about the share `share` of the time of one CPU core.

    With `share` 0 the record is never read.
    """

    def __init__(self, share: float, publish: Callable[[StepRecord], object], boundary: ErrorBoundary) -> None:
        self._share = share
        self._schedule = PollSchedule(share)
        self._publish = publish
        self._boundary = boundary
        self._assignment = StepAssignment(_read_before)
        self._began_us = 0
        # Steps that the assignment does not have yet: number, begin, end in microseconds.
        self._ended: deque[tuple[int | None, int, int]] = deque(maxlen=MOST_STEPS)
        self._ranks: dict[str, tuple[int, ...]] = {}  # also of destroyed groups, whose calls may be unread
        self._last_reading: float | None = None
        self._entries = 0
        self._wake = threading.Event()
        self._is_last = False
        self._thread: OwnThread | None = None
        self.totals = CollectiveCounters()
        """Number of calls and of bytes of each collective operation since the monitor was created."""
        self.overwritten = 0
        """Number of entries of the flight record that torch has overwritten before they were read."""

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that the thread that reads the flight record has used so far."""
        return 0.0 if self._thread is None else self._thread.cpu_seconds

    def on_before_step(self, step: int) -> None:  # noqa: ARG002 - the number may still change
        self._began_us = now_microseconds()

    def on_step_end(self, record: StepRecord) -> None:
        if self._share <= 0:
            return
        if self._thread is None:
            if not has_groups():  # there are no collectives
                return
            self._thread = OwnThread(target=self._run, name="rankscope-collectives", on_fault=self._boundary.report)
            self._thread.start()
        self._ended.append((record.step, self._began_us, now_microseconds()))
        if self._schedule.is_due(record.step, time.monotonic()):
            self._wake.set()

    def stop(self, seconds: float) -> None:
        """Request the last reading of the flight record, and wait for at most `seconds` until it has ended."""
        if self._thread is not None:
            self._is_last = True
            self._wake.set()
            self._thread.join(seconds)
            _read_before.update(self._assignment.last_id)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_last
            self._boundary.call("reading the flight record", functools.partial(self._read, is_last=is_last))
            if is_last:
                return

    def _read(self, *, is_last: bool) -> None:
        has_stacks = self._entries <= MOST_WITH_STACKS and prepare_stacks()
        began, began_cpu = time.monotonic(), time.thread_time()
        steps = 0
        while self._ended:
            self._assignment.step_ended(*self._ended.popleft())
            steps += 1
        read = functools.partial(read_with_stacks if has_stacks else read_without_stacks, self._boundary.report)
        readings = read()
        if is_last and any(not is_over(entry) for entries in readings.values() for entry in entries):
            time.sleep(RETIRE_SECONDS)
            readings = read()
        self._entries = sum(map(len, readings.values()))
        self._ranks |= ranks_by_group(self._boundary.report)
        self._publish_rows(self._assignment.take(readings, self._ranks, is_last=is_last))
        since = 0.0 if self._last_reading is None else began - self._last_reading
        self._last_reading = began
        # CPU time, because the thread holds the GIL during most of it; the time it waits for the GIL does not count.
        self._schedule.took(time.thread_time() - began_cpu, since / max(1, steps), time.monotonic())

    def _publish_rows(self, assigned: AssignedEntries) -> None:
        self.totals.add(assigned.rows)
        self.overwritten += assigned.overwritten
        events = [_overwritten(assigned.overwritten)] if assigned.overwritten else []
        if assigned.rows or events:
            self._publish(StepRecord.now(collectives=tuple(assigned.rows), events=events))


def _overwritten(count: int) -> Event:
    return Event(
        type=EventType.NOTE,
        severity=Severity.INFO,
        op="collectives_overrun",
        value=float(count),
        message=f"{count:,} collectives have no row in the dataset collectives: "
        "torch overwrote them before they were read; increase TORCH_FR_BUFFER_SIZE or collectives_share",
    )
