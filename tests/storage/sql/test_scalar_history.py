"""Curves over the attempts of a run, and its expected end, compared with Python."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import random
import statistics
from collections.abc import Iterable

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples, few

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.sql.scalar_history import LOSS_LOGGED_ONCE, LOSS_OF_SOLE_ATTEMPT

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)


def append(writer, dataset: str, rows: Iterable[dict]) -> None:
    """Append rows without incarnation, which are always stored."""
    identity = {"run": "r", "attempt": 0, "rank": 0, "ts": START, "ts_origin": "rank"}
    table = pa.Table.from_pylist([identity | row for row in rows], schema=dataset_schema(dataset))
    writer.append(Batch(tables={dataset: table}, watermarks={}))


def loss(attempt: int, step: int, value: float, **columns) -> dict:
    return {"attempt": attempt, "step": step, "name": "loss", "value": value, **columns}


def curve(connection, columns: str = "attempt, step, cumulative_step, loss") -> list[tuple]:
    return connection.sql(f"SELECT {columns} FROM loss_curve ORDER BY attempt, step").fetchall()


ATTEMPTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=4)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ATTEMPTS)
def test_last_attempt_of_a_step_is_valid_and_cumulative_steps_repeat(tmp_path_factory, attempts):
    """Each attempt is (first step, number of steps); the reference simulates the training."""
    store = Store.open(tmp_path_factory.mktemp("store"), create=True)
    rows, standing, trained = [], {}, 0
    for attempt, (first, count) in enumerate(attempts):
        last_before = attempts[attempt - 1][0] + attempts[attempt - 1][1] - 1 if attempt else first - 1
        trained += max(0, last_before + 1 - first) if attempt else 0
        standing = {step: row for step, row in standing.items() if step < first}
        for step in range(first, first + count):
            value = 100.0 * attempt + step
            rows.append(loss(attempt, step, value))
            standing[step] = (attempt, step, step + trained, value)
    with store.claim(owner="me") as writer, connect(store.root) as connection:
        append(writer, "scalars", rows)

        assert sorted(standing.values()) == curve(connection)
        assert len(rows) == connection.sql("FROM scalar_history").count("*").fetchall()[0][0]


FAR_ATTEMPTS = st.lists(st.tuples(st.integers(30, 60), st.integers(1, 20)), min_size=1, max_size=4)


def drawn(connection, name: str) -> list[tuple]:
    """Return the result of `scalar_curve` with one bucket per step."""
    return connection.sql(f"SELECT step, mean FROM scalar_curve('r', of_name := '{name}') ORDER BY step").fetchall()


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FAR_ATTEMPTS, st.integers(1, 9), st.integers(0, 8), st.booleans())
def test_rarely_logged_scalar_follows_the_attempts_of_the_loss(tmp_path_factory, attempts, every, offset, before):
    """An attempt may end before its first value; an evaluation before the first step has the last step's number."""
    store = Store.open(tmp_path_factory.mktemp("store"), create=True)
    rows, standing, trained = [], {}, 0
    for attempt, (first, count) in enumerate(attempts):
        last_before = attempts[attempt - 1][0] + attempts[attempt - 1][1] - 1 if attempt else first - 1
        trained += max(0, last_before + 1 - first) if attempt else 0
        steps = [step for step in range(first, first + count) if step % every == offset % every]
        evaluated = sorted({*steps, first - 1} if before else steps)
        standing = {
            step: row for step, row in standing.items() if step < (first - 1 if first - 1 in evaluated else first)
        }
        rows += [
            loss(attempt, step, 1.0, rank=None, labels=f'{{"of":"{step % 2}"}}') for step in range(first, first + count)
        ]
        for step in evaluated:
            rows.append(loss(attempt, step, 100.0 * attempt + step, name="eval_loss"))
            standing[step] = (step, attempt, step + trained, 100.0 * attempt + step)
    with store.claim(owner="me") as writer, connect(store.root) as connection:
        append(writer, "scalars", rows)
        asked = "SELECT step, attempt, cumulative_step, value FROM scalar_history WHERE name = 'eval_loss' AND stands"

        assert sorted(standing.values()) == sorted(connection.sql(asked).fetchall())
        assert sorted((step, value) for step, *_, value in standing.values()) == drawn(connection, "eval_loss")


