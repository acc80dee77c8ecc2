"""Grids for heat maps: a statistic of all tensors over the steps of a run.

A grid is pooled to a limited number of cells. Pooling keeps the value that is farthest from the reference of its row;
NaN has priority over Inf, and Inf over values. Columns are sampled steps in the order of arrival.

The histograms of one tensor over the steps are a grid, too: rows are bins, columns are steps.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.kinds import OPS, Kind
from rankscope_storage.base.escaping import sql_identifier
from rankscope_storage.connection import Connection
from rankscope_view.data.cells import (
    INFINITE,
    MOST_CELLS,
    MOST_ROWS,
    NOT_A_NUMBER,
    UPDATE_RATIO,
    CellQuery,
    Cells,
    GridRequest,
    Order,
    Singles,
    Window,
    cell_query,
    read_cells,
    relation_of,
    sampled_columns,
)
from rankscope_view.data.series import Integers, pairs

__all__ = ["INFINITE", "MOST_ROWS", "NOT_A_NUMBER", "UPDATE_RATIO", "GridRequest", "Order"]

MOST_COLUMNS: Final = 1000
LEVELS: Final = 250
ABSENT: Final = 253
"""Code of a cell without a value. Codes from 0 to LEVELS are the place of the value on the colour scale."""

_BLOCK_CELLS: Final = 1 << 18
"""Number of cells that are calculated together: their arrays fit into the cache of a processor."""

_OF_FORWARD: Final = re.compile("act_(?!grad)")
"""Kinds that the forward pass computes. Of all others, the last layer comes first, as in the order of anomalies."""

_DIGITS: Final = re.compile(r"(\d+)")

_LARGEST: Final = 3.0
_SMALLEST: Final = -1.0
"""Limits of the scale against the own median, as decimal logarithms: from a tenth to a thousand times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Cells of a heat map, with the meaning of rows, columns and colours."""

    cells: npt.NDArray[np.uint8]
    names: tuple[str, ...]  # of all tensors in the zoom window, in the chosen order
    rows: tuple[tuple[int, int, int], ...]  # number of the first tensor, of tensors, and of the most extreme one
    attempts: tuple[int, ...]  # of each column
    steps: tuple[int, ...]  # first step of each column
    last_steps: tuple[int, ...]
    scale: tuple[float, float]  # decimal logarithms, or plain numbers
    is_log: bool
    tensors: int
    columns: int
    notice: str
    base: int = 0  # number of the first of `names` among all tensors
    first_bad: tuple[int, int] | None = None  # row and column of the first NaN or Inf

    def encoded(self) -> bytes:
        """Return the grid for the browser: length of the header, header as JSON, and one byte for each cell."""
        same = ("names", "base", "rows", "attempts", "steps", "scale", "tensors", "columns", "notice")
        named = {"lastSteps": self.last_steps, "log": self.is_log, "firstBad": self.first_bad}
        header = {name: getattr(self, name) for name in same} | named
        text = json.dumps(header, allow_nan=False).encode()
        return struct.pack("<I", len(text)) + text + self.cells.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKinds:
    """The kinds of tensor statistics that a run has, the number of tensors of each, and the ranks with rows."""

    counts: dict[str, int]
    ranks: tuple[int, ...] = ()

    @property
    def default(self) -> str | None:
        """Return the kind that a page shows first: a gradient, if there is one."""
        preferred = (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.GRAD_CLIPPED)
        return next((kind for kind in preferred if kind in self.counts), next(iter(self.counts), None))


def tensor_kinds(connection: Connection, run: str) -> TensorKinds:
    """Return the kinds of `run` with their numbers of tensors, and its ranks."""
    bounds = connection.row_groups("tensor_stats", [run], {"run": [run]}, ("rank",)).bounds("rank")
    ranks = () if bounds is None else tuple(range(bounds[0], bounds[1] + 1))
    counts = Counter(kind for kind, _ in pairs(connection, "tensor_stats", run, "kind", "tensor"))
    return TensorKinds(counts={kind: counts[kind] for kind in sorted(counts)}, ranks=ranks)


def tensor_grid(connection: Connection, run: str, request: GridRequest) -> Grid:
    """Return the grid of a statistic of all tensors of one kind over the sampled steps of `run`."""
    with connection.pinned():
        query = cell_query(connection, run, request)
        columns = sampled_columns(connection, query)
        low, high = bounded(request.columns, columns.count)
        if high <= low:
            return empty_grid("no statistics of this kind")
        window = Window(columns, low, high, cell_width(query, high - low))
        cells = read_cells(query, window)
        if not cells.names:
            return empty_grid("no statistics of this kind and name")
        order = np.array(_by_model(connection, run, request, cells.names), np.int64)
    return _grid(request, cells, window, order)


def cell_width(query: CellQuery, columns: int) -> int:
    """Return the power of two of columns that a cell combines, so that neither limit is exceeded."""
    tensors = query.tensor_estimate(columns)
    width = 1
    while columns > width * MOST_COLUMNS or columns * tensors > width * MOST_CELLS:
        width *= 2
    return width


def bounded(chosen: tuple[int, int] | None, count: int) -> tuple[int, int]:
    if chosen is None:
        return 0, count
    return max(0, min(chosen)), min(count, max(chosen))


def empty_grid(notice: str) -> Grid:
    """Return a grid without cells."""
    return plain_grid(np.zeros((0, 0), np.uint8), (), (), scale=(0.0, 1.0), is_log=False, notice=notice)


def plain_grid(
    cells: npt.NDArray[np.uint8], names: Sequence[str], places: Sequence[tuple[int, int, int]], *,
    scale: tuple[float, float], is_log: bool, notice: str,
) -> Grid:  # fmt: skip
    """Return a grid with a name for each row, and attempt, first and last step of each column as `places`."""
    attempts, steps, last_steps = (tuple(place[at] for place in places) for at in range(3))
    return Grid(
        cells=cells, names=tuple(names), attempts=attempts, steps=steps, last_steps=last_steps, scale=scale,
        rows=tuple((at, 1, at) for at in range(len(names))),
        is_log=is_log, tensors=len(names), columns=len(places), notice=notice,
    )  # fmt: skip


def _by_model(connection: Connection, run: str, request: GridRequest, names: Sequence[str]) -> list[int]:
    """Return the numbers of `names` in the order of the model."""
    known = connection.query(
        "SELECT tensor, min(ordinal) AS place FROM tensors WHERE run = $run AND kind = $kind GROUP BY tensor",
        {"run": run, "kind": Kind.PARAM_BEFORE.value if request.kind == UPDATE_RATIO else request.kind},
    )
    places = dict(zip(known["tensor"].to_pylist(), known["place"].to_pylist(), strict=True))
    keys = [(0, places[name], ()) if name in places else (1, 0, natural(name)) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


def natural(name: str) -> list[Any]:
    """Return a sort key by which `layers.2` comes before `layers.10`, and an embedding before the layers."""
    parts: list[Any] = _DIGITS.split(name)
    parts[1::2] = map(int, parts[1::2])
    order = 0 if "embed" in name or "wte" in name else 2 if "lm_head" in name or name.startswith("norm") else 1
    return [order, *parts]


def part_of(name: str) -> str:
    """Return the name of a tensor without its numbers, which is equal for the same part of all layers."""
    return _DIGITS.sub("#", name)


def _grid(request: GridRequest, cells: Cells, window: Window, order: Integers) -> Grid:
    """Return the grid of the tensors in `order`, that of the model, which has their numbers in `cells`."""
    found = levels(cells, is_relative=request.is_relative)
    causal = np.argsort(order if _OF_FORWARD.match(request.kind) else order[::-1])
    if request.order is Order.PART:
        parts = {part: at for at, part in enumerate(dict.fromkeys(part_of(cells.names[at]) for at in order))}
        order = np.array(sorted(order, key=lambda at: parts[part_of(cells.names[at])]))
    if request.order is Order.WORST:
        order = order[np.argsort(-_badness(found.level, cells.bad)[order], kind="stable")]
    first, last = bounded(request.rows, len(order))
    order = order[first:last]
    names = [cells.names[at] for at in order.tolist()]
    height = -(-len(names) // min(request.most_rows, MOST_ROWS)) or 1
    pooled, pooled_bad, holders = _pooled(found, cells.bad, order, height)
    scale = (_SMALLEST, _LARGEST) if request.is_relative else _scale(found.level[order])
    coded = _coded(pooled, scale)
    coded[pooled_bad > 0] = pooled_bad[pooled_bad > 0]
    rows = tuple(
        (start, min(height, len(names) - start), start + at)
        for start, at in zip(range(0, len(names), height), holders, strict=True)
    )
    where = np.argwhere(coded >= INFINITE)
    held = causal[order[[holder for *_, holder in rows]]]
    earliest = where[np.lexsort((held[where[:, 0]], where[:, 1]))][:1].tolist()
    attempts, steps, last_steps = window.places()
    is_plain = height == 1 and window.width == 1
    cell = f"{height} tensor{'' if height == 1 else 's'} × {window.width} step{'' if window.width == 1 else 's'}"
    pooling = "no pooling" if is_plain else f"cells of {cell}, extremes kept"
    return Grid(
        cells=coded,
        names=tuple(names),
        base=first,
        rows=rows,
        attempts=attempts,
        steps=steps,
        last_steps=last_steps,
        scale=scale,
        is_log=found.is_log,
        tensors=len(cells.names),
        columns=window.columns.count,
        first_bad=(earliest[0][0], earliest[0][1]) if earliest else None,
        notice=f"{len(names):,} tensors × {window.high - window.low:,} sampled steps, {pooling}",
    )


def _coded(level: Singles, scale: tuple[float, float]) -> npt.NDArray[np.uint8]:
    with np.errstate(invalid="ignore"):
        code = (level - np.float32(scale[0])) * np.float32(LEVELS / ((scale[1] - scale[0]) or 1.0))
        np.clip(code, 0, LEVELS, out=code)
        return np.where(np.isnan(code), ABSENT, code).astype(np.uint8)


def _badness(level: Singles, bad: npt.NDArray[np.uint8]) -> npt.NDArray[np.floating[Any]]:
    """Return the largest distance of each tensor from the reference; infinite if it has non-finite values."""
    return np.where(bad.any(axis=1), np.inf, np.abs(np.nan_to_num(level)).max(axis=1))


@dataclass(frozen=True, slots=True)
class Levels:
    """Place of each cell on the colour scale, and the value of each row with which its extremes are compared."""

    level: Singles
    reference: Singles
    is_low: npt.NDArray[np.bool_] | None  # whether the lowest value of a cell is its extreme; None: one value per cell
    is_log: bool


def levels(cells: Cells, *, is_relative: bool) -> Levels:
    """Return the places of `cells` on the colour scale, in their arrays: the values of `cells` are overwritten."""
    high, is_low = cells.high, None
    with np.errstate(divide="ignore", invalid="ignore"):
        is_log = is_relative or bool(np.nanmin(cells.low, initial=np.inf) > 0)
        _scale_values(high, is_log=is_log)
        middle = row_medians(high)
        reference = np.where(np.isfinite(middle), middle, 0.0).astype(np.float32)
        if cells.low is not high:
            _scale_values(cells.low, is_log=is_log)
            is_low = np.abs(cells.low - reference[:, None]) > np.abs(high - reference[:, None])
            np.copyto(high, cells.low, where=is_low)
    if is_relative:
        high -= reference[:, None]
        reference = np.zeros_like(reference)
    return Levels(high, reference, is_low, is_log)


def _scale_values(values: Singles, *, is_log: bool) -> None:
    """Replace values by their logarithms, or infinite ones by NaN."""
    if is_log:
        np.abs(values, out=values)
        np.log(values, out=values)  # several times as fast as log10
        values *= np.float32(1 / np.log(10))
    if not np.isfinite(np.nanmin(values, initial=0.0) + np.nanmax(values, initial=0.0)):
        values[np.isinf(values)] = np.nan


def row_medians(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the median of each row without NaN; NaN for a row that has only NaN."""
    found = np.full(len(values), np.nan, values.dtype)
    known = values.shape[1] - np.isnan(values).sum(axis=1)
    for count in np.unique(known[known > 0]).tolist():  # NaN is behind all numbers
        rows, middle = np.flatnonzero(known == count), count // 2
        for start in range(0, len(rows), max(1, _BLOCK_CELLS // values.shape[1])):
            own = rows[start : start + max(1, _BLOCK_CELLS // values.shape[1])]
            parted = np.partition(values[own], middle, axis=1)  # by one place: several times as fast as by two
            upper = parted[:, middle]
            found[own] = upper if count % 2 else (parted[:, :middle].max(axis=1) + upper) / 2
    return found


def _pooled(
    found: Levels, bad: npt.NDArray[np.uint8], order: Integers, height: int
) -> tuple[Singles, npt.NDArray[np.uint8], list[int]]:
    """Return extreme and code of each group of `height` rows, and the number of the row in it with the largest one.

    `order` has the numbers of the rows.
    """
    pooled, codes = found.level[order[::height]], bad[order[::height]]
    farthest = _distances(found, bad, order[::height])
    most, holders = farthest.max(axis=1), np.zeros(len(pooled), np.int64)
    for row in range(1, height):
        own = order[row::height]  # of all groups, or of all but the last
        level, distance, groups = found.level[own], _distances(found, bad, own), slice(len(own))
        is_farther = distance > farthest[groups]
        np.copyto(farthest[groups], distance, where=is_farther)
        np.copyto(pooled[groups], level, where=is_farther)
        np.maximum(codes[groups], bad[own], out=codes[groups])
        extreme = distance.max(axis=1)
        holders[groups][extreme > most[groups]] = row
        np.maximum(most[groups], extreme, out=most[groups])
    return pooled, codes, holders.tolist()


def _distances(found: Levels, bad: npt.NDArray[np.uint8], rows: Integers) -> Singles:
    """Return the distances of cells from the reference: -1 without a value, and infinite for a non-finite cell."""
    distance: Singles = np.abs(found.level[rows] - found.reference[rows, None])
    np.fmax(distance, -1.0, out=distance)  # NaN becomes -1
    distance[bad[rows] > 0] = np.inf
    return distance


def _scale(level: Singles) -> tuple[float, float]:
    finite = level[np.isfinite(level)]
    if not len(finite):
        return 0.0, 1.0
    low, high = (float(value) for value in np.quantile(finite, (0.001, 0.999)))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


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


def cell_value(connection: Connection, run: str, request: GridRequest, column: int) -> dict[str, Any] | None:
    """Return the exact value of a cell: of `request.tensors` in the column with this number of the grid.

    The value is the one that determined the colour: non-finite, or else the farthest from the median of its tensor.
    """
    with connection.pinned():
        query = cell_query(connection, run, request)
        columns = sampled_columns(connection, query)
        low, high = bounded(request.columns, columns.count)
        window = Window(columns, low, high, cell_width(query, high - low))
        if not 0 <= column < window.cells:
            return None
        cells = read_cells(query, window)
        found = levels(cells, is_relative=request.is_relative)
        distance = np.nan_to_num(np.abs(found.level[:, column] - found.reference), nan=-1.0)
        bad = cells.bad[:, column].astype(int)
        if not len(distance) or (distance.max() < 0 and not bad.any()):
            return None
        best = int(np.lexsort((-distance, -bad))[0])
        is_low = found.is_low is not None and bool(found.is_low[best, column])
        place = tuple(places[column] for places in window.places())
        return _exact_value(connection, query, cells.names[best], place, is_low=is_low)


def _exact_value(
    connection: Connection, query: CellQuery, tensor: str, place: Sequence[int], *, is_low: bool
) -> dict[str, Any] | None:
    request, (attempt, first, last) = query.request, place
    column = sql_identifier(request.op if request.op in OPS else "norm")
    rows = connection.query(
        f"""SELECT step, rank, {column}::DOUBLE AS value, coalesce(nans, 0) AS nans, coalesce(infs, 0) AS infs
        FROM {relation_of(connection, query.run, request.kind, (first, last))}
        WHERE run = $run AND kind = $kind AND tensor = $tensor AND coalesce(attempt, 0) = $attempt
          AND step BETWEEN $first AND $last AND coalesce($rank, rank) IS NOT DISTINCT FROM rank
        ORDER BY nans > 0 DESC, infs > 0 DESC, {column} {"ASC" if is_low else "DESC"} NULLS LAST, step, rank LIMIT 1""",
        {
            "run": query.run,
            "kind": request.kind,
            "tensor": tensor,
            "attempt": attempt,
            "first": first,
            "last": last,
        }
        | {"rank": request.rank},
    ).to_pylist()
    return {"tensor": tensor, "attempt": attempt, **rows[0]} if rows else None
