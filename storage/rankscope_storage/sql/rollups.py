"""Rollups: aggregation of raw rows, combination of rollup rows, and the views over both tiers. SQL text.

Both aggregations are sums over disjoint rows, so neither the number of pieces nor their order matters. A rollup row is
placed at its last step. Its minimum and maximum remain exact, a counter has its last value, and every other number is
the mean of the rows: multiplied by `rows`, counts of elements are exact again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.model.rollups import BUCKET_SECONDS, BUCKET_STEPS, ROLLUPS
from rankscope_contract.security.escaping import sql_identifier, sql_string
from rankscope_storage.base.schema import dataset_schema

_IDENTITY: Final = ("run", "attempt", "rank", "micro_step", "vpp_stage")

SERIES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensor_stats": (*_IDENTITY, "kind", "tensor", "index", "placement", "shard_group", "call_seq"),
    "scalars": (*_IDENTITY, "name", "unit", "labels"),
}
"""Columns that tell the series of a dataset apart. Other micro-steps and calls measure something else."""

NUMBERS: Final[Mapping[str, tuple[str, ...]]] = {"tensor_stats": VALUE_OPS, "scalars": ("value",)}
TOTALS: Final[Mapping[str, tuple[str, ...]]] = {"tensor_stats": COUNT_OPS, "scalars": ()}

_NULLS: Final = {pa.string(): "NULL::VARCHAR", pa.int32(): "NULL::INTEGER", pa.int64(): "NULL::BIGINT"}
_NONFINITE: Final = ("nans", "infs")
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Known:
    """What holds for all rows that are summed up. To know less makes the sums dearer, and no different."""

    absent: frozenset[str] = frozenset()
    """Columns that are null in every row."""
    whole: frozenset[str] = frozenset()
    """Columns that are null in no row."""
    is_finite: bool = False
    """Whether no number is NaN or infinite, and all counts of such elements are 0, or null."""


NOTHING_KNOWN: Final = Known()


def bucket(row: str = "") -> str:
    """Return the first step of the bucket of a row; `row` is what stands before its columns."""
    # The modulus is taken so that buckets of negative steps are as wide; the lowest number of all has no bucket below.
    floor = f"greatest({row}step, {_LOWEST + BUCKET_STEPS})"
    return f"({floor} - ({row}step % {BUCKET_STEPS} + {BUCKET_STEPS}) % {BUCKET_STEPS})"


def moment(row: str = "") -> str:
    """Return the bucket of a row without a step, from a time within it."""
    return f"(CASE WHEN {row}step IS NULL THEN epoch_us({row}ts) // {BUCKET_SECONDS * 1_000_000} END)"


def look_through(dataset: str, source: str) -> str:
    """Return a query for one row, which tells `what_holds` for all rows of `dataset` in `source`."""
    counted = (*SERIES[dataset], "step", *NUMBERS[dataset], *TOTALS[dataset])
    counts = ", ".join(f"count({sql_identifier(name)}) AS {sql_identifier(name)}" for name in counted)
    return f"SELECT count(*) AS every_row, bool_or({_is_nonfinite(dataset, '<>')}) AS is_odd, {counts} FROM {source}"


def what_holds(found: Mapping[str, Any]) -> Known:
    """Return what the one row of `look_through` tells."""
    counts = {name: count for name, count in found.items() if name not in {"every_row", "is_odd"}}
    return Known(
        absent=frozenset(name for name, count in counts.items() if not count),
        whole=frozenset(name for name, count in counts.items() if count == found["every_row"]),
        is_finite=not found["is_odd"],
    )


def rolled_up(dataset: str, source: str, known: Known = NOTHING_KNOWN) -> str:
    """Return a query for the rollup rows of the rows of `dataset` in `source`, what stands behind FROM."""
    series = [name for name in SERIES[dataset] if name not in known.absent]
    named = {
        "step": "bucket",
        "first_step": "min(step)",
        "last_step": "max(step)",
        "first_ts": "min(ts)",
        "ts": "max(ts)",
        "ordinal": "max(ordinal)",
        "rows": "count(*)",
        "nonfinite_rows": "count(CASE WHEN is_nonfinite THEN 1 END)",
        "first_nonfinite_step": "min(CASE WHEN is_nonfinite THEN step END)",
    }
    if known.is_finite:
        named |= {"nonfinite_rows": "0::BIGINT", "first_nonfinite_step": "NULL::BIGINT"}
    for number in NUMBERS[dataset]:
        named |= _summary(number, known, is_wide=_is_wide(dataset, number))
    for total in TOTALS[dataset]:
        is_zero = known.is_finite and total in _NONFINITE and total in known.whole
        named |= {total: "0::BIGINT" if is_zero else _sum(total), f"{total}_rows": _count(total, known)}
    columns = _in_order(dataset, {name: sql_identifier(name) for name in series} | named)
    rows = ", ".join(_raw_columns(dataset, known))
    # Where every row has a step, none is told apart by its time.
    groups = ", ".join([*map(sql_identifier, series), "bucket", *([] if "step" in known.whole else ["moment"])])
    shown = ", ".join(map(sql_identifier, series))
    return f"SELECT {columns} FROM (SELECT {shown}, {rows} FROM {source}) GROUP BY {groups}"


def combined(dataset: str, source: str) -> str:
    """Return a query for one row per bucket of the rollup rows of `dataset` in `source`."""
    series = ", ".join(map(sql_identifier, SERIES[dataset]))
    named = {
        "step": "step",
        "first_step": "min(first_step)",
        "last_step": "max(last_step)",
        "first_ts": "min(first_ts)",
        "ts": "max(ts)",
        "ordinal": "max(ordinal)",
        "rows": _sum('"rows"'),
        "nonfinite_rows": _sum("nonfinite_rows"),
        "first_nonfinite_step": "min(first_nonfinite_step)",
    }
    for number in NUMBERS[dataset]:
        named |= _joined_summary(number, is_wide=_is_wide(dataset, number))
    for total in TOTALS[dataset]:
        named |= {total: _sum(total), f"{total}_rows": _sum(f"{total}_rows")}
    columns = _in_order(dataset, {name: sql_identifier(name) for name in SERIES[dataset]} | named)
    return f"SELECT {columns} FROM {source} GROUP BY {series}, step, {moment()}"


def _raw_columns(dataset: str, known: Known) -> Iterator[str]:
    yield from ("step", "ts", "ordinal", f"{bucket()} AS bucket", f"{moment()} AS moment")
    yield f"coalesce({_is_nonfinite(dataset)}, false) AS is_nonfinite"
    for number in NUMBERS[dataset]:
        column = sql_identifier(number)
        # One CASE for all aggregates of it: a FILTER in each of them took two thirds more time.
        finite = column if known.is_finite else f"CASE WHEN isfinite({column}) THEN {column} END"
        yield f"{column}, {finite} AS {number}_finite"
    yield from TOTALS[dataset]


def _is_nonfinite(dataset: str, comparison: str = ">") -> str:
    """Return whether a row shows anything that is not finite; null may stand for no. Counts compare so with 0."""
    odd = [f"NOT isfinite({sql_identifier(number)})" for number in NUMBERS[dataset]]
    odd += [f"{total} {comparison} 0" for total in TOTALS[dataset] if total in _NONFINITE]
    return " OR ".join(odd)


def _is_wide(dataset: str, number: str) -> bool:
    return bool(dataset_schema(dataset).field(number).type == pa.float64())


def _summary(number: str, known: Known, *, is_wide: bool) -> dict[str, str]:
    column, finite = sql_identifier(number), f"{number}_finite"
    nans = f"count(CASE WHEN isnan({column}) THEN 1 END)"
    odd = {"nans": nans, "infs": f"count({column}) - count({finite}) - {nans}"}
    if known.is_finite:
        odd = dict.fromkeys(odd, "0::BIGINT")
    return {
        f"{number}_min": f"min({finite})",
        f"{number}_max": f"max({finite})",
        f"{number}_avg": _mean(f"avg({finite})", f"avg({finite} / 1048576) * 1048576", is_wide=is_wide),
        f"{number}_count": _count(number, known) if known.is_finite else f"count({finite})",
        **{f"{number}_{what}": value for what, value in odd.items()},
    }


def _count(name: str, known: Known) -> str:
    """Return how many rows have the column called `name`; all rows are counted once for all that are whole."""
    return "count(*)" if name in known.whole else f"count({sql_identifier(name)})"


def _joined_summary(number: str, *, is_wide: bool) -> dict[str, str]:
    count = f"sum({number}_count)"
    mean = _mean(
        f"sum({number}_avg * {number}_count) / {count}",
        f"sum({number}_avg / 1048576 * {number}_count) / {count} * 1048576",
        is_wide=is_wide,
    )
    return {
        f"{number}_min": f"min({number}_min)",
        f"{number}_max": f"max({number}_max)",
        f"{number}_avg": f"CASE WHEN count(*) = 1 THEN max({number}_avg) ELSE {mean} END",
        **{f"{number}_{what}": _sum(f"{number}_{what}") for what in ("count", "nans", "infs")},
    }


def _mean(plain: str, scaled: str, *, is_wide: bool) -> str:
    """Return a mean that does not become infinite only because the sum on the way to it does.

    Sums are of float64: no number of float32 makes one of them infinite.
    """
    if not is_wide:
        return plain
    return f"CASE WHEN isinf({plain}) THEN {scaled} ELSE {plain} END"


def _sum(column: str) -> str:
    """Return a sum of integers that stops at the largest there is: whatever a rank sent, its row can be rolled up."""
    bounded = f"least(greatest(sum({column}), {_LOWEST}), {_HIGHEST})::BIGINT"
    return f"CASE WHEN count({column}) > 0 THEN {bounded} END"  # of null and a number, greatest() takes the number


def _in_order(dataset: str, named: Mapping[str, str]) -> str:
    """Return the columns of the rollup dataset as its schema has them; what many rows have none of together is null."""
    schema = dataset_schema(ROLLUPS[dataset])
    values = (named[field.name] if field.name in named else _NULLS[field.type] for field in schema)
    return ", ".join(f"{value} AS {sql_identifier(name)}" for value, name in zip(values, schema.names, strict=True))


_COUNTERS: Final = tuple(name for name, spec in catalogue.SCALARS_WITH_OWN_METRIC.items() if spec.type == "counter")
_EXTREMES: Final = {"min": "min_min", "max": "max_max"}
_ADDED: Final = ("first_step", "first_ts", "rows", "nonfinite_rows")
_ONE: Final = 'step AS first_step, ts AS first_ts, 1::BIGINT AS "rows"'


def in_raw_columns(dataset: str) -> str:
    """Return a SELECT list that shows combined rollup rows as rows of `dataset`; what is not kept is null."""
    shown = {name: sql_identifier(name) for name in SERIES[dataset]}
    shown |= {"step": "coalesce(last_step, step)", "ts": "ts", "ordinal": "ordinal"}
    shown |= {number: _number(number) for number in NUMBERS[dataset]}
    shown |= {total: f"{total} / nullif({total}_rows, 0)" for total in TOTALS[dataset]}
    names = dataset_schema(dataset).names
    return ", ".join(f"{shown.get(name, 'NULL')} AS {sql_identifier(name)}" for name in names)


def _number(number: str) -> str:
    mean = _EXTREMES.get(number, f"{number}_avg")
    if number == "value":
        mean = f"CASE WHEN name IN ({', '.join(map(sql_string, _COUNTERS))}) THEN value_max ELSE {mean} END"
    return (
        f"CASE WHEN {number}_count > 0 THEN {mean} WHEN {number}_nans > 0 THEN 'nan'::DOUBLE "
        f"WHEN {number}_infs > 0 THEN 'inf'::DOUBLE END"
    )


def _timeline(view: str, dataset: str, nonfinite: str) -> str:
    added = ", ".join(map(sql_identifier, _ADDED))
    return (
        f"CREATE OR REPLACE VIEW {view} AS\n"
        f"SELECT *, {_ONE}, ({nonfinite})::BIGINT AS nonfinite_rows, 'raw' AS tier FROM {dataset}\n"
        f"UNION ALL\n"
        f"SELECT {in_raw_columns(dataset)}, {added}, 'rollup' FROM {ROLLUPS[dataset]}"
    )


def rollup_view(dataset: str, raw: str) -> str:
    """Return the view of the rollups of `dataset` over the relation `raw` of rollup rows: one row per bucket."""
    return f"CREATE OR REPLACE VIEW {ROLLUPS[dataset]} AS {combined(dataset, raw)}"


_NONFINITE_TENSOR: Final = "coalesce(nans > 0 OR infs > 0 OR {}, false)".format(
    " OR ".join(f"NOT isfinite({sql_identifier(number)})" for number in NUMBERS["tensor_stats"])
)

TIMELINES: Final = (
    _timeline("tensor_timeline", "tensor_stats", _NONFINITE_TENSOR),
    _timeline("scalar_timeline", "scalars", "coalesce(NOT isfinite(value), false)"),
)
"""Statements that need nothing but the views of the datasets."""


ROLLED_STEPS: Final = """\
SELECT run, name, labels, coalesce(attempt, 0) AS attempt, max(last_step) AS step, min(first_step) AS first_step,
    max(ts) AS ts, count(*) AS parts,
    CASE WHEN sum(value_count) > 0 THEN sum(value_avg * value_count) / sum(value_count)
      WHEN sum(value_nans) > 0 THEN 'nan'::DOUBLE ELSE 'inf'::DOUBLE END AS value,
    min(value_min) AS lowest, max(value_max) AS highest
  FROM scalar_rollups WHERE step IS NOT NULL AND (value_count > 0 OR nonfinite_rows > 0)
  GROUP BY run, name, labels, coalesce(attempt, 0), scalar_rollups.step"""
"""The mean of a bucket over the finite numbers of all ranks and micro-batches, and not finite where none is."""
