"""SQL text of views that divide the wall time of a run: useful steps, lost steps, and time outside of steps.

The wall time of a launch is divided along the clock of one rank, the lowest one that logs step times. A step ends at
the time of its record and lasts as long as the record states; steps never overlap. Time between two steps is classified
by the records before and after it. The parts therefore always add up to the wall time. A run without rows that a rank
sent (such as an imported run) has no parts.

A rank reports a jump if its wall clock and its monotonic clock move apart by more than 2 s from one record to the next.
The service subtracts the jumps from the times of its records before it stores them.

Wall clocks measure the time between two launches. A launch after a jump of the clock may begin at an earlier time than
the launch before it, so the attempt numbers determine the order.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.events import JUMP_MICROSECONDS, EventType
from rankscope_contract.model.phases import STEP_PHASE_SECONDS, WITHIN_A_STEP, Phase
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.sql.scalar_history import is_main_source

JUMPS: Final = "clock_jumps"
"""Name of the view of jumps."""

CLOCK_JUMPS: Final = f"""\
CREATE OR REPLACE VIEW {JUMPS} AS
SELECT run, attempt, rank, incarnation, seq, step, make_timestamptz(epoch_us(ts) + offset_us) AS ts, value AS seconds,
  offset_us, lead(seq, 1, 9223372036854775807) OVER (PARTITION BY run, incarnation ORDER BY seq) AS next_seq
