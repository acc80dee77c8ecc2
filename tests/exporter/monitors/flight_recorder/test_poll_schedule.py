"""Readings keep to their share of the time, and fall on steps that ranks agree on without a word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.monitors.flight_recorder.poller import MOST_APART, PollSchedule


def readings(share: float, cost: float, step_seconds: float, steps: int) -> list[int]:
    """Return the steps at whose end was read, by a clock that goes on with the steps and the readings."""
    pace, now, read = PollSchedule(share), 0.0, []
    for step in range(1, steps + 1):
        now += step_seconds
        if pace.is_due(step, now):
            read.append(step)
            now += cost
            pace.took(cost, step_seconds, now)
    return read


def test_the_first_step_is_read():
    assert [1] == readings(0.001, 0.05, 1.0, 1)


def test_a_reading_of_50_ms_comes_once_in_64_steps_of_a_second():
    """0.1 % of the time allow one in 50."""
    assert [1, 64, 128, 192] == readings(0.001, 0.05, 1.0, 200)


def test_ranks_on_which_readings_cost_somewhat_more_read_at_steps_of_the_others():
    assert set(readings(0.001, 0.09, 1.0, 1000)) - {1} < set(readings(0.001, 0.05, 1.0, 1000))


def test_a_share_of_one_reads_at_every_step():
    assert [1, 2, 3, 4] == readings(1.0, 0.001, 1.0, 4)


def test_a_share_of_nothing_never_reads():
    assert [] == readings(0.0, 0.0, 1.0, 5)


def test_ranks_wait_for_a_common_step_no_longer_than_that():
    assert [1, MOST_APART, 2 * MOST_APART] == readings(0.001, 0.05, 0.0065, 2 * MOST_APART + 5)
    assert 2 == len(readings(0.001, 0.05, 0.004, 2 * MOST_APART + 5))


@given(
    share=st.floats(0.0005, 0.5), cost=st.floats(1e-4, 0.2), step_seconds=st.floats(1e-3, 10), steps=st.integers(1, 400)
)
def test_readings_take_no_more_than_their_share_beyond_the_first(share, cost, step_seconds, steps):
    read = readings(share, cost, step_seconds, steps)

    assert cost * (len(read) - 1) <= share * (steps * step_seconds + cost * len(read)) + 1e-9
