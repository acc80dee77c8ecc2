"""SQL text of views that divide the wall time of a run: useful steps, lost steps, and time outside of steps.

The wall time of a launch is divided along the clock of one rank, the lowest one that logs step times. A step ends at
the time of its record and lasts as long as the record states; steps never overlap. Time between two steps is classified
by the records before and after it. The parts therefore always add up to the wall time. A run without rows that a rank
sent (such as an imported run) has no parts. `launch_order` has the order of the launches, and the time between them.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.phases import STEP_PHASE_SECONDS, WITHIN_A_STEP, Phase
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.sql.launch_order import CLOCK_JUMPS, LAUNCHES
from rankscope_storage.sql.scalar_history import is_main_source

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
  SELECT run, attempt, rank, incarnation, seq, step, ts, labels->>'$.phase' AS phase, value AS seconds,
    sum(value) OVER (PARTITION BY run, incarnation, seq) AS whole
  FROM scalars WHERE name = '{STEP_PHASE_SECONDS}')
"""

GOODPUT_ATTEMPTS: Final = f"""\
CREATE OR REPLACE VIEW goodput_attempts AS
WITH rank_scalars AS (
  SELECT run, attempt, min(rank) FILTER (name = 'step_seconds') AS rank,
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
    labels->>'$.phase' AS phase
  FROM scalars JOIN reporter USING (run, attempt, rank)
  WHERE name IN ('step_seconds', '{STEP_PHASE_SECONDS}') AND {is_main_source()}
), phase_seconds AS (
  SELECT run, incarnation, seq,
    sum(seconds) FILTER (phase = '{Phase.CHECKPOINT}') AS checkpoint,
    sum(seconds) FILTER (phase = '{Phase.EVALUATION}') AS evaluation,
    sum(seconds) FILTER (phase NOT IN ('{Phase.CHECKPOINT}', '{Phase.EVALUATION}', {_IN_STEPS})) AS other_phase
  FROM logged WHERE name = '{STEP_PHASE_SECONDS}' GROUP BY ALL
), skipped AS (
  SELECT DISTINCT run, incarnation, seq FROM events WHERE type = 'step_skipped'
), step_time AS (
  SELECT run, attempt, rank, incarnation, logged.seq, step, ts AS step_ended, greatest(seconds, 0) AS seconds,
    coalesce(checkpoint, 0) AS checkpoint, coalesce(evaluation, 0) AS evaluation,
    coalesce(other_phase, 0) AS other_phase, skipped.seq IS NOT NULL AS is_skipped, began, ended,
    row_number() OVER (PARTITION BY run, attempt, incarnation ORDER BY ts, logged.seq) = 1 AS is_first,
    coalesce(min(step) OVER (
      PARTITION BY run ORDER BY ts - jumped, attempt, logged.seq
      ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) <= step, false) AS is_repeated
  FROM logged JOIN bounds USING (run, attempt)
  LEFT JOIN phase_seconds USING (run, incarnation, seq)
  LEFT JOIN skipped USING (run, incarnation, seq)
  WHERE name = 'step_seconds' AND incarnation IS NOT NULL AND ts IS NOT NULL AND isfinite(seconds)
), hang AS (
  SELECT run, attempt, incarnation, epoch(ts) AS ts, details->>'$.state' AS state, value AS seconds,
    coalesce(lead(details->>'$.state') OVER (PARTITION BY run, attempt, incarnation ORDER BY ts) = 'ended', false)
      AS is_ended
  FROM events JOIN reporter USING (run, attempt, rank)
  WHERE type = 'hang' AND ts IS NOT NULL AND json_valid(details)
), placed AS (
  SELECT *, coalesce(lag(stop) OVER (PARTITION BY run, attempt ORDER BY step_ended, seq), began) AS before FROM (
    SELECT *, least(greatest(step_ended, began), ended) AS stop FROM step_time
  )
), cut AS (
  SELECT *, least(greatest(step_ended - seconds, before), stop) AS start FROM placed
), parts AS (
  SELECT cut.*, stop - start AS length, start - before AS gap, coalesce((
    SELECT sum(hang.seconds + CASE hang.state WHEN 'began' THEN cut.stop - hang.ts ELSE 0 END) FROM hang
    WHERE hang.run = cut.run AND hang.attempt = cut.attempt AND hang.incarnation = cut.incarnation
      AND NOT (hang.state = 'began' AND hang.is_ended) AND hang.ts > cut.start AND hang.ts <= cut.stop), 0) AS hang
  FROM cut
), shared AS (
  SELECT *, CASE WHEN wanted > length THEN length / wanted ELSE 1 END AS fits
  FROM (SELECT *, checkpoint + evaluation + other_phase + hang AS wanted FROM parts)
), summed AS (
  SELECT run, attempt,
    sum(length - fits * wanted) FILTER (NOT is_first AND NOT is_repeated AND NOT is_skipped) AS useful,
    sum(length - fits * wanted) FILTER (NOT is_first AND (is_repeated OR is_skipped)) AS lost,
    sum(length - fits * wanted) FILTER (is_first) AS first_step,
    sum(fits * checkpoint) AS checkpoint,
    sum(fits * evaluation) AS evaluation,
    sum(fits * other_phase) AS other_phase,
    sum(fits * hang) AS hang,
    sum(gap) FILTER (before = began) AS startup,
    sum(gap) FILTER (before > began) AS idle,
    max(stop) AS stop,
    count(*) AS steps,
    count(*) FILTER (is_repeated OR is_skipped) AS lost_steps
  FROM shared GROUP BY ALL
), tailed AS (
  SELECT bounds.*, summed.* EXCLUDE (run, attempt),
    bounds.ended - coalesce(stop, bounds.began) AS tail,
    EXISTS (SELECT 1 FROM hang WHERE hang.run = bounds.run AND hang.attempt = bounds.attempt
      AND hang.state = 'began' AND hang.ts > coalesce(stop, bounds.began)) AS hangs
  FROM bounds LEFT JOIN summed USING (run, attempt)
)
SELECT run, attempt, make_timestamptz((began * 1e6)::BIGINT) AS began, make_timestamptz((ended * 1e6)::BIGINT) AS ended,
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
  min_by(began, place) + to_microseconds((sum(wall_seconds) * 1e6)::BIGINT) AS ended, sum(wall_seconds) AS wall_seconds,
  {_SUMS},
  sum(steps)::BIGINT AS steps, sum(lost_steps)::BIGINT AS lost_steps,
  sum(useful_seconds) / nullif(sum(wall_seconds), 0) AS goodput
FROM goodput_attempts GROUP BY run
"""

STATEMENTS: Final = (CLOCK_JUMPS, STEP_PHASES, GOODPUT_ATTEMPTS, GOODPUT)
