"""Grids of heat maps: pooling keeps extremes, and NaN has priority."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.view.training import event, events, rows, write

from rankscope_storage.connection import connect
from rankscope_view.data import cells, grid
from rankscope_view.data.cell_value import cell_value
from rankscope_view.data.cells import CellQuery, Window, find_groups, read_cells, sampled_columns
from rankscope_view.data.grid import Grid, GridRequest, Order, natural, tensor_grid
from rankscope_view.data.tensor import first_to_leave


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Return a connection to a store with 2,500 tensors of 40 steps: one has a spike, another one a NaN."""
    tensors, steps = 2500, 40
    step, number = np.tile(np.arange(steps), tensors), np.repeat(np.arange(tensors), steps)
    norm = np.where((number == 1700) & (step == 20), 500.0, 1.0)
    bad = (number == 2001) & (step == 30)
    known = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i", "seq": step, "step": step, "infs": 0 * step}
    names = [f"layers.{one}.weight" for one in number]
    values = {"norm": pa.array(norm, mask=bad), "nans": np.where(bad, 3, 0)}
    table = rows("tensor_stats", kind="grad_reduced", tensor=names, **known, **values)
    with connect(write(tmp_path_factory.mktemp("grid") / "store", {"tensor_stats": table})) as opened:
        yield opened


def holder(found: Grid, row: int) -> str:
    return found.names[found.rows[row].holder]


def test_pooled_rows_name_the_tensor_with_the_extreme(many):
    found = tensor_grid(many, "r", GridRequest(kind="grad_reduced"))

    assert (1250, 40) == found.cells.shape
    assert ("layers.1700.weight", 2, 1700) == (holder(found, 850), found.rows[850].tensors, found.rows[850].first)
    assert found.cells[850, 20] == found.cells[found.cells <= grid.LEVELS].max()
    assert cells.NOT_A_NUMBER == found.cells[1000, 30]
    assert "layers.2001.weight" == holder(found, 1000)
    assert (1000, 30) == found.first_bad


@pytest.mark.parametrize(
    ("kind", "first"), [("grad_reduced", "layers.2.a"), ("exp_avg", "layers.2.a"), ("act_out", "layers.0.a")]
)
def test_first_nan_is_that_of_the_causal_order_in_each_order_of_rows(opened, kind, first):
    """All layers become NaN at a step: in the backward pass, the last one is the first."""
    names = [f"layers.{layer}.{part}" for layer in range(3) for part in "ab"]
    nan = {"rule": "AnomalyNan", "op": "nans", "kind": kind, "rank": 0}
    wanted = [name for name in names if name.endswith("a")]
    calls = wanted if kind == "act_out" else wanted[::-1]
    listed = [event("r", "anomaly", 3, 3, tensor=name, call_id=at, **nan) for at, name in enumerate(calls)]
    bad = [3 if step == 3 and name in wanted else 0 for name in names for step in range(5)]
    step, tensor = list(range(5)) * 6, [name for name in names for _ in range(5)]
    known = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i", "seq": step, "norm": 1.0, "infs": 0}
    table = rows("tensor_stats", step=step, kind=kind, tensor=tensor, nans=bad, **known)
    store = opened(tensor_stats=table, events=events(listed))
    grids = [tensor_grid(store, "r", GridRequest(kind=kind, order=order)) for order in Order]
    leaving = first_to_leave(store, "r")[0].tensor

    assert [first] * 4 == [leaving, *(holder(found, found.first_bad[0]) for found in grids)]
    assert [3] * 3 == [found.first_bad[1] for found in grids]


def test_zoom_shows_single_tensors_and_steps(many):
    found = tensor_grid(many, "r", GridRequest(kind="grad_reduced", rows=(1690, 1710), columns=(15, 25)))

    assert (20, 10) == found.cells.shape
    assert (15, 24) == (found.steps[0], found.last_steps[-1])
    assert "layers.1700.weight" == holder(found, 10)
    assert "no pooling" in found.notice


