"""Grids for heat maps: a statistic of all tensors over the steps of a run, and step times of all ranks.

A grid is pooled to a limited number of cells. Pooling keeps the value that is farthest from the reference of its row;
NaN has priority over Inf, and Inf over values. Columns are sampled steps in the order of arrival.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.kinds import OPS, Kind
from rankscope_contract.security.escaping import sql_identifier, sql_string
from rankscope_storage.connection import Connection
from rankscope_view.data.history import Floats, Integers

MOST_ROWS: Final = 2000
MOST_COLUMNS: Final = 1000
LEVELS: Final = 250
ABSENT: Final = 253
INFINITE: Final = 254
NOT_A_NUMBER: Final = 255
"""Codes of a cell. Codes from 0 to LEVELS are the place of the value on the colour scale."""

_LARGEST: Final = 3.0
_SMALLEST: Final = -1.0
"""Limits of the scale against the own median, as decimal logarithms: from a tenth to a thousand times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRequest:
    """Choices of a reader for a heat map. `first` and `last` are columns; `words` select tensors by parts of names."""

    kind: str
    op: str = "norm"
    is_relative: bool = True
    worst_first: bool = False
    words: tuple[str, ...] = ()
    rank: int | None = None  # None: the largest of all ranks
    rows: tuple[int, int] | None = None  # zoom: numbers of tensors in the chosen order
    columns: tuple[int, int] | None = None  # zoom: numbers of sampled steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a grid: the tensor with the most extreme value, and the number of tensors that the row combines."""

    name: str
    tensors: int
    first: int  # number of its first tensor in the chosen order


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Cells of a heat map, with the meaning of rows, columns and colours."""

    cells: npt.NDArray[np.uint8]
    rows: tuple[Row, ...]
    attempts: tuple[int, ...]  # of each column
    steps: tuple[int, ...]  # first step of each column
    last_steps: tuple[int, ...]
    scale: tuple[float, float]  # decimal logarithms, or plain numbers
    is_log: bool
    tensors: int
    columns: int
    first_bad: tuple[int, int] | None  # row and column of the first NaN or Inf
    notice: str

    def encoded(self) -> bytes:
        """Return the grid for the browser: length of the header, header as JSON, and one byte for each cell."""
        header = {
            "rows": [[row.name, row.tensors, row.first] for row in self.rows],
            "attempts": self.attempts,
            "steps": self.steps,
            "lastSteps": self.last_steps,
            "scale": self.scale,
            "log": self.is_log,
            "tensors": self.tensors,
            "columns": self.columns,
            "firstBad": self.first_bad,
            "notice": self.notice,
        }
        text = json.dumps(header, allow_nan=False).encode()
        return struct.pack("<I", len(text)) + text + self.cells.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKinds:
    """The kinds of tensor statistics that a run has, and the number of tensors of each."""

    counts: dict[str, int]

    @property
    def default(self) -> str | None:
        """Return the kind that a page shows first: a gradient, if there is one."""
        preferred = (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.GRAD_CLIPPED)
        return next((kind for kind in preferred if kind in self.counts), next(iter(self.counts), None))


def tensor_kinds(connection: Connection, run: str) -> TensorKinds:
    """Return the kinds of `run` with their numbers of tensors."""
    source = connection.relation("tensor_stats", run=run)
    rows = connection.query(
        f"SELECT kind, count(DISTINCT tensor) AS tensors FROM {source} WHERE run = $run GROUP BY kind ORDER BY kind",
        {"run": run},
    )
    return TensorKinds(counts=dict(zip(rows["kind"].to_pylist(), rows["tensors"].to_pylist(), strict=True)))


@dataclass(frozen=True, slots=True)
class _Columns:
    """Places of sampled steps: of each attempt, its number, first and last step, stride and first column."""

    spans: tuple[tuple[int, int, int, int, int], ...]

    @property
    def count(self) -> int:
        if not self.spans:
            return 0
        _, first, last, stride, base = self.spans[-1]
        return base + (last - first) // stride + 1

    def expression(self) -> str:
        """Return the SQL expression for the column of a row."""
        cases = " ".join(
            f"WHEN {attempt} THEN (step - {first}) // {stride} + {base}"
            for attempt, first, _, stride, base in self.spans
        )
        return f"CASE coalesce(attempt, 0) {cases} END"

    def place(self, column: int) -> tuple[int, int]:
        """Return attempt and step of a column."""
        attempt, first, last, stride, base = next(span for span in reversed(self.spans) if span[4] <= column)
        return attempt, min(first + (column - base) * stride, last)


@dataclass(frozen=True, slots=True)
class _Window:
    """The columns from `low` to before `high`, of which each cell combines `width`."""

    columns: _Columns
    low: int
    high: int
    width: int

    @property
    def cells(self) -> int:
        return -(-(self.high - self.low) // self.width)

    def places(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return attempt, first step and last step of each cell."""
        starts = [self.low + at * self.width for at in range(self.cells)]
        first = [self.columns.place(at) for at in starts]
        last = [self.columns.place(min(at + self.width, self.high) - 1) for at in starts]
        ends = tuple(
            max(end[1], begin[1]) if end[0] == begin[0] else begin[1] for begin, end in zip(first, last, strict=True)
        )
        return tuple(one[0] for one in first), tuple(one[1] for one in first), ends


