"""SQL text of the view of clock jumps, and of relations whose times are corrected by them.

A rank reports a jump if its wall clock and its monotonic clock move apart by more than 2 s from one record to the next.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.events import EventType

JUMPS: Final = "clock_jumps"
"""Name of the view."""

CLOCK_JUMPS: Final = f"""\
CREATE OR REPLACE VIEW {JUMPS} AS
SELECT run, attempt, rank, incarnation, seq, step, ts, value AS seconds, offset_us,
  lead(seq, 1, 9223372036854775807) OVER (PARTITION BY run, incarnation ORDER BY seq) AS next_seq
FROM (
  SELECT *, CASE WHEN json_valid(details) THEN TRY_CAST(details->>'$.offset_us' AS BIGINT) END AS offset_us
  FROM events WHERE type = '{EventType.CLOCK}' AND incarnation IS NOT NULL AND seq IS NOT NULL
) WHERE offset_us IS NOT NULL
"""
"""View with one row per jump of a rank's clock. `seconds` is negative if the clock was set back.

`offset_us` is the sum of the jumps of the process so far, in microseconds. It applies to the records of the process
with the numbers from `seq` up to, but not including, `next_seq`."""


def without_jumps(relation: str, *, run: str | None = None) -> str:
    """Return an SQL relation with the rows of `relation`, in which `ts` is the time without the jumps of the clock.

    `relation` has the columns of a dataset. The SQL expression `run` is the name of the run if all rows are of one run.
    """
    jumps = JUMPS if run is None else f"(SELECT * FROM {JUMPS} WHERE run = {run})"
    # Runs without a jump, nearly all, need no other columns: joining all rows took a quarter of the time of a query.
    return f"""(
    SELECT * FROM {relation} ANTI JOIN {jumps} AS jump USING (run)
    UNION ALL BY NAME
    SELECT own.* REPLACE (
      CASE WHEN offset_us IS NULL THEN own.ts ELSE make_timestamptz(epoch_us(own.ts) - offset_us) END AS ts)
    FROM (SELECT * FROM {relation} SEMI JOIN {jumps} AS jump USING (run)) AS own
    LEFT JOIN {jumps} AS jump ON own.run = jump.run AND own.incarnation = jump.incarnation
      AND own.seq >= jump.seq AND own.seq < jump.next_seq)"""