def test_rows_are_the_worst_ones_or_pooled_to_the_height_of_the_screen(many):
    worst = tensor_grid(many, "r", GridRequest(kind="grad_reduced", order=Order.WORST, rows=(0, 2)))
    found = tensor_grid(many, "r", GridRequest(kind="grad_reduced", most_rows=100))

    assert ("layers.2001.weight", "layers.1700.weight") == worst.names
    assert (100, 40) == found.cells.shape
    assert "layers.1700.weight" == holder(found, 68)
    assert 2500 == sum(row.tensors for row in found.rows) == len(found.names)
    assert (0, 0) == tensor_grid(many, "no such run", GridRequest(kind="grad_reduced")).cells.shape


def test_exact_value_of_a_pooled_cell_names_its_tensor_and_nan_has_priority(many):
    def value(column, *numbers):
        names = tuple(f"layers.{number}.weight" for number in numbers)
        return cell_value(many, "r", GridRequest(kind="grad_reduced", tensors=names), column)

    for column, number, expected in ((20, 1700, 500.0), (3, 1699, 1)):
        found = value(column, *range(1699, 1703))
        assert (f"layers.{number}.weight", column, expected) == (found.tensor, found.step, found.value)
    found = value(30, 2000, 2001)
    assert ("layers.2001.weight", 3) == (found.tensor, found.nans)


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """Return a connection to two parts of four layers on three ranks, two attempts, two kinds and an odd stride."""
    random, batches = np.random.default_rng(3), []
    for attempt, steps in ((0, range(0, 60, 3)), (1, range(45, 90, 3))):
        for kind in ("grad_reduced", "param_after"):
            for rank in range(3):
                step = np.repeat(np.array(steps), 8)
                names = [f"layers.{at // 2}.{('a', 'b')[at % 2]}.weight" for at in range(8)] * len(steps)
                source = {"run": "r", "attempt": attempt, "rank": rank, "incarnation": f"{attempt}-{rank}", "seq": step}
                norm, mean = np.exp(random.normal(0, 2, len(step))), random.normal(0, 1, len(step))
                table = rows("tensor_stats", **source, step=step, kind=kind, tensor=names, norm=norm, mean=mean)
                batches.append({"tensor_stats": table})
    with connect(write(tmp_path_factory.mktemp("spread") / "store", *batches)) as opened:
        yield opened


def test_tensors_are_grouped_by_layer_or_by_part(spread):
    by = {order: tensor_grid(spread, "r", GridRequest(kind="grad_reduced", order=order)).names for order in Order}

    assert ["layers.0.a.weight", "layers.0.b.weight", "layers.1.a.weight"] == list(by[Order.MODEL][:3])
    assert ["layers.0.a.weight", "layers.1.a.weight", "layers.2.a.weight"] == list(by[Order.PART][:3])


@pytest.mark.parametrize(("op", "rank"), [("norm", None), ("mean", 2)])
def test_cells_equal_sql(spread, op, rank):
    query = CellQuery(run="r", kind="grad_reduced", op=op, rank=rank, groups=find_groups(spread, "r", "grad_reduced"))
    columns = sampled_columns(spread, query)
    for width in (1, 4):
        found = read_cells(query, Window(columns, 2, columns.count, width))
        place = f"((CASE coalesce(attempt, 0) WHEN 0 THEN step // 3 ELSE (step - 45) // 3 + 20 END) - 2) // {width}"
        own = "true" if rank is None else f"rank = {rank}"
        expected = spread.query(
            f"SELECT tensor, {place} AS place, min({op}) AS low, max({op}) AS high FROM tensor_stats "
            f"WHERE kind = 'grad_reduced' AND {own} AND NOT (attempt = 0 AND step < 6) GROUP BY ALL"
        ).to_pylist()

        assert len(expected) == np.isfinite(found.high).sum()
        for row in expected:
            at = found.names.index(row["tensor"]), row["place"]
            assert (row["low"], row["high"]) == (found.low[at], found.high[at])


def test_names_sort_by_their_numbers():
    names = ["lm_head", "layers.10.w", "layers.2.w", "embed.weight", "²", "1.x"]

    assert ["embed.weight", "1.x", "layers.2.w", "layers.10.w", "²", "lm_head"] == sorted(names, key=natural)