def _columns(connection: Connection, source: str, run: str, kind: str) -> _Columns:
    rows = connection.query(
        f"""SELECT coalesce(attempt, 0) AS attempt, min(step) AS first, max(step) AS last, count(DISTINCT step) AS steps
        FROM {source} WHERE run = $run AND kind = $kind AND step IS NOT NULL AND tensor = (
          SELECT min(tensor) FROM {source} WHERE run = $run AND kind = $kind)
        GROUP BY ALL ORDER BY 1""",
        {"run": run, "kind": kind},
    ).to_pylist()
    spans, base = [], 0
    for row in rows:
        stride = max(1, round((row["last"] - row["first"]) / max(1, row["steps"] - 1)))
        spans.append((row["attempt"], row["first"], row["last"], stride, base))
        base += (row["last"] - row["first"]) // stride + 1
    return _Columns(tuple(spans))


UPDATE_RATIO: Final = "update_ratio"
"""Kind of a grid whose statistic `norm` is the norm of an update divided by that of the parameter before it."""

_UPDATES: Final = f"""\
(SELECT run, attempt, rank, step, '{UPDATE_RATIO}' AS kind, parameter.tensor, updated.value / nullif(norm, 0) AS norm,
  coalesce(isnan(updated.value), false)::BIGINT AS nans, coalesce(isinf(updated.value), false)::BIGINT AS infs
FROM (SELECT * FROM {{tensor_stats}} WHERE kind = '{Kind.PARAM_BEFORE}') AS parameter
JOIN (SELECT run, attempt, rank, step, module AS tensor, value FROM {{features}} WHERE kind = 'update_norm') AS updated
  USING (run, attempt, rank, step, tensor))"""


def _source(connection: Connection, run: str, kind: str) -> str:
    """Return the relation with the statistics of a kind: rows of `tensor_stats`, or calculated ratios of updates."""
    stored = connection.relation("tensor_stats", run=run)
    if kind != UPDATE_RATIO:
        return stored
    return _UPDATES.format(tensor_stats=stored, features=connection.relation("features", run=run))


def tensor_grid(connection: Connection, run: str, request: GridRequest) -> Grid:
    """Return the grid of a statistic of all tensors of one kind over the sampled steps of `run`."""
    with connection.pinned():
        source = _source(connection, run, request.kind)
        columns = _columns(connection, source, run, request.kind)
        names = _names(connection, source, run, request)
        low, high = _range(request.columns, columns.count)
        width = 1
        while high - low > width * MOST_COLUMNS:
            width *= 2
        if not names or high <= low:
            return empty_grid("no statistics of this kind and name")
        window = _Window(columns, low, high, width)
        cells = _cells(connection, source, run, request=request, names=names, window=window)
    return _grid(request, names, cells, window)


def _range(chosen: tuple[int, int] | None, count: int) -> tuple[int, int]:
    if chosen is None:
        return 0, count
    return max(0, min(chosen)), min(count, max(chosen))


def empty_grid(notice: str) -> Grid:
    """Return a grid without cells."""
    return Grid(
        cells=np.zeros((0, 0), np.uint8), rows=(), attempts=(), steps=(), last_steps=(), scale=(0.0, 1.0), is_log=False,
        tensors=0, columns=0, first_bad=None, notice=notice,
    )  # fmt: skip


def _names(connection: Connection, source: str, run: str, request: GridRequest) -> list[str]:
    """Return the names of the chosen tensors in the order of the model."""
    parameters = {"run": run, "kind": request.kind}
    found = connection.query(f"SELECT DISTINCT tensor FROM {source} WHERE run = $run AND kind = $kind", parameters)
    known = connection.query(
        "SELECT tensor, min(ordinal) AS place FROM tensors WHERE run = $run AND kind = $kind GROUP BY tensor",
        {"run": run, "kind": Kind.PARAM_BEFORE.value if request.kind == UPDATE_RATIO else request.kind},
    )
    places = dict(zip(known["tensor"].to_pylist(), known["place"].to_pylist(), strict=True))
    names: list[str] = [
        name for name in found["tensor"].to_pylist() if all(word in name.lower() for word in request.words)
    ]
    return sorted(names, key=lambda name: (places.get(name) is None, places.get(name) or 0, natural(name)))