def test_scalar_that_counts_epochs_uses_its_own_steps(writer, connection):
    """Both attempts begin in the middle of an epoch. In the second, the first step of the loss exceeds all epochs."""
    rows = [loss(attempt, step, 1.0) for attempt, first in ((0, 1), (1, 451)) for step in range(first, first + 500)]
    rows += [loss(0, epoch, float(epoch), name="accuracy") for epoch in range(5)]
    rows += [loss(1, epoch, 10.0 + epoch, name="accuracy") for epoch in range(4, 9)]
    append(writer, "scalars", rows)
    asked = "SELECT step, cumulative_step, value FROM scalar_history WHERE name = 'accuracy' AND stands ORDER BY 1"
    expected = [(0, 0, 0.0), (1, 1, 1.0), (2, 2, 2.0), (3, 3, 3.0), *((n, n + 1, 10.0 + n) for n in range(4, 9))]

    assert expected == connection.sql(asked).fetchall()
    assert [(step, value) for step, _, value in expected] == drawn(connection, "accuracy")


@pytest.mark.parametrize("is_said_again", [False, True])
def test_every_loss_uses_the_extent_of_all_losses_of_its_run(writer, connection, is_said_again):
    """One loss ended early, far from the last step of the other."""
    rows = [loss(0, step, 1.0) for step in range(101)] + [loss(1, step, 2.0) for step in range(5, 51)]
    rows += [loss(0, step, 3.0, labels='{"of":"b"}') for step in range(11)]
    append(writer, "scalars", rows)
    if is_said_again:
        append(writer, "scalars", [loss(1, 5, 2.0, ordinal=1)])
    asked = "SELECT step FROM loss_curve WHERE labels IS NOT NULL ORDER BY step"
    drawn_of_b = "SELECT step FROM scalar_curve('r', of_labels := '{\"of\":\"b\"}') ORDER BY step"

    assert [(step,) for step in range(5)] == connection.sql(asked).fetchall()
    assert is_said_again != (connection._views.instance.defined["loss_curve"] == LOSS_LOGGED_ONCE)
    assert [(step,) for step in range(5)] == connection.sql(drawn_of_b).fetchall()


def test_epochs_use_their_own_steps_also_after_a_fresh_start(writer, connection):
    rows = [loss(attempt, step, 1.0) for attempt in (0, 1) for step in range(1, 1001)]
    rows += [loss(attempt, epoch, epoch + 10.0 * attempt, name="accuracy") for attempt in (0, 1) for epoch in range(3)]
    append(writer, "scalars", rows)
    asked = "SELECT step, cumulative_step, value FROM scalar_history WHERE name = 'accuracy' AND stands ORDER BY 1"

    assert [(0, 3, 10.0), (1, 4, 11.0), (2, 5, 12.0)] == connection.sql(asked).fetchall()
    assert [(0, 10.0), (1, 11.0), (2, 12.0)] == drawn(connection, "accuracy")


@pytest.mark.parametrize("evaluated", [(500, 1000), (0, 500, 1000), (520, 1040)])
def test_rarely_logged_loss_defines_the_attempts_of_other_scalars(writer, connection, evaluated):
    """An attempt also trains before its first and after its last logged loss."""
    rows = [loss(0, step, 1.0) for step in range(50, 1001, 50)] + [loss(1, step, 1.0) for step in range(850, 951, 50)]
    append(writer, "scalars", rows + [loss(0, step, 1.0 * step, name="eval_loss") for step in evaluated])
    expected = [(step, 1.0 * step) for step in evaluated if step < 850]

    assert expected == drawn(connection, "eval_loss")
    asked = "SELECT step, value FROM scalar_history WHERE name = 'eval_loss' AND stands ORDER BY 1"
    assert expected == connection.sql(asked).fetchall()


def test_run_without_loss_uses_the_steps_of_each_scalar(writer, connection):
    append(
        writer, "scalars", [loss(attempt, step, 1.0 + attempt, name="lr") for attempt, step in ((0, 1), (0, 2), (1, 2))]
    )

    assert [(1, 1.0), (2, 2.0)] == drawn(connection, "lr")
    asked = "SELECT step, value FROM scalar_history WHERE stands ORDER BY 1"
    assert [(1, 1.0), (2, 2.0)] == connection.sql(asked).fetchall()


