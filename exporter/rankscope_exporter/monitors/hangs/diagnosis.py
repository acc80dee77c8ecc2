"""What is done when somebody wants to know where this rank stands: take stacks and flight record, publish them.

Events go straight to the channel: the publisher may be waiting for the very device that does not answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.diagnostics.rank_groups import Standing
from rankscope_contract.diagnostics.stacks import FlightRecord, StackDump
from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.model.parameter_names import encodable
from rankscope_exporter.monitors.flight_recorder.entry import take_flight_record
from rankscope_exporter.monitors.hangs.stack_dump import read_stacks, take_stacks
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.records.pending_step import now_microseconds
from rankscope_exporter.records.step_record import StepRecord

MIN_SECONDS: Final = 2.0
"""Asked again within this time, one is given what was taken before, and nothing new is recorded."""

LOCK_SECONDS: Final = 5.0
"""Training may ask, and does not wait longer than this for another thread that a disk or a device holds up."""

FLIGHT_SECONDS: Final = 2.0
"""Torch asks the device when it reads the flight record, and a device that hangs may not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStacks:
    """Stacks and flight record of one moment."""

    ts: int  # UTC microseconds
    step: int | None  # the last one published
    stacks: StackDump
    flight: FlightRecord | None

    def document(self, rank: int) -> dict[str, Any]:
        """Return what POST /stacks answers."""
        flight = None if self.flight is None else self.flight.document()
        return {"rank": rank, "ts": self.ts, "step": self.step, "stacks": self.stacks.document(), "flight": flight}


class Diagnosis:
    """Takes and publishes; from any thread, and one at a time. The thread that made it is the one that trains."""

    def __init__(
        self,
        rank: int,
        publish: Callable[[StepRecord], object],
        last_step: Callable[[], int | None],
        boundary: ErrorBoundary,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._publish = publish
        self._last_step = last_step
        self._boundary = boundary
        self._clock = clock
        self._training_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._taking: int | None = None  # the thread that does
        self._latest: CapturedStacks | None = None
        self._taken_at = float("-inf")
        self._asking: threading.Thread | None = None

    def take(self, reason: str, *, severity: Severity = Severity.INFO, first: Event | None = None) -> CapturedStacks:
        """Take, publish and return both; what was taken a moment ago is returned again.

        `first` is published before them, and has them taken afresh. Where publishing is held up, or a signal handler
        asks in the middle of it, stacks are taken and returned all the same, and nothing is recorded.
        """
        # The thread that holds the lock would wait for itself for ever: a handler runs on top of what it interrupts.
        if self._taking == threading.get_ident() or not self._lock.acquire(timeout=LOCK_SECONDS):
            return CapturedStacks(
                ts=now_microseconds(), step=self._last_step(), stacks=self._stacks(reason), flight=None
            )
        try:
            self._taking = threading.get_ident()
            return self._take(reason, severity, first)
        finally:
            self._taking = None
            self._lock.release()

    def take_written(self, text: str, reason: str) -> None:
        """Publish stacks that the handler of a signal wrote, of the moment when it came."""
        with self._lock:
            self._record(self._stacks_event(read_stacks(text, reason, self._training_thread), Severity.INFO))

    def take_flight(self, reason: str) -> None:
        """Take and publish the flight record alone, where there is one."""
        with self._lock:
            flight = self._flight(reason)
            if flight is not None:
                self._record_flight(flight, Severity.INFO)

    def tell(self, event: Event) -> None:
        """Publish an event past the publisher."""
        with self._lock:
            self._record(event)

    def _take(self, reason: str, severity: Severity, first: Event | None) -> CapturedStacks:
        if first is not None:
            self._boundary.call(f"recording an event ({first.type})", self._record, first)
        elif self._latest is not None and self._clock() - self._taken_at < MIN_SECONDS:
            return self._latest
        ts, step = now_microseconds(), self._last_step()
        stacks = self._stacks(reason)
        # Stacks are published before the flight record is read, which may take seconds or never come.
        if stacks.threads:
            self._boundary.call("recording stacks", lambda: self._record(self._stacks_event(stacks, severity)))
        flight: FlightRecord | None = self._boundary.call("the flight record", self._flight, reason)
        if flight is not None:
            self._boundary.call("recording the flight record", self._record_flight, flight, severity)
        self._latest, self._taken_at = CapturedStacks(ts=ts, step=step, stacks=stacks, flight=flight), self._clock()
        return self._latest

    def _stacks(self, reason: str) -> StackDump:
        """Return the stacks, empty where they cannot be taken: the flight record is of use without them."""
        stacks: StackDump | None = self._boundary.call("taking stacks", take_stacks, reason, self._training_thread)
        return StackDump(reason=reason, threads=()) if stacks is None else stacks

    def _record_flight(self, flight: FlightRecord, severity: Severity) -> None:
        self._record(_event(EventType.FLIGHT_RECORD, severity, _flight_text(flight), flight.to_json()))

    def _flight(self, reason: str) -> FlightRecord | None:
        if self._asking is not None and self._asking.is_alive():
            return None  # the device has not answered the last time, and one thread is enough to wait for it
        found: list[FlightRecord | None] = []
        is_read = threading.Event()

        def read() -> None:
            failures: list[tuple[str, BaseException]] = []
            try:
                found.append(take_flight_record(reason, lambda *failure: failures.append(failure)))
            except Exception as error:  # noqa: BLE001 - the edge of the thread
                failures.append(("the flight record", error))
            is_read.set()
            # Reported last: a report takes locks that a training that hangs may hold.
            for failure in failures:
                self._boundary.report(*failure)

        self._asking = OwnThread(target=read, name="rankscope-flight-record")
        self._asking.start()
        is_read.wait(FLIGHT_SECONDS)
        return found[0] if found else None

    def _stacks_event(self, stacks: StackDump, severity: Severity) -> Event:
        where = str(Standing.of(self.rank, stacks, None))
        return _event(EventType.STACKS, severity, f"rank {self.rank} {where}", stacks.to_json())

    def _record(self, event: Event) -> None:
        self._publish(StepRecord(ts=now_microseconds(), step=self._last_step(), events=(event,)))


def _event(kind: EventType, severity: Severity, message: str, details: str) -> Event:
    return Event(type=kind, severity=severity, message=encodable(message), details=encodable(details))


def _flight_text(flight: FlightRecord) -> str:
    if flight.pending is not None:
        return f"waits in {flight.pending} for {flight.pending.age_seconds:.0f} s"
    return f"waits in no collective; the last was {flight.latest}"
