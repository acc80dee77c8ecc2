"""Comparisons of runs and ranks: the first difference, the difference of curves, and settings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from tests.programs import run_command
from tests.view.test_site import Reader
from tests.view.training import rows, run_row, scalars, write

from rankscope_storage.connection import connect
from rankscope_view.data.comparison import Side, compare, compared_values, difference, first_difference
from rankscope_view.data.detail import read_chart
from rankscope_view.data.speed import Method, Utilization
from rankscope_view.data.summary import read_summary
from rankscope_view.site import Site


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a store with three runs of 200 steps on two ranks: `other` differs from step 150, and `long` is longer.

    In the run `long`, the replicas of rank 1 differ from step 40.
    """
    batches = []
    for run, steps in (("same", 200), ("other", 200), ("long", 260)):
        tables, statistics, step = [], [], np.arange(steps)
        for rank in (0, 1):
            source = {"rank": rank, "incarnation": f"{run}-{rank}"}
            loss = 5 - step / 100 + np.where((run == "other") & (step >= 150), 0.5, 0.0) + rank
            times = np.where(step == steps - 1, 9.0, 0.5 + rank / 10)
            tables += [scalars(run, "loss", step, loss, **source), scalars(run, "step_seconds", step, times, **source)]
            apart = (run == "long") & (rank == 1) & (step >= 40)
            known = {"attempt": 0, "seq": step, "step": step, "tensor": "w.0", "placement": "replica"} | source
            norm = 2.0 + step / 7 + np.where(apart, 0.25, 0.0)
            statistics.append(rows("tensor_stats", run=run, kind="param_after", norm=norm, **known))
        rate = 1e-3 if run == "other" else 1e-4
        config = json.dumps({"optimizer": {"lr": rate}, "argv": ["train.py", f"--lr={rate}"], "run": run})
        row = run_row(run, "completed", config=config, last_step=steps - 1)
        tables = {"scalars": pa.concat_tables(tables), "tensor_stats": pa.concat_tables(statistics)}
        batches.append({"runs": row, **tables})
    return write(tmp_path_factory.mktemp("compare") / "store", *batches)


@pytest.fixture(scope="module")
def compared(folder):
    with connect(folder) as connection:
        yield connection


@pytest.mark.thorough
def test_first_difference_is_found_after_several_ranges_of_steps(compared):
    found = first_difference(compared, "same", "other")

    assert (150, "loss", 0) == (found.first.step, found.first.tensor, found.first.rank)
    assert 200 == found.steps_compared


def test_compare_prints_the_number_of_steps_that_both_runs_have(folder):
    """The comparison of values ends after the steps 16 to 143, in which the first difference is."""
    printed = run_command("compare", "same", "long", "--store", folder, "--no-figure").stdout

    assert "200 common steps: first difference at step 40:" in printed


def test_curves_of_a_rank_and_of_a_difference_equal_sql(compared):
    a, b = (read_chart(compared, run, "loss") for run in ("same", "other"))
    expected = compared.query(
        "SELECT step, avg(value) FILTER (run = 'other') - avg(value) FILTER (run = 'same') AS value, "
        "any_value(value) FILTER (run = 'same' AND rank = 1) AS own FROM scalars "
        "WHERE name = 'loss' AND run IN ('same', 'other') GROUP BY step ORDER BY step"
    )
    found = difference(a, b)

    assert expected["step"].to_pylist() == found.step.tolist()
    assert expected["value"].to_pylist() == pytest.approx(found.value)
    assert expected["own"].to_pylist() == read_chart(compared, "same", "loss", rank=1).value.tolist()


@pytest.mark.thorough
def test_three_sides_have_their_settings_and_differences_from_the_first(compared):
    names = ("same", "other", "long")
    found = compare(compared, [Side(letter=letter, run=run) for letter, run in zip("abc", names, strict=True)])

    assert [150, 40] == [one.first.step for one in found.differences]
    commands = tuple(f"train.py --lr={rate}" for rate in ("0.0001", "0.001", "0.0001"))
    rates = ("0.0001", "0.001", "0.0001")
    assert [("command", commands), ("optimizer.lr", rates)] == [(one.key, one.values) for one in found.settings]


def page(folder, **sides) -> str:
    return Reader(Site(folder).respond(("compare",), sides).body.decode()).text


def test_page_states_the_first_difference_of_each_side(folder):
    html = Site(folder).respond(("compare",), {"a": "same", "b": "other", "c": "long"}).body.decode()

    assert "B and A differ first at step 150" in html
    assert "C and A differ first at step 40, on rank 1" in html
    assert "The 150 common steps before it are equal." in html
    assert "The 40 common steps before it are equal." in html
    assert "/compare?a=same&amp;b=long" in html  # removes B


def test_page_has_the_changed_command_and_the_usual_speed(folder):
    """The last step of a run has another length: 9 s instead of 0.5 s on rank 0 and 0.6 s on rank 1."""
    runs = page(folder, a="same", b="other")

    assert "command train.py --lr=0.0001 train.py --lr=0.001" in runs
    assert "s/step, newest 20 steps 0.5500 0.5500 0" in runs
    of_run = Reader(Site(folder).respond(("runs", "same"), {}).body.decode()).text
    assert "0.5500 s/step median, newest 20 steps" in of_run


def test_curves_of_all_sides_have_their_letters(folder):
    site, query = Site(folder), {"a": "same", "b": "other", "c": "long", "smooth": "none"}
    for name, labels in {"loss": ["A", "B", "C"], "difference": ["B − A", "C − A"]}.items():
        answer = json.loads(site.respond(("data", "compare"), query | {"name": name}).body)
        assert labels == [line["label"] for line in answer["lines"]]
    assert 404 == site.respond(("data", "compare"), {"a": "same"}).status


def test_estimated_utilisation_is_named_so_and_has_a_row_of_its_own(compared):
    summary = read_summary(compared, "same")
    runs = [
        replace(summary, utilization=Utilization(value=0.5, method=method)) for method in (Method.NVML, Method.PACE)
    ]
    found = {one.name: one.values for one in compared_values(runs)}

    assert (0.5, None) == found["GPU utilisation"]
    assert (None, 0.5) == found["GPU utilisation (estimated)"]


def test_page_of_two_ranks_names_their_first_difference_and_swaps_them(folder):
    sides = {"a": "long", "b": "long", "a.rank": "0", "b.rank": "1"}
    html = Site(folder).respond(("compare",), sides).body.decode()

    assert "The ranks differ first at step 40" in html
    assert "w.0" in html
    assert "a.rank=1&amp;b=long&amp;b.rank=0" in html  # swap
    assert "s/step, newest 20 steps 0.5000 0.6000 +0.1000" in Reader(html).text


def test_first_difference_of_a_scalar_is_in_words_for_people(stored):
    rates = [
        scalars(run, "learning_rate", np.arange(5), np.full(5, rate), labels='{"group":"0"}')
        for run, rate in (("a", 0.0), ("b", 1e-3))
    ]
    states = [run_row(run, "completed") for run in "ab"]
    store = stored(scalars=pa.concat_tables(rates), runs=pa.concat_tables(states))
    text = page(store, a="a", b="b")
    printed = run_command("compare", "a", "b", "--store", store, "--no-figure").stdout

    assert "The runs differ first at step 0, in the learning rate, group 0" in text
    assert "Learning rate, group 0: 0 against 0.001000, a difference of 100 %." in text
    assert "first difference at step 0: learning rate, group 0, rank 0" in printed
    assert "{" not in printed
