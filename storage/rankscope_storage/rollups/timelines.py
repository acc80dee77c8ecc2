"""Raw rows where they still are, and rollup rows beyond, in the columns of raw ones. SQL text.

A rollup row stands at its last step. Its lowest and highest numbers stay what they are, a counter is where it stood
last, and everything else is the mean of the rows: multiplied by `rows`, counts of elements are exact again.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract import metrics
from rankscope_contract.escaping import sql_identifier, sql_string
from rankscope_contract.rollups import ROLLUPS
from rankscope_storage.rollups.summing import NUMBERS, SERIES, TOTALS, combined
from rankscope_storage.schema import dataset_schema

_COUNTERS: Final = tuple(name for name, spec in metrics.SCALARS_WITH_OWN_METRIC.items() if spec.type == "counter")
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
