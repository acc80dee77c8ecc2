"""Views and macros over tensor statistics: latest rows, non-finite rows, largest deviations. SQL text.

A deviation compares with the baseline of the rules, or with the tensor's own earlier steps.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from rankscope_contract.security.escaping import sql_identifier
from rankscope_storage.base.schema import dataset_schema, sql_null

_NEWEST: Final = """\
  SELECT run AS of_run, attempt AS of_attempt, rank AS of_rank, kind AS of_kind, max(step) AS of_step
  FROM tensor_stats WHERE step IS NOT NULL
  GROUP BY run, attempt, rank, kind
  QUALIFY attempt IS NOT DISTINCT FROM max(attempt) OVER (PARTITION BY run)
"""


_LAST_WORD: Final = """\
QUALIFY row_number() OVER (
  PARTITION BY run, rank, micro_step, vpp_stage, kind, tensor, "index", call_seq
  ORDER BY ordinal DESC NULLS LAST, seq DESC NULLS LAST) = 1
"""


def tensor_latest(newest: str = _NEWEST, *, measured_once: bool = False) -> str:
    """Return the view's statement; `newest` tells the newest step of each rank and kind.

    With `measured_once`, no rank has measured anything of that step twice; to look for it takes most of the time.
    """
    # The step is found first and joined: DuckDB then reads only the row groups that can hold it.
    return f"""\
CREATE OR REPLACE VIEW tensor_latest AS
WITH newest AS (
{newest})
SELECT tensor_stats.* FROM tensor_stats JOIN newest
  ON run = of_run AND step = of_step AND kind = of_kind
  AND attempt IS NOT DISTINCT FROM of_attempt AND rank IS NOT DISTINCT FROM of_rank
{"" if measured_once else _LAST_WORD}"""


TENSOR_LATEST: Final = tensor_latest()
"""Of the newest attempt of each run: every rank's last step of each kind. What was absent at that step has no row."""

NONFINITE: Final = """\
CREATE OR REPLACE VIEW nonfinite AS
SELECT * FROM tensor_stats WHERE nans > 0
UNION ALL
SELECT * FROM tensor_stats WHERE infs > 0 AND (nans IS NULL OR nans <= 0)
"""
"""Rows of tensors with a NaN or an infinity. DuckDB skips row groups by each condition alone."""


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
