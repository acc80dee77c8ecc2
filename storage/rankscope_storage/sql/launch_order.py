"""SQL text of the jumps of the clocks of ranks, of the order of the launches of a run, and of the time between them.

A rank reports a jump if its wall clock and its monotonic clock move apart by more than 2 s from one record to the next.
The service subtracts the jumps from the times of its records before it stores them.

Wall clocks measure the time between two launches. A launch after a jump of the clock may begin at an earlier time than
the launch before it, so the attempt numbers determine the order.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.events import JUMP_MICROSECONDS, EventType

JUMPS: Final = "clock_jumps"
"""Name of the view of jumps."""

CLOCK_JUMPS: Final = f"""\
CREATE OR REPLACE VIEW {JUMPS} AS
SELECT run, attempt, rank, incarnation, seq, step, make_timestamptz(epoch_us(ts) + offset_us) AS ts, value AS seconds,
  offset_us, lead(seq, 1, 9223372036854775807) OVER (PARTITION BY run, incarnation ORDER BY seq) AS next_seq
FROM (
  SELECT *, CASE WHEN json_valid(details) THEN TRY_CAST(details->>'$.offset_us' AS BIGINT) END AS offset_us
  FROM events WHERE type = '{EventType.CLOCK}' AND incarnation IS NOT NULL AND seq IS NOT NULL
) WHERE offset_us IS NOT NULL
"""
"""View with one row per jump of a rank's clock. `seconds` is negative if the clock was set back.

`offset_us` is the sum of the jumps of the process so far, in microseconds. It was subtracted from the times of the
records of the process with the numbers from `seq` up to, but not including, `next_seq`. `ts` is the time that the clock
showed."""

_JUMP_SECONDS: Final = JUMP_MICROSECONDS // 1_000_000

LAUNCHES: Final = f"""\
registered AS (  -- arrival numbers are times that never go back
  SELECT run, attempt, min(epoch(ts)) AS seen_at, greatest(seen_at, min(ordinal) / 1e6) AS registered_at,
    min_by(rank, ordinal) AS first_rank
  FROM events WHERE type = 'launch' AND ts_origin = 'ingest' GROUP BY ALL
), rank_jumps AS (
  SELECT run, attempt, list({{rank: rank, seconds: seconds}}) AS jumps FROM (
    SELECT run, attempt, rank, max_by(offset_us, seq) / 1e6 AS seconds FROM {JUMPS}
    GROUP BY run, attempt, rank, incarnation
  ) GROUP BY ALL
), launch AS (
  SELECT run, attempt, coalesce(epoch(started_at), first_ts) AS began, coalesce(epoch(ended_at), last_ts) AS ended,
    coalesce(last_ts, epoch(started_at)) AS last_ts, jumps, reporter.rank AS reporter,
    first_rank, coalesce(last_ts < seen_at, false) AS is_recovered,
    CASE WHEN NOT is_recovered THEN registered_at END AS registered_at
  FROM (SELECT * FROM attempts WHERE source_kind = 'live' AND attempt IS NOT NULL)
  FULL JOIN seen USING (run, attempt)
  LEFT JOIN registered USING (run, attempt)
  LEFT JOIN rank_jumps USING (run, attempt)
  LEFT JOIN reporter USING (run, attempt)
  WHERE coalesce(epoch(started_at), first_ts) IS NOT NULL
), ordered AS (
  SELECT *, row_number() OVER (PARTITION BY run ORDER BY number NULLS LAST, NOT is_recovered, began, attempt) AS place
  FROM (
    SELECT *, CASE WHEN is_recovered THEN min(attempt) FILTER (NOT is_recovered) OVER (
      PARTITION BY run ORDER BY began, attempt ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) ELSE attempt END
      AS number
    FROM launch
  )
), next AS (
  SELECT *, lead(began) OVER by_place AS next_began, lead(first_rank) OVER by_place AS next_rank,
    CASE WHEN NOT is_recovered THEN lead(registered_at) OVER by_place END AS next_registered_at
  FROM ordered WINDOW by_place AS (PARTITION BY run ORDER BY place)
), clocks AS (  -- jumps of the clocks that may show next_began: the time of a rank, but at most that of the service
  SELECT *, list_transform(list_filter(jumps, lambda jump: jump.rank = coalesce(next_rank, reporter)),
      lambda jump: jump.seconds) AS own,
    CASE WHEN next_rank IS NULL THEN list_transform(jumps, lambda jump: jump.seconds) ELSE own END AS known,
    CASE WHEN len(own) > 0 AND list_max(known) <= 0 THEN known ELSE list_append(coalesce(known, []), 0) END AS possible
  FROM next
), moved AS (  -- the clock with the shortest time between the launches
  SELECT *, coalesce(
    list_max(list_filter(possible, lambda seconds: last_ts + seconds <= next_began + {_JUMP_SECONDS})),
    list_min(possible)) AS jump
  FROM clocks
), followed AS (  -- a clock that is set back between two launches leaves no time between them
  SELECT *, next_began - jump AS follows_at,
    coalesce(follows_at < began
      OR (follows_at < last_ts - {_JUMP_SECONDS} AND next_registered_at >= last_ts), false) AS is_set_back,
    CASE WHEN is_set_back THEN greatest(ended, began)
      ELSE coalesce(least(greatest(ended, began), follows_at), began) END AS stopped
  FROM moved
), bounds AS (
  SELECT run, attempt, place, began, stopped AS ended,
    coalesce(lag(CASE WHEN is_set_back THEN 0 ELSE follows_at - stopped END) OVER by_place, 0) AS downtime,
    coalesce(sum(CASE WHEN is_set_back THEN next_began - stopped ELSE jump END) OVER (
      by_place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS jumped
  FROM followed WINDOW by_place AS (PARTITION BY run ORDER BY place)
)"""
"""Common table expressions that end with `bounds`, which has one row per launch.

They read `seen` and `reporter`. `seen` has the first and last time of the rows of the ranks of each attempt, without
jumps of the clock. `reporter` has one rank of each attempt: its steps count.
`place` is the position of the launch in its run, from 1. `began` is the time of the clock with which the launch began,
and `ended` the time of this clock without later jumps. `downtime` is the time since the launch before, and `jumped` the
sum of the jumps of the clock during and between all launches before; both are seconds.

A launch whose last row is older than its registration was dead when it registered: the service found its spool later.
Its attempt number does not show the order, so it precedes the launches that began later."""
