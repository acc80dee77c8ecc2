"""Rows that are read without SQL: long series without the columns of names, and the same numbers as by SQL."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.view.training import START, append, scalars

from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect
from rankscope_view.data.history import read_history
from rankscope_view.data.raw_rows import is_constant, raw_histories, read_rows

STEPS = 70_000  # more than one row group


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a store with a long run, one with gaps, an imported one, and one of three scalars."""
    path = tmp_path_factory.mktemp("raw") / "store"
    random, steps = np.random.default_rng(0), np.arange(STEPS)
    values = random.normal(size=STEPS)
    gaps = pa.array(values, mask=steps % 1000 == 7)
    with Store.open(path, create=True).claim(owner="a test") as writer:
        for run, value, source in (("long", values, "long-0"), ("gaps", gaps, "gaps-0"), ("log", values, "import-0")):
            columns = {"incarnation": source, "ts": START + steps}
            append(writer, scalars=scalars(run, "loss", steps, value, **columns))
        for name, own in (
            ("loss", steps),
            ("grad_norm", steps),
            ("late", np.where(steps < STEPS - 9, steps, steps + 5)),
        ):
            columns = {"incarnation": f"{name}-0", "ts": START + steps}
            append(writer, scalars=scalars("several", name, own, values, **columns))
    with connect(path) as connection:
        yield connection


@pytest.mark.parametrize("run", ["long", "gaps"])
def test_long_series_equals_sql(stored, run):
    expected = read_history(stored, run, "loss")
    found = raw_histories(stored, run, ["loss"])

    for name in ("attempt", "step", "cumulative", "time", "value", "lowest", "highest", "stands"):
        np.testing.assert_allclose(getattr(expected, name), getattr(found["loss"], name), rtol=1e-15)


def test_columns_of_one_value_take_no_memory(stored):
    rows = read_rows(stored, ["long"], ["loss"]).main("long", "loss")

    assert all(is_constant(getattr(rows, name)) for name in ("attempt", "rank", "micro_step"))
    assert STEPS == len(rows.rank)


def test_series_of_the_same_records_share_steps_and_times(stored):
    names = ["grad_norm", "late", "loss"]
    rows = read_rows(stored, ["several"], names)
    first, late, last = (rows.main("several", name) for name in names)

    assert np.shares_memory(first.time, last.time)
    assert not np.shares_memory(first.step, late.step)
    assert not np.shares_memory(first.value, last.value)
    for name in names:
        expected, found = read_history(stored, "several", name), rows.main("several", name)
        np.testing.assert_array_equal(expected.step, found.step)
        np.testing.assert_allclose(expected.time, found.time, rtol=1e-15)


def test_long_imported_run_needs_sql(stored):
    assert {"log"} == read_rows(stored, ["log"], ["loss"]).for_sql
