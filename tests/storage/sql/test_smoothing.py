"""Smoothing macros and `downsample`, compared with recursion, sums and buckets in Python."""

import math
from collections import defaultdict
from collections.abc import Sequence

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_storage.sql.functions import SCALAR_MACROS
from rankscope_storage.sql.smoothing import DOWNSAMPLE, EMA, MOVING_AVERAGE, P10

ONCE = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
VALUES = st.lists(
    st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, None])),
    min_size=1,
    max_size=60,
)


@pytest.fixture(scope="module")
def database():
    with duckdb.connect() as database:
        for macro in (*SCALAR_MACROS, EMA, MOVING_AVERAGE, P10, DOWNSAMPLE):
            database.execute(macro.statement())
        yield database


def curve(database, values: Sequence[float | None], series: Sequence[int] | None = None) -> None:
    """Create the relation `curve` with its rows in reverse order, because only x orders them."""
    table = pa.table(
        {
            "series": pa.array(series or [0] * len(values), pa.int32()),
            "x": pa.array(range(len(values)), pa.int64()),
            "y": pa.array(values, pa.float64(), from_pandas=False),
        }
    )
    database.register("curve", table.take(list(reversed(range(len(values))))))


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def order_of(value: float | None) -> tuple[int, float]:
    """Return the sort key of DuckDB: numbers, NaN, null."""
    return (2, 0.0) if value is None else (1, 0.0) if math.isnan(value) else (0, value)


def recursion(values: Sequence[float | None], alpha: float) -> list[float | None]:
    found: list[float | None] = []
    average: float | None = None
    for value in values:
        if is_finite(value):
            average = value if average is None else (1 - alpha) * average + alpha * value
        found.append(average)
    return found


def assert_close(expected: Sequence[float | None], found: Sequence[float | None], scale: float) -> None:
    assert [value is None for value in expected] == [value is None for value in found]
    for one, other in zip(expected, found, strict=True):
        assert one is None or one == pytest.approx(other, rel=1e-9, abs=1e-9 * scale)


@ONCE
@given(VALUES, st.sampled_from([1e-300, 1e-9, 0.01, 0.3, 0.9, 0.999999, 1.0]))
def test_ema_is_the_recursion_of_the_rules_over_finite_values(database, values, alpha):
    curve(database, values)
    found = database.sql(f"SELECT ema FROM ema(curve, x, y, {alpha})").fetchall()

    assert_close(recursion(values, alpha), [value for (value,) in found], scale=1e6)


@pytest.mark.parametrize("alpha", [0.01, 0.5, 0.99])
def test_ema_of_many_values_continues_over_blocks(database, alpha):
    values = np.random.default_rng(7).normal(2, 1, 30_000).tolist()
    curve(database, values)
    found = database.sql(f"SELECT ema FROM ema(curve, x, y, {alpha})").fetchnumpy()["ema"]

    assert np.allclose(recursion(values, alpha), found, rtol=1e-9, atol=1e-9)


def test_each_series_has_a_separate_ema_and_columns_are_kept(database):
    curve(database, [1.0, 5.0, 3.0, 7.0], series=[0, 1, 0, 1])
    rows = database.sql("SELECT * FROM ema(curve, x, y, 0.5, series := series)").fetchall()

    assert [(0, 0, 1.0, 1.0), (0, 2, 3.0, 2.0), (1, 1, 5.0, 5.0), (1, 3, 7.0, 6.0)] == rows


TIES = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([*map(float, range(5)), -math.inf, math.inf, math.nan, None])),
    min_size=1,
    max_size=30,
)


@ONCE
@given(TIES, st.sampled_from([0.01, 0.5, 0.9999, 1.0]), st.randoms(use_true_random=False))
def test_rows_of_one_step_are_ordered_by_value_in_any_input_order(database, points, alpha, order):
    """Two attempts can have trained a step. Powers of 0.0001 fill a block with 21 values."""
    laid = order.sample(points, len(points))
    database.register("curve", pa.table({"x": [x for x, _ in laid], "y": pa.array([y for _, y in laid], pa.float64())}))
    values = [y for _, y in sorted(points, key=lambda point: (point[0], order_of(point[1])))]
    averages = [value for (value,) in database.sql(f"SELECT ema FROM ema(curve, x, y, {alpha})").fetchall()]
    recent = [v for (v,) in database.sql("SELECT moving_average FROM moving_average(curve, x, y, 3)").fetchall()]

    assert_close(recursion(values, alpha), averages, scale=10)
    finite = [list(filter(is_finite, values[max(0, end - 2) : end + 1])) for end in range(len(values))]
    assert_close([sum(some) / len(some) if some else None for some in finite], recent, scale=10)


@pytest.mark.parametrize("alpha", [0.0, -0.5, 1.5])
def test_ema_refuses_an_alpha_outside_of_its_range(database, alpha):
    curve(database, [1.0, 2.0])
    with pytest.raises(duckdb.Error, match="alpha, the weight of a new value"):
        database.sql(f"SELECT ema FROM ema(curve, x, y, {alpha})").fetchall()


@ONCE
@given(VALUES, st.integers(1, 7))
def test_moving_average_and_range_use_the_last_finite_values(database, values, width):
    curve(database, values)
    found = database.sql(f"SELECT moving_average, moving_min, moving_max FROM moving_average(curve, x, y, {width})")
    expected = []
    for end in range(1, len(values) + 1):
        recent = [value for value in values[max(0, end - width) : end] if is_finite(value)]
        expected.append((sum(recent) / len(recent), min(recent), max(recent)) if recent else (None, None, None))

    rows = found.fetchall()
    for column in range(3):
        assert_close([row[column] for row in expected], [row[column] for row in rows], scale=1e6)


@ONCE
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_p10_is_the_interpolated_percentile_and_marks_lower_values(database, values):
    curve(database, values)
    rows = database.sql("SELECT y, p10, is_below_p10 FROM p10(curve, y)").fetchall()
    expected = float(np.percentile(values, 10))

    for value, p10, is_below in rows:
        assert expected == pytest.approx(p10, rel=1e-9, abs=1e-6)
        assert (value < p10) == is_below


def test_p10_ignores_values_that_are_not_finite(database):
    curve(database, [*map(float, range(11)), math.nan, -math.inf])
    rows = database.sql("SELECT y FROM p10(curve, y) WHERE is_below_p10 AND p10 = 1.0 ORDER BY y").fetchall()

    assert [(-math.inf,), (0.0,)] == rows


def test_perplexity_that_exceeds_a_double_is_inf(database):
    found = database.sql("SELECT perplexity(ln(10)), perplexity(1e4), perplexity('nan'::DOUBLE), perplexity(NULL)")
    ((ten, huge, nan, none),) = found.fetchall()

    assert (pytest.approx(10.0), math.inf, None) == (ten, huge, none)
    assert math.isnan(nan)


# --- `downsample`: never more points than requested, and every extreme


Point = tuple[float, float]

POINTS = st.dictionaries(
    st.integers(0, 500),
    st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, -math.inf])),
    min_size=1,
    max_size=120,
)


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
