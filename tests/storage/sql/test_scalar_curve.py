"""`scalar_curve`: buckets of one scalar, compared with sums in Python."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.properties import few

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
def test_curve_has_mean_and_range_of_buckets_without_superseded_steps(writer, connection, attempts, points):
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


def test_curve_has_at_most_32767_points(writer, connection):
    append(writer, [{"step": step} for step in (0, 32_767, 65_536)])
    drawn = [connection.sql("FROM scalar_curve('r', points := 1000000)").fetchall()]
    append_rolled_up(writer)
    drawn.append(connection.sql("FROM scalar_curve('r', points := 1000000)").fetchall())

    assert [[0, 32_766, 65_535]] * 2 == [[row[0] for row in curve] for curve in drawn]


@pytest.mark.parametrize("attempts", [[0], [1], [0, None], [0, 1], [None], []])
def test_shorter_macro_is_used_if_all_files_are_of_attempt_0(writer, connection, attempts):
    append(writer, [{"attempt": attempt, "step": 1} for attempt in attempts] or [{"run": "s", "attempt": 3, "step": 1}])
    connection.sql("FROM scalar_curve('r')").fetchall()
    made_of = connection._views.instance.defined["scalar_curve"]

    assert (made_of == SOLE_ATTEMPT_CURVE) == (attempts in ([0], [0, None]))


def test_restarted_run_has_its_curve_immediately(writer, connection):
    append(writer, [{"step": step, "value": 1.0} for step in range(4)])
    before = connection.sql("FROM scalar_curve('r')").fetchall()
    append(writer, [{"attempt": 1, "step": step, "value": 2.0} for step in (2, 3)])

    assert [1.0, 1.0, 1.0, 1.0] == [row[1] for row in before]
    assert [1.0, 1.0, 2.0, 2.0] == [row[1] for row in connection.sql("FROM scalar_curve('r')").fetchall()]


def test_curves_of_several_runs_include_new_rows(writer, connection):
    """A query with the name of a run reads only the extents of that run; a query through a view has no name."""
    both = "SELECT step, mean FROM scalar_curve('r') UNION ALL SELECT step, mean FROM scalar_curve($other) ORDER BY 1"
    append(writer, [{"step": 1}, {"step": 2, "run": "s"}])
    one = connection.sql("SELECT step, mean FROM scalar_curve('r')").fetchall()
    two = connection.sql(both, {"other": "s"}).fetchall()
    connection.sql("CREATE VIEW mine AS FROM scalar_curve('r', points := 2)")
    append(writer, [{"step": 0}, {"step": 8}])
    of_view = connection.sql("SELECT step, parts FROM mine").fetchall()

    assert ([(1, 1.0)], [(1, 1.0), (2, 1.0)], [(0, 2), (5, 1)]) == (one, two, of_view)


def test_files_with_older_columns_are_part_of_a_curve(writer, connection, monkeypatch):
    append(writer, [{"step": 1}])
    (path,) = map(Path, connection.files("scalars"))
    pq.write_table(pq.ParquetFile(path).read().drop_columns(["labels", "attempt"]), path)
    append(writer, [{"step": 9}])
    monkeypatch.setattr("rankscope_storage.sql.views.file_fingerprint", lambda path: "0ld5hape")

    with connect(connection.path) as fresh:
        assert [1, 9] == [row[0] for row in fresh.sql("FROM scalar_curve('r')").fetchall()]


def test_scalars_and_labels_have_separate_curves_and_nan_is_visible(writer, connection):
    append(
        writer, [{"step": step, "name": "lr", "labels": "{}", "value": math.nan if step else 1.0} for step in (0, 9)]
    )
    found = connection.sql("FROM scalar_curve('r', of_name := 'lr', of_labels := '{}', points := 2)").fetchall()

    assert [0, 5] == [row[0] for row in found]
    assert math.isnan(found[1][1])
    assert [] == connection.sql("FROM scalar_curve('nobody')").fetchall()


@pytest.mark.usual(1)
@pytest.mark.parametrize("seed", few(2, range(8)))
def test_raw_curve_equals_the_macro_with_rollups(writer, connection, seed):
    """Several files: null attempts, rewinds, attempts without values, repeated steps, NaN and labels."""
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


def test_curve_includes_rollups_immediately(writer, connection):
    append(writer, [{"step": 100}])
    described = connection.sql("DESCRIBE FROM scalar_curve('r')").fetchall()

    assert [(100, 1.0, 1.0, 1.0, 1)] == connection.sql("FROM scalar_curve('r')").fetchall()
    append_rolled_up(writer)

    assert [1, 51] == [row[0] for row in connection.sql("FROM scalar_curve('r', points := 2)").fetchall()]
    assert described == connection.sql("DESCRIBE FROM scalar_curve('r')").fetchall()


def append_rolled_up(writer) -> None:
    """Append steps 1 to 99 with 300 numbers from 1 to 3."""
    rolled = {"run": "r", "attempt": 0, "name": "loss", "step": 0, "first_step": 1, "last_step": 99, "rows": 300}
    rolled |= {"value_min": 1.0, "value_max": 3.0, "value_avg": 2.0, "value_count": 300, "value_nans": 0}
    table = pa.Table.from_pylist([rolled], schema=dataset_schema("scalar_rollups"))
    writer.append(Batch(tables={"scalar_rollups": table}, watermarks={}))


def test_rollups_are_weighted_by_their_number_of_rows(writer, connection):
    append(writer, [{"step": 100 + step, "value": 4.0} for step in range(100)])
    append_rolled_up(writer)

    assert [(1, 2.5, 1.0, 4.0, 400)] == connection.sql("FROM scalar_curve('r', points := 1)").fetchall()
