"""Assignment of collectives to steps and detection of lost entries, compared with a replay of each call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.monitors.flight_recorder.poller import StepAssignment

RANKS = {"0": (0, 1)}


def raw(number: int, at_us: int, *, over: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number, "collective_seq_id": number + 1, "p2p_seq_id": 0, "is_p2p": False,
        "process_group": ("0", "default_pg"), "profiling_name": "gloo:all_reduce", "state": "scheduled",
        "time_created_ns": at_us * 1000 + 7, "retired": over, **more,
    }  # fmt: skip


def test_call_belongs_to_the_last_step_that_began_before_it():
    timeline = StepAssignment()
    timeline.step_ended(7, 10, 20)
    timeline.step_ended(8, 25, 40)
    taken = timeline.take({"cpu": [raw(0, 5), raw(1, 10), raw(2, 22), raw(3, 25), raw(4, 39)]}, RANKS)

    assert [(None, 0), (7, 0), (7, 1), (8, 0), (8, 1)] == [(row["step"], row["call_seq"]) for row in taken.rows]


def test_call_becomes_a_row_after_the_end_of_its_step():
    """Until then the call may belong to the next step."""
    timeline = StepAssignment()
    timeline.step_ended(1, 0, 10)

    assert [] == timeline.take({"cpu": [raw(0, 15)]}, RANKS).rows
    timeline.step_ended(2, 14, 30)
    assert [2] == [row["step"] for row in timeline.take({"cpu": [raw(0, 15)]}, RANKS).rows]
    assert [] == timeline.take({"cpu": [raw(0, 15)]}, RANKS).rows


def test_unfinished_call_waits_and_keeps_its_position():
    timeline = StepAssignment()
    timeline.step_ended(1, 0, 10)
    first = timeline.take({"cpu": [raw(0, 1, over=False), raw(1, 2)]}, RANKS).rows
    second = timeline.take({"cpu": [raw(0, 1, duration_ms=2.5), raw(1, 2)]}, RANKS).rows

    assert [(2, 1, "left", None)] == [_summary(row) for row in first]
    assert [(1, 0, "left", 0.0025)] == [_summary(row) for row in second]


@pytest.mark.parametrize(("end", "state"), [("overwritten", None), ("last reading", "entered")])
def test_unfinished_call_is_entered_unless_it_was_overwritten(end, state):
    timeline = StepAssignment()
    timeline.step_ended(1, 0, 10)
    timeline.take({"cpu": [raw(0, 1, over=False)]}, RANKS)
    last = [raw(1, 2)] if end == "overwritten" else [raw(0, 1, over=False), raw(1, 2)]

    taken = timeline.take({"cpu": last}, RANKS, is_last=end == "last reading")
    assert [(1, 0, state, None), (2, 1, "left", None)] == [_summary(row) for row in taken.rows]


def test_last_reading_includes_calls_after_the_last_step():
    timeline = StepAssignment()
    timeline.step_ended(1, 0, 10)

    assert [1] == [row["step"] for row in timeline.take({"cpu": [raw(0, 99)]}, RANKS, is_last=True).rows]


def test_calls_of_a_step_with_lost_entries_have_no_position():
    timeline = StepAssignment()
    timeline.step_ended(1, 0, 10)
    timeline.take({"cpu": [raw(0, 1)]}, RANKS)
    timeline.step_ended(2, 10, 20)
    timeline.step_ended(3, 20, 30)
    taken = timeline.take({"cpu": [raw(5, 12), raw(6, 13), raw(7, 21)]}, RANKS)

    assert 4 == taken.overwritten
    assert [(2, None), (2, None), (3, 0)] == [(row["step"], row["call_seq"]) for row in taken.rows]


def test_restarted_recorder_is_followed():
    timeline = StepAssignment()
    timeline.step_ended(1, 0, 10)
    timeline.take({"cpu": [raw(8, 1), raw(9, 2, over=False)]}, RANKS)
    timeline.step_ended(2, 10, 20)
    taken = timeline.take({"cpu": [raw(0, 11), raw(1, 12)]}, RANKS)

    assert 0 == taken.overwritten
    assert [(1, None), (2, "left"), (2, "left")] == [(row["step"], row["state"]) for row in taken.rows]


def test_two_recorders_of_a_process_share_one_order():
    timeline = StepAssignment()
    timeline.step_ended(1, 0, 10)
    taken = timeline.take({"cpu": [raw(0, 1), raw(1, 5)], "nccl": [raw(0, 3)]}, RANKS)

    assert [(1, 0), (3, 1), (5, 2)] == [(row["t_start"], row["call_seq"]) for row in taken.rows]


def _summary(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["collective_seq"], row["call_seq"], row["state"], row["duration"]


@st.composite
def trainings(draw: st.DrawFn) -> tuple[int, list[tuple[str, int]]]:
    """Return the size of the ring, and a list of events: a call, the end of a step, or a reading."""
    events = draw(st.lists(st.sampled_from(["call", "call", "call", "step", "read"]), max_size=60))
    return draw(st.integers(1, 8)), [(event, draw(st.integers(0, 2))) for event in events]


@given(trainings())
def test_each_call_has_one_row_or_is_counted_as_overwritten(training):
    """For any order of calls, steps and readings; a call may last for any number of events."""
    ring, events = training
    timeline, rows, overwritten = StepAssignment(), [], 0
    calls: list[tuple[int, int, int]] = []  # time, step, end
    step, began = 1, 0
    for now, (event, length) in enumerate([*events, ("read", 0)], start=1):
        if event == "call":
            calls.append((now, step, now + length))
        elif event == "step":
            timeline.step_ended(step, began, now)
            step, began = step + 1, now
        else:
            is_last = now > len(events)
            if is_last:
                timeline.step_ended(step, began, now)
            held = [raw(number, at, over=end <= now) for number, (at, _, end) in enumerate(calls)][-ring:]
            taken = timeline.take({"cpu": held}, RANKS, is_last=is_last)
            rows += taken.rows
            overwritten += taken.overwritten

    assert len(calls) == len(rows) + overwritten
    expected = {number + 1: of for number, (_, of, _) in enumerate(calls)}
    assert {row["collective_seq"]: expected[row["collective_seq"]] for row in rows} == {
        row["collective_seq"]: row["step"] for row in rows
    }
    assert len(rows) == len({row["collective_seq"] for row in rows})
    for of in set(expected.values()):
        numbers = [seq for seq, its in expected.items() if its == of]
        places = {row["collective_seq"]: row["call_seq"] for row in rows if row["step"] == of}
        assert all(place is None or numbers[place] == seq for seq, place in places.items())
