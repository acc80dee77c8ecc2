"""Jumps of the wall clock between two records, and the offsets of the records after them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_contract.model.events import EventType
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.serving.rank_server import ClockWatch

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


def test_jumps_add_up_and_records_without_a_monotonic_time_are_corrected():
    records = watched(record(1, HOUR), StepRecord(ts=START), record(2, HOUR - 5 * SECOND), record(3))

    assert [HOUR, HOUR, HOUR - 5 * SECOND, 0] == [one.clock_offset for one in records]


def test_clock_that_is_corrected_slowly_has_not_jumped():
    records = [record(second, second * SECOND) for second in range(20)]

    assert records == watched(*records)


@pytest.mark.parametrize("jump", [-HOUR, HOUR, -DAYS, DAYS])
def test_late_record_from_before_a_jump_does_not_name_the_jump_again(jump):
    records = watched(record(1), record(2.1, jump), record(2), record(1.5), record(3, jump))

    assert [0, 1, 0, 0, 0] == [len(one.events) for one in records]
    assert [1, 2.1, 2, 1.5, 3] == [(one.ts - one.clock_offset - START) / SECOND for one in records]
    assert [0, *[jump] * 4] == [one.clock_offset for one in records]


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-0.99, 0.99)), max_size=20))
def test_records_of_a_clock_without_a_jump_are_not_changed(records):
    """Records arrive in any order, and NTP corrects the clock by less than a jump."""
    published = [record(seconds, round(apart * SECOND)) for seconds, apart in records]

    assert published == watched(*published)
