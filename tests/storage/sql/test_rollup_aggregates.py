"""The query for rollups that sums up less because of what it knows, against the one that knows nothing."""

from __future__ import annotations

import duckdb
import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings
from tests.storage.sql.test_rollups import SCALAR_ROWS, TENSOR_ROWS, comparable

from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.sql.rollups import SERIES, Known, look_through, rolled_up, what_holds

NUMBERS = {"tensor_stats": ("norm", "min", "max", "mean"), "scalars": ("value",)}
USUAL = {"rank": 0, "step": 7, "nans": 0, "infs": 0, "zeros": 5}


def table(dataset: str, rows: list[dict]) -> pa.Table:
    """Return the rows, with a time each."""
    told = [{"run": "r", "ts": number * 1_000_000, **row} for number, row in enumerate(rows)]
    return pa.Table.from_pylist(told, schema=dataset_schema(dataset))


def looked_through(dataset: str, rows: pa.Table) -> Known:
    with duckdb.connect() as engine:
        found = engine.from_arrow(rows).query("rows", look_through(dataset, "rows")).to_arrow_table()
    [row] = found.to_pylist()
    return what_holds(row)


def summed(dataset: str, rows: pa.Table, known: Known | None = None) -> pa.Table:
    with duckdb.connect() as engine:
        engine.execute("SET TimeZone = 'UTC'")
        question = rolled_up(dataset, "rows") if known is None else rolled_up(dataset, "rows", known)
        return engine.from_arrow(rows).query("rows", question).to_arrow_table()


@pytest.mark.parametrize(("dataset", "shapes"), [("tensor_stats", TENSOR_ROWS), ("scalars", SCALAR_ROWS)])
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_sums_are_the_same_whatever_is_known(dataset, shapes, data):
    """Of rows in which some columns are the usual ones throughout: finite, whole, or absent."""
    names = set(dataset_schema(dataset).names)
    tame = data.draw(st.sets(st.sampled_from(sorted({*USUAL, *NUMBERS[dataset]} & names))))
    optional = {*SERIES[dataset], "step", *NUMBERS[dataset]} & names - {"run"}
    absent = data.draw(st.sets(st.sampled_from(sorted(optional))))
    fixed = {name: USUAL.get(name, 1.5) for name in tame} | dict.fromkeys(absent)
    rows = table(dataset, [row | fixed for row in data.draw(st.lists(shapes, min_size=1, max_size=20))])
    known = looked_through(dataset, rows)
    plain, sooner = summed(dataset, rows), summed(dataset, rows, known)

    assert absent <= known.absent
    assert plain.schema == sooner.schema
    assert comparable(plain.to_pylist()) == comparable(sooner.to_pylist())


def test_what_holds_is_seen():
    rows = [{"rank": 0, "step": 1, "kind": "k", "tensor": "t", "norm": 1.0, "nans": 0, "infs": None}] * 2
    rows = [*rows, {**rows[0], "rank": None}]
    known = looked_through("tensor_stats", table("tensor_stats", rows))

    assert {"step", "norm", "nans"} < known.whole
    assert {"micro_step", "call_seq", "mean", "infs"} < known.absent
    assert "rank" not in known.whole | known.absent
    assert known.is_finite
    for odd in ({"norm": float("nan")}, {"mean": float("-inf")}, {"nans": 1}, {"infs": -2}):
        assert not looked_through("tensor_stats", table("tensor_stats", [rows[0], rows[0] | odd])).is_finite
