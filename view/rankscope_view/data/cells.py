"""Statistics of all tensors of one kind over the sampled steps of a run, as arrays of tensors and steps.

Ten million rows are read in about half a second: as Arrow batches instead of by SQL, and only those columns that are
needed. Columns of the arrays are sampled steps in the order of arrival.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_contract.model.kinds import OPS, Kind
from rankscope_storage.connection import Connection
from rankscope_storage.query.column_scan import RowGroups, row_groups
from rankscope_view.data.series import Integers

INFINITE: Final = 254
NOT_A_NUMBER: Final = 255
"""Codes of cells with infinite values and with NaN. The larger one has priority."""

UPDATE_RATIO: Final = "update_ratio"
"""Kind of a grid whose statistic `norm` is the norm of an update divided by that of the parameter before it."""

_UPDATES: Final = f"""\
(SELECT run, attempt, rank, step, '{UPDATE_RATIO}' AS kind, parameter.tensor, updated.value / nullif(norm, 0) AS norm,
  coalesce(isnan(updated.value), false)::BIGINT AS nans, coalesce(isinf(updated.value), false)::BIGINT AS infs
FROM (SELECT * FROM {{tensor_stats}} WHERE kind = '{Kind.PARAM_BEFORE}') AS parameter
JOIN (SELECT run, attempt, rank, step, module AS tensor, value FROM {{features}} WHERE kind = 'update_norm') AS updated
  USING (run, attempt, rank, step, tensor))"""

MOST_CELLS: Final = 20_000_000
"""Largest number of tensors times columns before pooling. More tensors have fewer columns."""

_REQUESTED: Final = ("run", "kind")
_OF_ROW: Final = (*_REQUESTED, "tensor")

MOST_ROWS: Final = 2000

Singles = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Places of sampled steps: of each attempt, its number, first and last step, stride and first column."""

    spans: tuple[tuple[int, int, int, int, int], ...]

    @property
    def count(self) -> int:
        """Return the number of columns."""
        if not self.spans:
            return 0
        _, first, last, stride, base = self.spans[-1]
        return base + (last - first) // stride + 1

    def of(self, attempt: Integers | None, step: Integers, place: Integers) -> Integers:
        """Return `place` with the columns of rows, -1 for a row of none. Without attempts, all are of the first one."""
        if attempt is None:
            _, first, last, stride, base = self.spans[0]
            np.subtract(step, first if stride > 1 else first - base, out=place)
            if stride > 1:
                place //= stride
                place += base
            if len(step) and (step.min() < first or step.max() > last):
                place[(step < first) | (step > last)] = -1
            return place
        place[:] = -1
        for number, first, last, stride, base in self.spans:
            own = (attempt == number) & (step >= first) & (step <= last)
            place[own] = (step[own] - first) // stride + base
        return place

    def place(self, column: int) -> tuple[int, int]:
        """Return attempt and step of a column."""
        attempt, first, last, stride, base = next(span for span in reversed(self.spans) if span[4] <= column)
        return attempt, min(first + (column - base) * stride, last)


@dataclass(frozen=True, slots=True)
class Window:
    """The columns from `low` to before `high`, of which each cell combines `width`."""

    columns: Columns
    low: int
    high: int
    width: int

    @property
    def cells(self) -> int:
        """Return the number of cells of a row."""
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


@dataclass(slots=True)
class Cells:
    """Lowest and highest value of each tensor and cell, NaN without one, and the codes of non-finite cells.

    `low` is the same array as `high` if each cell has only one value.
    """

    names: list[str]
    low: Singles
    high: Singles
    bad: npt.NDArray[np.uint8]


