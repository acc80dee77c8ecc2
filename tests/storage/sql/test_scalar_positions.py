"""Curves of imported logs: steps that restart with each epoch, records without steps, and live runs as before."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

import pytest
from tests.storage.rows import ask, put

from rankscope_storage.api import summaries
from rankscope_storage.diff.diff import DiffSide, divergence
from rankscope_storage.sql.scalar_history import STEPS_ARE_POSITIONS

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
HISTORY = (
    "SELECT attempt, step, cumulative_step, value FROM scalar_history WHERE run = 'r' AND name = '{}'{} ORDER BY 3"
)


def append(writer, rows: Iterable[dict]) -> None:
    """Append scalars; rows with a seq are covered by a watermark."""
    listed = list(rows)
    watermarks = dict(sorted((row["incarnation"], row["seq"]) for row in listed if "seq" in row))
    put(writer, "scalars", listed, watermarks, run="r", attempt=0, ts=START, ts_origin="log")


def log(records: Iterable[dict[str, float | None]], *, incarnation: str = "import-a", ordinal: int = 0, **columns):
    """Yield the rows of imported records; `step` and `attempt` of a record are no scalars."""
    for seq, record in enumerate(records):
        own = {key: record[key] for key in ("step", "attempt") if key in record}
        for name in record.keys() - own.keys():
            place = {"incarnation": incarnation, "seq": seq, "ordinal": ordinal + seq}
            yield {**place, **columns, **own, "name": name, "value": record[name]}


def epoch(number: int, steps: Iterable[int], **columns) -> list[dict]:
    return [{"epoch": float(number), "step": step, "loss": 10.0 * number + step, **columns} for step in steps]


def both(connection, query: str) -> list[tuple]:
    """Return the rows of `query`, after a check that a statement without pruning returns the same rows."""
    text = query.replace("'", "''")
    rows = ask(connection, query)
    assert rows == ask(connection, f"FROM query('{text}')")
    return rows


def drawn(connection) -> list[tuple]:
    return both(connection, "SELECT step, mean FROM scalar_curve('r') ORDER BY step")


def test_cumulative_step_continues_over_epochs_and_step_does_not(writer, connection):
    """One evaluation has no epoch, and its own counter of batches does not decide."""
    evaluation = [{"step": 30, "eval_loss": 5.0}, {"epoch": 2.0, "step": 1, "accuracy": 0.5}]
    append(writer, log([*epoch(1, (10, 20, 30)), *evaluation, *epoch(2, (5, 15, 25)), *epoch(3, (10, 20))]))
    places = [(1, 10, 10), (1, 20, 20), (1, 30, 30), (2, 5, 35), (2, 15, 45), (2, 25, 55), (3, 10, 65), (3, 20, 75)]
    expected = [(0, step, at, 10.0 * number + step) for number, step, at in places]
    curve = "SELECT step, cumulative_step FROM loss_curve WHERE run = 'r' AND cumulative_step IN (10, 35) ORDER BY 2"

    assert expected == both(connection, HISTORY.format("loss", " AND stands"))
    assert [(0, 30, 30, 5.0)] == both(connection, HISTORY.format("eval_loss", ""))
    assert [(10, 10), (5, 35)] == both(connection, curve)
    assert [(at, value) for _, _, at, value in expected] == drawn(connection)


def test_steps_from_0_continue_behind_the_last_step(writer, connection):
    append(writer, log([*epoch(0, (0, 1)), *epoch(1, (0, 1))]))

    assert [0, 1, 2, 3] == [row[2] for row in both(connection, HISTORY.format("loss", ""))]


def test_restart_in_mid_epoch_supersedes_later_steps_only(writer, connection):
    """The second attempt begins at step 20 of epoch 2: step 20 of epoch 1 is not superseded."""
    first = [*epoch(1, (10, 20, 30)), *epoch(2, (10, 20, 30))]
    again = [*epoch(2, (20, 30), attempt=1), *epoch(3, (10,), attempt=1)]
    append(writer, log([*first, *again]))
    standing, superseded = (
        both(connection, HISTORY.format("loss", f" AND {which}")) for which in ("stands", "NOT stands")
    )
    expected = [(0, 10, 10), (0, 20, 20), (0, 30, 30), (0, 10, 40), (1, 20, 61), (1, 30, 71), (1, 10, 81)]

    assert expected == [row[:3] for row in standing]
    assert [(0, 20, 50), (0, 30, 60)] == [row[:3] for row in superseded]


def test_global_steps_are_positions_also_with_fractions_of_epochs(writer, connection):
    records = [{"epoch": step / 40, "step": step, "loss": 1.0} for step in range(10, 130, 10)]
    append(writer, log(records))
    again = [{"epoch": step / 40, "step": step, "loss": 2.0, "attempt": 1} for step in (50, 60)]
    append(writer, log(again, incarnation="import-b", ordinal=100))

    assert [(1, 50, 121), (1, 60, 131)] == [row[:3] for row in both(connection, HISTORY.format("loss", ""))][-2:]
    connection.sql("SELECT count(*) FROM scalar_history WHERE run = 'r'").fetchall()
    assert STEPS_ARE_POSITIONS == connection._views.instance.defined["scalar_positions"]


def test_records_without_steps_are_rows_in_the_order_of_their_logs(writer, connection):
    """Record 1 of the first log is an evaluation; the second log is a rotated one, which was imported later."""
    append(writer, log([{"loss": 5.0}, {"eval_loss": 4.0}, {"loss": 3.0}], ordinal=10))
    append(writer, log([{"loss": 2.0}, {"loss": 1.0}], incarnation="import-0", ordinal=20))

    expected = [(1, 5.0), (3, 3.0), (4, 2.0), (5, 1.0)]
    curve = "SELECT step, loss FROM loss_curve WHERE run = 'r' ORDER BY cumulative_step"

    assert [(0, None, *point) for point in expected] == both(connection, HISTORY.format("loss", " AND stands"))
    assert expected == drawn(connection)
    assert [(None, loss) for _, loss in expected] == both(connection, curve)


MIXED = {
    "space between steps": ([10, None, None, 20, None], [10, 11, 12, 20, 21]),
    "before the first step": ([None, None, 10], [8, 9, 10]),
    "no space between steps": ([1, None, 2, None, None, 3], [1, 2, 3, 4, 5, 6]),
}


@pytest.mark.usual(1)
@pytest.mark.parametrize("case", MIXED)
def test_records_without_steps_remain_between_steps(writer, connection, case):
    steps, positions = MIXED[case]
    append(writer, log([{"step": step, "loss": float(place)} for place, step in enumerate(steps)]))
    query = "SELECT step, {} FROM {} WHERE run = 'r' ORDER BY 3"

    expected = list(zip(steps, map(float, range(len(steps))), positions, strict=True))
    assert expected == both(connection, query.format("value, position", "scalar_positions"))
    assert positions == [row[2] for row in both(connection, query.format("value, cumulative_step", "scalar_history"))]
    found = summaries.summary(connection, "r")
    assert (0.0, len(steps) - 1.0, 0.0) == (found.loss_first, found.loss_last, found.loss_min)


def test_stepless_evaluations_do_not_move_the_steps(writer, connection):
    """Evaluations and a summary without a step are behind the step before them; a restart supersedes them, too."""
    records = [{"step": 1, "loss": 5.0}, {"eval_loss": 4.0}, {"step": 2, "loss": 3.0}, {"eval_loss": 2.0}]
    again = [{"step": 2, "loss": 2.5, "attempt": 1}, {"eval_loss": 1.5, "attempt": 1}]
    append(writer, log([*records, *again]))

    assert [(0, 1, 1, 5.0), (1, 2, 3, 2.5)] == both(connection, HISTORY.format("loss", " AND stands"))
    assert [(0, None, 2, 4.0), (0, None, 3, 2.0), (1, None, 4, 1.5)] == both(
        connection, HISTORY.format("eval_loss", "")
    )


def test_only_ranks_are_averaged(writer, connection):
    for rank in range(2):
        records = [{**each, "loss": each["loss"] + rank} for each in (*epoch(1, (1, 2)), *epoch(2, (1, 2)))]
        append(writer, log(records, incarnation=f"import-{rank}", rank=rank))
    curve = "SELECT parts, loss FROM loss_curve WHERE run = 'r' ORDER BY cumulative_step"

    assert [(2, 11.5), (2, 12.5), (2, 21.5), (2, 22.5)] == both(connection, curve)


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([{"loss": 2.345}, {"loss": 1.0}, {"loss": 1.365}], (2.345, 1.365, 1.0)),
        ([*epoch(1, (1, 2)), *epoch(2, (1, 2))], (11.0, 22.0, 11.0)),
        ([{"step": 1, "loss": 5.0}, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 4.0}], (5.0, 4.0, 1.0)),
    ],
    ids=["no steps", "epochs", "repeated step"],
)
def test_summary_takes_first_last_and_lowest_of_records(writer, connection, records, expected):
    append(writer, log(records))
    found = summaries.summary(connection, "r")

    assert expected == (found.loss_first, found.loss_last, found.loss_min)


@pytest.mark.usual(1)
@pytest.mark.parametrize("steps", [(None, None, None, None), (1, 2, 1, 2)])
def test_diff_compares_each_record(writer, connection, steps):
    for run, third in (("a", 3.0), ("b", 3.5)):
        places = zip((0.0, 0.0, 1.0, 1.0), steps, (1.0, 2.0, third, 4.0), strict=True)
        records = [{"step": step, "epoch": number, "loss": value} for number, step, value in places]
        append(writer, log(records, incarnation=f"import-{run}", run=run))
    found = divergence(connection, DiffSide(run="a"), DiffSide(run="b"))

    assert (4, [(3, 3.0, 3.5)]) == (found.steps_compared, [(point.step, point.a, point.b) for point in found.points])
