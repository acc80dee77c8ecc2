"""SQL text of views and macros over tensor statistics: latest rows, non-finite rows, and largest deviations.

`top_deviations` compares a statistic with the baseline of the anomaly rules. `bucket_deviations` compares it with
earlier steps of the same tensor.
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


_LAST_RECORD: Final = """\
QUALIFY row_number() OVER (
  PARTITION BY run, rank, micro_step, vpp_stage, kind, tensor, "index", call_seq
  ORDER BY ordinal DESC NULLS LAST, seq DESC NULLS LAST) = 1
"""


def tensor_latest(newest: str = _NEWEST, *, measured_once: bool = False) -> str:
    """Return the statement that creates the view `tensor_latest`.

    `newest` is a query for the newest step of each rank and kind. With `measured_once`, the caller guarantees that no
    rank measured such a step twice. The view then omits the search for repeated rows, which would take most of the time
    of the view.
    """
    # The step is found first and then joined: DuckDB then reads only row groups that can contain it.
    return f"""\
CREATE OR REPLACE VIEW tensor_latest AS
WITH newest AS (
{newest})
SELECT tensor_stats.* FROM tensor_stats JOIN newest
  ON run = of_run AND step = of_step AND kind = of_kind
  AND attempt IS NOT DISTINCT FROM of_attempt AND rank IS NOT DISTINCT FROM of_rank
{"" if measured_once else _LAST_RECORD}"""


TENSOR_LATEST: Final = tensor_latest()
"""View of the latest tensor statistics, from the newest attempt of each run.

It has the rows of the last step of each rank and kind, and no earlier rows."""

NONFINITE: Final = """\
CREATE OR REPLACE VIEW nonfinite AS
SELECT * FROM tensor_stats WHERE nans > 0
UNION ALL
SELECT * FROM tensor_stats WHERE infs > 0 AND (nans IS NULL OR nans <= 0)
"""
"""View of the rows of `tensor_stats` that count at least one NaN or infinite element.

It is a union of the rows with a NaN and the other rows with an infinite element, so that DuckDB can skip row groups by
each of the two counts."""


# No parameter has the name of a column, because a macro also replaces names of columns.
_TOP_DEVIATIONS: Final = """\
CREATE OR REPLACE MACRO top_deviations(of_run, top := 20) AS TABLE
WITH deviation AS (
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
FROM deviation ORDER BY ratio DESC, attempt, step, rank LIMIT top
"""
"""Macro that returns the rows with the largest ratio of a statistic to the baseline of the anomaly rules.

The ratio is infinite if the baseline is 0."""

OPTIONAL_KEYS: Final = ("attempt", "rank", "micro_step", "vpp_stage", "index", "call_seq")
"""Columns that distinguish the series of one tensor. In many runs, some of these columns are null in all rows."""

_RESULT: Final = ("attempt", "rank", "step", "micro_step", "vpp_stage", "kind", "tensor", "index")


def bucket_deviations(absent: Collection[str] = ()) -> str:
    """Return the statement that creates the macro `bucket_deviations`.

    `absent` has those of the columns OPTIONAL_KEYS that are null in all rows which the macro will read. The macro does
    not group by these columns: with them, it would take a tenth longer and return the same groups.
    """
    keys = [name for name in OPTIONAL_KEYS if name not in absent]
    grouped = ", ".join(map(sql_identifier, (*keys, "kind", "tensor")))
    same = "".join(f" AND measured.{name} IS NOT DISTINCT FROM best.{name}" for name in map(sql_identifier, keys))
    order = ", ".join(name for name in ("attempt", "number", "rank", "kind", "tensor") if name not in absent)
    result = ", ".join(_result_column(name, absent) for name in _RESULT)
    # The step of the highest norm is found for the result rows only, which is cheaper than for all groups.
    return f"""\
CREATE OR REPLACE MACRO bucket_deviations(of_run, top := 20, width := 50) AS TABLE
WITH bucket AS (
  SELECT {grouped}, step // width AS number, avg(norm) FILTER (isfinite(norm)) AS mean_norm, max(norm) AS highest
  FROM tensor_stats WHERE run = of_run AND step IS NOT NULL
  GROUP BY {grouped}, number
),
compared AS (
  SELECT *, lag(mean_norm) OVER (PARTITION BY {grouped} ORDER BY number) AS before FROM bucket
),
best AS MATERIALIZED (
  SELECT *, highest::DOUBLE / before AS ratio FROM compared WHERE before > 0 AND highest > before
  ORDER BY ratio DESC, {order} LIMIT top
),
dated AS (
  SELECT best.*, min(step) AS step
  FROM best JOIN tensor_stats AS measured ON measured.tensor = best.tensor AND measured.kind = best.kind
    AND measured.step // width = best.number AND measured.norm = best.highest{same}
  WHERE measured.run = of_run AND measured.step IS NOT NULL
  GROUP BY ALL
)
SELECT {result}, highest AS norm, before AS norm_before, ratio
FROM dated ORDER BY ratio DESC, attempt, step, rank
"""


def _result_column(name: str, absent: Collection[str]) -> str:
    return sql_null(dataset_schema("tensor_stats").field(name)) if name in absent else sql_identifier(name)


DEVIATION_MACROS: Final = (_TOP_DEVIATIONS, bucket_deviations())
"""Statements of the macros `top_deviations` and `bucket_deviations`; the second needs no baseline.

`bucket_deviations` divides steps into buckets of `width` steps. It compares the highest norm of a bucket with the mean
norm of the previous bucket, and returns the first step that has the highest norm."""
