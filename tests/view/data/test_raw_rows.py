"""Rows that are read without SQL: long series without the columns of names, and the same numbers as by SQL."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.view.training import START, scalars, write

from rankscope_storage.connection import connect
from rankscope_view.data.history import read_history
from rankscope_view.data.raw_rows import is_constant, raw_histories, read_rows

STEPS = 70_000  # more than one row group


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a store with a long run, one with gaps, an imported one, and one of three scalars."""
    random, steps = np.random.default_rng(0), np.arange(STEPS)
    values, late = random.normal(size=STEPS), np.where(steps < STEPS - 9, steps, steps + 5)
    gaps = pa.array(values, mask=steps % 1000 == 7)
    series = [("long", "loss", steps, values), ("gaps", "loss", steps, gaps), ("log", "loss", steps, values)]
    series += [("several", name, own, values) for name, own in (("loss", steps), ("grad_norm", steps), ("late", late))]
    batches = [
        {"scalars": scalars(run, name, own, value, ts=START + steps, incarnation=source)}
        for run, name, own, value in series
        for source in ["import-0" if run == "log" else f"{run}-{name}-0"]
    ]
    with connect(write(tmp_path_factory.mktemp("raw") / "store", *batches)) as connection:
        yield connection


@pytest.mark.parametrize("run", ["long", "gaps", "several"])
def test_long_series_equals_sql(stored, run):
    names = ["grad_norm", "late", "loss"] if run == "several" else ["loss"]
    histories = raw_histories(stored, run, names)

    for scalar in names:
        expected, found = read_history(stored, run, scalar), histories[scalar]
        for name in ("attempt", "step", "cumulative", "time", "value", "lowest", "highest", "stands"):
            np.testing.assert_allclose(getattr(expected, name), getattr(found, name), rtol=1e-15)


def test_columns_of_one_value_and_equal_columns_take_no_memory(stored):
    rows = read_rows(stored, ["long"], ["loss"]).main("long", "loss")
    several = read_rows(stored, ["several"], ["grad_norm", "loss"])
    first, last = (several.main("several", name) for name in ("grad_norm", "loss"))

    assert all(is_constant(getattr(rows, name)) for name in ("attempt", "rank", "micro_step"))
    assert np.shares_memory(first.time, last.time)
    assert not np.shares_memory(first.value, last.value)


def test_long_imported_run_needs_sql(stored):
    assert {"log"} == read_rows(stored, ["log"], ["loss"]).for_sql
