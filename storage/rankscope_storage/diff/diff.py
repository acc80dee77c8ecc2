"""Comparison of two runs, or of two ranks of one run.

The result has the number of differences at each step, and a list of all differences at the first different step, in
causal order (causes before their effects). Steps are compared in ranges of limited size, so that the memory does not
depend on the size of the store. Both sides are read through one connection and from one version of the store.

Each side of a comparison has one row per series (rank, kind, name and so on) and step, from the last attempt that ran
the step. The steps of scalars are positions of the view `scalar_positions`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankscope_contract.model.events import causal_key
from rankscope_contract.model.kinds import COUNT_OPS, GRADIENT_KINDS, VALUE_OPS
from rankscope_contract.model.scalar_names import SOURCE_NAME, SOURCE_UNIT
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.log.snapshot import divided
from rankscope_storage.prometheus.names import HARDWARE_SCALARS, MONITOR_SCALARS

TIMING: Final = "timing"
"""Name that represents the scalars of times, hosts and Rankscope itself, which differ between any two runs."""

SCALAR: Final = "scalar"
"""Name that represents all scalars where a kind is expected, for example in `DiffSelection.kinds`."""

SCALARS: Final = ("loss", "grad_norm", "learning_rate")
"""Names of the scalars that are compared by default.

Other scalars, such as times and rates, differ between any two runs."""

_NAMES: Final = "|".join(sorted(HARDWARE_SCALARS | MONITOR_SCALARS))
_TIMES: Final = (
    rf"regexp_matches(name, '(^|[_/])(seconds|(run)?time(rs?)?)($|[_/])|_per_(second|gpu)|^(mfu|{_NAMES})$')"
)
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
    "scalars": f"'{SCALAR}' AS kind, {{scalar}} AS tensor, value",
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


_SERIES: Final = "name || coalesce(labels, '')"
_NOT_OF_LOGS: Final = f"""\
nullif(json_merge_patch(coalesce(labels, '{{}}'), '{{"{SOURCE_NAME}":null, "{SOURCE_UNIT}":null}}')::VARCHAR, '{{}}')"""
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
    scalar: str = _SERIES
    """SQL of the name by which scalars are compared."""


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
        query = f"SELECT step, count(*) AS rows FROM ({self._places()}) GROUP BY step ORDER BY step"
        found = self._connection.query(query)
        return dict(zip(found["step"].to_pylist(), found["rows"].to_pylist(), strict=True))

    def ranks(self) -> set[int]:
        """Return the ranks that have rows on this side of the comparison; 0 for rows without a rank."""
        query = f"SELECT DISTINCT coalesce(rank, 0) AS rank FROM ({self._places()})"
        return set(self._connection.query(query)["rank"].to_pylist())

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
        places = self._places("attempt")
        return self._any(f"SELECT min(attempt) <> max(attempt) AS found FROM ({places}) GROUP BY step, rank")

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
                f"FROM ({self._places('seq', 'incarnation', datasets=[dataset])}) GROUP BY step, rank"
            )
        )

    def _any(self, query: str) -> bool:
        return bool(self._connection.query(f"SELECT bool_or(found) AS found FROM ({query})")["found"][0].as_py())

    def _places(self, *columns: str, datasets: Sequence[str] = ()) -> str:
        """Return a query for step, rank and `columns` of all rows of `datasets`, or of all datasets of this side."""
        steps = self._selected.steps
        return " UNION ALL ".join(
            f"SELECT {', '.join(('step', 'rank', *columns))} FROM {self._relation(dataset, steps)} "
            f"WHERE {self._where(dataset, steps or _EVERY_STEP)}"
            for dataset in datasets or self._datasets()
        )

    def _once(self, dataset: str, steps: tuple[int, int], repeated: bool) -> str:  # noqa: FBT001 - private
        rows = self._selected_rows(dataset, steps)
        return f"SELECT * FROM ({_NO_ROWS} UNION ALL BY NAME {rows}) {_LAST_SEEN}" if repeated else rows

    def _selected_rows(self, dataset: str, steps: tuple[int, int]) -> str:
        columns = _SELECTED[dataset].format(scalar=self._selected.scalar)
        return (
            f"SELECT '{dataset}' AS source, step, rank, attempt, ordinal, seq, {columns} "
            f"FROM {self._relation(dataset, steps)} WHERE {self._where(dataset, steps)}"
        )

    @functools.cached_property
    def _has_positions(self) -> bool:
        """Return whether the position of any scalar of the run is not its step."""
        query = "SELECT 1 FROM scalars WHERE run = $run AND position IS DISTINCT FROM step LIMIT 1"
        return bool(self._connection.query(query, {"run": self.side.run}).num_rows)

    def _relation(self, dataset: str, steps: tuple[int, int] | None) -> str:
        if dataset == "scalars" and self._has_positions:
            return "(SELECT * REPLACE (position AS step) FROM scalars)"
        return self._connection.relation(dataset, run=self.side.run, steps=steps)

    def _datasets(self) -> list[str]:
        if self._between_ranks and not self._selected.kinds:
            return ["tensor_stats", "hashes"]
        if self._selected.kinds and not {SCALAR, TIMING} & set(self._selected.kinds):
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
            parts.append(_chosen(kinds))
        elif kinds:
            parts.append(f"kind IN ({', '.join(map(sql_string, kinds))})")
        if self._between_ranks and not kinds and dataset == "tensor_stats":
            parts.append("placement = 'replica'")
        return " AND ".join(parts)


def _chosen(kinds: Sequence[str]) -> str:
    """Return an SQL condition for the scalars that are compared if `kinds` are requested."""
    if not kinds:
        return f"name IN ({', '.join(map(sql_string, SCALARS))})"
    return "true" if {SCALAR, TIMING} <= set(kinds) else _TIMES if TIMING in kinds else f"NOT ({_TIMES})"


def _common_names(connection: Connection, runs: Sequence[str], kinds: Sequence[str]) -> str:
    """Return SQL of the name of a scalar, which is the same for `lm loss` of one run and `loss` of the other.

    Series that both runs have keep their names, and so do those after the first one of a stored name in a run.
    """
    query = f"""\
