"""Which tensors left their course the furthest: against the baseline the rules kept, or against their own past. SQL."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from rankscope_contract.escaping import sql_identifier
from rankscope_storage.schema import dataset_schema
from rankscope_storage.sql_types import sql_null

# Parameters are named so that no column has their name: a macro replaces names, also those of columns.
_TOP_DEVIATIONS: Final = """\
CREATE OR REPLACE MACRO top_deviations(of_run, top := 20) AS TABLE
WITH judged AS (
  (SELECT attempt, rank, step, micro_step, vpp_stage, kind, tensor, "index", 'norm' AS op, norm AS value,
    norm_baseline AS baseline, abs(norm::DOUBLE) / norm_baseline AS ratio
  FROM tensor_stats WHERE run = of_run AND norm_baseline >= 0 AND abs(norm) > norm_baseline
  ORDER BY ratio DESC, attempt, step, rank LIMIT top)
  UNION ALL
  (SELECT attempt, rank, step, micro_step, vpp_stage, kind, tensor, "index", 'mean', mean,
    mean_baseline, abs(mean::DOUBLE) / mean_baseline AS ratio
  FROM tensor_stats WHERE run = of_run AND mean_baseline >= 0 AND abs(mean) > mean_baseline
  ORDER BY ratio DESC, attempt, step, rank LIMIT top)
)
FROM judged ORDER BY ratio DESC, attempt, step, rank LIMIT top
"""
"""The rows that exceed the baseline the rules compared with by the largest ratio; above a baseline of 0 it is Inf."""

OPTIONAL_KEYS: Final = ("attempt", "rank", "micro_step", "vpp_stage", "index", "call_seq")
"""Columns that tell the series of one tensor apart, and are null in all rows of many a run."""

_SHOWN: Final = ("attempt", "rank", "step", "micro_step", "vpp_stage", "kind", "tensor", "index")


def bucket_deviations(absent: Collection[str] = ()) -> str:
    """Return the macro's statement; of the optional keys those that are `absent` are null in all rows it will read.

    A column that is null all over makes groups no finer, and grouping by it a tenth slower.
    """
    keys = [name for name in OPTIONAL_KEYS if name not in absent]
    grouped = ", ".join(map(sql_identifier, (*keys, "kind", "tensor")))
    same = "".join(f" AND measured.{name} IS NOT DISTINCT FROM best.{name}" for name in map(sql_identifier, keys))
    order = ", ".join(name for name in ("attempt", "number", "rank", "kind", "tensor") if name not in absent)
    shown = ", ".join(_shown(name, absent) for name in _SHOWN)
    # Which step was the highest is looked up for the few that are shown: to carry it through all groups is dearer.
    return f"""\
CREATE OR REPLACE MACRO bucket_deviations(of_run, top := 20, width := 50) AS TABLE
WITH bucket AS (
  SELECT {grouped}, step // width AS number, avg(norm) FILTER (isfinite(norm)) AS mean_norm, max(norm) AS highest
  FROM tensor_stats WHERE run = of_run AND step IS NOT NULL
  GROUP BY {grouped}, number
),
beside AS (
  SELECT *, lag(mean_norm) OVER (PARTITION BY {grouped} ORDER BY number) AS before FROM bucket
),
best AS MATERIALIZED (
  SELECT *, highest::DOUBLE / before AS ratio FROM beside WHERE before > 0 AND highest > before
  ORDER BY ratio DESC, {order} LIMIT top
),
dated AS (
  SELECT best.*, min(step) AS step
  FROM best JOIN tensor_stats AS measured ON measured.tensor = best.tensor AND measured.kind = best.kind
    AND measured.step // width = best.number AND measured.norm = best.highest{same}
  WHERE measured.run = of_run AND measured.step IS NOT NULL
  GROUP BY ALL
)
SELECT {shown}, highest AS norm, before AS norm_before, ratio
FROM dated ORDER BY ratio DESC, attempt, step, rank
"""


def _shown(name: str, absent: Collection[str]) -> str:
    return sql_null(dataset_schema("tensor_stats").field(name)) if name in absent else sql_identifier(name)


DEVIATION_MACROS: Final = (_TOP_DEVIATIONS, bucket_deviations())
"""The second does the same without a baseline: the highest norm in `width` steps, and the first step that has it,
against the mean of the steps before these."""
