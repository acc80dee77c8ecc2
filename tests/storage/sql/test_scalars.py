"""Curves over the attempts of a run and of imported logs, and buckets of one scalar, compared with Python."""

import datetime as dt
import functools
import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples
from tests.storage.rows import ask, put, table

from rankscope_ingest.importers.common.positions import Positions
from rankscope_storage.api import summaries
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.connection import connect
from rankscope_storage.diff.diff import DiffSide, divergence
from rankscope_storage.sql.views import has_positions

# Curves over the attempts of a run, and its expected end.

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
    """Each attempt is (first step, number of steps); the reference simulates the training."""
    # A scalar that is logged rarely follows the attempts of the loss. An attempt may end before its first value; an
    # evaluation before the first step has the last step's number.
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
        *(("r", "loss", None, 1.0), ("s", "loss", None, 2.0), ("r", "loss", "{}", 3.0), ("r", "lr", None, 4.0)),
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


# `scalar_curve`: buckets of one scalar, compared with sums in Python.


@pytest.fixture
def append_loss(writer):
    return functools.partial(put, writer, "scalars", run="r", attempt=0, rank=0, name="loss", value=1.0)


@pytest.fixture
def append_rolled_up(writer):
    """Return a function that appends steps 1 to 99 with 300 numbers from 1 to 3."""
    rolled = {"run": "r", "attempt": 0, "name": "loss", "step": 0, "first_step": 1, "last_step": 99, "rows": 300}
    rolled |= {"value_min": 1.0, "value_max": 3.0, "value_avg": 2.0, "value_count": 300, "value_nans": 0}
    return functools.partial(put, writer, "scalar_rollups", [rolled])


