"""Jumps of the wall clock between two records, and the offsets of the records after them."""

from __future__ import annotations

import json

import pytest

from rankscope_contract.model.events import EventType
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.serving.clock_watch import ClockWatch

SECOND = 1_000_000
START = 1_700_000_000 * SECOND
HOUR, DAYS = 3600 * SECOND, 40 * 86400 * SECOND


def watched(*records: StepRecord) -> list[StepRecord]:
    watch = ClockWatch(START, 0)
    return [watch.corrected(record) for record in records]


def record(seconds: float, offset: int = 0) -> StepRecord:
    """Return a record of `seconds` after the start, by a clock that was set forward by `offset` microseconds."""
    monotonic = round(seconds * SECOND)
    return StepRecord(ts=START + monotonic + offset, monotonic=monotonic)


@pytest.mark.parametrize("jump", [-HOUR, HOUR, -DAYS, DAYS])
def test_jump_is_named_once_and_removed_from_all_later_records(jump):
    before, first, second = watched(record(1), record(2, jump), record(3, jump))
    (event,) = first.events

    assert (0, jump, jump) == (before.clock_offset, first.clock_offset, second.clock_offset)
    assert ((), ()) == (before.events, second.events)
    assert (EventType.CLOCK, jump / SECOND) == (event.type, event.value)
    assert ("forward" if jump > 0 else "back") in event.message
    assert jump == json.loads(str(event.details))["offset_us"]
    assert START + 2 * SECOND + jump == first.ts  # stored times do not change


def test_jumps_add_up():
    offsets = [one.clock_offset for one in watched(record(1, HOUR), record(2, HOUR - 5 * SECOND), record(3))]

    assert [HOUR, HOUR - 5 * SECOND, 0] == offsets


def test_clock_that_is_corrected_slowly_has_not_jumped():
    records = [record(second, second * SECOND) for second in range(20)]

    assert records == watched(*records)


def test_late_record_from_before_a_jump_keeps_its_time():
    offsets = [one.clock_offset for one in watched(record(1), record(2.1, HOUR), record(2), record(3, HOUR))]

    assert [0, HOUR, 0, HOUR] == offsets


def test_record_without_a_monotonic_time_has_the_offset_of_the_record_before():
    offsets = [one.clock_offset for one in watched(record(1, HOUR), StepRecord(ts=START))]

    assert [HOUR, HOUR] == offsets
