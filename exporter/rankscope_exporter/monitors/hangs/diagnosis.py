"""Reads and publishes the stacks of all threads of this process, and the flight record with the latest collectives.

This happens after a hang, at a request of the script or over HTTP, after a signal, and at a capture.

Events are published directly, without the publisher thread: that thread may be waiting for a device that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.diagnostics.rank_groups import Standing
from rankscope_contract.diagnostics.stacks import FlightRecord, StackDump
from rankscope_contract.model.events import Event, EventType, ExitReason, Severity
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.model.parameter_names import encodable
from rankscope_exporter.monitors.flight_recorder.entry import take_flight_record
from rankscope_exporter.monitors.hangs.stack_dump import read_stacks, take_stacks
from rankscope_exporter.process.lifecycle import exit_event
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.records.pending_step import monotonic_microseconds, now_microseconds
from rankscope_exporter.records.step_record import StepRecord

MIN_SECONDS: Final = 2.0
"""Minimum seconds between two readings of the stacks.

A caller that requests stacks within this time receives the result of the previous reading, and nothing is published.
"""

LOCK_SECONDS: Final = 5.0
"""Maximum seconds that a thread waits for another thread that reads stacks and may be blocked by a disk or device."""

FLIGHT_SECONDS: Final = 2.0
"""Timeout in seconds for the flight record. torch queries the device, and a device that hangs may not respond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStacks:
    """The stacks of all threads and the flight record of this process at one time."""

    ts: int  # UTC microseconds
    step: int | None  # the last published step
    stacks: StackDump
    flight: FlightRecord | None

    def document(self, rank: int) -> dict[str, Any]:
        """Return the stacks and the flight record as the JSON object with which the rank answers POST /stacks."""
        flight = None if self.flight is None else self.flight.document()
        return {"rank": rank, "ts": self.ts, "step": self.step, "stacks": self.stacks.document(), "flight": flight}


class Diagnosis:
    """Reads and publishes stacks and flight records. Any thread may call the methods; one call runs at a time.

    The thread that creates the object counts as the training thread.
    """

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
        self._taking: int | None = None  # id of the thread that takes stacks now
        self._latest: CapturedStacks | None = None
        self._taken_at = float("-inf")
        self._reader: threading.Thread | None = None

    def take(self, reason: str, *, severity: Severity = Severity.INFO, first: Event | None = None) -> CapturedStacks:
        """Read, publish and return stacks and flight record.

        If the last result is less than MIN_SECONDS old, it is returned instead and nothing is read.

        If the event `first` is given, it is published before the stacks, and the stacks are always read. If publishing
        is blocked, or a signal handler calls the method during another call, stacks are read and returned, but nothing
        is published.
        """
        # A signal handler runs on the thread that it interrupts: if that thread holds the lock, waiting would deadlock.
        if self._taking == threading.get_ident() or not self._lock.acquire(timeout=LOCK_SECONDS):
            stacks = self._stacks(reason)
            return CapturedStacks(ts=now_microseconds(), step=self._last_step(), stacks=stacks, flight=None)
        try:
            self._taking = threading.get_ident()
            return self._take(reason, severity, first)
        finally:
            self._taking = None
            self._lock.release()

    def take_written(self, text: str, reason: str) -> None:
        """Publish the stacks in `text`.

        The handler of the signal in the setting `stacks_signal` wrote them when the signal arrived.
        """
        with self._lock:
            self._publish_stacks(read_stacks(text, reason, self._training_thread), Severity.INFO)

    def take_flight(self, reason: str) -> None:
        """Read and publish the flight record, without the stacks. Does nothing if torch has no flight record."""
        with self._lock:
            flight = self._flight(reason)
            if flight is not None:
                self._publish_flight(flight, Severity.INFO)

    def publish(self, event: Event) -> None:
        """Publish an event from the calling thread, without the publisher thread."""
        with self._lock:
            self._publish_event(event)

    def publish_exit(self, name: str) -> None:
        """Publish the exit event of a process that the signal `name` ends while its training thread is stuck.

        The method does not wait for a thread that reads stacks or the device.
        """
        self._publish_event(exit_event(ExitReason.SIGNAL, name, self._last_step()))

    def _take(self, reason: str, severity: Severity, first: Event | None) -> CapturedStacks:
        if first is not None:
            self._boundary.call(f"recording an event ({first.type})", self._publish_event, first)
        elif self._latest is not None and self._clock() - self._taken_at < MIN_SECONDS:
            return self._latest
        ts, step = now_microseconds(), self._last_step()
        stacks = self._stacks(reason)
        # Stacks are published before the flight record is read: the reading may take seconds or not return.
        if stacks.threads:
            self._boundary.call("recording stacks", self._publish_stacks, stacks, severity)
        flight: FlightRecord | None = self._boundary.call("the flight record", self._flight, reason)
        if flight is not None:
            self._boundary.call("recording the flight record", self._publish_flight, flight, severity)
        self._latest, self._taken_at = CapturedStacks(ts=ts, step=step, stacks=stacks, flight=flight), self._clock()
        return self._latest

    def _stacks(self, reason: str) -> StackDump:
        """Return the stacks of all threads.

        If they cannot be read, the result has no threads: the flight record is useful without stacks.
        """
        stacks: StackDump | None = self._boundary.call("taking stacks", take_stacks, reason, self._training_thread)
        return StackDump(reason=reason, threads=()) if stacks is None else stacks

    def _flight(self, reason: str) -> FlightRecord | None:
        if self._reader is not None and self._reader.is_alive():
            return None  # the device has not responded to the last reading; one waiting thread is enough
        found: list[FlightRecord | None] = []
        is_read = threading.Event()

        def read() -> None:
            failures: list[tuple[str, BaseException]] = []
            try:
                found.append(take_flight_record(reason, lambda *failure: failures.append(failure)))
            except Exception as error:  # noqa: BLE001 - top of the thread
                failures.append(("the flight record", error))
            is_read.set()
            # Reported after `is_read`: a report takes locks that a hanging training thread may hold.
            for failure in failures:
                self._boundary.report(*failure)

        self._reader = OwnThread(target=read, name="rankscope-flight-record", ends=False)
        self._reader.start()
        is_read.wait(FLIGHT_SECONDS)
        return found[0] if found else None

    def _publish_stacks(self, stacks: StackDump, severity: Severity) -> None:
        message = f"rank {self.rank} {Standing.of(self.rank, stacks, None)}"
        self._publish_event(_event(EventType.STACKS, severity, message, stacks.to_json()))

    def _publish_flight(self, flight: FlightRecord, severity: Severity) -> None:
        pending = flight.pending
        if pending is not None:
            message = f"waits in {pending} for {pending.age_seconds:.0f} s"
        else:
            message = f"waits in no collective; the last was {flight.latest}"
        self._publish_event(_event(EventType.FLIGHT_RECORD, severity, message, flight.to_json()))

    def _publish_event(self, event: Event) -> None:
        ts, monotonic = now_microseconds(), monotonic_microseconds()
        self._publish(StepRecord(ts=ts, monotonic=monotonic, step=self._last_step(), events=(event,)))


def _event(kind: EventType, severity: Severity, message: str, details: str) -> Event:
    return Event(type=kind, severity=severity, message=encodable(message), details=encodable(details))