def natural(name: str) -> list[Any]:
    """Return a sort key by which `layers.2` comes before `layers.10`, and an embedding before the layers."""
    parts = re.split(r"(\d+)", name)
    order = 0 if "embed" in name or "wte" in name else 2 if "lm_head" in name or name.startswith("norm") else 1
    return [order, *(int(part) if at % 2 else part for at, part in enumerate(parts))]


@dataclass(frozen=True, slots=True)
class _Cells:
    """Statistics of each tensor and column: lowest and highest value, NaN without one, and non-finite flags."""

    low: Floats
    high: Floats
    is_nan: npt.NDArray[np.bool_]
    is_inf: npt.NDArray[np.bool_]


def _cells(
    connection: Connection,
    source: str,
    run: str,
    *,
    request: GridRequest,
    names: Sequence[str],
    window: _Window,
) -> _Cells:
    expression, low, high = window.columns.expression(), window.low, window.high
    column = sql_identifier(request.op if request.op in OPS else "norm")
    rank = "" if request.rank is None else f" AND rank = {request.rank}"
    chosen = "" if not request.words else f" AND tensor IN ({', '.join(map(sql_string, names))})"
    rows = connection.query(
        f"""SELECT tensor, (({expression}) - {low}) // {window.width} AS place, min({column})::DOUBLE AS low,
          max({column})::DOUBLE AS high, coalesce(max(nans), 0) > 0 AS is_nan, coalesce(max(infs), 0) > 0 AS is_inf
        FROM {source} WHERE run = $run AND kind = $kind AND step IS NOT NULL{rank}{chosen}
          AND ({expression}) >= {low} AND ({expression}) < {high}
        GROUP BY tensor, place""",
        {"run": run, "kind": request.kind},
    )
    shape = (len(names), window.cells)
    # The names are encoded once, so that each row costs one look-up of a number and not of a text.
    encoded = rows["tensor"].combine_chunks().dictionary_encode()
    number = {name: at for at, name in enumerate(names)}
    of_code = np.array([number[name] for name in encoded.dictionary.to_pylist()], np.int64)
    where = (of_code[encoded.indices.to_numpy()], rows["place"].to_numpy().astype(np.int64))
    found = _Cells(np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, bool), np.zeros(shape, bool))
    found.low[where] = rows["low"].to_numpy(zero_copy_only=False)
    found.high[where] = rows["high"].to_numpy(zero_copy_only=False)
    found.is_nan[where] = rows["is_nan"].to_numpy(zero_copy_only=False)
    found.is_inf[where] = rows["is_inf"].to_numpy(zero_copy_only=False)
    return found


