"""The list of runs, and the history, summary, evaluations and advice of one run: numbers equal SQL."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from tests.view.data.test_curves import history
from tests.view.training import HOSTILE, MAIN, event, events, run_row, scalars

from rankscope.output.run_texts import summary_text
from rankscope_storage.connection import connect
from rankscope_view.data.curves import Axis, CurveRequest, Role, Smoothing, curve
from rankscope_view.data.detail import chart_curve, early_stopping, logging_interval, perplexity, read_chart
from rankscope_view.data.runs import INCIDENTS, NO_CURVE, STOPPING, RunQuery, run_facts, run_list
from rankscope_view.data.runs import run_row as row_of_run
from rankscope_view.data.summary import Trend, losses_of, read_summary, summary_document, trend
from rankscope_view.pages.sections import _decimals, _six, sections
from rankscope_view.site import Site


@pytest.fixture(scope="module")
def listed(connection):
    return {row.run: row for row in run_list(connection, RunQuery()).rows}


def test_numbers_of_the_list_equal_sql(connection, listed):
    losses = connection.query(
        "SELECT run, arg_max(loss, cumulative_step) AS loss FROM loss_curve GROUP BY run"
    ).to_pylist()
    etas = connection.query("SELECT run, eta_seconds FROM run_eta WHERE state = 'running'").to_pylist()

    assert len(losses) == sum(row.loss is not None for row in listed.values())
    for row in losses:
        assert row["loss"] == pytest.approx(listed[row["run"]].loss, nan_ok=True)
    for row in etas:
        assert row["eta_seconds"] == pytest.approx(listed[row["run"]].eta_seconds)
    assert {None} == {row.eta_seconds for row in listed.values() if row.state == "stalled"}


def test_running_run_with_an_exit_is_stopping(listed):
    assert STOPPING == listed["llama-8b-dpo-b0.1"].state


def test_sparkline_has_at_most_60_points_and_its_last_row(listed):
    last = listed["qwen-7b-sft-tulu"].sparkline

    assert all(len(row.sparkline.points) <= 60 for row in listed.values())
    assert last.places - 1 == last.points[-1][0]
    assert math.isnan(last.points[-1][1])


def test_run_of_any_shape_has_a_row_and_facts(connection, listed):
    for run in ("only-nan", "one-row", "no-loss", "no-times", "mamba2-370m-32k-ctx", HOSTILE):
        without_curve = replace(listed[run], sparkline=NO_CURVE)

        assert repr(without_curve) == repr(row_of_run(connection, run)), "NaN differs from itself"
        assert run_facts(connection, run).attempts == 0
    assert row_of_run(connection, "no such run") is None


def test_step_without_a_row_is_unknown_and_not_zero(listed):
    assert listed["mamba2-370m-32k-ctx"].step is None
    assert listed["no-loss"].loss is None


def test_loss_that_ended_before_the_newest_step_is_named(stored):
    """Two logs go on with another scalar, and one of them has a loss every 20 steps. A third one goes back."""
    steps, batches = np.arange(1, 91), []
    for run, losses in (("ended", steps[:65]), ("every", steps[19::20])):
        others = scalars(run, "accuracy", steps, 1.0 * steps, ordinal=steps + 90, seq=steps + 90)
        state = run_row(run, "running", source_kind="jsonl", last_step=65, started_at=None)
        tables = [scalars(run, "loss", losses, 1.0 * losses), others]
        batches.append({"scalars": pa.concat_tables(tables), "runs": state})
    state = run_row("again", "running", source_kind="jsonl", attempt=1, last_step=25)
    batches.append({"scalars": scalars("again", "loss", steps[:25], 1.0), "runs": state})
    batches.append({"scalars": scalars("again", "loss", [20, 21], 2.5, attempt=1, seq=[31, 32])})
    store = stored(*batches)
    with connect(store) as opened:
        found = {row.run: row for row in run_list(opened, RunQuery()).rows}
        words = summary_text(read_summary(opened, "ended"), "text")
    page = Site(store).respond(("runs", "ended"), {}).body.decode()

    assert {"ended": 90, "every": 90, "again": 21} == {run: row.step for run, row in found.items()}
    notes = {"ended": "no loss since step 65", "every": "", "again": ""}
    assert notes == {run: row.loss_note for run, row in found.items()}
    assert "current: 65.000000 at step 65 (no loss since step 65)" in words
    assert "no loss since step 65" in page


def test_search_selects_by_words_tags_and_state_and_unknown_losses_are_last(connection):
    for text, expected in (
        ("muon", {"llama-1b-muon-sweep-02", "llama-1b-muon-sweep-04"}),
        ("tag:team=post", {"qwen-7b-sft-tulu", "llama-8b-dpo-b0.1"}),
        ("tag:sweep state:stopped", {"llama-1b-muon-sweep-02"}),
        (f"state:{INCIDENTS}", {MAIN, "qwen-7b-sft-tulu"}),
    ):
        assert expected == {row.run for row in run_list(connection, RunQuery.parse(text)).rows}
    found = [row.loss for row in run_list(connection, RunQuery.parse("", sort="-loss")).rows]
    known = [loss for loss in found if loss is not None and not math.isnan(loss)]
    assert sorted(known, reverse=True) == found[: len(known)]


def test_steps_that_an_attempt_repeated_are_superseded(connection, course):
    found = read_chart(connection, MAIN, "loss")
    again = found.select(~found.stands)

    assert set(course.step[course.attempt == 1]) >= set(again.step[again.attempt == 0].tolist())
    assert found.is_varied
    assert 0 == len(read_chart(connection, "no such run", "loss"))


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
        *(([5.0, *[4.0] * 10], Trend.FALLING), ([1.0, *[4.0] * 10], Trend.RISING), ([4.0] * 20, Trend.STEADY)),
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


@pytest.mark.parametrize("axis", list(Axis))
def test_training_loss_is_behind_evaluations_on_common_axes(connection, axis):
    evaluations, loss, absent = (read_chart(connection, MAIN, name) for name in ("eval_loss", "loss", "absent"))
    request = CurveRequest(axis=axis, smoothing=Smoothing.NONE)
    found, alone = (chart_curve(evaluations, one, request) for one in (loss, absent))

    expected = [] if axis in {Axis.ARRIVAL, Axis.ATTEMPT} else [Role.TRAINING]
    assert expected == [line.role for line in found.lines if line.role]
    assert {None} == {line.role for line in (found.lines[-1], *alone.lines)}
    if expected:
        behind = found.lines[0]
        since = behind.value[behind.x >= found.lines[-1].x[0]]
        assert (behind.x.min(), behind.x.max()) == found.extent
        assert curve(loss, CurveRequest(axis=axis)).restarts == found.restarts
        assert found.bulk[0] <= float(np.nanmedian(since)) <= found.bulk[1]


def test_perplexity_is_infinite_above_the_largest_exponent():
    found = perplexity(np.array([0.0, 709.0, 710.0, np.nan]))

    assert [1.0, True, True, True] == [found[0], np.isfinite(found[1]), np.isinf(found[2]), np.isnan(found[3])]


@pytest.mark.parametrize(
    ("losses", "words", "is_action"),
    [
        *(([], "no evaluation loss", False), ([2.0], "one evaluation loss", False)),
        ([3.0, 2.0, 1.0], "improved in 2 of the last 2 evaluations; best 1 at step 2. No reason to stop", False),
        ([3.0, 2.0], "Evaluation loss improved in the last evaluation; best 2 at step 1.", False),
        *(([3.0, 1.0, 2.0], "Wait", False), ([3.0, 1.0, 2.0, 2.1, 2.2], "Consider stopping", True)),
    ],
)
def test_advice_follows_the_best_evaluation(losses, words, is_action):
    found = early_stopping(history(losses), history(np.linspace(5, 1, 20)))

    assert words in found.text
    assert is_action is found.is_action


def test_advice_names_overfitting_if_the_training_loss_still_falls():
    evaluation = history([3.0, 1.0, 2.0, 2.1, 2.2], step=[0, 5, 10, 15, 20])

    assert "overfitting" in early_stopping(evaluation, history(np.linspace(5, 1, 20))).text
    assert "overfitting" not in early_stopping(evaluation, history(np.linspace(1, 5, 20))).text


def test_long_run_that_logs_each_step_is_advised_to_log_less():
    found = logging_interval(history(np.ones(100_001)))

    assert found is not None
    assert "a higher logging interval" in found.text
    assert logging_interval(history(np.ones(200))) is None