def test_rollup_is_superseded_if_one_of_its_steps_is(writer, connection):
    """The next attempt began within the second hundred steps; the reason for its restart may be in their mean."""
    rolled = {"name": "loss", "rows": 9, "value_count": 9, "value_nans": 0, "rank": None}
    buckets = ((0, 1, 99, 2.0), (100, 100, 199, 1e9))
    append(
        writer,
        "scalar_rollups",
        [
            rolled | {"step": step, "first_step": first, "last_step": last, "value_avg": mean}
            for step, first, last, mean in buckets
        ],
    )
    append(writer, "scalars", [loss(1, step, 1.0) for step in range(151, 250)])

    assert [(0, 99, 99, 2.0), (1, 151, 200, 1.0)] == curve(connection)[:2]
    assert [(1, 2.0), (151, 1.0)] == drawn(connection, "loss")[:2]


def test_step_logged_again_in_an_attempt_has_its_last_value(writer, connection):
    append(writer, "scalars", [loss(0, 5, 1.0, ordinal=7), loss(0, 6, 2.0, ordinal=8), loss(0, 5, 9.0, ordinal=9)])

    assert [(0, 5, 5, 9.0), (0, 6, 6, 2.0)] == curve(connection)


def test_ranks_and_micro_steps_are_averaged_with_their_range(writer, connection):
    values = {(rank, micro): 1.0 + rank + 10 * micro for rank in range(3) for micro in range(2)}
    append(
        writer, "scalars", [loss(0, 1, value, rank=rank, micro_step=micro) for (rank, micro), value in values.items()]
    )
    expected = (6, statistics.fmean(values.values()), min(values.values()), max(values.values()))

    assert [expected] == curve(connection, "parts, loss, lowest, highest")


def test_runs_names_and_labels_have_separate_histories(writer, connection):
    rows = [
        loss(0, 1, 1.0),
        loss(0, 1, 2.0, run="s"),
        loss(0, 1, 3.0, labels='{"loss":"aux"}'),
        loss(1, 1, 4.0, name="lr"),
    ]
    append(writer, "scalars", rows)
    found = connection.sql("SELECT run, name, labels, value FROM scalar_history WHERE stands ORDER BY value").fetchall()

    expected = [("r", "loss", None), ("s", "loss", None), ("r", "loss", '{"loss":"aux"}'), ("r", "lr", None)]
    assert [(*key, value) for key, value in zip(expected, (1.0, 2.0, 3.0, 4.0), strict=True)] == found


@pytest.mark.usual(3)
@pytest.mark.parametrize("said", few(1, ["again in another file", "once", "again in a file"]))
@pytest.mark.parametrize(
    ("attempts", "less"),
    [
        ([0], LOSS_OF_SOLE_ATTEMPT),
        ([None, 0], LOSS_OF_SOLE_ATTEMPT),
        ([0, 1], LOSS_LOGGED_ONCE),
        ([3], LOSS_LOGGED_ONCE),
    ],
)
@pytest.mark.parametrize("micro_steps", [[None], [0, 1]])
def test_cheaper_loss_curves_equal_the_general_view(writer, connection, said, attempts, less, micro_steps):
    """Several files: rewinds, ranks, micro-batches, NaN, labels, and steps that are logged again."""
    draw, ordinals = random.Random(len(said) + len(attempts)), itertools.count()
    for first in (40, 0, 90, 91 if said == "again in another file" else -40):
        keys = itertools.product(
            ["r", "s"], attempts, [None, 0, 1], micro_steps, range(first, first + 15), [None, "{}"]
        )
        rows = [
            loss(
                attempt,
                step + 5 * (attempt or 0),
                draw.choice([math.nan, math.inf, *map(float, range(6))]),
                run=run,
                rank=rank
                if attempt == attempts[0]
                else 2,  # a null attempt counts as 0, so that one rank in both would repeat steps
                micro_step=micro_step,
                labels=labels,
                ordinal=next(ordinals),
                ts=START + dt.timedelta(seconds=draw.randrange(99)),
            )
            for run, attempt, rank, micro_step, step, labels in keys
            if draw.random() < 0.7 and (attempt == attempts[0] or rank == 0)
        ]
        again = rows[::97] if said == "again in a file" else []
        others = [loss(0, 1, 1.0, name="lr"), loss(0, 1, 2.0, name="lr"), loss(0, None, 1.0)]
        append(
            writer, "scalars", [*rows, *({**row, "value": 9.0, "ordinal": next(ordinals)} for row in again), *others]
        )
    for run in ("r", "s"):
        asked = f"FROM loss_curve WHERE run = '{run}' ORDER BY ALL"
        sooner = connection.sql(asked)
        made_of = connection._views.instance.defined["loss_curve"]
        in_a_text = asked.replace("'", "''")
        plain = connection.sql(f"FROM query('{in_a_text}')")

        assert (made_of == less) == (said == "once")
        assert (plain.columns, plain.types) == (sooner.columns, sooner.types)
        assert repr(plain.fetchall()) == repr(sooner.fetchall())


