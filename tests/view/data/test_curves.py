"""Curves: axes, zoom windows, reduction that keeps extremes, breaks, and smoothing."""

from __future__ import annotations

import numpy as np
import pytest
from tests.view.training import MAIN

from rankscope_view.data.curves import Axis, CurveRequest, Smoothing, curve, notice
from rankscope_view.data.history import History, read_history
from rankscope_view.data.smoothing import ema, ema_at, moving_average


def history(values, *, attempt=None, step=None, time=None) -> History:
    value = np.asarray(values, float)
    rows = np.arange(len(value))
    attempts = np.zeros(len(value), np.int64) if attempt is None else np.asarray(attempt)
    steps = rows if step is None else np.asarray(step)
    return History(
        name="loss",
        attempt=attempts,
        step=steps,
        cumulative=rows,
        time=rows.astype(float) if time is None else np.asarray(time, float),
        value=value,
        lowest=value,
        highest=value,
        stands=np.ones(len(value), bool),
    )


AVERAGE = CurveRequest(smoothing=Smoothing.AVERAGE, width=7)


def test_arrival_axis_has_raw_steps_as_labels():
    found = curve(history([3, 1, 2, 4], step=[30, 10, 20, 30], attempt=[0, 1, 1, 1]), CurveRequest(axis=Axis.ARRIVAL))

    assert [30, 10, 10, 20, 30] == found.lines[0].step.tolist()
    assert (1.0,) == found.restarts


def test_no_line_crosses_a_restart(connection):
    loss = read_history(connection, MAIN, "loss")
    for axis in Axis:
        found = curve(loss, CurveRequest(axis=axis))
        if axis is Axis.ATTEMPT:
            assert ["attempt 0", "attempt 1", "attempt 2"] == [line.label for line in found.lines]
        for line in found.lines:
            assert (np.diff(line.x) > 0).all()
            breaks = [] if axis is Axis.ATTEMPT else [np.flatnonzero(line.x < at)[-1] for at in found.restarts]
            assert np.isnan(line.value[breaks]).all()


def test_nan_breaks_the_line_and_is_a_range():
    found = curve(history([1, np.nan, np.inf, 2, 3]), CurveRequest())

    (line,) = found.lines
    assert [1.0, None, 2.0, 3.0] == found.document()["lines"][0]["value"]
    assert [0.0, 1.0, 3.0, 4.0] == line.x.tolist()
    assert [[1.0, 2.0, "NaN, Inf 1–2"]] == found.document()["nonfinite"]


def test_curve_without_points_has_an_extent_and_a_pause_is_a_gap():
    only_nan, timeless = history([np.nan] * 6), history([1, 2], time=[np.nan, np.nan])
    found, without = curve(only_nan, CurveRequest()), curve(timeless, CurveRequest(axis=Axis.TIME))
    paused = curve(history([1, 2, 3, 4], time=[0, 1, 2, 500]), CurveRequest(axis=Axis.TIME))

    assert (0, (0.0, 5.0), 6) == (len(found.lines[0].x), found.extent, found.nonfinite[0].rows)
    assert (0, None) == (without.rows, without.extent)
    assert [1.0, 2.0, 3.0, None, 4.0] == paused.document()["lines"][0]["value"]


@pytest.mark.parametrize("axis", [Axis.STEP, Axis.TIME, Axis.ARRIVAL])
def test_reduction_keeps_extremes_at_their_places(axis):
    values = np.sin(np.arange(100_000) / 900)
    values[61_234], values[77_777] = 90.0, -90.0
    found = curve(history(values), CurveRequest(axis=axis))

    (line,) = found.lines
    assert len(line.x) <= 4000
    assert 90.0 == line.value[line.x == 61_234]
    assert -90.0 == line.value[line.x == 77_777]
    assert (values[0], values[-1]) == (line.value[0], line.value[-1])
    np.testing.assert_array_equal(values[line.x.astype(int)], line.value)
    assert f"{found.buckets:,} stretches of 128" in notice(found)
    assert "1 row stored, drawn" == notice(curve(history([3]), CurveRequest()))


