"""`tensor_latest`: the newest statistics of every tensor, and those that are not finite. SQL text."""

from __future__ import annotations

from typing import Final

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
