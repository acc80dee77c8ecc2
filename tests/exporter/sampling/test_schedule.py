"""The steps at which a quantity is sampled."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.sampling.schedule import Schedule, Timing


def measured(timing: Timing, steps: Iterable[int]) -> list[int]:
    schedule = Schedule(timing)
    taken = []
    for step in steps:
        if schedule.begins(step):
            schedule.sampled()
            taken.append(step)
    return taken


@given(st.integers(1, 7), st.none() | st.integers(0, 50), st.none() | st.integers(0, 9))
def test_schedule_selects_every_nth_step_from_the_first_on(every, start, times):
    taken = measured(Timing(start_step=start, every=every, times=times), range(40))

    assert list(range(start or 0, 40, every))[:times] == taken


def test_gap_in_step_numbers_does_not_change_the_interval():
    """Resumed at 100 after 1 … 4: steps are counted; only `start_step` compares numbers."""
    assert [3, 100, 102] == measured(Timing(start_step=3, every=2), [1, 2, 3, 4, 100, 101, 102])


def test_due_step_that_was_not_measured_does_not_count():
    schedule = Schedule(Timing(times=1))

    assert schedule.begins(1)
    assert schedule.begins(2)
    schedule.sampled()
    assert schedule.is_over
    assert not schedule.begins(3)
