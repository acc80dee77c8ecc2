"""`scalar_curve`: buckets of one scalar against sums in plain Python."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope_storage.api.store import Batch
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.connection.view_binding import SOLE_ATTEMPT_CURVE
from rankscope_storage.sql.scalar_curve import SCALAR_CURVE


def append(writer, rows: list[dict]) -> None:
    usual = {"run": "r", "attempt": 0, "rank": 0, "name": "loss", "value": 1.0}
    table = pa.Table.from_pylist([usual | row for row in rows], schema=dataset_schema("scalars"))
    writer.append(Batch(tables={"scalars": table}, watermarks={}))


def reference(rows: list[dict], points: int) -> list[tuple]:
    """What stands, in buckets of equal length from the first step on."""
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


@pytest.mark.parametrize("attempts", [[0], [None], [0, 1, 2], [2, None]])
@pytest.mark.parametrize("points", [1, 7, 4000])
def test_a_curve_is_the_mean_and_range_of_buckets_of_what_stands(writer, connection, attempts, points):
    draw = random.Random(len(attempts) + points)
    rows = [
        {"attempt": attempt, "rank": rank, "step": draw.choice([None, *range(10, 200)]), "value": draw.gauss(2, 1)}
        for attempt in attempts
        for rank in range(3)
        for _ in range(60)
    ]
    append(writer, rows)
    append(writer, [{"step": 5, "value": None}, {"step": 1, "run": "s"}, {"step": 1, "name": "lr"}])
    append(writer, [{"step": 1, "labels": '{"head":"a"}'}])

    found = connection.sql(f"FROM scalar_curve('r', points := {points})").fetchall()

    assert reference(rows, points) == found
    assert len(found) <= points


def test_no_curve_has_more_points_than_there_are_numbers_of_16_bits(writer, connection):
    append(writer, [{"step": step} for step in (0, 32_767, 65_536)])
    drawn = [connection.sql("FROM scalar_curve('r', points := 1000000)").fetchall()]
    append_rolled_up(writer)
    drawn.append(connection.sql("FROM scalar_curve('r', points := 1000000)").fetchall())

    assert [[0, 32_766, 65_535]] * 2 == [[row[0] for row in curve] for curve in drawn]


@pytest.mark.parametrize("attempts", [[0], [1], [0, None], [0, 1], [None], []])
def test_the_shorter_statement_is_taken_where_the_log_tells_that_all_is_of_attempt_0(writer, connection, attempts):
    append(writer, [{"attempt": attempt, "step": 1} for attempt in attempts] or [{"run": "s", "attempt": 3, "step": 1}])
    connection.sql("FROM scalar_curve('r')").fetchall()
    made_of = connection._views.engine.defined["scalar_curve"]

    assert (made_of == SOLE_ATTEMPT_CURVE) == (attempts in ([0], [0, None]))


def test_a_run_that_begins_again_has_its_curve_at_once(writer, connection):
    append(writer, [{"step": step, "value": 1.0} for step in range(4)])
    before = connection.sql("FROM scalar_curve('r')").fetchall()
    append(writer, [{"attempt": 1, "step": step, "value": 2.0} for step in (2, 3)])

    assert [1.0, 1.0, 1.0, 1.0] == [row[1] for row in before]
    assert [1.0, 1.0, 2.0, 2.0] == [row[1] for row in connection.sql("FROM scalar_curve('r')").fetchall()]


def test_curves_of_several_runs_and_of_a_view_have_what_came_since(writer, connection):
    """A question names its run, so that only its extents are looked up; through a view it names none."""
    both = "SELECT step, mean FROM scalar_curve('r') UNION ALL SELECT step, mean FROM scalar_curve($other) ORDER BY 1"
    append(writer, [{"step": 1}, {"step": 2, "run": "s"}])
    one = connection.sql("SELECT step, mean FROM scalar_curve('r')").fetchall()
    two = connection.sql(both, {"other": "s"}).fetchall()
    connection.sql("CREATE VIEW mine AS FROM scalar_curve('r', points := 2)")
    append(writer, [{"step": 0}, {"step": 8}])
    of_view = connection.sql("SELECT step, parts FROM mine").fetchall()

    assert ([(1, 1.0)], [(1, 1.0), (2, 1.0)], [(0, 2), (5, 1)]) == (one, two, of_view)


def test_files_of_an_older_shape_have_their_place_in_a_curve(writer, connection, monkeypatch):
    append(writer, [{"step": 1}])
    (path,) = map(Path, connection.files("scalars"))
    pq.write_table(pq.ParquetFile(path).read().drop_columns(["labels", "attempt"]), path)
    append(writer, [{"step": 9}])
    monkeypatch.setattr("rankscope_storage.sql.views.file_fingerprint", lambda path: "0ld5hape")

    with connect(connection.path) as fresh:
        assert [1, 9] == [row[0] for row in fresh.sql("FROM scalar_curve('r')").fetchall()]


def test_other_scalars_and_labels_have_curves_of_their_own_and_nan_shows(writer, connection):
    append(
        writer, [{"step": step, "name": "lr", "labels": "{}", "value": math.nan if step else 1.0} for step in (0, 9)]
    )
    found = connection.sql("FROM scalar_curve('r', of_name := 'lr', of_labels := '{}', points := 2)").fetchall()

    assert [0, 5] == [row[0] for row in found]
    assert math.isnan(found[1][1])
    assert [] == connection.sql("FROM scalar_curve('nobody')").fetchall()


@pytest.mark.parametrize("seed", range(8))
def test_a_curve_without_rollups_is_that_of_the_statement_that_reads_both(writer, connection, seed):
    """Over several files: attempts that are null, rewind or have no value, steps written twice, NaN and labels."""
    draw = random.Random(seed)
    attempts = draw.choice([[0], [None], [None, 0], [None, 1], [0, 1, 3], [4]])
    for _ in range(3):
        rows = [
            {
                "attempt": draw.choice(attempts),
                "rank": draw.choice([None, 0, 1]),
                "step": draw.choice([None, *range(-20, 60)]),
                "value": draw.choice([None, math.nan, math.inf, *map(float, range(6))]),
                "labels": draw.choice([None, None, "{}"]),
            }
            for _ in range(draw.choice([1, 40]))
        ]
        append(writer, [*rows, {"attempt": seed % 2 * 7, "step": 99, "value": None}])
    with connect(connection.path) as both:
        both.execute("FROM scalars, scalar_rollups")
        both.execute(SCALAR_CURVE.replace("scalar_curve", "curve_of_both"))
        for arguments in ("points := 7", "points := 1000", "of_labels := '{}'"):
            expected = both.sql(f"FROM curve_of_both('r', {arguments})").fetchall()
            found = connection.sql(f"FROM scalar_curve('r', {arguments})").fetchall()

            assert repr(expected) == repr(found)


def test_a_curve_has_what_is_rolled_up_as_soon_as_there_is_anything(writer, connection):
    append(writer, [{"step": 100}])
    described = connection.sql("DESCRIBE FROM scalar_curve('r')").fetchall()

    assert [(100, 1.0, 1.0, 1.0, 1)] == connection.sql("FROM scalar_curve('r')").fetchall()
    append_rolled_up(writer)

    assert [1, 51] == [row[0] for row in connection.sql("FROM scalar_curve('r', points := 2)").fetchall()]
    assert described == connection.sql("DESCRIBE FROM scalar_curve('r')").fetchall()


def append_rolled_up(writer) -> None:
    """Steps 1 to 99: 300 numbers from 1 to 3."""
    rolled = {"run": "r", "attempt": 0, "name": "loss", "step": 0, "first_step": 1, "last_step": 99, "rows": 300}
    rolled |= {"value_min": 1.0, "value_max": 3.0, "value_avg": 2.0, "value_count": 300, "value_nans": 0}
    table = pa.Table.from_pylist([rolled], schema=dataset_schema("scalar_rollups"))
    writer.append(Batch(tables={"scalar_rollups": table}, watermarks={}))


def test_what_is_rolled_up_counts_with_as_many_as_it_stands_for(writer, connection):
    append(writer, [{"step": 100 + step, "value": 4.0} for step in range(100)])
    append_rolled_up(writer)

    assert [(1, 2.5, 1.0, 4.0, 400)] == connection.sql("FROM scalar_curve('r', points := 1)").fetchall()
