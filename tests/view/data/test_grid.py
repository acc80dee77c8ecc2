"""Grids of heat maps: pooling keeps extremes, and NaN has priority."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.view.training import append, rows

from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect
from rankscope_view.data import grid
from rankscope_view.data.grid import GridRequest, natural, tensor_grid


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Return a connection to a store with 2,500 tensors of 40 steps: one has a spike, another one a NaN."""
    folder = tmp_path_factory.mktemp("grid") / "store"
    tensors, steps = 2500, 40
    step = np.tile(np.arange(steps), tensors)
    number = np.repeat(np.arange(tensors), steps)
    norm = np.ones(tensors * steps)
    norm[(number == 1700) & (step == 20)] = 500.0
    bad = (number == 2001) & (step == 30)
    table = rows(
        "tensor_stats", run="r", attempt=0, rank=0, incarnation="i", seq=step, step=step, kind="grad_reduced",
        tensor=[f"layers.{one}.weight" for one in number], norm=pa.array(norm, mask=bad), nans=np.where(bad, 3, 0),
        infs=np.zeros(len(step), np.int64),
    )  # fmt: skip
    with Store.open(folder, create=True).claim(owner="a test") as writer:
        append(writer, tensor_stats=table)
    with connect(folder) as opened:
        yield opened


def test_pooled_rows_name_the_tensor_with_the_extreme(many):
    found = tensor_grid(many, "r", GridRequest(kind="grad_reduced"))

    assert (1250, 40) == found.cells.shape
    assert ("layers.1700.weight", 2, 1700) == (found.rows[850].name, found.rows[850].tensors, found.rows[850].first)
    assert found.cells[850, 20] == found.cells[found.cells <= grid.LEVELS].max()
    assert grid.NOT_A_NUMBER == found.cells[1000, 30]
    assert "layers.2001.weight" == found.rows[1000].name
    assert (1000, 30) == found.first_bad


def test_zoom_shows_single_tensors_and_steps(many):
    found = tensor_grid(many, "r", GridRequest(kind="grad_reduced", rows=(1690, 1710), columns=(15, 25)))

    assert (20, 10) == found.cells.shape
    assert (15, 24) == (found.steps[0], found.last_steps[-1])
    assert "layers.1700.weight" == found.rows[10].name
    assert "no pooling" in found.notice


def test_worst_tensors_come_first(many):
    found = tensor_grid(many, "r", GridRequest(kind="grad_reduced", worst_first=True, rows=(0, 2)))

    assert ["layers.2001.weight", "layers.1700.weight"] == [row.name for row in found.rows]


def test_unknown_run_has_an_empty_grid(many):
    assert (0, 0) == tensor_grid(many, "no such run", GridRequest(kind="grad_reduced")).cells.shape


def test_names_sort_by_their_numbers():
    names = ["lm_head", "layers.10.w", "layers.2.w", "embed.weight", "²", "1.x"]

    assert ["embed.weight", "1.x", "layers.2.w", "layers.10.w", "²", "lm_head"] == sorted(names, key=natural)