def test_zoom_and_the_newest_rows_are_drawn_exactly():
    values = np.random.default_rng(1).normal(size=70_000)
    zoomed = curve(history(values), CurveRequest(first=1000, last=2000))
    newest = curve(history(values), CurveRequest(newest=4000))

    before, after = (curve(history(values[:count]), CurveRequest()).lines[0] for count in (60_000, 63_000))
    done = before.x < 60_000 - 64

    np.testing.assert_array_equal(before.x[done], after.x[: done.sum()], "old buckets do not change")
    assert zoomed.bucket_width is None
    assert [999.0, 2001.0] == [zoomed.lines[0].x[0], zoomed.lines[0].x[-1]]
    np.testing.assert_array_equal(values[-4000:], newest.lines[0].value)
    assert "66,000 older rows are left out" in notice(newest)


@pytest.mark.parametrize(("macro", "request_"), [("ema", CurveRequest(decay=0.9)), ("moving_average", AVERAGE)])
def test_smoothing_equals_the_macro_of_the_store_without_its_first_bias(connection, macro, request_):
    found = curve(read_history(connection, "no-times", "loss"), request_).lines[0].smoothed
    parameter = 0.1 if macro == "ema" else AVERAGE.width
    stored = connection.query(
        "WITH points AS (SELECT step, loss FROM loss_curve WHERE run = 'no-times') "
        f"FROM {macro}(points, step, loss, {parameter})"
    )
    expected, first = stored[macro].to_numpy(), stored["loss"].to_numpy()[0]
    weight = 0.9 ** np.arange(1, len(expected) + 1) if macro == "ema" else 0.0
    # The weight of the first value, which the macro `ema` counts for all before it.

    np.testing.assert_allclose(found, (expected - weight * first) / (1 - weight))


def test_both_is_the_moving_average_of_the_exponential_one():
    values = np.random.default_rng(0).normal(size=60)
    series = np.zeros(60, np.int64)
    found = curve(history(values), CurveRequest(smoothing=Smoothing.BOTH, width=5))

    np.testing.assert_allclose(found.lines[0].smoothed, moving_average(ema(values, series, 0.9), series, 5))


def test_range_of_the_axis_has_all_values_unless_a_reader_cuts_it():
    values = np.r_[np.linspace(9, 3, 30), np.full(60, 2.5), 40.0, np.full(60, 2.4)]
    found = curve(history(values), CurveRequest())

    assert (2.4, 40.0) == found.range()
    assert 9 > found.range(is_cut=True)[1]


@pytest.mark.parametrize("spike", [1.0, 1e30, np.nan])
@pytest.mark.parametrize("attempts", [1, 2])
def test_ema_of_few_rows_equals_that_of_all_rows(spike, attempts):
    values = np.random.default_rng(0).normal(size=100_000)
    values[50_000] = spike
    series, rows = np.arange(len(values)) * attempts // len(values), np.array([0, 7, 700, 50_600, 99_999])

    np.testing.assert_allclose(ema_at(values, series, 0.9, rows), ema(values, series, 0.9)[rows], rtol=1e-9)


@pytest.mark.parametrize("smoothing", [Smoothing.EMA, Smoothing.AVERAGE])
def test_smoothing_starts_again_at_a_restart_and_skips_nan(smoothing):
    values = [8.0, 8.0, np.nan, 8.0, 2.0, 2.0]
    request = CurveRequest(axis=Axis.ARRIVAL, smoothing=smoothing)
    found = curve(history(values, attempt=[0, 0, 0, 0, 1, 1]), request)

    drawn = np.isfinite(found.lines[0].value)
    assert [8.0, 8.0, 8.0, 2.0, 2.0] == pytest.approx(found.lines[0].smoothed[drawn].tolist())


def test_spike_does_not_disturb_a_later_moving_average():
    values = np.ones(100)
    values[10] = 1e30
    found = curve(history(values), CurveRequest(smoothing=Smoothing.AVERAGE, width=5))

    assert 1.0 == found.lines[0].smoothed[20]
