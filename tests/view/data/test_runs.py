"""The list of runs: every number equals SQL, and a run of any shape has a row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.view.training import HOSTILE, MAIN

from rankscope_view.data.newest import NO_CURVE, read_newest
from rankscope_view.data.raw_rows import RawRows
from rankscope_view.data.runs import INCIDENTS, STOPPING, RunQuery, run_facts, run_list, run_row


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
    for row in listed.values():
        assert len(row.sparkline.points) <= 60
    last = listed["qwen-7b-sft-tulu"].sparkline
    assert last.places - 1 == last.points[-1][0]
    assert math.isnan(last.points[-1][1])


@pytest.mark.parametrize("run", ["only-nan", "one-row", "no-loss", "no-times", "mamba2-370m-32k-ctx", HOSTILE])
def test_run_of_any_shape_has_a_row_and_facts(connection, listed, run):
    assert repr(replace(listed[run], sparkline=NO_CURVE)) == repr(run_row(connection, run))  # NaN differs from itself
    assert run_facts(connection, run).attempts == 0


def test_step_without_a_row_is_unknown_and_not_zero(listed):
    assert listed["mamba2-370m-32k-ctx"].step is None
    assert listed["no-loss"].loss is None


def test_unknown_run_has_no_row(connection):
    assert run_row(connection, "no such run") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("muon", {"llama-1b-muon-sweep-02", "llama-1b-muon-sweep-04"}),
        ("tag:team=post", {"qwen-7b-sft-tulu", "llama-8b-dpo-b0.1"}),
        ("tag:sweep state:stopped", {"llama-1b-muon-sweep-02"}),
        (f"state:{INCIDENTS}", {MAIN, "qwen-7b-sft-tulu"}),
    ],
)
def test_search_selects_by_words_tags_and_state(connection, text, expected):
    assert expected == {row.run for row in run_list(connection, RunQuery.parse(text)).rows}


def test_sort_by_loss_puts_unknown_losses_last(connection):
    found = run_list(connection, RunQuery.parse("", sort="-loss")).rows

    known = [row.loss for row in found if row.loss is not None and not math.isnan(row.loss)]
    assert sorted(known, reverse=True) == [row.loss for row in found[: len(known)]]


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