def reference(rows: list[dict], points: int) -> list[tuple]:
    """Return the reference: buckets of equal length from the first step, without superseded steps."""
    told = [row for row in rows if row["step"] is not None and row["value"] is not None]
    first = {row["attempt"] or 0: 1 << 60 for row in told}
    for row in told:
        first[row["attempt"] or 0] = min(first[row["attempt"] or 0], row["step"])
    later = {attempt: min((first[other] for other in first if other > attempt), default=1 << 60) for attempt in first}
    origin, end = min(row["step"] for row in told), max(row["step"] for row in told)
    width = (end - origin) // points + 1
    buckets: dict[int, list[float]] = defaultdict(list)
    for row in told:
        if row["step"] < later[row["attempt"] or 0]:
            buckets[(row["step"] - origin) // width].append(row["value"])
    return [
        (origin + number * width, pytest.approx(statistics.fmean(values)), min(values), max(values), len(values))
        for number, values in sorted(buckets.items())
    ]


@pytest.mark.usual(4)
@pytest.mark.parametrize("attempts", [[0], [None], [0, 1, 2], [2, None]])
@pytest.mark.parametrize("points", [1, 7, 4000])
def test_curve_has_mean_and_range_of_buckets_without_superseded_steps(append_loss, connection, attempts, points):
    draw = random.Random(len(attempts) + points)
    rows = [
        {"attempt": attempt, "rank": rank, "step": draw.choice([None, *range(10, 200)]), "value": draw.gauss(2, 1)}
        for attempt in attempts
        for rank in range(3)
        for _ in range(60)
    ]
    append_loss(rows)
    append_loss([{"step": 5, "value": None}, {"step": 1, "run": "s"}, {"step": 1, "name": "lr"}])
    append_loss([{"step": 1, "labels": '{"head":"a"}'}])
    found = ask(connection, f"FROM scalar_curve('r', points := {points})")

    assert reference(rows, points) == found
    assert len(found) <= points


def test_curve_has_at_most_32767_points(append_loss, append_rolled_up, connection):
    append_loss([{"step": step} for step in (0, 32_767, 65_536)])
    drawn = [ask(connection, "FROM scalar_curve('r', points := 1000000)")]
    append_rolled_up()
    drawn.append(ask(connection, "FROM scalar_curve('r', points := 1000000)"))

    assert [[0, 32_766, 65_535]] * 2 == [[row[0] for row in curve] for curve in drawn]


def test_curves_of_several_runs_include_new_rows(append_loss, connection):
    """A query with the name of a run reads only the extents of that run; a query through a view has no name."""
    both = "SELECT step, mean FROM scalar_curve('r') UNION ALL SELECT step, mean FROM scalar_curve($other) ORDER BY 1"
    append_loss([{"step": 1}, {"step": 2, "run": "s"}])
    one = ask(connection, "SELECT step, mean FROM scalar_curve('r')")
    two = connection.sql(both, {"other": "s"}).fetchall()
    connection.sql("CREATE VIEW mine AS FROM scalar_curve('r', points := 2)")
    append_loss([{"step": 0}, {"step": 8}])
    of_view = ask(connection, "SELECT step, parts FROM mine")

    assert ([(1, 1.0)], [(1, 1.0), (2, 1.0)], [(0, 2), (5, 1)]) == (one, two, of_view)


def test_files_with_older_columns_are_part_of_a_curve(append_loss, connection, monkeypatch):
    append_loss([{"step": 1}])
    (path,) = map(Path, connection.files("scalars"))
    pq.write_table(pq.ParquetFile(path).read().drop_columns(["labels", "attempt"]), path)
    append_loss([{"step": 9}])
    monkeypatch.setattr("rankscope_storage.sql.views.file_fingerprint", lambda path: "0ld5hape")

    with connect(connection.path) as fresh:
        assert [(1,), (9,)] == ask(fresh, "SELECT step FROM scalar_curve('r')")


def test_scalars_and_labels_have_separate_curves_and_nan_is_visible(append_loss, connection):
    append_loss([{"step": step, "name": "lr", "labels": "{}", "value": math.nan if step else 1.0} for step in (0, 9)])
    found = ask(connection, "FROM scalar_curve('r', of_name := 'lr', of_labels := '{}', points := 2)")

    assert [0, 5] == [row[0] for row in found]
    assert math.isnan(found[1][1])
    assert [] == ask(connection, "FROM scalar_curve('nobody')")


def test_curve_includes_rollups_immediately_with_the_weight_of_their_rows(append_loss, append_rolled_up, connection):
    append_loss([{"step": 100 + step, "value": 4.0} for step in range(100)])
    described = ask(connection, "DESCRIBE FROM scalar_curve('r')")

    assert [(100, 4.0, 4.0, 4.0, 100)] == ask(connection, "FROM scalar_curve('r', points := 1)")
    append_rolled_up()

    assert [(1, 2.5, 1.0, 4.0, 400)] == ask(connection, "FROM scalar_curve('r', points := 1)")
    assert [1, 101] == [row[0] for row in ask(connection, "FROM scalar_curve('r', points := 2)")]
    assert described == ask(connection, "DESCRIBE FROM scalar_curve('r')")


# Imported logs: steps that restart with each epoch, records without steps, and live runs as before.

HISTORY = (
    "SELECT attempt, step, cumulative_step, value FROM scalar_history WHERE run = 'r' AND name = '{}'{} ORDER BY 3"
)


@pytest.fixture
def append_log(writer):
    """Return a function that appends scalars of a log with the positions that an import gives them."""
    axes: dict[str, list[Positions]] = defaultdict(list)

    def append(rows: Iterable[dict]) -> None:
        listed = list(rows)
        scalars = table("scalars", listed, run="r", attempt=0, ts=START, ts_origin="log")
        earlier = axes[listed[0].get("run", "r")]
        earlier.append(Positions([axis.state for axis in earlier]))
        watermarks = dict(sorted((row["incarnation"], row["seq"]) for row in listed))
        writer.append(Batch(tables={"scalars": earlier[-1].placed(scalars)}, watermarks=watermarks))

    return append


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


def drawn_positions(connection) -> list[tuple]:
    return both(connection, "SELECT step, mean FROM scalar_curve('r') ORDER BY step")


def test_cumulative_step_continues_over_epochs_and_step_does_not(append_log, connection):
    """One evaluation has no epoch, and its own counter of batches does not decide."""
    evaluation = [{"step": 30, "eval_loss": 5.0}, {"epoch": 2.0, "step": 99, "accuracy": 0.5}]
    append_log(log([*epoch(1, (10, 20, 30)), *evaluation, *epoch(2, (5, 15, 25)), *epoch(3, (10, 20))]))
    places = [(1, 10, 10), (1, 20, 20), (1, 30, 30), (2, 5, 35), (2, 15, 45), (2, 25, 55), (3, 10, 65), (3, 20, 75)]
    expected = [(0, step, at, 10.0 * number + step) for number, step, at in places]
    curve = "SELECT step, cumulative_step FROM loss_curve WHERE run = 'r' AND cumulative_step IN (10, 35) ORDER BY 2"

    assert expected == both(connection, HISTORY.format("loss", " AND stands"))
    assert [(0, 30, 30, 5.0)] == both(connection, HISTORY.format("eval_loss", ""))
    assert [(10, 10), (5, 35)] == both(connection, curve)
    assert [(at, value) for _, _, at, value in expected] == drawn_positions(connection)


def test_steps_from_0_continue_behind_the_last_step(append_log, connection):
    append_log(log([*epoch(0, (0, 1)), *epoch(1, (0, 1))]))

    assert [0, 1, 2, 3] == [row[2] for row in both(connection, HISTORY.format("loss", ""))]


def test_restart_in_mid_epoch_supersedes_later_steps_only(append_log, connection):
    """The second attempt begins at step 20 of epoch 2: step 20 of epoch 1 is not superseded."""
    first = [*epoch(1, (10, 20, 30)), *epoch(2, (10, 20, 30))]
    again = [*epoch(2, (20, 30), attempt=1), *epoch(3, (10,), attempt=1)]
    append_log(log([*first, *again]))
    standing, superseded = (
        both(connection, HISTORY.format("loss", f" AND {which}")) for which in ("stands", "NOT stands")
    )
    expected = [(0, 10, 10), (0, 20, 20), (0, 30, 30), (0, 10, 40), (1, 20, 61), (1, 30, 71), (1, 10, 81)]

    assert expected == [row[:3] for row in standing]
    assert [(0, 20, 50), (0, 30, 60)] == [row[:3] for row in superseded]


def test_global_steps_are_positions_also_with_fractions_of_epochs(append_log, connection):
    records = [{"epoch": step / 40, "step": step, "loss": 1.0} for step in range(10, 130, 10)]
    append_log(log(records))
    again = [{"epoch": step / 40, "step": step, "loss": 2.0, "attempt": 1} for step in (50, 60)]
    append_log(log(again, incarnation="import-b", ordinal=100))

    assert [(1, 50, 121), (1, 60, 131)] == [row[:3] for row in both(connection, HISTORY.format("loss", ""))][-2:]
    assert not has_positions(connection.files("scalars"))


def test_records_without_steps_are_rows_in_the_order_of_their_logs(append_log, connection):
    """Record 1 of the first log is an evaluation; the second log is a rotated one, which was imported later."""
    append_log(log([{"loss": 5.0}, {"eval_loss": 4.0}, {"loss": 3.0}], ordinal=10))
    append_log(log([{"loss": 2.0}, {"loss": 1.0}], incarnation="import-0", ordinal=20))

    expected = [(1, 5.0), (3, 3.0), (4, 2.0), (5, 1.0)]
    curve = "SELECT step, loss FROM loss_curve WHERE run = 'r' ORDER BY cumulative_step"

    assert [(0, None, *point) for point in expected] == both(connection, HISTORY.format("loss", " AND stands"))
    assert expected == drawn_positions(connection)
    assert [(None, loss) for _, loss in expected] == both(connection, curve)


MIXED = {
    "space between steps": ([10, None, None, 20, None], [10, 11, 12, 20, 21]),
    "before the first step": ([None, None, 10], [8, 9, 10]),
    "no space between steps": ([1, None, 2, None, None, 3], [1, 2, 3, 4, 5, 6]),
}


@pytest.mark.usual(1)
@pytest.mark.parametrize("case", MIXED)
def test_records_without_steps_remain_between_steps(append_log, connection, case):
    steps, positions = MIXED[case]
    append_log(log([{"step": step, "loss": float(place)} for place, step in enumerate(steps)]))
    query = "SELECT step, {} FROM {} WHERE run = 'r' ORDER BY 3"

    expected = list(zip(steps, map(float, range(len(steps))), positions, strict=True))
    assert expected == both(connection, query.format("value, position", "scalar_positions"))
    assert positions == [row[2] for row in both(connection, query.format("value, cumulative_step", "scalar_history"))]
    found = summaries.summary(connection, "r")
    assert (0.0, len(steps) - 1.0, 0.0) == (found.loss_first, found.loss_last, found.loss_min)


def test_stepless_evaluations_do_not_move_the_steps(append_log, connection):
    """Evaluations and a summary without a step are behind the step before them; a restart supersedes them, too."""
    records = [{"step": 1, "loss": 5.0}, {"eval_loss": 4.0}, {"step": 2, "loss": 3.0}, {"eval_loss": 2.0}]
    again = [{"step": 2, "loss": 2.5, "attempt": 1}, {"eval_loss": 1.5, "attempt": 1}]
    append_log(log([*records, *again]))

    assert [(0, 1, 1, 5.0), (1, 2, 3, 2.5)] == both(connection, HISTORY.format("loss", " AND stands"))
    assert [(0, None, 2, 4.0), (0, None, 3, 2.0), (1, None, 4, 1.5)] == both(
        connection, HISTORY.format("eval_loss", "")
    )


def test_only_ranks_are_averaged(append_log, connection):
    for rank in range(2):
        records = [{**each, "loss": each["loss"] + rank} for each in (*epoch(1, (1, 2)), *epoch(2, (1, 2)))]
        append_log(log(records, incarnation=f"import-{rank}", rank=rank))
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
def test_summary_takes_first_last_and_lowest_of_records(append_log, connection, records, expected):
    append_log(log(records))
    found = summaries.summary(connection, "r")

    assert expected == (found.loss_first, found.loss_last, found.loss_min)


@pytest.mark.usual(1)
@pytest.mark.parametrize("steps", [(None, None, None, None), (1, 2, 1, 2)])
def test_diff_compares_each_record(append_log, connection, steps):
    for run, third in (("a", 3.0), ("b", 3.5)):
        places = zip((0.0, 0.0, 1.0, 1.0), steps, (1.0, 2.0, third, 4.0), strict=True)
        records = [{"step": step, "epoch": number, "loss": value} for number, step, value in places]
        append_log(log(records, incarnation=f"import-{run}", run=run))
    found = divergence(connection, DiffSide(run="a"), DiffSide(run="b"))

    assert (4, [(3, 3.0, 3.5)]) == (found.steps_compared, [(point.step, point.a, point.b) for point in found.points])


FOLLOWED = {
    "epochs": ([*epoch(1, (10, 20)), *epoch(2, (10, 20)), *epoch(3, (10,))], [10, 20, 30, 40, 50]),
    "space between steps": ([{"step": step, "loss": 1.0} for step in (10, None, None, 20)], [10, 11, 12, 20]),
    "no space": ([{"step": step, "loss": 1.0} for step in (1, None, 2, None, 3)], [1, 2, 3, 4, 5]),
    "no steps": ([{"loss": 1.0}, {"eval_loss": 1.0}, {"loss": 1.0}], [1, 2, 3]),
}


@pytest.mark.parametrize("case", FOLLOWED)
def test_positions_of_a_followed_log_are_those_of_the_whole_log(case):
    records, expected = FOLLOWED[case]
    axis = Positions()
    found = []
    for seq, rows in itertools.groupby(log(records), lambda row: row["seq"]):
        placed = axis.placed(table("scalars", rows, run="r"))
        found.append((seq, pc.coalesce(placed["position"], placed["step"])[0].as_py()))

    assert list(enumerate(expected)) == found