FROM (
  SELECT *,
    CASE WHEN json_valid(details) THEN TRY_CAST(json_extract_string(details, '$.offset_us') AS BIGINT) END AS offset_us
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
    min_by(rank, (ordinal, rank)) FILTER (WHERE rank IS NOT NULL AND ordinal IS NOT NULL) AS first_rank
  FROM events WHERE type = 'launch' AND ts_origin = 'ingest' GROUP BY ALL
), rank_jumps AS (
  SELECT run, attempt, rank, max_by(offset_us, seq) / 1e6 AS seconds FROM {JUMPS}
  GROUP BY run, attempt, rank, incarnation
), launch AS (
  SELECT run, attempt, coalesce(epoch(started_at), first_ts) AS began, coalesce(epoch(ended_at), last_ts) AS ended,
    coalesce(last_ts, epoch(started_at)) AS last_ts, reporter.rank AS reporter,
    first_rank, coalesce(last_ts < seen_at, false) AS is_recovered,
    CASE WHEN NOT is_recovered THEN registered_at END AS registered_at
  FROM (SELECT * FROM attempts WHERE source_kind = 'live' AND attempt IS NOT NULL)
  FULL JOIN seen USING (run, attempt)
  LEFT JOIN registered USING (run, attempt)
  LEFT JOIN reporter USING (run, attempt)
  WHERE coalesce(epoch(started_at), first_ts) IS NOT NULL
), ordered AS (
  SELECT *, row_number() OVER (PARTITION BY run ORDER BY number NULLS LAST, NOT is_recovered, began, attempt) AS place
  FROM (
    SELECT *, CASE WHEN is_recovered THEN min(attempt) FILTER (WHERE NOT is_recovered) OVER (
      PARTITION BY run ORDER BY began, attempt ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) ELSE attempt END
      AS number
    FROM launch
  )
), next AS (
  SELECT *, lead(began) OVER by_place AS next_began, lead(first_rank) OVER by_place AS next_rank,
    CASE WHEN NOT is_recovered THEN lead(registered_at) OVER by_place END AS next_registered_at
  FROM ordered WINDOW by_place AS (PARTITION BY run ORDER BY place)
), clocks AS (  -- jumps of the clocks that may show next_began: the time of a rank, but at most that of the service
  SELECT run, place, min(seconds) AS lowest,
    max(seconds) FILTER (WHERE last_ts + seconds <= next_began + {_JUMP_SECONDS}) AS fitting,
    coalesce(max(seconds) <= 0 AND bool_or(rank = coalesce(next_rank, reporter)), false) AS is_known
  FROM next JOIN rank_jumps USING (run, attempt) WHERE next_rank IS NULL OR rank = next_rank GROUP BY run, place
), moved AS (  -- the clock with the shortest time between the launches; 0 is a clock without jumps
  SELECT next.*, CASE WHEN is_known THEN coalesce(fitting, lowest)
      WHEN last_ts <= next_began + {_JUMP_SECONDS} THEN greatest(fitting, 0)
      ELSE coalesce(fitting, least(lowest, 0)) END AS jump
  FROM next LEFT JOIN clocks USING (run, place)
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
      PARTITION BY run ORDER BY place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS jumped
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

PARTS: Final = (
    "useful",
    "lost",
    "first_step",
    "checkpoint",
    "evaluation",
    "other_phase",
    "hang",
    "startup",
    "idle",
    "downtime",
)
"""Names of the parts of the wall time; the column of a part is `<part>_seconds`."""

_IN_STEPS: Final = ", ".join(sorted(sql_string(phase) for phase in (*WITHIN_A_STEP, Phase.FIRST_STEP)))

STEP_PHASES: Final = f"""\
CREATE OR REPLACE VIEW step_phases AS
SELECT run, attempt, rank, incarnation, seq, step, ts, phase, seconds, seconds / nullif(whole, 0) AS share
FROM (  -- DuckDB 1.4.0 permits no nullif() of a window
  SELECT run, attempt, rank, incarnation, seq, step, ts, json_extract_string(labels, '$.phase') AS phase,
    value AS seconds, sum(value) OVER (PARTITION BY run, incarnation, seq) AS whole
  FROM scalars WHERE name = '{STEP_PHASE_SECONDS}')
"""

GOODPUT_ATTEMPTS: Final = f"""\
CREATE OR REPLACE VIEW goodput_attempts AS
WITH rank_scalars AS (
  SELECT run, attempt, min(rank) FILTER (WHERE name = 'step_seconds') AS rank,
    max(epoch(ts)) AS last_ts, min(epoch(ts)) AS first_ts
  FROM scalars WHERE incarnation IS NOT NULL AND ts IS NOT NULL AND {is_main_source()} GROUP BY ALL
), reporter AS (
  SELECT run, attempt, rank FROM rank_scalars WHERE rank IS NOT NULL
), seen AS (
  SELECT run, attempt, max(last_ts) AS last_ts, min(first_ts) AS first_ts FROM (
    SELECT run, attempt, last_ts, first_ts FROM rank_scalars
    UNION ALL
    SELECT run, attempt, max(epoch(ts)), min(epoch(ts)) FROM events
    WHERE incarnation IS NOT NULL AND ts IS NOT NULL AND ts_origin = 'rank' GROUP BY ALL
  ) GROUP BY ALL
), {LAUNCHES}, logged AS (
  SELECT run, attempt, rank, incarnation, seq, step, epoch(ts) AS ts, name, value AS seconds,
    json_extract_string(labels, '$.phase') AS phase
  FROM scalars JOIN reporter USING (run, attempt, rank)
  WHERE name IN ('step_seconds', '{STEP_PHASE_SECONDS}') AND {is_main_source()}
), phase_seconds AS (
  SELECT run, incarnation, seq,
    sum(seconds) FILTER (WHERE phase = '{Phase.CHECKPOINT}') AS checkpoint,
    sum(seconds) FILTER (WHERE phase = '{Phase.EVALUATION}') AS evaluation,
    sum(seconds) FILTER (WHERE phase NOT IN ('{Phase.CHECKPOINT}', '{Phase.EVALUATION}', {_IN_STEPS})) AS other_phase
  FROM logged WHERE name = '{STEP_PHASE_SECONDS}' GROUP BY ALL
), skipped AS (
  SELECT DISTINCT run, incarnation, seq FROM events WHERE type = 'step_skipped'
), step_time AS (
  SELECT run, attempt, rank, incarnation, logged.seq, step, ts AS step_ended, greatest(seconds, 0) AS seconds,
    coalesce(checkpoint, 0) AS checkpoint, coalesce(evaluation, 0) AS evaluation,
    coalesce(other_phase, 0) AS other_phase, skipped.seq IS NOT NULL AS is_skipped, began, ended,
    row_number() OVER (PARTITION BY run, attempt, incarnation ORDER BY ts, logged.seq NULLS LAST) = 1 AS is_first,
    coalesce(min(step) OVER (
      PARTITION BY run ORDER BY ts - jumped DESC, attempt DESC, logged.seq DESC NULLS FIRST
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) <= step, false) AS is_repeated
  FROM logged JOIN bounds USING (run, attempt)
  LEFT JOIN phase_seconds USING (run, incarnation, seq)
  LEFT JOIN skipped USING (run, incarnation, seq)
  WHERE name = 'step_seconds' AND incarnation IS NOT NULL AND ts IS NOT NULL AND isfinite(seconds)
), hang AS (
  SELECT *, coalesce(lead(state) OVER (PARTITION BY run, attempt, incarnation ORDER BY ts, seq) = 'ended', false)
    AS is_ended
  FROM (
    SELECT run, attempt, incarnation, seq, epoch(ts) AS ts, json_extract_string(details, '$.state') AS state,
      value AS seconds
    FROM events JOIN reporter USING (run, attempt, rank)
    WHERE type = 'hang' AND ts IS NOT NULL AND json_valid(details)
  )
), placed AS (
  SELECT *, coalesce(lag(stop) OVER in_order, began) AS before, row_number() OVER in_order AS number
  FROM (SELECT *, least(greatest(step_ended, began), ended) AS stop FROM step_time)
  WINDOW in_order AS (PARTITION BY run, attempt ORDER BY step_ended, seq NULLS LAST)
), cut AS (
  SELECT *, least(greatest(step_ended - seconds, before), stop) AS start FROM placed
), hung AS (
  SELECT run, attempt, number, sum(hang.seconds + CASE state WHEN 'began' THEN stop - hang.ts ELSE 0 END) AS hang
  FROM cut JOIN hang USING (run, attempt, incarnation)
  WHERE NOT (state = 'began' AND is_ended) AND hang.ts > start AND hang.ts <= stop
  GROUP BY ALL
), parts AS (
  SELECT cut.*, stop - start AS length, start - before AS gap, coalesce(hang, 0) AS hang
  FROM cut LEFT JOIN hung USING (run, attempt, number)
), shared AS (
  SELECT *, CASE WHEN wanted > length THEN length / wanted ELSE 1 END AS fits
  FROM (SELECT *, checkpoint + evaluation + other_phase + hang AS wanted FROM parts)
), summed AS (
  SELECT run, attempt,
    sum(length - fits * wanted) FILTER (WHERE NOT is_first AND NOT is_repeated AND NOT is_skipped) AS useful,
    sum(length - fits * wanted) FILTER (WHERE NOT is_first AND (is_repeated OR is_skipped)) AS lost,
    sum(length - fits * wanted) FILTER (WHERE is_first) AS first_step,
    sum(fits * checkpoint) AS checkpoint,
    sum(fits * evaluation) AS evaluation,
    sum(fits * other_phase) AS other_phase,
    sum(fits * hang) AS hang,
    sum(gap) FILTER (WHERE before = began) AS startup,
    sum(gap) FILTER (WHERE before > began) AS idle,
    max(stop) AS stop,
    count(*) AS steps,
    count(*) FILTER (WHERE is_repeated OR is_skipped) AS lost_steps
  FROM shared GROUP BY ALL
), hanging AS (
  SELECT run, attempt, max(ts) FILTER (WHERE state = 'began') AS last_hang FROM hang GROUP BY ALL
), tailed AS (
  SELECT *, ended - coalesce(stop, began) AS tail, coalesce(last_hang > coalesce(stop, began), false) AS hangs
  FROM bounds LEFT JOIN summed USING (run, attempt) LEFT JOIN hanging USING (run, attempt)
)
SELECT run, attempt, make_timestamptz(round(began * 1e6)::BIGINT) AS began,
  make_timestamptz(round(ended * 1e6)::BIGINT) AS ended,
  ended - began + downtime AS wall_seconds,
  coalesce(useful, 0) AS useful_seconds,
  coalesce(lost, 0) AS lost_seconds,
  coalesce(first_step, 0) AS first_step_seconds,
  coalesce(checkpoint, 0) AS checkpoint_seconds,
  coalesce(evaluation, 0) AS evaluation_seconds,
  coalesce(other_phase, 0) AS other_phase_seconds,
  coalesce(hang, 0) + CASE WHEN hangs THEN tail ELSE 0 END AS hang_seconds,
  coalesce(startup, 0) + CASE WHEN stop IS NULL AND NOT hangs THEN tail ELSE 0 END AS startup_seconds,
  coalesce(idle, 0) + CASE WHEN stop IS NOT NULL AND NOT hangs THEN tail ELSE 0 END AS idle_seconds,
  downtime AS downtime_seconds,
  coalesce(steps, 0) AS steps,
  coalesce(lost_steps, 0) AS lost_steps,
  coalesce(useful, 0) / nullif(ended - began + downtime, 0) AS goodput,
  place
FROM tailed
"""

_SUMS: Final = ",\n  ".join(f"sum({part}_seconds) AS {part}_seconds" for part in PARTS)

GOODPUT: Final = f"""\
CREATE OR REPLACE VIEW goodput AS
SELECT run, count(*) AS attempts, min_by(began, place) AS began,
  min_by(began, place) + to_microseconds(round(sum(wall_seconds) * 1e6)::BIGINT) AS ended,
  sum(wall_seconds) AS wall_seconds,
  {_SUMS},
  sum(steps)::BIGINT AS steps, sum(lost_steps)::BIGINT AS lost_steps,
  sum(useful_seconds) / nullif(sum(wall_seconds), 0) AS goodput
FROM goodput_attempts GROUP BY run
"""

STATEMENTS: Final = (CLOCK_JUMPS, STEP_PHASES, GOODPUT_ATTEMPTS, GOODPUT)
