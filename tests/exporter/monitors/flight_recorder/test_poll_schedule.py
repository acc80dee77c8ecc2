"""Readings keep within their share of the time, and ranks read at common steps without communication."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.monitors.flight_recorder.poller import MOST_STEPS_BETWEEN, PollSchedule


def readings(share: float, cost: float, step_seconds: float, steps: int) -> list[int]:
    """Return the steps after which a reading took place; steps and readings advance the clock."""
    pace, now, read = PollSchedule(share), 0.0, []
    for step in range(1, steps + 1):
        now += step_seconds
        if pace.is_due(step, now):
            read.append(step)
            now += cost
            pace.took(cost, step_seconds, now)
    return read


def test_first_step_is_read():
    assert [1] == readings(0.001, 0.05, 1.0, 1)


def test_reading_of_50_ms_is_due_every_64_steps_of_a_second():
    """0.1 % of the time allow one in 50."""
    assert [1, 64, 128, 192] == readings(0.001, 0.05, 1.0, 200)


def test_ranks_with_slower_readings_read_at_common_steps():
    assert set(readings(0.001, 0.09, 1.0, 1000)) - {1} < set(readings(0.001, 0.05, 1.0, 1000))


def test_share_of_one_reads_at_each_step():
    assert [1, 2, 3, 4] == readings(1.0, 0.001, 1.0, 4)


def test_share_of_zero_never_reads():
    assert [] == readings(0.0, 0.0, 1.0, 5)


def test_interval_between_readings_is_limited():
    assert [1, MOST_STEPS_BETWEEN, 2 * MOST_STEPS_BETWEEN] == readings(0.001, 0.05, 0.0065, 2 * MOST_STEPS_BETWEEN + 5)
    assert 2 == len(readings(0.001, 0.05, 0.004, 2 * MOST_STEPS_BETWEEN + 5))


@given(
    share=st.floats(0.0005, 0.5), cost=st.floats(1e-4, 0.2), step_seconds=st.floats(1e-3, 10), steps=st.integers(1, 400)
)
def test_readings_after_the_first_keep_within_their_share(share, cost, step_seconds, steps):
    read = readings(share, cost, step_seconds, steps)

    assert cost * (len(read) - 1) <= share * (steps * step_seconds + cost * len(read)) + 1e-9
