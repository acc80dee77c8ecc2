"""Decisions about a training without a log: thresholds of rows, phases, and the clock of another machine."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest

from rankscope_ingest.base.watch_config import WatchSection
from rankscope_ingest.watch.clock import Clock, RemoteClock
from rankscope_ingest.watch.judge import Condition, Facts, judge
from rankscope_ingest.watch.rows import LogRows

LIMITS = WatchSection(log="train.log")
START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)


def rows_of(seconds: list[float], *, every: int = 1, evaluations: tuple[int, ...] = (), times: bool = True) -> LogRows:
    """Return rows of which each has one step time; a row contains `every` steps."""
    scalars, events, now = [], [], START
    for number, value in enumerate(seconds):
        step = (number + 1) * every
        now += dt.timedelta(seconds=value * every)
        common = {"incarnation": "i", "seq": step, "attempt": 0, "rank": None, "step": step}
        common["ts"] = now if times else None
        scalars += [common | {"name": "step_seconds", "value": value}, common | {"name": "loss", "value": 1.0}]
        if step in evaluations:
            event = {"type": "evaluation", "severity": "info", "op": None, "message": "", "details": None}
            events.append(common | event | {"seq": step})
    rows = LogRows()
    rows.add(
        {"scalars": pa.Table.from_pylist(scalars)} | ({"events": pa.Table.from_pylist(events)} if events else {}), 0
    )
    return rows


def condition(rows: LogRows, silence: float, **facts: object) -> Condition:
    return judge(rows, Facts(silence=silence, quiet=silence, clock="", **facts), LIMITS).condition


@pytest.mark.parametrize("seconds", [0.5, 0.7])
def test_pace_of_rows_whose_times_are_whole_seconds(seconds):
    texts = [START + dt.timedelta(seconds=int(n * seconds)) for n in range(60)]
    columns = {"incarnation": "i", "attempt": 0, "rank": None, "name": "loss", "value": 1.0}
    rows = LogRows()
    rows.add(
        {"scalars": pa.Table.from_pylist([columns | {"seq": n, "step": n, "ts": at} for n, at in enumerate(texts)])}, 0
    )

    assert seconds == pytest.approx(rows.expected_seconds, rel=0.03)


@pytest.mark.parametrize(("name", "last"), [("entropy", 32), ("eval_loss", 30)])
def test_row_of_a_further_step_without_a_loss_is_a_row(name, last):
    rows = rows_of([1.0] * 30)
    own = {"incarnation": "i", "attempt": 0, "rank": None, "name": name, "value": 1.0, "ts": None}
    rows.add({"scalars": pa.Table.from_pylist([own | {"seq": n, "step": n} for n in (31, 32)])}, 0)

    assert last == rows.last.step


def test_short_steps_whose_times_are_whole_seconds_are_not_slow():
    assert Condition.TRAINING == condition(rows_of([*[0.0] * 30, 1.0]), 1.0)


@pytest.mark.parametrize(("silence", "text"), [(63.0, "63 s"), (7500.0, "2 h 5 min"), (31937537.0, "369 d 15 h")])
def test_long_time_without_a_row_has_large_units(silence, text):
    found = judge(rows_of([1.0] * 30), Facts(silence=silence, quiet=silence, clock="clock"), LIMITS)

    assert f"no row for {text} (clock), expected every 1 s" == found.reason


@pytest.mark.parametrize(
    ("seconds", "every", "silence", "expected"),
    [
        ([1.0] * 30, 1, 59.0, Condition.TRAINING),  # below the shortest time
        ([1.0] * 30, 1, 61.0, Condition.STALLED),
        ([40.0] * 30, 1, 119.0, Condition.TRAINING),  # 3 times the time between rows
        ([40.0] * 30, 1, 121.0, Condition.STALLED),
        ([4.0] * 30, 100, 1199.0, Condition.TRAINING),  # a row contains 100 steps
        ([4.0] * 30, 100, 1201.0, Condition.STALLED),
        ([900.0], 1, 1799.0, Condition.TRAINING),  # the first step
        ([], 1, 1801.0, Condition.STALLED),
        ([], 1, 1799.0, Condition.WAITING),
    ],
)
def test_stall_is_judged_by_the_usual_time_between_rows(seconds, every, silence, expected):
    assert expected == condition(rows_of(seconds, every=every), silence)
    assert expected == condition(rows_of(seconds, every=every, times=False), silence)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([60.0, *[1.0] * 30, 2.1], Condition.SLOW),  # the first step is no part of the median
        ([60.0, *[1.0] * 30, 1.9], Condition.TRAINING),
        ([*[5.0] * 10, *[1.0] * 4, 9.0], Condition.SLOW),
        ([1.0, 1.0, 9.0], Condition.TRAINING),  # too few rows for a median
    ],
)
def test_slow_step_is_compared_with_the_median(seconds, expected):
    assert expected == condition(rows_of(seconds), 1.0)


def test_long_slow_phase_does_not_become_normal():
    """The median before the first slow step remains the baseline."""
    rows = rows_of([*[1.0] * 30, *[3.0] * 300])

    assert Condition.TRAINING == condition(rows, 1.0)
    assert Condition.SLOW == condition(rows, 1.0, slow_since=1.0)


def test_slow_steps_that_are_not_over_are_described_by_the_last_slow_one():
    verdict = judge(
        rows_of([*[1.0] * 30, 5.0, 1.0, 1.0]), Facts(silence=1.0, quiet=1.0, clock="", slow_since=1.0), LIMITS
    )

    assert "a step 2 rows ago took 5 s, 5 times the median of 1 s" == verdict.reason


def test_due_evaluation_extends_the_time_without_a_row():
    before = rows_of([1.0] * 29, evaluations=(10, 20))
    due = rows_of([1.0] * 30, evaluations=(10, 20))

    assert Condition.STALLED == condition(before, 100.0)
    assert Condition.TRAINING == condition(due, 100.0)
    assert Condition.STALLED == condition(due, 1801.0)


@pytest.mark.parametrize("zone", [0, 28_800, -18_000])
@pytest.mark.parametrize("writes_utc", [True, False])
def test_time_of_a_row_is_read_in_the_zone_that_fits(zone, writes_utc):
    clock = RemoteClock()
    clock.set(Clock(offset_seconds=0.0, source="date over SSH", zone_seconds=zone))
    moment = 1_000_000.0
    written = moment if writes_utc or not zone else moment + zone

    assert moment == clock.moment(written, moment + 5.0)


def test_clock_of_the_growing_log_is_the_least_delayed_change():
    """A poll finds a change late, so that the difference of the clocks is at least the largest one seen."""
    clock = RemoteClock()
    for modified, now in ((1030.0, 1005.0), (1040.0, 1011.0), (1050.0, 1028.0)):
        clock.observe_change(modified, now)

    assert 1129.0 == clock.now(1100.0)
    assert "time of the last change of the growing log" == clock.source
