"""SQL text for rollups: the aggregation of raw rows, the combination of rollup rows, and views over both.

Both aggregations add up disjoint rows. The result therefore depends neither on how the rows are divided nor on their
order. The step of a rollup row is the first step of its bucket. Minima and maxima remain exact, and a counter has its
last value. Every other number is the mean of the rows. Counts of elements are means too; multiplied by `rows`, they are
exact totals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_storage.base.datasets import BUCKET_SECONDS, BUCKET_STEPS, ROLLUPS
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.base.schema import dataset_schema

_IDENTITY: Final = ("run", "attempt", "rank", "micro_step", "vpp_stage")

SERIES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensor_stats": (*_IDENTITY, "kind", "tensor", "index", "placement", "shard_group", "call_seq"),
    "scalars": (*_IDENTITY, "name", "unit", "labels"),
}
"""Columns that identify a series, by dataset. Rows of different micro-steps or calls belong to different series."""

NUMBERS: Final[Mapping[str, tuple[str, ...]]] = {"tensor_stats": VALUE_OPS, "scalars": ("value",)}
TOTALS: Final[Mapping[str, tuple[str, ...]]] = {"tensor_stats": COUNT_OPS, "scalars": ()}

_NULLS: Final = {pa.string(): "NULL::STRING", pa.int32(): "NULL::INTEGER", pa.int64(): "NULL::BIGINT"}
_NONFINITE: Final = ("nans", "infs")
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


def bucket(row: str = "") -> str:
    """Return an SQL expression for the first step of the bucket that a row belongs to.

    `row` is the prefix of column names, such as `t.`.
    """
    # The modulus gives buckets of negative steps the same width. The smallest integer has no lower bucket.
    floor = f"greatest({row}step, {_LOWEST + BUCKET_STEPS})"
    return f"({floor} - ({row}step % {BUCKET_STEPS} + {BUCKET_STEPS}) % {BUCKET_STEPS})"


def time_bucket(row: str = "") -> str:
    """Return an SQL expression for the time bucket of a row without a step; null for other rows.

    It is the start of the bucket, in microseconds since 1970.
    """
    micros = f"epoch_us({row}ts)"
    return f"(CASE WHEN {row}step IS NULL THEN {micros} - {micros} % {BUCKET_SECONDS * 1_000_000} END)"


def rollup_query(dataset: str, source: str) -> str:
    """Return a query that aggregates raw rows of `dataset` to rollup rows; `source` is the text after FROM."""
    series = ", ".join([f'"{name}"' for name in SERIES[dataset]])
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
    for number in NUMBERS[dataset]:
        named |= _summary(dataset, number)
    for total in TOTALS[dataset]:
        named |= {total: _sum(total), f"{total}_rows": f"count({total})"}
    columns = _in_order(dataset, {name: f'"{name}"' for name in SERIES[dataset]} | named)
    rows = ", ".join(_input_columns(dataset))
    return f"SELECT {columns} FROM (SELECT {series}, {rows} FROM {source}) GROUP BY {series}, bucket, time_bucket"


def combined_query(dataset: str, source: str) -> str:
    """Return a query that combines the rollup rows of `dataset` in `source` to one row per series and bucket."""
    series = ", ".join([f'"{name}"' for name in SERIES[dataset]])
    named = {
        "step": "step",
        "first_step": "min(first_step)",
        "last_step": "max(last_step)",
        "first_ts": "min(first_ts)",
        "ts": "max(ts)",
        "ordinal": "max(ordinal)",
        "rows": _sum('wide("rows")'),
        "nonfinite_rows": _sum("wide(nonfinite_rows)"),
        "first_nonfinite_step": "min(first_nonfinite_step)",
    }
    for number in NUMBERS[dataset]:
        named |= _combined_summary(dataset, number)
    for total in TOTALS[dataset]:
        named |= {name: _sum(f"wide({name})") for name in (total, f"{total}_rows")}
    columns = _in_order(dataset, {name: f'"{name}"' for name in SERIES[dataset]} | named)
    return f"SELECT {columns} FROM {source} GROUP BY {series}, step, {time_bucket()}"


def _input_columns(dataset: str) -> Iterator[str]:
    yield from ("step", "ts", "ordinal", f"{bucket()} AS bucket", f"{time_bucket()} AS time_bucket")
    yield f"coalesce({_is_nonfinite(dataset)}, false) AS is_nonfinite"
    for number in NUMBERS[dataset]:
        column = f'"{number}"'
        # One CASE for all aggregates of the column: a FILTER in each of them took two thirds more time.
        yield f"{column}, CASE WHEN isfinite({column}) THEN {column} END AS {number}_finite"
    yield from TOTALS[dataset]


def _is_nonfinite(dataset: str) -> str:
    """Return an SQL condition: a number of the row is not finite, or the row counts NaN or infinite elements.

    The condition is false or null for a finite row.
    """
    odd = [f'NOT isfinite("{number}")' for number in NUMBERS[dataset]]
    odd += [f"{total} > 0" for total in TOTALS[dataset] if total in _NONFINITE]
    return " OR ".join(odd)


def _summary(dataset: str, number: str) -> dict[str, str]:
    column, finite = f'"{number}"', f"{number}_finite"
    nans = f"count(CASE WHEN isnan({column}) THEN 1 END)"
    return {
        f"{number}_min": f"min({finite})",
        f"{number}_max": f"max({finite})",
        f"{number}_avg": _mean(dataset, number, f"avg({finite})", f"avg({finite} / 1048576) * 1048576"),
        f"{number}_count": f"count({finite})",
        f"{number}_nans": nans,
        f"{number}_infs": f"count({column}) - count({finite}) - {nans}",
    }


def _combined_summary(dataset: str, number: str) -> dict[str, str]:
    count = f"sum(wide({number}_count))"
    plain = f"sum({number}_avg * {number}_count) / {count}"
    scaled = f"sum({number}_avg / 1048576 * {number}_count) / {count} * 1048576"
    mean = _mean(dataset, number, plain, scaled)
    return {
        f"{number}_min": f"min({number}_min)",
        f"{number}_max": f"max({number}_max)",
        f"{number}_avg": f"CASE WHEN count(*) = 1 THEN max({number}_avg) ELSE {mean} END",
        **{f"{number}_{suffix}": _sum(f"wide({number}_{suffix})") for suffix in ("count", "nans", "infs")},
    }


def _mean(dataset: str, number: str, plain: str, scaled: str) -> str:
    """Return an SQL expression for a mean that remains finite if only the sum overflows.

    `plain` is the mean, and `scaled` is the mean of scaled values. Sums of float32 numbers are computed in float64 and
    cannot overflow, so `plain` is returned for float32 columns.
    """
    if dataset_schema(dataset).field(number).type != pa.float64():
        return plain
    return f"CASE WHEN isinf({plain}) THEN {scaled} ELSE {plain} END"


def _sum(column: str) -> str:
    """Return an SQL expression for a sum of integers, limited to the range of BIGINT so that no sum causes an error."""
    bounded = f"least(greatest(sum({column}), {_LOWEST}), {_HIGHEST})::BIGINT"
    return f"CASE WHEN count({column}) > 0 THEN {bounded} END"  # greatest() ignores null


def _in_order(dataset: str, named: Mapping[str, str]) -> str:
    """Return the SELECT list of the rollup dataset in schema order.

    `named` maps column names to SQL. Columns without an entry are null: they have no meaning for several rows.
    """
    schema = dataset_schema(ROLLUPS[dataset])
    values = [named[field.name] if field.name in named else _NULLS[field.type] for field in schema]
    return ", ".join([f'{value} AS "{name}"' for value, name in zip(values, schema.names, strict=True)])


_COUNTERS: Final = tuple(name for name, spec in catalogue.SCALARS_WITH_OWN_METRIC.items() if spec.type == "counter")
_EXTREMES: Final = {"min": "min_min", "max": "max_max"}
_ADDED: Final = ("first_step", "first_ts", "rows", "nonfinite_rows")
_ONE: Final = 'step AS first_step, ts AS first_ts, 1::BIGINT AS "rows"'


def raw_columns(dataset: str) -> str:
    """Return a SELECT list that converts combined rollup rows to rows of `dataset`.

    Columns that rollups do not have are null.
    """
    shown = {name: f'"{name}"' for name in SERIES[dataset]}
    shown |= dict.fromkeys(("step", "position"), "coalesce(last_step, step)") | {"ts": "ts", "ordinal": "ordinal"}
    shown |= {number: _number(number) for number in NUMBERS[dataset]}
    shown |= {total: f"{total} / nullif({total}_rows, 0)" for total in TOTALS[dataset]}
    names = dataset_schema(dataset).names
    return ", ".join([f'{shown.get(name, "NULL")} AS "{name}"' for name in names])


def _number(number: str) -> str:
    mean = _EXTREMES.get(number, f"{number}_avg")
    if number == "value":
        mean = f"CASE WHEN name IN ({', '.join(map(sql_string, _COUNTERS))}) THEN value_max ELSE {mean} END"
    return (
        f"CASE WHEN {number}_count > 0 THEN {mean} WHEN {number}_nans > 0 THEN 'nan'::DOUBLE "
        f"WHEN {number}_infs > 0 THEN 'inf'::DOUBLE END"
    )


def _timeline(view: str, dataset: str) -> str:
    added = ", ".join([f'"{name}"' for name in _ADDED])
    return (
        f"CREATE OR REPLACE VIEW {view} AS\n"
        f"SELECT *, {_ONE}, coalesce({_is_nonfinite(dataset)}, false)::BIGINT AS nonfinite_rows, 'raw' AS tier "
        f"FROM {dataset}\n"
        f"UNION ALL\n"
        f"SELECT {raw_columns(dataset)}, {added}, 'rollup' FROM {ROLLUPS[dataset]}"
    )


def rollup_view(dataset: str, raw: str) -> str:
    """Return the statement that creates the view of the rollups of `dataset`, one row per series and bucket.

    `raw` is the name of the relation with the stored rollup rows.
    """
    return f"CREATE OR REPLACE VIEW {ROLLUPS[dataset]} AS {combined_query(dataset, raw)}"


TIMELINES: Final = (
    _timeline("tensor_timeline", "tensor_stats"),
    _timeline("scalar_timeline", "scalars"),
)
"""Statements that create `tensor_timeline` and `scalar_timeline`, the views of raw rows together with rollups.

These two views read only the views of the datasets."""


ROLLED_STEPS: Final = """\
SELECT run, name, labels, coalesce(attempt, 0) AS attempt, max(last_step) AS step, min(first_step) AS first_step,
    max(ts) AS ts, count(*) AS parts,
    CASE WHEN sum(value_count) > 0 THEN sum(value_avg * value_count) / sum(value_count)
      WHEN sum(value_nans) > 0 THEN 'nan'::DOUBLE ELSE 'inf'::DOUBLE END AS value,
    min(value_min) AS lowest, max(value_max) AS highest
  FROM scalar_rollups WHERE step IS NOT NULL AND (value_count > 0 OR nonfinite_rows > 0)
  GROUP BY run, name, labels, coalesce(attempt, 0), scalar_rollups.step"""
"""Query for the mean of a scalar per bucket, over the finite numbers of all ranks and micro-batches.

The mean is NaN or infinite if the bucket has no finite number."""
