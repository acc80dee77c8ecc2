"""`downsample`: never more points than requested, and every extreme."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_storage.sql.smoothing import DOWNSAMPLE

Point = tuple[float, float]

POINTS = st.dictionaries(
    st.integers(0, 500),
    st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, -math.inf])),
    min_size=1,
    max_size=120,
)


@pytest.fixture(scope="module")
def database():
    with duckdb.connect() as database:
        database.execute(DOWNSAMPLE)
        yield database


def thinned(database, rows: Sequence[tuple[int, int, float]], points: int) -> dict[int, list[Point]]:
    columns = zip(*rows, strict=True)
    types = (pa.int32(), pa.int64(), pa.float64())
    database.register(
        "curve", pa.table([pa.array(*pair) for pair in zip(columns, types, strict=True)], ["s", "x", "y"])
    )
    found = defaultdict(list)
    for series, x, y in database.sql(f"FROM downsample(curve, x, y, {points}, series := s)").fetchall():
        found[series].append((x, y))
    return found


def bits(points: Sequence[Point]) -> set[tuple[float, str]]:
    """Return values as text, in which NaN equals NaN."""
    return {(x, str(y)) for x, y in points}


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(POINTS, min_size=1, max_size=3), st.integers(5, 60))
def test_points_are_stored_ordered_and_include_ends_and_extremes(database, curves, limit):
    rows = [(number, x, y) for number, curve in enumerate(curves) for x, y in curve.items()]
    found = thinned(database, rows, limit)

    assert list(range(len(curves))) == sorted(found)
    for number, curve in enumerate(curves):
        kept = found[number]
        assert len(kept) <= limit
        assert [x for x, _ in kept] == sorted(x for x, _ in kept)
        assert bits(kept) <= bits(list(curve.items()))
        assert len(kept) == len({x for x, _ in kept})
        assert {min(curve), max(curve)} <= {x for x, _ in kept}
        for bucket in buckets(curve, limit):
            assert_extremes_kept(bucket, {x: y for x, y in kept if x in bucket})
        if len(curve) <= limit:
            assert bits(list(curve.items())) == bits(kept)


def buckets(curve: dict[int, float], limit: int) -> list[dict[int, float]]:
    """Return the reference: buckets of equal width in x, a third as many as points."""
    first, last, count = min(curve), max(curve), (limit - 2) // 3
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for x, y in curve.items():
        share = (x - first) / (last - first) if last > first else 0.0
        found[min(int(share * count), count - 1)][x] = y
    return list(found.values())


def assert_extremes_kept(bucket: dict[int, float], kept: dict[int, float]) -> None:
    numbers = [y for y in bucket.values() if not math.isnan(y)]
    if numbers:
        assert {min(numbers), max(numbers)} <= set(kept.values())
    if len(numbers) < len(bucket):
        assert any(map(math.isnan, kept.values()))


def test_points_with_equal_x_at_an_end_give_one_of_them(database):
    ends = [(0, 0, math.nan), (0, 0, 5.0), (0, 99, math.nan), (0, 99, 7.0)]
    rows = [(0, x, float(x % 10)) for x in range(1, 99)]
    kept = thinned(database, rows + ends, 20)[0]

    assert bits(kept) <= bits([(x, y) for _, x, y in rows + ends])
    assert {0, 99} <= {x for x, _ in kept}
    assert len(kept) <= 20


def test_fewer_than_five_points_are_refused(database):
    with pytest.raises(duckdb.Error, match="ask for at least 5 points"):
        thinned(database, [(0, 0, 1.0)], 4)


def test_rows_without_a_number_are_no_points(database):
    database.execute("CREATE OR REPLACE TEMP TABLE holes AS FROM (VALUES (1, 2.0), (2, NULL), (NULL, 3.0)) t(x, y)")

    assert [(None, 1, 2.0)] == database.sql("FROM downsample(holes, x, y, 10)").fetchall()
