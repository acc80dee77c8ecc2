"""The exact value behind one cell of a heat map, of one tensor or of several that share a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope_contract.model.kinds import OPS
from rankscope_storage.base.escaping import sql_identifier
from rankscope_storage.connection import Connection
from rankscope_view.data.cells import CellQuery, Window, read_cells, relation_of, sampled_columns
from rankscope_view.data.grid import GridRequest, bounded, cell_width, grid_query, levels


@dataclass(frozen=True, slots=True, kw_only=True)
class CellValue:
    """The exact value that a cell shows: the most extreme one of its tensors in its steps."""

    tensor: str
    attempt: int
    step: int
    rank: int | None
    value: float | None
    nans: int
    infs: int


def cell_value(connection: Connection, run: str, request: GridRequest, column: int) -> CellValue | None:
    """Return the exact value of a cell: of `request.tensors` in the column with this number of the grid.

    The value is the one that determined the colour: non-finite, or else the farthest from the median of its tensor.
    """
    with connection.pinned():
        query = grid_query(connection, run, request)
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
        return _exact(connection, query, cells.names[best], _place(window, column), is_low=is_low)


def _place(window: Window, column: int) -> tuple[int, int, int]:
    attempts, steps, last_steps = window.places()
    return attempts[column], steps[column], last_steps[column]


def _exact(
    connection: Connection, query: CellQuery, tensor: str, place: tuple[int, int, int], *, is_low: bool
) -> CellValue | None:
    attempt, first, last = place
    column = sql_identifier(query.op if query.op in OPS else "norm")
    rows = connection.query(
        f"""SELECT step, rank, {column}::DOUBLE AS value, coalesce(nans, 0) AS nans, coalesce(infs, 0) AS infs
        FROM {relation_of(connection, query.run, query.kind, (first, last))}
        WHERE run = $run AND kind = $kind AND tensor = $tensor AND coalesce(attempt, 0) = $attempt
          AND step BETWEEN $first AND $last AND coalesce($rank, rank) IS NOT DISTINCT FROM rank
        ORDER BY nans > 0 DESC, infs > 0 DESC, {column} {"ASC" if is_low else "DESC"} NULLS LAST, step, rank LIMIT 1""",
        {"run": query.run, "kind": query.kind, "tensor": tensor, "attempt": attempt, "first": first, "last": last}
        | {"rank": query.rank},
    ).to_pylist()
    return CellValue(tensor=tensor, attempt=attempt, **rows[0]) if rows else None
