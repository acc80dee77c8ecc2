"""Curves over the attempts of a run, and its expected end, compared with Python."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples
from tests.storage.rows import ask, put

from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)


def append(writer, dataset: str, rows: Iterable[dict]) -> None:
    put(writer, dataset, rows, run="r", attempt=0, rank=0, ts=START, ts_origin="rank")


def loss(attempt: int, step: int, value: float, **columns) -> dict:
    return {"attempt": attempt, "step": step, "name": "loss", "value": value, **columns}


def rolled(first: int, last: int, mean: float, **columns) -> dict:
    counts = {"rows": 9, "value_count": 9, "value_nans": 0}
    own = {"name": "loss", "rank": None, "step": first // 100 * 100, "first_step": first, "last_step": last}
    return {**own, **counts, "value_avg": mean, **columns}


def curve(connection, columns: str = "attempt, step, cumulative_step, loss") -> list[tuple]:
    return ask(connection, f"SELECT {columns} FROM loss_curve ORDER BY attempt, step")


def drawn(connection, name: str) -> list[tuple]:
    """Return the result of `scalar_curve` with one bucket per step."""
    return ask(connection, f"SELECT step, mean FROM scalar_curve('r', of_name := '{name}') ORDER BY step")


def standing(connection, name: str) -> list[tuple]:
    asked = f"SELECT step, cumulative_step, value FROM scalar_history WHERE name = '{name}' AND stands ORDER BY 1"
    return ask(connection, asked)


ATTEMPTS = st.lists(st.tuples(st.integers(10, 50), st.integers(1, 20)), min_size=1, max_size=4)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ATTEMPTS, st.integers(1, 9), st.integers(0, 8), st.booleans())
def test_last_attempt_of_a_step_is_valid_and_cumulative_steps_repeat(tmp_path_factory, attempts, every, offset, before):
    """Each attempt is (first step, number of steps); the reference simulates the training.

    A scalar that is logged rarely follows the attempts of the loss. An attempt may end before its first value; an
    evaluation before the first step has the last step's number.
    """
    store = Store.open(tmp_path_factory.mktemp("store"), create=True)
    rows, losses, evaluations, trained, end = [], {}, {}, 0, 0
    for attempt, (first, count) in enumerate(attempts):
        trained += max(0, end - first)
        end = first + count
        evaluated = {step for step in range(first, end) if step % every == offset % every}
        evaluated |= {first - 1} if before else set()
        losses = {step: row for step, row in losses.items() if step < first}
        evaluations = {step: row for step, row in evaluations.items() if step < first - (first - 1 in evaluated)}
        for step in range(first, end):
            rows.append(loss(attempt, step, 100.0 * attempt + step, rank=None, labels=f'{{"of":"{step % 2}"}}'))
            losses[step] = (attempt, step, step + trained, 100.0 * attempt + step)
        for step in sorted(evaluated):
            rows.append(loss(attempt, step, 100.0 * attempt + step, name="eval_loss"))
            evaluations[step] = (step, step + trained, 100.0 * attempt + step)
    with store.claim(owner="me") as writer, connect(store.root) as connection:
        append(writer, "scalars", rows)

        assert sorted(losses.values()) == curve(connection)
        assert [(len(rows),)] == ask(connection, "SELECT count(*) FROM scalar_history")
        assert sorted(evaluations.values()) == standing(connection, "eval_loss")
        assert sorted((step, value) for step, _, value in evaluations.values()) == drawn(connection, "eval_loss")


def test_scalar_that_counts_epochs_uses_its_own_steps(writer, connection):
    """Both attempts begin in the middle of an epoch. In the second, the first step of the loss exceeds all epochs."""
    rows = [loss(attempt, step, 1.0) for attempt, first in ((0, 1), (1, 451)) for step in range(first, first + 500)]
    rows += [loss(0, epoch, float(epoch), name="accuracy") for epoch in range(5)]
    rows += [loss(1, epoch, 10.0 + epoch, name="accuracy") for epoch in range(4, 9)]
    append(writer, "scalars", rows)
    expected = [(0, 0, 0.0), (1, 1, 1.0), (2, 2, 2.0), (3, 3, 3.0), *((n, n + 1, 10.0 + n) for n in range(4, 9))]

    assert expected == standing(connection, "accuracy")
    assert [(step, value) for step, _, value in expected] == drawn(connection, "accuracy")


@pytest.mark.parametrize("is_said_again", [False, True])
def test_every_loss_uses_the_extent_of_all_losses_of_its_run(writer, connection, is_said_again):
    """One loss ended early, far from the last step of the other."""
    rows = [loss(0, step, 1.0) for step in range(101)] + [loss(1, step, 2.0) for step in range(5, 51)]
    rows += [loss(0, step, 3.0, labels='{"of":"b"}') for step in range(11)]
    append(writer, "scalars", rows)
    if is_said_again:
        append(writer, "scalars", [loss(1, 5, 2.0, ordinal=1)])

    for asked in ("loss_curve WHERE labels IS NOT NULL", "scalar_curve('r', of_labels := '{\"of\":\"b\"}')"):
        assert [(step,) for step in range(5)] == ask(connection, f"SELECT step FROM {asked} ORDER BY step")


def test_epochs_use_their_own_steps_also_after_a_fresh_start(writer, connection):
    rows = [loss(attempt, step, 1.0) for attempt in (0, 1) for step in range(1, 1001)]
    rows += [loss(attempt, epoch, epoch + 10.0 * attempt, name="accuracy") for attempt in (0, 1) for epoch in range(3)]
    append(writer, "scalars", rows)

    assert [(0, 3, 10.0), (1, 4, 11.0), (2, 5, 12.0)] == standing(connection, "accuracy")
    assert [(0, 10.0), (1, 11.0), (2, 12.0)] == drawn(connection, "accuracy")


@pytest.mark.parametrize("evaluated", [(500, 1000), (0, 500, 1000), (520, 1040)])
def test_rarely_logged_loss_defines_the_attempts_of_other_scalars(writer, connection, evaluated):
    """An attempt also trains before its first and after its last logged loss."""
    rows = [loss(0, step, 1.0) for step in range(50, 1001, 50)] + [loss(1, step, 1.0) for step in range(850, 951, 50)]
    append(writer, "scalars", rows + [loss(0, step, 1.0 * step, name="eval_loss") for step in evaluated])
    expected = [(step, 1.0 * step) for step in evaluated if step < 850]

    assert expected == drawn(connection, "eval_loss")
    assert expected == [(step, value) for step, _, value in standing(connection, "eval_loss")]


def test_run_without_loss_uses_the_steps_of_each_scalar(writer, connection):
    append(writer, "scalars", [loss(at, step, 1.0 + at, name="lr") for at, step in ((0, 1), (0, 2), (1, 2))])

    assert [(1, 1.0), (2, 2.0)] == drawn(connection, "lr")
    assert [(1, 1.0), (2, 2.0)] == [(step, value) for step, _, value in standing(connection, "lr")]


def test_rollup_is_superseded_if_one_of_its_steps_is(writer, connection):
    """The next attempt began within the second hundred steps; the reason for its restart may be in their mean."""
    append(writer, "scalar_rollups", [rolled(1, 99, 2.0), rolled(100, 199, 1e9)])
    append(writer, "scalars", [loss(1, step, 1.0) for step in range(151, 250)])

    assert [(0, 99, 99, 2.0), (1, 151, 200, 1.0)] == curve(connection)[:2]
    assert [(1, 2.0), (151, 1.0)] == drawn(connection, "loss")[:2]


def test_step_logged_again_in_an_attempt_has_its_last_value(writer, connection):
    append(writer, "scalars", [loss(0, 5, 1.0, ordinal=7), loss(0, 6, 2.0, ordinal=8), loss(0, 5, 9.0, ordinal=9)])

    assert [(0, 5, 5, 9.0), (0, 6, 6, 2.0)] == curve(connection)


def test_ranks_and_micro_steps_are_averaged_with_their_range(writer, connection):
    rows = [loss(0, 1, 1.0 + rank + 10 * micro, rank=rank, micro_step=micro) for rank in range(3) for micro in range(2)]
    append(writer, "scalars", rows)

    assert [(6, 7.0, 1.0, 13.0)] == curve(connection, "parts, loss, lowest, highest")


def test_runs_names_and_labels_have_separate_histories(writer, connection):
    rows = [loss(0, 1, 1.0), loss(0, 1, 2.0, run="s"), loss(0, 1, 3.0, labels="{}"), loss(1, 1, 4.0, name="lr")]
    append(writer, "scalars", rows)
    found = ask(connection, "SELECT run, name, labels, value FROM scalar_history WHERE stands ORDER BY value")

    assert [
        ("r", "loss", None, 1.0),
        ("s", "loss", None, 2.0),
        ("r", "loss", "{}", 3.0),
        ("r", "lr", None, 4.0),
    ] == found


def test_later_rollup_or_repeated_loss_is_visible_immediately(writer, connection):
    append(writer, "scalars", [loss(0, step, 1.0, ordinal=step) for step in (100, 101)])
    before = curve(connection)
    append(writer, "scalars", [loss(0, 101, 5.0, ordinal=200)])
    again = curve(connection)
    append(writer, "scalar_rollups", [rolled(1, 99, 2.0), rolled(101, 199, 3.0, run="s")])
    found = [[row[3] for row in rows] for rows in (before, again, curve(connection))]

    assert [[1.0, 1.0], [1.0, 5.0], [2.0, 1.0, 5.0, 3.0]] == found
    of_s = ask(connection, "SELECT loss FROM loss_curve WHERE run = 's'")
    assert [(3.0,)] == of_s  # rollups of one run do not change another


def run_row(**columns) -> dict:
    return {"rank": None, "ordinal": 1, "state": "running", **columns}


def paced(step: int, seconds: float, attempt: int = 0) -> dict:
    return loss(attempt, step, 1.0, ts=START + dt.timedelta(seconds=seconds))


def eta(connection) -> list[tuple]:
    return ask(connection, "SELECT step, seconds_per_step, eta_seconds, expected_end FROM run_eta")


@pytest.mark.parametrize("fast", [0.1, 0.5])
def test_eta_follows_a_change_of_pace_and_not_a_pause(fast, writer, connection):
    """Ten steps of 3 s follow faster ones. Then, one checkpoint takes a minute."""
    changed = [paced(100 + step, fast * 100 + 3.0 * step) for step in range(1, 11)]
    paused = [paced(110 + step, fast * 100 + 90.0 + 3.0 * step) for step in range(1, 5)]
    append(writer, "scalars", [*[paced(step, fast * step) for step in range(1, 101)], *changed])
    append(writer, "runs", [run_row(planned_steps=150)])
    before = eta(connection)
    append(writer, "scalars", paused)

    assert [(110, pytest.approx(3.0), pytest.approx(120.0))] == [row[:3] for row in before]
    assert [(114, pytest.approx(3.0), pytest.approx(108.0))] == [row[:3] for row in eta(connection)]


def test_eta_uses_the_newest_steps_of_the_newest_attempt(writer, connection):
    """The first steps are slow, the last ones take 2 s each; the previous attempt was ten times slower."""
    slow = [paced(step, 100.0 * step) for step in range(1, 50)]
    fast = [paced(step, 10_000 + 2.0 * step, attempt=1) for step in range(300, 500)]
    append(writer, "scalars", [*slow, *[paced(step, 0.0, attempt=1) for step in range(290, 300)], *fast])
    append(writer, "runs", [run_row(planned_steps=1000)])
    end = START + dt.timedelta(seconds=10_000 + 2.0 * 1000)

    assert [(499, pytest.approx(2.0), pytest.approx(1002.0), end)] == eta(connection)


@pytest.mark.parametrize(
    ("planned", "state", "expected"),
    [
        (None, "running", None), (10, "running", 0.0), (100, "failed", None), (10, "completed", 0.0),
        (10**12, "running", pytest.approx(10**12)), (2**63 - 1, "running", pytest.approx(2**63 - 1)),
    ],
)  # fmt: skip
def test_run_without_plan_or_with_no_or_endless_steps_left_has_no_end(writer, connection, planned, state, expected):
    append(writer, "scalars", [paced(step, step) for step in range(1, 11)])
    append(writer, "runs", [run_row(planned_steps=planned, state=state)])

    assert [(10, 1.0, expected, None)] == eta(connection)