def _grid(request: GridRequest, names: Sequence[str], cells: _Cells, window: _Window) -> Grid:
    is_log = request.is_relative or bool(np.nanmin(np.where(np.isfinite(cells.low), cells.low, np.inf)) > 0)
    level, reference = _levels(cells, is_log=is_log, is_relative=request.is_relative)
    bad = np.where(cells.is_nan, NOT_A_NUMBER, np.where(cells.is_inf, INFINITE, 0))
    first, last = _range(request.rows, len(names))
    order = (_worst_first(level, bad) if request.worst_first else np.arange(len(names)))[first:last]
    height = -(-len(order) // MOST_ROWS) or 1
    starts = np.arange(0, len(order), height)
    pooled, holder = _pooled(level[order], bad[order], starts, reference[order])
    scale = (_SMALLEST, _LARGEST) if request.is_relative else _scale(level)
    code = np.clip((pooled - scale[0]) / ((scale[1] - scale[0]) or 1.0), 0, 1) * LEVELS
    coded = np.where(np.isnan(pooled), ABSENT, np.nan_to_num(code)).astype(np.uint8)
    if len(order):
        coded = np.maximum(np.maximum.reduceat(bad[order], starts, axis=0), coded).astype(np.uint8)
    rows = tuple(
        Row(name=names[order[start + holder[at]]], tensors=min(height, len(order) - start), first=first + start)
        for at, start in enumerate(starts.tolist())
    )
    where = np.argwhere(coded >= INFINITE)
    earliest = where[np.lexsort((where[:, 0], where[:, 1]))][:1].tolist()
    attempts, steps, last_steps = window.places()
    is_plain = height == 1 and window.width == 1
    cell = f"{height} tensor{'' if height == 1 else 's'} × {window.width} step{'' if window.width == 1 else 's'}"
    pooling = "no pooling" if is_plain else f"cells of {cell}, extremes kept"
    return Grid(
        cells=coded,
        rows=rows,
        attempts=attempts,
        steps=steps,
        last_steps=last_steps,
        scale=scale,
        is_log=is_log,
        tensors=len(names),
        columns=window.columns.count,
        first_bad=(earliest[0][0], earliest[0][1]) if earliest else None,
        notice=f"{len(order):,} tensors × {window.high - window.low:,} sampled steps, {pooling}",
    )


def _worst_first(level: Floats, bad: npt.NDArray[Any]) -> Integers:
    """Return the tensors in the order of their largest distance from the reference, non-finite ones first."""
    badness = np.where(bad.any(axis=1), np.inf, np.abs(np.nan_to_num(level)).max(axis=1))
    order: Integers = np.argsort(-badness, kind="stable")
    return order


def _levels(cells: _Cells, *, is_log: bool, is_relative: bool) -> tuple[Floats, Floats]:
    """Return the value of each cell on the colour scale, and the reference of each row."""
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = (np.log10(np.abs(one)) if is_log else one for one in (cells.low, cells.high))
        low, high = (np.where(np.isfinite(one), one, np.nan) for one in (low, high))
        middle = row_medians(high)
        reference = np.where(np.isfinite(middle), middle, 0.0)
        extreme = np.where(np.abs(low - reference[:, None]) > np.abs(high - reference[:, None]), low, high)
    return (extreme - reference[:, None], np.zeros(len(reference))) if is_relative else (extreme, reference)


def row_medians(values: Floats) -> Floats:
    """Return the median of each row without NaN; NaN for a row that has only NaN."""
    found = np.full(len(values), np.nan)
    known = ~np.isnan(values).all(axis=1)
    found[known] = np.nanmedian(values[known], axis=1)
    return found


def _pooled(level: Floats, bad: npt.NDArray[Any], starts: Integers, reference: Floats) -> tuple[Floats, list[int]]:
    """Return the extreme of each group of rows, and the row of the group that has the largest one."""
    if len(starts) == len(level):
        return level, [0] * len(starts)
    distance = np.where(np.isnan(level), -1.0, np.abs(level - reference[:, None]))
    distance = np.where(bad > 0, np.inf, distance)
    pooled, holder = np.full((len(starts), level.shape[1]), np.nan), []
    for at, start in enumerate(starts.tolist()):
        stop = starts[at + 1] if at + 1 < len(starts) else len(level)
        best = np.argmax(distance[start:stop], axis=0)
        pooled[at] = level[start:stop][best, np.arange(level.shape[1])]
        holder.append(int(np.argmax(distance[start:stop].max(axis=1))))
    return pooled, holder


def _scale(level: Floats) -> tuple[float, float]:
    finite = level[np.isfinite(level)]
    if not len(finite):
        return 0.0, 1.0
    low, high = (float(value) for value in np.quantile(finite, (0.001, 0.999)))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellValue:
    """The exact value that a cell shows: the most extreme one of a tensor in a range of steps."""

    tensor: str
    attempt: int
    step: int
    rank: int | None
    value: float | None
    nans: int
    infs: int


def cell_value(
    connection: Connection, run: str, kind: str, *, op: str, tensor: str, attempt: int, steps: tuple[int, int]
) -> CellValue | None:
    """Return the exact value of a tensor within the closed range `steps` of an attempt, non-finite ones first."""
    column = sql_identifier(op if op in OPS else "norm")
    rows = connection.query(
        f"""SELECT step, rank, {column}::DOUBLE AS value, coalesce(nans, 0) AS nans, coalesce(infs, 0) AS infs
        FROM {connection.relation("tensor_stats", run=run, steps=steps)}
        WHERE run = $run AND kind = $kind AND tensor = $tensor AND coalesce(attempt, 0) = $attempt
          AND step BETWEEN $first AND $last
        ORDER BY nans > 0 DESC, infs > 0 DESC, abs({column}) DESC NULLS LAST, step, rank LIMIT 1""",
        {"run": run, "kind": kind, "tensor": tensor, "attempt": attempt, "first": steps[0], "last": steps[1]},
    ).to_pylist()
    return CellValue(tensor=tensor, attempt=attempt, **rows[0]) if rows else None
