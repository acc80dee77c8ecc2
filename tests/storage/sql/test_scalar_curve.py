"""`scalar_curve`: buckets of one scalar, compared with sums in Python."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.storage.rows import ask, put

from rankscope_storage.connection import connect


@pytest.fixture
def append(writer):
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
def test_curve_has_mean_and_range_of_buckets_without_superseded_steps(append, connection, attempts, points):
    draw = random.Random(len(attempts) + points)
    rows = [
        {"attempt": attempt, "rank": rank, "step": draw.choice([None, *range(10, 200)]), "value": draw.gauss(2, 1)}
        for attempt in attempts
        for rank in range(3)
        for _ in range(60)
    ]
    append(rows)
    append([{"step": 5, "value": None}, {"step": 1, "run": "s"}, {"step": 1, "name": "lr"}])
    append([{"step": 1, "labels": '{"head":"a"}'}])
    found = ask(connection, f"FROM scalar_curve('r', points := {points})")

    assert reference(rows, points) == found
    assert len(found) <= points


def test_curve_has_at_most_32767_points(append, append_rolled_up, connection):
    append([{"step": step} for step in (0, 32_767, 65_536)])
    drawn = [ask(connection, "FROM scalar_curve('r', points := 1000000)")]
    append_rolled_up()
    drawn.append(ask(connection, "FROM scalar_curve('r', points := 1000000)"))

    assert [[0, 32_766, 65_535]] * 2 == [[row[0] for row in curve] for curve in drawn]


def test_curves_of_several_runs_include_new_rows(append, connection):
    """A query with the name of a run reads only the extents of that run; a query through a view has no name."""
    both = "SELECT step, mean FROM scalar_curve('r') UNION ALL SELECT step, mean FROM scalar_curve($other) ORDER BY 1"
    append([{"step": 1}, {"step": 2, "run": "s"}])
    one = ask(connection, "SELECT step, mean FROM scalar_curve('r')")
    two = connection.sql(both, {"other": "s"}).fetchall()
    connection.sql("CREATE VIEW mine AS FROM scalar_curve('r', points := 2)")
    append([{"step": 0}, {"step": 8}])
    of_view = ask(connection, "SELECT step, parts FROM mine")

    assert ([(1, 1.0)], [(1, 1.0), (2, 1.0)], [(0, 2), (5, 1)]) == (one, two, of_view)


def test_files_with_older_columns_are_part_of_a_curve(append, connection, monkeypatch):
    append([{"step": 1}])
    (path,) = map(Path, connection.files("scalars"))
    pq.write_table(pq.ParquetFile(path).read().drop_columns(["labels", "attempt"]), path)
    append([{"step": 9}])
    monkeypatch.setattr("rankscope_storage.sql.views.file_fingerprint", lambda path: "0ld5hape")

    with connect(connection.path) as fresh:
        assert [(1,), (9,)] == ask(fresh, "SELECT step FROM scalar_curve('r')")


def test_scalars_and_labels_have_separate_curves_and_nan_is_visible(append, connection):
    append([{"step": step, "name": "lr", "labels": "{}", "value": math.nan if step else 1.0} for step in (0, 9)])
    found = ask(connection, "FROM scalar_curve('r', of_name := 'lr', of_labels := '{}', points := 2)")

    assert [0, 5] == [row[0] for row in found]
    assert math.isnan(found[1][1])
    assert [] == ask(connection, "FROM scalar_curve('nobody')")


def test_curve_includes_rollups_immediately_with_the_weight_of_their_rows(append, append_rolled_up, connection):
    append([{"step": 100 + step, "value": 4.0} for step in range(100)])
    described = ask(connection, "DESCRIBE FROM scalar_curve('r')")

    assert [(100, 4.0, 4.0, 4.0, 100)] == ask(connection, "FROM scalar_curve('r', points := 1)")
    append_rolled_up()

    assert [(1, 2.5, 1.0, 4.0, 400)] == ask(connection, "FROM scalar_curve('r', points := 1)")
    assert [1, 101] == [row[0] for row in ask(connection, "FROM scalar_curve('r', points := 2)")]
    assert described == ask(connection, "DESCRIBE FROM scalar_curve('r')")