class Order(enum.StrEnum):
    """Order of the tensors of a grid."""

    MODEL = "model"  # by layer
    PART = "part"  # by the part of the layer, such as `mlp.down_proj.weight`; then by layer
    WORST = "worst"  # by the largest distance from the median, non-finite ones first


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRequest:
    """Choices of a reader for a heat map. `words` select tensors by parts of names."""

    kind: str
    op: str = "norm"
    is_relative: bool = True
    order: Order = Order.MODEL
    words: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()  # empty: all
    rank: int | None = None  # None: of all ranks, the farthest from the median
    rows: tuple[int, int] | None = None  # zoom: numbers of tensors in the chosen order
    columns: tuple[int, int] | None = None  # zoom: numbers of sampled steps
    most_rows: int = MOST_ROWS

    def selects(self, name: str) -> bool:
        """Return whether the words and tensors select the tensor `name`."""
        lowered = name.lower()
        return all(word in lowered for word in self.words) and (not self.tensors or name in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellQuery:
    """The rows of a request, and the row groups that can have them."""

    run: str
    request: GridRequest
    groups: RowGroups

    def tensor_estimate(self, columns: int) -> int:
        """Return the probable number of tensors, from the number of rows. Rows of other kinds count too."""
        low, high = self.groups.bounds("rank") or (0, 0)
        return max(1, self.groups.rows // int(max(1, columns) * (high - low + 1)))


def cell_query(connection: Connection, run: str, request: GridRequest) -> CellQuery:
    """Return the row groups that can have the rows of a request; of calculated ratios of updates, all rows."""
    others = ("nans", "infs", "attempt", "rank")
    equal = {"run": [run], "kind": [request.kind]} | ({"tensor": list(request.tensors)} if request.tensors else {})
    if request.kind == UPDATE_RATIO:
        source, content = relation_of(connection, run, request.kind), pa.BufferOutputStream()
        rows = connection.query(
            f"SELECT * FROM {source} WHERE run = $run ORDER BY tensor, rank, attempt, step", {"run": run}
        )
        pq.write_table(rows, content)
        groups = row_groups([content.getvalue()], "tensor_stats", equal, others)
    else:
        groups = connection.row_groups("tensor_stats", [run], equal, others)
    return CellQuery(run=run, request=request, groups=groups)


def relation_of(connection: Connection, run: str, kind: str, steps: tuple[int, int] | None = None) -> str:
    """Return the relation with the statistics of a kind: rows of `tensor_stats`, or calculated ratios of updates."""
    stored = connection.relation("tensor_stats", run=run, steps=steps)
    if kind != UPDATE_RATIO:
        return stored
    return _UPDATES.format(tensor_stats=stored, features=connection.relation("features", run=run, steps=steps))


def sampled_columns(connection: Connection, query: CellQuery) -> Columns:
    """Return the places of the sampled steps, which are those of the first tensor in the files."""
    name = _first_name(query)
    if name is None:
        return Columns(())
    request = replace(query.request, words=(), tensors=(name,))
    own = (
        replace(query, request=request) if request.kind == UPDATE_RATIO else cell_query(connection, query.run, request)
    )
    spans, base = [], 0
    for attempt, steps in sorted(_steps_of(own).items()):
        first, last = steps[0], steps[-1]
        stride = max(1, round((last - first) / max(1, len(steps) - 1)))
        spans.append((attempt, first, last, stride, base))
        base += (last - first) // stride + 1
    return Columns(tuple(spans))


def _steps_of(query: CellQuery) -> dict[int, list[int]]:
    """Return the sorted steps of each attempt in the rows that `query` selects."""
    found: dict[int, set[int]] = {}
    for batch in query.groups.batches([*_OF_ROW, "attempt", "step"]):
        chosen = _Tensors.of(batch, query, {}).is_chosen
        is_own = _both(chosen, batch.column("step").is_valid().to_numpy(zero_copy_only=False))
        attempt, step = (_whole(batch.column(one))[is_own] for one in ("attempt", "step"))
        for number in np.unique(attempt).tolist():
            found.setdefault(number, set()).update(step[attempt == number].tolist())
    return {number: sorted(steps) for number, steps in found.items()}


def _first_name(query: CellQuery) -> str | None:
    for group in query.groups.each():
        for batch in group.batches(_OF_ROW):
            rows: dict[str, int] = {}
            _Tensors.of(batch, query, rows)
            if rows:
                return next(iter(rows))
    return None


def read_cells(query: CellQuery, window: Window) -> Cells:
    """Return the values of all chosen tensors in the cells of `window`. The tensors have the order of the files."""
    table = _Table(window, query.tensor_estimate(window.columns.count))
    request = query.request
    op = request.op if request.op in OPS else "norm"
    finite, others = query.groups.split(("nans", "infs"))
    attempts = query.groups.bounds("attempt")
    several = [] if attempts in {None, (0, 0)} and len(window.columns.spans) == 1 else ["attempt"]
    common = ["tensor", "step", op, *several, *(["rank"] if request.rank is not None else [])]
    for groups, counts in ((finite, []), (others, [one for one in ("nans", "infs") if one != op])):
        for own, names in zip(groups.split_constant(_REQUESTED), ((), _REQUESTED), strict=True):
            for batch in own.batches([*names, *common, *counts]):
                table.add(batch, query, op)
    return table.cells()


class _Table:
    """Arrays that grow with the number of tensors."""

    def __init__(self, window: Window, tensors: int) -> None:
        self._window = window
        self._rows: dict[str, int] = {}
        self._low: Singles | None = None
        self._scratch = np.empty((2, 0), np.int64)  # of one batch: the first use of new memory takes most of the time
        self._high, self._bad = self._arrays(tensors)

    def _arrays(self, rows: int) -> tuple[Singles, npt.NDArray[np.uint8]]:
        shape = (rows, self._window.cells)
        return np.full(shape, np.nan, np.float32), np.zeros(shape, np.uint8)

    def add(self, batch: pa.RecordBatch, query: CellQuery, op: str) -> None:
        """Add the rows of a batch."""
        window = self._window
        tensors = _Tensors.of(batch, query, self._rows)
        self._reserve()
        attempt = _whole(batch.column("attempt")) if "attempt" in batch.schema.names else None
        if self._scratch.shape[1] < batch.num_rows:
            self._scratch = np.empty((2, batch.num_rows), np.int64)
        place, at = self._scratch[:, : batch.num_rows]
        window.columns.of(attempt, _whole(batch.column("step"), absent=-1), place)
        place -= window.low
        is_kept = tensors.is_chosen
        if len(place) and (place.min() < 0 or place.max() >= window.high - window.low):
            is_kept = _both(is_kept, (place >= 0) & (place < window.high - window.low))
        if query.request.rank is not None:
            is_kept = _both(is_kept, _whole(batch.column("rank"), absent=-1) == query.request.rank)
        if window.width > 1:
            place //= window.width
        np.take(tensors.rows * window.cells, tensors.codes, out=at, mode="clip")  # other modes use a buffer
        at += place
        values = batch.column(op)
        numbers = values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        self._store(*((at, numbers) if is_kept is None else (at[is_kept], numbers[is_kept])))
        self._mark(batch, at, is_kept, values)

    def _store(self, at: Integers, values: Singles) -> None:
        """Store values. The lowest ones have an array as soon as a cell may have two values."""
        high = self._high.reshape(-1)
        if self._low is None and np.isnan(high[at]).all():
            high[at] = values
            if np.array_equal(high[at], values, equal_nan=True):
                return
        if self._low is None:
            self._low = self._high.copy()
        np.fmin.at(self._low.reshape(-1), at, values)
        np.fmax.at(high, at, values)

    def _mark(self, batch: pa.RecordBatch, at: Integers, is_kept: Mask | None, values: pa.Array) -> None:
        """Mark cells with NaN or Inf: by the counts of elements, or by the statistic itself."""
        numbers = values.to_numpy(zero_copy_only=False)
        counts = [one for one in (("infs", INFINITE), ("nans", NOT_A_NUMBER)) if one[0] in batch.schema.names]
        if not counts and np.isfinite(numbers).all():
            return
        bad = np.zeros(len(at), np.uint8)
        bad[np.isinf(numbers)] = INFINITE
        bad[np.isnan(numbers) & values.is_valid().to_numpy(zero_copy_only=False)] = NOT_A_NUMBER
        for count, code in counts:
            bad[_whole(batch.column(count)) > 0] = code
        marked = np.flatnonzero(bad if is_kept is None else bad * is_kept)
        np.maximum.at(self._bad.reshape(-1), at[marked], bad[marked])

    def _reserve(self) -> None:
        if len(self._rows) <= len(self._high):
            return
        high, bad = self._arrays(max(len(self._rows), 2 * len(self._high)))
        high[: len(self._high)], bad[: len(self._bad)] = self._high, self._bad
        if self._low is not None:
            low = np.full_like(high, np.nan)
            low[: len(self._low)] = self._low
            self._low = low
        self._high, self._bad = high, bad

    def cells(self) -> Cells:
        """Return the arrays of the tensors that were added."""
        rows = len(self._rows)
        high = self._high[:rows]
        return Cells(list(self._rows), high if self._low is None else self._low[:rows], high, self._bad[:rows])


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of the rows of a batch: `rows[codes]` are their numbers, -1 for tensors that are not selected."""

    codes: npt.NDArray[np.int32]
    rows: Integers
    is_chosen: Mask | None  # of each row; None: all are of the run and kind, and of selected tensors

    @classmethod
    def of(cls, batch: pa.RecordBatch, query: CellQuery, rows: dict[str, int]) -> _Tensors:
        """Return the tensors of a batch. `rows` gets the names that are new."""
        is_chosen = None
        for column, value in (("run", query.run), ("kind", query.request.kind)):
            if column not in batch.schema.names:
                continue  # all rows have this value
            known = batch.column(column)
            if known.dictionary.to_pylist() != [value]:
                code = known.dictionary.index(value).as_py()
                is_chosen = _both(is_chosen, known.indices.to_numpy(zero_copy_only=False) == code)
        codes = batch.column("tensor").indices.to_numpy(zero_copy_only=False)
        begins = np.append(0, np.flatnonzero(codes[1:] != codes[:-1]) + 1)[: len(codes)]
        used = np.array(list(dict.fromkeys(codes[begins if is_chosen is None else is_chosen].tolist())), np.int64)
        names = batch.column("tensor").dictionary
        texts = names.take(pa.array(used)).to_pylist()
        found: list[Any] = list(map(rows.get, texts))
        if None in found:
            found = [
                rows.setdefault(name, len(rows)) if name in rows or query.request.selects(name) else -1
                for name in texts
            ]
        numbers = np.full(len(names), -1, np.int64)
        numbers[used] = found
        if -1 in found:
            is_chosen = _both(is_chosen, numbers[codes] >= 0)
        return cls(codes, numbers, is_chosen)


def _both(first: Mask | None, second: Mask) -> Mask:
    return second if first is None else first & second


def _whole(column: Any, absent: int = 0) -> Integers:
    filled = column.fill_null(absent) if column.null_count else column
    found: Integers = filled.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return found
