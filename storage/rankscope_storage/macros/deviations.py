"""Which tensors left their course the furthest: against the baseline the rules kept, or against their own past. SQL."""

from __future__ import annotations

from typing import Final

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

_BUCKET_DEVIATIONS: Final = """\
CREATE OR REPLACE MACRO bucket_deviations(of_run, top := 20, width := 50) AS TABLE
WITH bucket AS (
  SELECT attempt, rank, micro_step, vpp_stage, kind, tensor, "index", call_seq, step // width AS number,
    avg(norm) FILTER (isfinite(norm)) AS mean_norm, max(norm) AS highest, arg_max(step, norm) AS step
  FROM tensor_stats WHERE run = of_run AND step IS NOT NULL
  GROUP BY attempt, rank, micro_step, vpp_stage, kind, tensor, "index", call_seq, tensor_stats.step // width
),
beside AS (
  SELECT *, lag(mean_norm) OVER (
    PARTITION BY attempt, rank, micro_step, vpp_stage, kind, tensor, "index", call_seq ORDER BY number) AS before
  FROM bucket
)
SELECT attempt, rank, step, micro_step, vpp_stage, kind, tensor, "index", highest AS norm, before AS norm_before,
  highest::DOUBLE / before AS ratio
FROM beside WHERE before > 0 AND highest > before
ORDER BY ratio DESC, attempt, step, rank LIMIT top
"""
"""The same without a baseline: the highest norm in `width` steps against the mean of the steps before these."""

DEVIATION_MACROS: Final = (_TOP_DEVIATIONS, _BUCKET_DEVIATIONS)
