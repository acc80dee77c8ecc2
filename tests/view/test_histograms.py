"""Histograms of Adam's update and ratio: a heat map of bins over steps on the page of tensors."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.view.served import served
from tests.view.training import START, rows, run_row, write

from rankscope_storage.connection import connect
from rankscope_view.data.grid import LEVELS, NOT_A_NUMBER, histogram_grid, histogram_tensors
from rankscope_view.site import Site

STEPS = 30
COUNTS = [10, 20, 30, 40]


def histograms(run: str, *, ranks: int = 1, nonfinite: int = 0) -> dict[str, pa.Table]:
    steps, known = np.arange(STEPS), {"run": run, "attempt": 0, "ts": START, "ts_origin": "rank"}
    known |= {"scheme": "linear:-1.0:1.0:4", "below": 0, "above": 100, "counts": [COUNTS] * STEPS}
    known |= {"seq": steps, "ordinal": steps, "step": steps, "nonfinite": np.where(steps == 20, nonfinite, 0)}
    tables = [
        rows("histograms", **known, rank=rank, incarnation=f"{run}-{rank}", kind=kind, tensor=tensor)
        for rank in range(ranks)
        for kind in ("adam_ratio", "adam_update")
        for tensor in ("layers.2.weight", "layers.10.weight")
    ]
    return {"histograms": pa.concat_tables(tables), "runs": run_row(run, "completed", last_step=STEPS - 1)}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("histograms") / "store"
    return write(path, histograms("adam"), histograms("broken", ranks=2, nonfinite=3))


def test_cells_are_logarithms_of_shares_of_the_elements(store):
    with connect(store) as connection:
        grid = histogram_grid(connection, "adam", "adam_update", "layers.2.weight")
        tensors = histogram_tensors(connection, "adam")
        broken = histogram_grid(connection, "broken", "adam_update", "layers.2.weight")

    shares = np.array([100, 40, 30, 20, 10]) / 200
    low = grid.scale[0]
    expected = np.rint((np.log10(shares) - low) / -low * LEVELS).tolist()
    assert ["above 1", "0.5 to 1", "0 to 0.5", "-0.5 to 0", "-1 to -0.5"] == [row.name for row in grid.rows]
    assert (5, STEPS) == grid.cells.shape
    assert expected == grid.cells[:, 7].tolist()
    assert {kind: ["layers.2.weight", "layers.10.weight"] for kind in ("adam_ratio", "adam_update")} == tensors
    assert "NaN, Inf" == broken.rows[0].name
    assert [20] == np.flatnonzero(broken.cells[0] == NOT_A_NUMBER).tolist()


def test_page_of_tensors_draws_the_histogram_that_a_reader_chooses(chromium, store):
    with served(Site(store, clock=lambda: START / 1e6 + 300)) as address:
        chromium.problems.clear()
        chromium.look(1280, 900)
        chromium.open(f"{address}/runs/adam/tensors")
        chromium.wait("document.querySelector('#histogram canvas')?.width > 100")
        chromium.wait("performance.getEntriesByType('resource').some(({name}) => name.includes('/data/histogram'))")
        chromium.drain(0.1)
        x, y = chromium.place("#histogram canvas", 0.5, 0.07)
        chromium.point(x, y)
        chromium.wait("document.querySelector('#histogram .readout').innerText.includes('share of elements')")
        assert "about 50 %" in chromium.run("document.querySelector('#histogram .readout').innerText")

        chromium.run("document.querySelector('#histogram select').value = 'adam_update:layers.10.weight'")
        chromium.run("document.querySelector('#histogram select').dispatchEvent(new Event('change', {bubbles: true}))")
        chromium.wait("location.search.includes('adam_update')")
        chromium.wait("document.querySelector('#histogram canvas')?.width > 100")
        assert "Adam update: histogram by step" in chromium.run("document.querySelector('#histogram').innerText")
        assert "layers.10.weight" in chromium.run("document.querySelector('#histogram bdi').title")
        assert [] == chromium.problems
        chromium.call("Page.navigate", url="about:blank")
