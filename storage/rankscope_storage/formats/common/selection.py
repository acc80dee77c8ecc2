"""Selection of the rows of one run for an export: SQL predicates, and ranges of steps that limit the memory."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from rankscope_storage.base.datasets import DATASETS, DIMENSIONS
from rankscope_storage.base.errors import ExportError
from rankscope_storage.base.escaping import sql_identifier, sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.formats.common.base import ExportOptions
from rankscope_storage.log.snapshot import divided

WINDOW_ROWS: Final = 50_000


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of a run that are exported. The SQL predicates refer to named values in `parameters`."""

    connection: Connection
    run: str
    options: ExportOptions
    parameters: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        """Store in `parameters` the values of those options to which the SQL predicates refer."""
        values: dict[str, Any] = {"run": self.run}
        options = self.options
        values |= {} if options.time_start is None else {"time_start": options.time_start}
        values |= {} if options.time_end is None else {"time_end": options.time_end}
        values |= {} if options.steps is None else {"first_step": options.steps[0], "last_step": options.steps[1]}
        values |= {} if options.attempt is None else {"attempt": options.attempt}
        object.__setattr__(self, "parameters", values)

    def where(self, dataset: str) -> str:
        """Return the SQL predicate for the exported rows of `dataset`.

        The option `data_type_list` restricts only datasets with a column `kind`. Dimension tables (versions of the run,
        attempts, tensors) are exported completely, for any steps and ranks.
        """
        if dataset in DIMENSIONS:
            return "run = $run"
        parts = ["run = $run"]
        options = self.options
        if options.time_start is not None:
            parts.append("(ts IS NULL OR ts >= $time_start)")
        if options.time_end is not None:
            parts.append("(ts IS NULL OR ts <= $time_end)")
        if options.steps is not None:
            parts.append("step BETWEEN $first_step AND $last_step")
        if options.attempt is not None:
            parts.append("attempt = $attempt")
        if options.ranks:
            parts.append(f"rank IN ({', '.join(str(int(rank)) for rank in options.ranks)})")
        kinds = options.kinds()
        if kinds is not None and any(column.name == "kind" for column in DATASETS[dataset]):
            parts.append(f"kind IN ({', '.join(map(sql_string, sorted(kinds)))})")
        return " AND ".join(parts)

    def source(self, dataset: str) -> str:
        """Return the FROM and WHERE clauses for the exported rows of `dataset`.

        Files without such rows are not read.
        """
        steps = None if dataset in DIMENSIONS else self.options.steps
        relation = self.connection.relation(dataset, run=self.run, steps=steps)
        return f"{relation} WHERE {self.where(dataset)}"

    def query(self, query: str) -> pa.Table:
        """Return the rows of `query`, which may use the parameters of this selection.

        The query itself must restrict its rows to the run, for example by the predicate that `where` returns.
        """
        return self.connection.query(query, self._named_in(query))

    def stream(self, query: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of `query` in batches. The connection must not run another query meanwhile."""
        return self.connection.stream(query, self._named_in(query), batch_rows=batch_rows)

    def count(self, dataset: str, extra: str = "true") -> int:
        """Return the number of exported rows of `dataset` that satisfy the predicate `extra`."""
        rows: int = self.query(f"SELECT count(*) AS rows FROM {self.source(dataset)} AND {extra}")["rows"][0].as_py()
        return rows

    def only(self, *, attempt: int | None, rank: int | None) -> str:
        """Return the SQL predicate for the rows of one rank of one attempt.

        If `attempt` or `rank` is None, the rows in which this column is null are selected.
        """
        return " AND ".join(
            f"{name} IS NULL" if value is None else f"{name} = {int(value)}"
            for name, value in (("attempt", attempt), ("rank", rank))
        )

    def _named_in(self, query: str) -> dict[str, Any]:
        # DuckDB rejects parameters that the statement does not use.
        return {name: value for name, value in self.parameters.items() if f"${name}" in query}

    def windows(self, dataset: str, extra: str = "true", *, column: str = "step") -> Iterator[tuple[Any, Any]]:
        """Yield closed ranges of `column` with about WINDOW_ROWS rows each, in ascending order.

        The exported rows of `dataset` that satisfy the SQL predicate `extra` are counted.
        """
        counted = self.query(
            f"SELECT {column}, count(*) AS rows FROM {self.source(dataset)} AND {extra} AND {column} IS NOT NULL "
            f"GROUP BY {column} ORDER BY {column}"
        )
        pairs = zip(counted[column].to_pylist(), counted["rows"].to_pylist(), strict=True)
        for group in divided(pairs, operator.itemgetter(1), WINDOW_ROWS):
            yield group[0][0], group[-1][0]

    def within(self, first: int, last: int) -> Selection:
        """Return a selection of those rows of this selection that are in a closed range of steps.

        Files without these steps are not read.
        """
        lowest, highest = self.options.steps or (first, last)
        steps = (max(first, lowest), min(last, highest))
        return dataclasses.replace(self, options=dataclasses.replace(self.options, steps=steps))


def columns(dataset: str, *names: str) -> str:
    """Return a SELECT list of `names`, or of all columns of `dataset`."""
    return ", ".join(map(sql_identifier, names or [column.name for column in DATASETS[dataset]]))


def require_rows(selection: Selection, counts: Mapping[str, int]) -> None:
    """Raise ExportError if no row is selected, because an empty file looks like a run without problems."""
    if not any(counts.values()):
        raise ExportError(
            f"the options select no rows of {', '.join(counts)} of run {selection.run}: nothing was written"
        )
