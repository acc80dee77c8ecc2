"""Histograms of one tensor over the steps of a run, as the grid of a heat map: rows are bins, columns are steps."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope_storage.connection import Connection
from rankscope_view.data.grid import (
    ABSENT,
    LEVELS,
    MOST_COLUMNS,
    NOT_A_NUMBER,
    Grid,
    empty_grid,
    natural,
    pairs,
    plain_grid,
)

_LEAST: Final = -6.0
"""Least decimal logarithm of a share that has a colour of its own."""

_HISTOGRAMS: Final = """\
SELECT coalesce(attempt, 0)::BIGINT AS attempt, step, scheme, counts, coalesce(below, 0) AS below,
  coalesce(above, 0) AS above, coalesce(nonfinite, 0) AS nonfinite
FROM histograms WHERE run = $run AND kind = $kind AND tensor = $tensor AND step IS NOT NULL
  AND ($rank IS NULL OR rank = $rank) ORDER BY attempt, step"""


def histogram_tensors(connection: Connection, run: str) -> dict[str, list[str]]:
    """Return the tensors of `run` with histograms, by kind of histogram."""
    found: dict[str, list[str]] = {}
    for kind, tensor in sorted(pairs(connection, "histograms", run, "kind", "tensor")):
        found.setdefault(kind, []).append(tensor)
    return {kind: sorted(tensors, key=natural) for kind, tensors in found.items()}


def histogram_grid(connection: Connection, run: str, kind: str, tensor: str, rank: int | None = None) -> Grid:
    """Return the shares of the elements of a tensor in each bin, of all ranks together or one.

    The first row has the largest values. Values outside of the bins and values that are not finite have rows of their
    own, if there are any. If the bins changed, only histograms with the newest bins are in the grid.
    """
    parameters = {"run": run, "kind": kind, "tensor": tensor, "rank": rank}
    rows = connection.query(_HISTOGRAMS, parameters).to_pylist()
    rows = [
        row for row in rows if row["scheme"] == rows[-1]["scheme"] and len(row["counts"]) == len(rows[-1]["counts"])
    ]
    if not rows:
        return empty_grid("no histograms: measure the quantity adam_updates")
    numbers = np.array(
        [[row["nonfinite"], row["above"], *row["counts"][::-1], row["below"]] for row in rows], np.float64
    )
    names = ["NaN, Inf", *_names(rows[-1]["scheme"], len(rows[-1]["counts"]))]
    places = np.array([(row["attempt"], row["step"]) for row in rows])
    starts = _starts(places)
    ends = np.append(starts[1:], len(places)) - 1
    elements = np.add.reduceat(numbers, starts).T
    kept = [at for at in range(len(names)) if 1 < at < len(names) - 1 or elements[at].any()]
    scale, cells = _cells(elements)
    columns = [(*first, last) for first, (_, last) in zip(places[starts].tolist(), places[ends].tolist(), strict=True)]
    notice = f"{len(np.unique(places, axis=0)):,} sampled steps, shares of the elements of the tensor"
    return plain_grid(cells[kept], [names[at] for at in kept], columns, scale=scale, is_log=True, notice=notice)


def _starts(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the first row of each column: of each step, or of as many steps that the columns are not too many."""
    steps = np.append(0, np.flatnonzero((places[1:] != places[:-1]).any(axis=1)) + 1)
    width = -(-len(steps) // MOST_COLUMNS)
    chosen = np.arange(len(steps)) % width == 0
    chosen |= np.append(False, places[steps[1:], 0] != places[steps[:-1], 0])  # a column has steps of one attempt
    found: npt.NDArray[np.int64] = steps[chosen]
    return found


def _names(scheme: str, bins: int) -> list[str]:
    """Return the names of the rows: above, the bins from the largest to the smallest one, below."""
    word, *bounds = scheme.split(":")
    if word != "linear":
        return ["above", *(f"bin {at}" for at in range(bins - 1, -1, -1)), "below"]
    edges = np.linspace(float(bounds[0]), float(bounds[1]), bins + 1)
    inner = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
    return [f"above {edges[-1]:.3g}", *reversed(inner), f"below {edges[0]:.3g}"]


def _cells(elements: npt.NDArray[np.float64]) -> tuple[tuple[float, float], npt.NDArray[Any]]:
    """Return the range of the logarithms of shares, and the cells. The first row has elements that are not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.log10(elements / elements.sum(axis=0))
    least = max(_LEAST, float(np.floor(np.min(level, initial=0.0, where=np.isfinite(level)))))
    scale = (min(least, -1.0), 0.0)
    code = np.rint(np.clip((level - scale[0]) / (scale[1] - scale[0]), 0, 1) * LEVELS)
    cells = np.where(np.isnan(code), ABSENT, np.nan_to_num(code)).astype(np.uint8)
    cells[0] = np.where(elements[0] > 0, NOT_A_NUMBER, ABSENT)
    return scale, cells
