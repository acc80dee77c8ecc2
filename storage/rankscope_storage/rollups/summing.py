"""From raw rows to rollup rows, and from several rollup rows of one bucket to one. SQL text.

Both are sums over disjoint rows, so it does not matter in how many pieces and in which order rows were rolled up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa

from rankscope_contract.escaping import sql_identifier
from rankscope_contract.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.rollups import BUCKET_SECONDS, BUCKET_STEPS, ROLLUPS
from rankscope_storage.schema import dataset_schema

_IDENTITY: Final = ("run", "attempt", "rank", "micro_step", "vpp_stage")

SERIES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensor_stats": (*_IDENTITY, "kind", "tensor", "index", "placement", "shard_group", "call_seq"),
    "scalars": (*_IDENTITY, "name", "unit", "labels"),
}
"""Columns that tell the series of a dataset apart. Other micro-steps and calls measure something else."""

NUMBERS: Final[Mapping[str, tuple[str, ...]]] = {"tensor_stats": VALUE_OPS, "scalars": ("value",)}
TOTALS: Final[Mapping[str, tuple[str, ...]]] = {"tensor_stats": COUNT_OPS, "scalars": ()}

_NULLS: Final = {pa.string(): "NULL::VARCHAR", pa.int64(): "NULL::BIGINT"}
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


def bucket(row: str = "") -> str:
    """Return the first step of the bucket of a row; `row` is what stands before its columns."""
    # The modulus is taken so that buckets of negative steps are as wide; the lowest number of all has no bucket below.
    floor = f"greatest({row}step, {_LOWEST + BUCKET_STEPS})"
    return f"({floor} - ({row}step % {BUCKET_STEPS} + {BUCKET_STEPS}) % {BUCKET_STEPS})"


def moment(row: str = "") -> str:
    """Return the bucket of a row without a step, from a time within it."""
    return f"(CASE WHEN {row}step IS NULL THEN epoch_us({row}ts) // {BUCKET_SECONDS * 1_000_000} END)"


def rolled_up(dataset: str, source: str) -> str:
    """Return a query for the rollup rows of the rows of `dataset` in `source`, what stands behind FROM."""
    series = ", ".join(map(sql_identifier, SERIES[dataset]))
    rows = ", ".join(_raw_columns(dataset))
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
        named |= _summary(number, is_wide=_is_wide(dataset, number))
    for total in TOTALS[dataset]:
        named |= {total: _sum(total), f"{total}_rows": f"count({total})"}
    columns = _in_order(dataset, named)
    return f"SELECT {columns} FROM (SELECT {series}, {rows} FROM {source}) GROUP BY {series}, bucket, moment"


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
    columns = _in_order(dataset, named)
    return f"SELECT {columns} FROM {source} GROUP BY {series}, step, {moment()}"


def _raw_columns(dataset: str) -> Iterator[str]:
    yield from ("step", "ts", "ordinal", f"{bucket()} AS bucket", f"{moment()} AS moment")
    odd = [f"NOT isfinite({sql_identifier(number)})" for number in NUMBERS[dataset]]
    odd += [f"{total} > 0" for total in TOTALS[dataset] if total in {"nans", "infs"}]
    yield f"coalesce({' OR '.join(odd)}, false) AS is_nonfinite"
    for number in NUMBERS[dataset]:
        column = sql_identifier(number)
        # One CASE for all aggregates of it: a FILTER in each of them took two thirds more time.
        yield f"{column}, CASE WHEN isfinite({column}) THEN {column} END AS {number}_finite"
    yield from TOTALS[dataset]


def _is_wide(dataset: str, number: str) -> bool:
    return bool(dataset_schema(dataset).field(number).type == pa.float64())


def _summary(number: str, *, is_wide: bool) -> dict[str, str]:
    column, finite = sql_identifier(number), f"{number}_finite"
    nans = f"count(CASE WHEN isnan({column}) THEN 1 END)"
    return {
        f"{number}_min": f"min({finite})",
        f"{number}_max": f"max({finite})",
        f"{number}_avg": _mean(f"avg({finite})", f"avg({finite} / 1048576) * 1048576", is_wide=is_wide),
        f"{number}_count": f"count({finite})",
        f"{number}_nans": nans,
        f"{number}_infs": f"count({column}) - count({finite}) - {nans}",
    }


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
    known = {**{name: sql_identifier(name) for name in SERIES[dataset]}, **named}
    schema = dataset_schema(ROLLUPS[dataset])
    values = (known[field.name] if field.name in known else _NULLS[field.type] for field in schema)
    return ", ".join(f"{value} AS {sql_identifier(name)}" for value, name in zip(values, schema.names, strict=True))