def test_later_rollup_or_repeated_loss_is_visible_immediately(writer, connection):
    append(writer, "scalars", [loss(0, step, 1.0, ordinal=step) for step in (100, 101)])
    before = curve(connection)
    append(writer, "scalars", [loss(0, 101, 5.0, ordinal=200)])
    again = curve(connection)
    rolled = {"name": "loss", "step": 0, "first_step": 1, "last_step": 99, "rows": 9, "value_count": 9}
    append(writer, "scalar_rollups", [rolled | {"rank": None, "value_avg": 2.0, "value_nans": 0}])
    rolled_up = curve(connection)

    assert [1.0, 1.0] == [row[3] for row in before]
    assert [1.0, 5.0] == [row[3] for row in again]
    assert [2.0, 1.0, 5.0] == [row[3] for row in rolled_up]


def test_rollups_of_one_run_do_not_change_another(writer, connection):
    append(writer, "scalars", [loss(0, step, 1.0) for step in (1, 2)])
    rolled = {"run": "s", "name": "loss", "step": 0, "first_step": 1, "last_step": 99, "rows": 9, "value_count": 9}
    append(writer, "scalar_rollups", [rolled | {"rank": None, "value_avg": 2.0, "value_nans": 0}])
    found, made_of = {}, {}
    for asked in ("WHERE run = 'r'", "WHERE run = 's'", ""):
        found[asked] = connection.sql(f"SELECT run, loss FROM loss_curve {asked} ORDER BY ALL").fetchall()
        made_of[asked] = connection._views.instance.defined["loss_curve"] == LOSS_OF_SOLE_ATTEMPT

    of_r, of_s = [("r", 1.0), ("r", 1.0)], [("s", 2.0)]
    assert [of_r, of_s, of_r + of_s] == list(found.values())
    assert [True, False, False] == list(made_of.values())


def run_row(**columns) -> dict:
    return {"rank": None, "ordinal": 1, "state": "running", **columns}


def paced(step: int, seconds: float, attempt: int = 0) -> dict:
    return loss(attempt, step, 1.0, ts=START + dt.timedelta(seconds=seconds))


def eta(connection) -> list[tuple]:
    return connection.sql("SELECT step, seconds_per_step, eta_seconds, expected_end FROM run_eta").fetchall()


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
    ("run", "expected"),
    [
        (run_row(planned_steps=None), None),
        (run_row(planned_steps=10), 0.0),
        (run_row(planned_steps=100, state="failed"), None),
        (run_row(planned_steps=10, state="completed"), 0.0),
    ],
)
def test_run_without_plan_or_remaining_steps_has_no_eta(writer, connection, run, expected):
    append(writer, "scalars", [paced(step, step) for step in range(1, 11)])
    append(writer, "runs", [run])

    assert [(10, 1.0, expected, None)] == eta(connection)


@pytest.mark.parametrize("planned", [10**12, 2**63 - 1])
def test_plan_of_practically_infinite_steps_has_no_expected_end(writer, connection, planned):
    append(writer, "scalars", [paced(step, step) for step in range(1, 11)])
    append(writer, "runs", [run_row(planned_steps=planned)])

    assert [(10, 1.0, pytest.approx(planned), None)] == eta(connection)
