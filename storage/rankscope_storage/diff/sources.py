"""SQL for the two sides of a comparison of runs, attempts or ranks.

Each side has one row per series (rank, kind, name and so on) and step, from the last attempt that ran the step. The
steps of scalars are positions of the view `scalar_positions`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.security.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.sql.scalar_history import POSITIONS

SCALAR: Final = "scalar"
"""Name that represents all scalars where a kind is expected, for example in `DiffSelection.kinds`."""

SCALARS: Final = ("loss", "grad_norm", "learning_rate")
"""Names of the scalars that are compared by default.

Other scalars, such as times and rates, differ between any two runs."""

DATASETS: Final = ("tensor_stats", "features", "scalars", "hashes")
NUMBERS: Final = (*VALUE_OPS, "value")
EXACT: Final = (*COUNT_OPS, "hash")
KEYS: Final = ("source", "micro_step", "vpp_stage", "kind", "tensor", '"index"', "call_seq")

_SELECTED: Final = {
    "tensor_stats": (
        'micro_step, vpp_stage, kind, tensor, "index", call_seq, placement, '
        + ", ".join(f'"{op}"' for op in (*VALUE_OPS, *COUNT_OPS))
    ),
    "features": 'micro_step, vpp_stage, kind, module AS tensor, "index", value::DOUBLE AS value',
    "scalars": f"'{SCALAR}' AS kind, name || coalesce(labels, '') AS tensor, value",
    "hashes": "vpp_stage, kind, tensor, replicas, hash, norm, 'replica' AS placement",
}
_TYPES: Final = {
    **dict.fromkeys(("source", "kind", "tensor", "placement", "replicas"), "VARCHAR"),
    **dict.fromkeys(("rank", "attempt", "micro_step", "vpp_stage", "index"), "INTEGER"),
    **dict.fromkeys(("step", "ordinal", "seq", "call_seq", *EXACT), "BIGINT"),
    **dict.fromkeys(VALUE_OPS, "FLOAT"),
    "value": "DOUBLE",
}
_NO_ROWS: Final = "SELECT " + ", ".join(f'NULL::{type_} AS "{name}"' for name, type_ in _TYPES.items()) + " WHERE false"


_EVERY_STEP: Final = (-(1 << 62), 1 << 62)
_LAST_SEEN: Final = (
    f"QUALIFY row_number() OVER (PARTITION BY step, rank, {', '.join(KEYS)} "
    "ORDER BY attempt DESC NULLS LAST, ordinal DESC NULLS LAST, seq DESC NULLS LAST) = 1"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSide:
    """One side of a comparison: a run or one rank of a run, with all attempts or one attempt."""

    run: str
    rank: int | None = None
    attempt: int | None = None

    def __str__(self) -> str:
        parts = (self.run, "" if self.attempt is None else f"attempt {self.attempt}")
        return ", ".join(filter(None, (*parts, "" if self.rank is None else f"rank {self.rank}")))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSelection:
    """The kinds, ranks and steps that are compared, on both sides of the comparison."""

    kinds: tuple[str, ...] = ()
    """Kinds to compare, including `scalar`. If empty, all kinds that are expected to be equal are compared."""
    ranks: tuple[int, ...] = ()
    steps: tuple[int, int] | None = None


class DiffSource:
    """One side of a comparison in a store.

    With `between_ranks` and without `kinds`, only rows that are expected to be equal on replicas are compared.
    """

    def __init__(self, connection: Connection, side: DiffSide, selected: DiffSelection, *, between_ranks: bool) -> None:
        self._connection = connection
        self.side = side
        self._selected = selected
        self._between_ranks = between_ranks

    def rows(self, steps: tuple[int, int]) -> str:
        """Return the query for the rows of this side in the closed range `steps`: one row per rank, series and step."""
        again = frozenset(self._datasets()) if self._has_attempts else self._repeated
        parts = " UNION ALL BY NAME ".join(self._once(dataset, steps, dataset in again) for dataset in self._datasets())
        # A requeued job repeats steps. The training continued from the last attempt of a step.
        last = "QUALIFY attempt IS NOT DISTINCT FROM max(attempt) OVER (PARTITION BY step, rank)"
        return f"SELECT * FROM ({_NO_ROWS} UNION ALL BY NAME {parts}) {last if self._has_attempts else ''}"

    def names(self, steps: tuple[int, int]) -> set[tuple[str, str]]:
        """Return the pairs of kind and name of all rows of this side in the closed range `steps`."""
        parts = " UNION ALL ".join(
            f"SELECT DISTINCT kind, tensor FROM ({self._selected_rows(dataset, steps)})" for dataset in self._datasets()
        )
        found = self._connection.query(f"SELECT DISTINCT kind, tensor FROM ({parts})")
        return set(zip(found["kind"].to_pylist(), found["tensor"].to_pylist(), strict=True))

    def counted(self) -> dict[int, int]:
        """Return the steps of this side in ascending order, each with its number of rows."""
        bounds = self._selected.steps or (-(1 << 62), 1 << 62)
        parts = " UNION ALL ".join(
            f"SELECT step FROM {self._relation(dataset, self._selected.steps)} WHERE {self._where(dataset, bounds)}"
            for dataset in self._datasets()
        )
        query = f"SELECT step, count(*) AS rows FROM ({parts}) GROUP BY step ORDER BY step"
        found = self._connection.query(query)
        return dict(zip(found["step"].to_pylist(), found["rows"].to_pylist(), strict=True))

    def ranks(self) -> set[int | None]:
        """Return the ranks that have rows on this side of the comparison."""
        parts = " UNION ALL ".join(self._places(dataset) for dataset in self._datasets())
        return set(self._connection.query(f"SELECT DISTINCT rank FROM ({parts})")["rank"].to_pylist())

    def order(self) -> dict[tuple[str, str], int]:
        """Return the position of each pair of kind and tensor name by the column `ordinal` of the dataset `tensors`.

        This is the order in which rows about the tensors first arrived: the order of the model or of its calls.
        """
        relation = self._connection.relation("tensors", run=self.side.run)
        found = self._connection.query(
            f"SELECT kind, tensor FROM {relation} WHERE run = {sql_string(self.side.run)} "
            "GROUP BY kind, tensor ORDER BY min(ordinal), kind, tensor"
        )
        names = zip(found["kind"].to_pylist(), found["tensor"].to_pylist(), strict=True)
        return {name: position for position, name in enumerate(names)}

    @functools.cached_property
    def _has_attempts(self) -> bool:
        """Return whether any rank has rows of the same step from several attempts on this side of the comparison."""
        parts = " UNION ALL ".join(self._places(dataset, "attempt") for dataset in self._datasets())
        return self._any(f"SELECT min(attempt) <> max(attempt) AS found FROM ({parts}) GROUP BY step, rank")

    @functools.cached_property
    def _repeated(self) -> frozenset[str]:
        """Return the datasets in which a rank may have stored several rows of one series for the same step.

        This is possible if rows of the rank and step come from several records.
        """
        return frozenset(
            dataset
            for dataset in self._datasets()
            if self._any(
                "SELECT min(seq) <> max(seq) OR min(incarnation) <> max(incarnation) OR count(seq) < count(*) AS found "
                f"FROM ({self._places(dataset, 'seq', 'incarnation')}) GROUP BY step, rank"
            )
        )

    def _any(self, query: str) -> bool:
        return bool(self._connection.query(f"SELECT bool_or(found) AS found FROM ({query})")["found"][0].as_py())

    def _places(self, dataset: str, *columns: str) -> str:
        bounds = self._selected.steps or _EVERY_STEP
        return (
            f"SELECT {', '.join(('step', 'rank', *columns))} FROM {self._relation(dataset, self._selected.steps)} "
            f"WHERE {self._where(dataset, bounds)}"
        )

    def _once(self, dataset: str, steps: tuple[int, int], repeated: bool) -> str:  # noqa: FBT001 - private
        rows = self._selected_rows(dataset, steps)
        return f"SELECT * FROM ({_NO_ROWS} UNION ALL BY NAME {rows}) {_LAST_SEEN}" if repeated else rows

    def _selected_rows(self, dataset: str, steps: tuple[int, int]) -> str:
        return (
            f"SELECT '{dataset}' AS source, step, rank, attempt, ordinal, seq, {_SELECTED[dataset]} "
            f"FROM {self._relation(dataset, steps)} WHERE {self._where(dataset, steps)}"
        )

    @functools.cached_property
    def _has_positions(self) -> bool:
        """Return whether the position of any scalar of the run is not its step."""
        query = f"SELECT 1 FROM {POSITIONS} WHERE run = $run AND position IS DISTINCT FROM step LIMIT 1"
        return bool(self._connection.query(query, {"run": self.side.run}).num_rows)

    def _relation(self, dataset: str, steps: tuple[int, int] | None) -> str:
        if dataset == "scalars" and self._has_positions:
            return f"(SELECT * REPLACE (position AS step) FROM {POSITIONS})"
        return self._connection.relation(dataset, run=self.side.run, steps=steps)

    def _datasets(self) -> list[str]:
        if self._between_ranks and not self._selected.kinds:
            return ["tensor_stats", "hashes"]
        if self._selected.kinds and SCALAR not in self._selected.kinds:
            return [name for name in DATASETS if name != "scalars"]
        return list(DATASETS)

    def _where(self, dataset: str, steps: tuple[int, int]) -> str:
        parts = [f"run = {sql_string(self.side.run)}", f"step BETWEEN {steps[0]} AND {steps[1]}"]
        ranks = self._selected.ranks if self.side.rank is None else (self.side.rank,)
        if ranks:
            parts.append(f"rank IN ({', '.join(str(int(rank)) for rank in ranks)})")
        if self.side.attempt is not None:
            parts.append(f"attempt = {int(self.side.attempt)}")
        kinds = self._selected.kinds
        if dataset == "scalars":
            parts += [] if kinds else [f"name IN ({', '.join(map(sql_string, SCALARS))})"]
        elif kinds:
            parts.append(f"kind IN ({', '.join(map(sql_string, kinds))})")
        if self._between_ranks and not kinds and dataset == "tensor_stats":
            parts.append("placement = 'replica'")
        return " AND ".join(parts)
