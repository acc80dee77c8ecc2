"""The summary of a run: its numbers equal SQL, and a run of any shape has one."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from tests.view.data.test_curves import history
from tests.view.training import HOSTILE, MAIN, event, events, run_row, scalars

from rankscope_view.data.summary import Trend, losses_of, read_summary, summary_document, trend
from rankscope_view.pages.sections import _decimals, _six, sections

ODD = ("one-row", "only-nan", "no-loss", "no-times", "mamba2-370m-32k-ctx", HOSTILE)


def test_losses_and_steps_equal_sql(connection):
    found = read_summary(connection, MAIN)
    (expected,) = connection.query(
        f"""SELECT min(loss) AS lowest, max(loss) AS highest, avg(loss) AS mean, count(*) AS rows, max(step) AS step,
        arg_max(loss, cumulative_step) AS current FROM loss_curve WHERE run = '{MAIN}' AND isfinite(loss)"""
    ).to_pylist()

    assert expected["rows"] == found.losses.rows
    assert expected["step"] == found.progress.step
    for name in ("lowest", "highest", "mean", "current"):
        assert expected[name] == pytest.approx(getattr(found.losses, name)), name


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], Trend.NO_DATA),
        (np.arange(9.0), Trend.INSUFFICIENT),
        (np.arange(10.0), Trend.INSUFFICIENT),  # no loss before the last ten
        ([5.0, *[4.0] * 10], Trend.FALLING),
        ([1.0, *[4.0] * 10], Trend.RISING),
        ([4.0] * 20, Trend.STEADY),
        ([4.0, 4.2] * 9 + [4.1, 4.3], Trend.STEADY),  # within the noise
        ([4.0, 4.2] * 5 + [4.2, 4.4] * 5, Trend.RISING),
        (4.0 - np.arange(20) / 100, Trend.FALLING),
        ([*[0.0] * 30, *[5.0] * 10, *[4.0] * 10], Trend.FALLING),
        (2 + 1.6 ** np.arange(20.0), Trend.RISING),  # ever faster, with large errors
    ],
)
def test_trend_compares_the_last_ten_losses_with_ten_before(losses, expected):
    assert expected == trend(np.asarray(losses, float))


def test_infinite_perplexity_and_nan_are_not_numbers_of_the_loss():
    found = losses_of(history([1.0, np.nan, 3.0, 800.0]))

    assert (4, 1, 1.0, 800.0) == (found.rows, found.nonfinite, found.lowest, found.highest)
    assert math.inf == found.perplexity
    assert ["5.16e+73", "8,518.5379", "NaN"] == [_decimals(one) for one in (5.163e73, 8518.5379, math.nan)]
    assert "5.16e+73" == _six(5.163e73)
    assert losses_of(history([1.0, np.nan])).perplexity is None


@pytest.mark.usual(2)
@pytest.mark.parametrize("run", ODD)
def test_run_of_any_shape_has_a_summary(connection, run):
    found = read_summary(connection, run)
    titles = [section.title for section in sections(found)]

    assert ["progress", "loss", "parameters", "time"] == titles[:4]
    json.dumps(summary_document(found))
    assert read_summary(connection, "nothing") is None


@pytest.mark.parametrize(("slope", "words"), [(-1, "No reason to stop."), (1, "which is overfitting. Consider stop")])
@pytest.mark.usual(1)
def test_ruined_run_gets_no_advice_from_its_curves(connection, opened, slope, words):
    """A failure, a newest loss or gradient norm of NaN, and an incident that is open or that a person closed."""
    steps = np.arange(9)
    losses = dict.fromkeys(("good", "slow", "failed", "grad", "closed"), 4.0 - steps / 9)
    losses["nan"] = np.where(steps > 7, np.nan, 2)
    known = {"kind": "grad_reduced", "rule": "AnomalyNan", "op": "nans", "value": 1.0, "severity": "critical"}
    states = [("slow", {"rule": "SlowRank"}, "opened"), ("closed", known, "opened"), ("closed", known, "closed")]
    listed = [
        event(run, "incident", 3, at, details={"key": "n", "state": state}, **one)
        for at, (run, one, state) in enumerate(states)
    ]
    tables, rows = [], []
    for run, loss in losses.items():
        rows.append(run_row(run, "failed" if run == "failed" else "completed", last_step=8))
        tables += [scalars(run, "loss", steps, loss), scalars(run, "eval_loss", steps[:8], 4 + slope * steps[:8] / 9)]
        tables += [scalars(run, name, steps, 0.0 * steps + 0.3) for name in ("step_seconds", "data_time")]
        tables.append(scalars(run, "grad_norm", steps, np.where((steps > 7) & (run == "grad"), np.nan, 1.0)))
    ruined = opened(events=events(listed), runs=pa.concat_tables(rows), scalars=pa.concat_tables(tables))
    documents = {run: summary_document(read_summary(ruined, run)) for run in losses}
    documents[MAIN] = summary_document(read_summary(connection, MAIN))
    texts = [[one["text"] for one in document["advice"]] for document in documents.values()]

    assert {"nan"} == {run for run, document in documents.items() if not document["hints"]} - {MAIN}
    assert [True, True] == [words in text for text, *_ in texts[:2]]
    assert [[]] * 5 == [[one for one in found if "stop" in one or "Wait" in one] for found in texts[2:]]