WITH series AS (SELECT DISTINCT run, {_SERIES} AS series, name || coalesce({_NOT_OF_LOGS}, '') AS plain
  FROM scalars WHERE run IN (SELECT unnest($runs)) AND {_chosen(kinds)})
SELECT plain, min(series) AS series FROM series GROUP BY plain, run HAVING min(series) <> plain
  AND plain NOT IN (SELECT plain FROM series GROUP BY plain, series HAVING count(*) > 1)"""
    rows = connection.query(query, {"runs": list(runs)}).to_pylist()
    cases = " ".join(f"WHEN {sql_string(row['series'])} THEN {sql_string(row['plain'])}" for row in rows)
    return f"CASE {_SERIES} {cases} ELSE {_SERIES} END" if rows else _SERIES


WINDOW_ROWS: Final = 500_000
ROUNDING: Final = 1e-5
"""Usual relative difference of two float32 norms or means of equal elements that are added in different orders."""

_MOST_POINTS: Final = 200_000
_OPS: Final = (*NUMBERS, *EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest allowed difference of two numbers: `absolute` + `relative` times the scale of the numbers.

    The scale is the larger magnitude of both numbers. For a mean, the scale is also at least the root mean square of
    the tensor's elements, if known. The rounding difference of two sums of the same elements in different orders is
    proportional to that scale, and may be as large as a mean near zero.

    Counts of NaN, of Inf and of all elements are compared exactly. Hashes and counts of zeros are compared only if both
    tolerances are 0, because any tolerance allows differences that change a hash or a count of zeros.
    """

    relative: float = 0.0
    absolute: float = 0.0

    @property
    def is_exact(self) -> bool:
        """True if both tolerances are 0, so that no difference is allowed."""
        return not (self.relative or self.absolute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number that differs between the two sides. `a` or `b` is None if that side does not have the number."""

    step: int
    rank: int | None
    micro_step: int | None
    vpp_stage: int | None
    kind: str
    tensor: str
    index: int | None
    call_seq: int | None
    op: str
    a: float | int | None
    b: float | int | None
    scale: float | None = None
    """Lower limit of the scale; the relative difference is the difference of `a` and `b` divided by the scale.

    The scale is the larger magnitude of `a` and `b`, but at least this limit. Only means have a limit: the root mean
    square of the tensor's elements, if it is known."""

    @property
    def relative(self) -> float | None:
        """Return the difference of `a` and `b` relative to the larger magnitude of both, or to `scale` if it is larger.

        Returns None if one of them is missing or not finite, and for counts and hashes.
        """
        return relative_difference(self.a, self.b, self.scale) if self.op in NUMBERS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """Differences of two sides (runs or ranks) at one step.

    These are the numbers of compared and of different rows, and the largest relative difference of two numbers, which
    is NaN if a value or an element is NaN or infinite on one side.
    """

    step: int
    compared: int
    apart: int
    worst: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Result of the comparison of two sides (runs, attempts or ranks).

    `points` are the differences at the first step with a difference, in causal order (causes before their effects).
    """

    a: DiffSide
    b: DiffSide
    tolerance: Tolerance
    steps_compared: int
    steps_before: int  # compared steps before the first difference
    rows_compared: int
    points: tuple[Point, ...]
    points_at_first: int
    steps: tuple[StepDifference, ...]
    only_in_a: tuple[tuple[str, str], ...]
    only_in_b: tuple[tuple[str, str], ...]
    ranks_only_in_a: tuple[int, ...]
    ranks_only_in_b: tuple[int, ...]
    steps_only_in_a: tuple[int, ...]
    steps_only_in_b: tuple[int, ...]

    @property
    def first(self) -> Point | None:
        """Return the first difference of the sides in causal order (causes first); None if there is no difference."""
        return self.points[0] if self.points else None

    @property
    def looks_rounded(self) -> bool:
        """Return whether the differences at the first different step are so small that rounding can cause them."""
        shares = [point.relative for point in self.points if point.op in ("norm", "mean")]
        small = all(share is not None and share <= ROUNDING for share in shares)
        return bool(shares) and small and len(shares) == len(self.points)


def divergence(
    connection: Connection,
    a: DiffSide,
    b: DiffSide,
    tolerance: Tolerance | None = None,
    selected: DiffSelection | None = None,
    *,
    top: int = 8,
    window_rows: int = WINDOW_ROWS,
) -> Divergence:
    """Compare the sides `a` and `b` at the steps that both have, rank by rank.

    If both sides name a rank, these two ranks are compared, even if their numbers are different.
    """
    tolerance, selected = tolerance or Tolerance(), selected or DiffSelection()
    selected = replace(selected, scalar=_common_names(connection, (a.run, b.run), selected.kinds))
    between = a.rank is not None and b.rank is not None
    with connection.pinned():
        sources = [DiffSource(connection, side, selected, between_ranks=between) for side in (a, b)]
        comparison = _Comparison(connection, sources[0], sources[1], tolerance, by_rank=not between)
        counts = [source.counted() for source in sources]
        ranks: list[set[int]] = [set() if between else source.ranks() for source in sources]
        common = [step for step in counts[0] if step in counts[1]]
        steps: list[StepDifference] = []
        compared = 0
        names: tuple[set[tuple[str, str]], ...] = (set(), set())
        for first, last in _windows(common, counts, window_rows):
            for found in comparison.steps(first, last):
                compared += found.compared
                steps += [found] if found.apart else []
            for known, source in zip(names, sources, strict=True):
                known.update(source.names((first, last)))
        points = comparison.points(steps[0].step) if steps else []
    return Divergence(
        a=a,
        b=b,
        tolerance=tolerance,
        steps_compared=len(common),
        steps_before=sum(not steps or step < steps[0].step for step in common),
        rows_compared=compared,
        points=tuple(points[:top]),
        points_at_first=len(points),
        steps=tuple(steps),
        only_in_a=tuple(sorted(names[0] - names[1])),
        only_in_b=tuple(sorted(names[1] - names[0])),
        ranks_only_in_a=tuple(sorted(ranks[0] - ranks[1])),
        ranks_only_in_b=tuple(sorted(ranks[1] - ranks[0])),
        steps_only_in_a=tuple(step for step in counts[0] if step not in counts[1]),
        steps_only_in_b=tuple(step for step in counts[1] if step not in counts[0]),
    )


def relative_difference(a: float | None, b: float | None, scale: float | None = None) -> float | None:
    """Return |a - b| divided by the largest of |a|, |b| and `scale`; None if `a` or `b` is missing or not finite."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return None
    largest = max(abs(a), abs(b), scale or 0.0)
    return abs(a - b) / largest if largest else 0.0


class _Comparison:
    """The SQL queries of one comparison, which compare rows of the sides `a` and `b` (runs, attempts or ranks)."""

    def __init__(
        self, connection: Connection, a: DiffSource, b: DiffSource, tolerance: Tolerance, *, by_rank: bool
    ) -> None:
        self._connection = connection
        self._sources = (a, b)
        self._tolerance = tolerance
        self._by_rank = by_rank

    def steps(self, first: int, last: int) -> Iterator[StepDifference]:
        """Yield the numbers of differences between the two sides at each step from `first` to `last`."""
        shares = [f"WHEN {_finite(op)} THEN {_relative(op)} WHEN {op}_apart THEN 'nan'::DOUBLE" for op in NUMBERS]
        worst = ", ".join(f"CASE {case} END" for case in (*shares, "WHEN nans_apart OR infs_apart THEN 'nan'::DOUBLE"))
        query = (
            f"SELECT step, count(*) AS compared, count(*) FILTER (apart) AS apart, max(greatest({worst})) AS worst "
            f"FROM ({self._joined(first, last)}) GROUP BY step ORDER BY step"
        )
        for row in self._connection.query(query).to_pylist():
            yield StepDifference(**row)

    def points(self, step: int) -> list[Point]:
        """Return all differences between the two sides at `step`, in causal order (causes before their effects)."""
        query = f"SELECT * FROM ({self._joined(step, step)}) WHERE apart LIMIT {_MOST_POINTS}"
        rows = self._connection.query(query).to_pylist()
        order = {**self._sources[1].order(), **self._sources[0].order()}
        points = [point for row in rows for point in self._of(row)]
        return sorted(points, key=lambda point: _place(point, order))

    def _of(self, row: Mapping[str, Any]) -> Iterator[Point]:
        """Yield each number that differs between the two sides; `row` has the numbers of both sides."""
        shared = {
            name: row[name] for name in ("step", "micro_step", "vpp_stage", "kind", "tensor", "index", "call_seq")
        }
        shared["rank"] = row["rank"] if self._by_rank else None
        for op in _OPS:
            if row[f"{op}_apart"]:
                scale = row["mean_scale"] if op == "mean" else None
                yield Point(op=op, a=row[f"{op}_a"], b=row[f"{op}_b"], scale=scale, **shared)

    def _joined(self, first: int, last: int) -> str:
        keys = ("step", *(("rank",) if self._by_rank else ()), *KEYS)
        on = " AND ".join(f"a.{key} IS NOT DISTINCT FROM b.{key}" for key in keys)
        on = re.sub(r"[ab]\.rank", r"coalesce(\g<0>, 0)", on)  # a log without ranks is compared with rank 0
        a, b = (source.rows((first, last)) for source in self._sources)
        both = ", ".join(f'a."{op}" AS "{op}_a", b."{op}" AS "{op}_b"' for op in _OPS)
        flags = {op: self._apart(op) for op in _OPS}
        flagged = ", ".join(f'coalesce({flag}, false) AS "{op}_apart"' for op, flag in flags.items())
        any_ = " OR ".join(f'"{op}_apart"' for op in _OPS)
        return (
            f"SELECT *, {any_} AS apart, {_largest('mean')} AS mean_scale FROM (SELECT *, {flagged} FROM ("
            f"SELECT {', '.join(f'a.{key}' for key in keys)}, {both} FROM ({a}) a JOIN ({b}) b ON {on}))"
        )

    def _apart(self, op: str) -> str:
        a, b = f'"{op}_a"', f'"{op}_b"'
        if op in EXACT:
            is_compared = self._tolerance.is_exact or op not in ("zeros", "hash")
            return f"{a} <> {b}" if is_compared else "false"
        limit = f"{self._tolerance.absolute!r} + {self._tolerance.relative!r} * {_largest(op)}"
        beyond = f"{a} <> {b}" if self._tolerance.is_exact else f"abs({a}::DOUBLE - {b}::DOUBLE) > {limit}"
        return f"CASE WHEN {_finite(op)} THEN {beyond} ELSE {a} <> {b} END"


def _finite(op: str) -> str:
    return f'(isfinite("{op}_a") AND isfinite("{op}_b"))'


def _largest(op: str) -> str:
    own = ", ".join(f'abs("{op}_{side}"::DOUBLE)' for side in "ab")
    if op != "mean":
        return f"greatest({own})"
    squares = ", ".join(
        f'CASE WHEN isfinite("norm_{side}") THEN "norm_{side}"::DOUBLE / sqrt(greatest("numel_{side}", 1)) END'
        for side in "ab"
    )
    return f"greatest({own}, {squares})"  # greatest ignores null


def _relative(op: str) -> str:
    return f'coalesce(abs("{op}_a"::DOUBLE - "{op}_b"::DOUBLE) / nullif({_largest(op)}, 0), 0)'


def _windows(steps: Sequence[int], counts: Sequence[Mapping[int, int]], window_rows: int) -> Iterator[tuple[int, int]]:
    """Yield closed ranges of `steps` with about `window_rows` rows each, counted on both sides together.

    `steps` are the steps that both sides have, and `counts` the numbers of rows per step of each side.
    """
    for group in divided(steps, lambda step: sum(count[step] for count in counts), window_rows):
        yield group[0], group[-1]


def _place(point: Point, order: Mapping[tuple[str, str], int]) -> tuple[Any, ...]:
    """Return the sort key of a difference: causal order (causes before effects), then the position of the tensor.

    Tensors are in the order of the model; gradients are in the reverse order.
    """
    causal = causal_key(
        step=point.step,
        micro_step=point.micro_step,
        kind=None if point.kind == SCALAR else point.kind,
        vpp_stage=point.vpp_stage,
        pp_stage=None,
        call_id=None,
    )
    backward = -1 if point.kind in GRADIENT_KINDS else 1
    position = order.get((point.kind, point.tensor))
    natural = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", point.tensor)]
    return (
        *causal[:-1],
        position is None,
        backward * (position or 0),
        natural,
        point.index if point.index is not None else -1,
        point.call_seq or 0,
        -1 if point.rank is None else point.rank,
        _OPS.index(point.op),
    )
