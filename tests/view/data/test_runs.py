"""The list of runs: every number equals SQL, and a run of any shape has a row."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from tests.view.training import HOSTILE, MAIN, run_row, scalars

from rankscope.output.summary_text import TextFormat, summary_text
from rankscope_storage.connection import connect
from rankscope_view.data.newest import NO_CURVE, read_newest
from rankscope_view.data.raw_rows import RawRows
from rankscope_view.data.runs import INCIDENTS, STOPPING, RunQuery, run_facts, run_list
from rankscope_view.data.runs import run_row as row_of_run
from rankscope_view.data.summary import read_summary
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
        words = summary_text(read_summary(opened, "ended"), TextFormat.TEXT)
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


def test_newest_values_equal_those_by_sql(connection, listed, monkeypatch):
    runs = list(listed)
    live = {run: {"attempt": None, "planned_steps": 1000} for run in runs}
    fast = read_newest(connection, runs, live, has_curves=True)
    monkeypatch.setattr("rankscope_view.data.newest.read_rows", lambda *_: RawRows(for_sql=set(runs)))
    slow = read_newest(connection, runs, live, has_curves=True)

    assert repr(slow.sparklines) == repr({run: fast.sparklines[run] for run in slow.sparklines})
    for key, row in slow.values.items():
        for name in ("value", "total", "position", "logged_at"):
            assert row[name] == pytest.approx(fast.values[key][name], nan_ok=True)
    assert slow.values.keys() == fast.values.keys()
    etas = {run: eta for run, eta in fast.etas.items() if slow.etas.get(run) is not None}
    assert etas
