"""The query for rollups that uses facts about its rows, compared with the query without facts."""

from __future__ import annotations

import duckdb
import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings
from tests.properties import examples
from tests.storage.sql.test_rollups import SCALAR_ROWS, TENSOR_ROWS, comparable

from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.sql.rollups import SERIES, RowFacts, facts_query, rollup_query, row_facts

NUMBERS = {"tensor_stats": ("norm", "min", "max", "mean"), "scalars": ("value",)}
USUAL = {"rank": 0, "step": 7, "nans": 0, "infs": 0, "zeros": 5}


def table(dataset: str, rows: list[dict]) -> pa.Table:
    """Return the rows with a time in each."""
    told = [{"run": "r", "ts": number * 1_000_000, **row} for number, row in enumerate(rows)]
    return pa.Table.from_pylist(told, schema=dataset_schema(dataset))


def looked_through(dataset: str, rows: pa.Table) -> RowFacts:
    with duckdb.connect() as engine:
        found = engine.from_arrow(rows).query("rows", facts_query(dataset, "rows")).to_arrow_table()
    [row] = found.to_pylist()
    return row_facts(row)


def summed(dataset: str, rows: pa.Table, facts: RowFacts | None = None) -> pa.Table:
    with duckdb.connect() as engine:
        engine.execute("SET TimeZone = 'UTC'")
        question = rollup_query(dataset, "rows") if facts is None else rollup_query(dataset, "rows", facts)
        return engine.from_arrow(rows).query("rows", question).to_arrow_table()


@pytest.mark.usual(1)
@pytest.mark.parametrize(("dataset", "shapes"), [("tensor_stats", TENSOR_ROWS), ("scalars", SCALAR_ROWS)])
@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_rollups_are_equal_with_and_without_facts(dataset, shapes, data):
    """Some columns are finite, without nulls, or absent in all rows, as in usual data."""
    names = set(dataset_schema(dataset).names)
    tame = data.draw(st.sets(st.sampled_from(sorted({*USUAL, *NUMBERS[dataset]} & names))))
    optional = {*SERIES[dataset], "step", *NUMBERS[dataset]} & names - {"run"}
    absent = data.draw(st.sets(st.sampled_from(sorted(optional))))
    fixed = {name: USUAL.get(name, 1.5) for name in tame} | dict.fromkeys(absent)
    rows = table(dataset, [row | fixed for row in data.draw(st.lists(shapes, min_size=1, max_size=20))])
    facts = looked_through(dataset, rows)
    plain, sooner = summed(dataset, rows), summed(dataset, rows, facts)

    assert absent <= facts.absent
    assert plain.schema == sooner.schema
    assert comparable(plain.to_pylist()) == comparable(sooner.to_pylist())


def test_row_facts_of_usual_rows():
    rows = [{"rank": 0, "step": 1, "kind": "k", "tensor": "t", "norm": 1.0, "nans": 0, "infs": None}] * 2
    rows = [*rows, {**rows[0], "rank": None}]
    facts = looked_through("tensor_stats", table("tensor_stats", rows))

    assert {"step", "norm", "nans"} < facts.whole
    assert {"micro_step", "call_seq", "mean", "infs"} < facts.absent
    assert "rank" not in facts.whole | facts.absent
    assert facts.is_finite
    for odd in ({"norm": float("nan")}, {"mean": float("-inf")}, {"nans": 1}, {"infs": -2}):
        assert not looked_through("tensor_stats", table("tensor_stats", [rows[0], rows[0] | odd])).is_finite
