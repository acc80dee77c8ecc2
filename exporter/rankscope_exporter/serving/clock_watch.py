"""Find jumps of the wall clock between the records of one process, and correct later times by them.

A clock jumps if a person or NTP sets it. The stored times of records are those of the clock. Figures that are derived
from them, such as tokens per second, subtract the offset of the record.
"""

from __future__ import annotations

import dataclasses
import json

from rankscope_contract.model.clock_jump import JUMP_MICROSECONDS, jump_details, jump_message
from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.records.step_record import StepRecord


class ClockWatch:
    """Wall clock of one process, compared with its monotonic clock. Not thread-safe.

    Records may arrive out of order, because several threads publish. The sum of the jumps applies to all records after
    the event that names it. A record from before a jump that arrives after this event therefore gets the time that the
    clock would have shown if it had been set already.
    """

    def __init__(self, ts: int, monotonic: int) -> None:
        """The offset is 0 for records of the time `ts`. Both times are read together, in microseconds."""
        self._apart = ts - monotonic
        self._newest = monotonic
        self._offset = 0

    def corrected(self, record: StepRecord) -> StepRecord:
        """Return `record` with the offset of its time, and with an event if the clock has jumped before it."""
        if record.monotonic is None:
            return dataclasses.replace(record, clock_offset=self._offset) if self._offset else record
        apart = record.ts - record.monotonic
        if record.monotonic < self._newest:
            is_from_before = abs(apart - self._apart) > JUMP_MICROSECONDS
            ts = record.monotonic + self._apart if is_from_before else record.ts
            return dataclasses.replace(record, ts=ts, clock_offset=self._offset) if self._offset else record
        jump, self._apart, self._newest = apart - self._apart, apart, record.monotonic
        if abs(jump) > JUMP_MICROSECONDS:
            self._offset += jump
            events = (*record.events, _jump_event(jump, self._offset))
            return dataclasses.replace(record, clock_offset=self._offset, events=events)
        return dataclasses.replace(record, clock_offset=self._offset) if self._offset else record


def _jump_event(jump: int, offset: int) -> Event:
    return Event(
        type=EventType.CLOCK,
        severity=Severity.WARNING,
        value=jump / 1e6,
        message=jump_message(jump, owner="host", remark="figures are corrected by it"),
        details=json.dumps(jump_details(jump) | {"offset_us": offset}, sort_keys=True),
    )
