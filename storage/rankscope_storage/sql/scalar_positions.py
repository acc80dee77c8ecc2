"""SQL text of the view `scalar_positions`: scalars with the place of their record on the axis of the run.

For the records that ranks send, the position is the step. Imported logs may not contain a step, or may begin to count
at each epoch; only their records have other positions.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.schema import IMPORT_PREFIX

POSITIONS: Final = "scalar_positions"
"""Name of the view."""

_BEHIND_PREFIX: Final = IMPORT_PREFIX[:-1] + chr(ord(IMPORT_PREFIX[-1]) + 1)
IS_IMPORTED: Final = f"incarnation >= '{IMPORT_PREFIX}' AND incarnation < '{_BEHIND_PREFIX}'"
"""SQL condition that selects rows of imported logs.

It is a range, so that DuckDB skips row groups without imported rows."""

EPOCHS: Final = f"name = 'epoch' AND isfinite(value) AND step IS NOT NULL AND {IS_IMPORTED}"
"""SQL condition that selects the rows of `scalars` with the epoch of an imported record."""

STEPLESS: Final = f"step IS NULL AND {IS_IMPORTED}"
"""SQL condition that selects the rows of `scalars` of imported records without a step."""

SCALAR_POSITIONS: Final = f"""\
CREATE OR REPLACE VIEW {POSITIONS} AS
WITH with_epoch AS (
  SELECT run, coalesce(attempt, 0) AS attempt, incarnation, seq, step, floor(value) AS epoch
  FROM scalars WHERE {EPOCHS}
),
of_loss AS (
  -- An evaluation may count its own batches: if the log has a loss, the steps of the loss decide.
  SELECT *, bool_or(has_loss) OVER (PARTITION BY run) AS any_loss
  FROM (
    SELECT *, (run, incarnation, seq) IN (
      SELECT (run, incarnation, seq) FROM scalars WHERE name = 'loss' AND {IS_IMPORTED}) AS has_loss
    FROM with_epoch
  )
),
part AS (
  SELECT *, first_step <= lag(last_step) OVER (PARTITION BY run, attempt ORDER BY epoch) AS restarts
  FROM (
    SELECT run, attempt, epoch, min(step) AS first_step, max(step) AS last_step
    FROM of_loss WHERE has_loss OR NOT any_loss GROUP BY run, attempt, epoch
  )
),
epochs AS (
  SELECT run, epoch, (sum(steps) OVER (PARTITION BY run ORDER BY epoch) - steps)::BIGINT AS steps_before
  FROM (
    SELECT run, epoch, max(last_step) + (min(min(first_step)) OVER (PARTITION BY run) = 0)::INTEGER AS steps,
      bool_or(bool_or(restarts)) OVER (PARTITION BY run) AS restart
    FROM part GROUP BY run, epoch
  )
  WHERE restart
),
within_epochs AS (
  SELECT DISTINCT run, incarnation, seq, step FROM scalars
  WHERE step IS NOT NULL AND {IS_IMPORTED} AND run IN (SELECT run FROM epochs)
),
behind_epochs AS (
  SELECT run, incarnation, seq, step + steps_before AS position
  FROM (
    SELECT within_epochs.*, with_epoch.epoch FROM within_epochs
    ASOF JOIN with_epoch ON within_epochs.run = with_epoch.run AND within_epochs.incarnation = with_epoch.incarnation
      AND within_epochs.seq >= with_epoch.seq
  ) JOIN epochs USING (run, epoch)
),
-- The records of runs with records without a step, in groups of a record with a step and those behind it without one.
record AS (
  SELECT *, count(position) OVER (PARTITION BY run, rank, attempt, incarnation ORDER BY seq) AS part_number
  FROM (
    SELECT DISTINCT run, rank, coalesce(attempt, 0) AS attempt, incarnation, seq, coalesce(position, step) AS position
    FROM scalars LEFT JOIN behind_epochs USING (run, incarnation, seq)
    WHERE {IS_IMPORTED} AND run IN (SELECT run FROM scalars WHERE {STEPLESS})
  )
),
between_steps AS (
  SELECT run, rank, attempt, incarnation, seq, coalesce(
      first_value(position) OVER in_part + row_number() OVER in_part - 1,
      min(position) FILTER (part_number = 1) OVER (PARTITION BY run, rank, attempt, incarnation)
        - count(*) OVER (PARTITION BY run, rank, attempt, incarnation, part_number) + row_number() OVER in_part - 1
    ) AS position
  FROM record WINDOW in_part AS (PARTITION BY run, rank, attempt, incarnation, part_number ORDER BY seq)
),
crowded AS (  -- runs in which more records are without a step than fit between two steps of a scalar
  SELECT DISTINCT run
  FROM (
    SELECT run, seq > lag(seq) OVER earlier AND position <= lag(position) OVER earlier
      AND (step IS NULL OR lag(step) OVER earlier IS NULL) AS is_behind
    FROM scalars JOIN between_steps USING (run, incarnation, seq) WHERE {IS_IMPORTED}
    WINDOW earlier AS (
      PARTITION BY run, scalars.rank, between_steps.attempt, incarnation, name, labels ORDER BY seq)
  )
  WHERE is_behind
),
source AS (
  SELECT run, rank, incarnation, (sum(records) OVER earlier)::BIGINT AS records_before
  FROM (
    SELECT run, rank, incarnation, max(seq) + 1 AS records, min(attempt) AS attempt, min(ordinal) AS arrived
    FROM scalars WHERE {IS_IMPORTED} AND (step IS NULL OR run IN (SELECT run FROM crowded))
    GROUP BY run, rank, incarnation
  )
  WINDOW earlier AS (PARTITION BY run, rank ORDER BY attempt, arrived, incarnation
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
place AS (
  SELECT run, incarnation, seq, position FROM behind_epochs
  WHERE run NOT IN (SELECT run FROM between_steps)
  UNION ALL
  SELECT between_steps.run, between_steps.incarnation, seq,
    CASE WHEN position IS NULL OR between_steps.run IN (SELECT run FROM crowded)
      THEN coalesce(records_before, 0) + seq + 1 ELSE position END
  FROM between_steps LEFT JOIN source
    ON between_steps.run = source.run AND between_steps.incarnation = source.incarnation
      AND between_steps.rank IS NOT DISTINCT FROM source.rank
)
SELECT *, step AS position FROM scalars WHERE NOT coalesce({IS_IMPORTED}, false)
UNION ALL
SELECT scalars.*, coalesce(position, step) AS position
FROM scalars LEFT JOIN place USING (run, incarnation, seq) WHERE {IS_IMPORTED}
"""
"""View of the scalars with the column `position`, by which the records of an attempt follow each other.

Usually, the position is the step. If the steps of a log restart with each epoch, the steps of the previous epochs are
added. A record without a step has the position of the record with a step before it, plus the number of records without
a step in between, so that the positions of a scalar have the order of its log. If they do not fit between two steps, or
if the log has no steps, the position of each record is its number, from 1, in its log; earlier logs of the run count
too. The position of scalars without a step that ranks sent is null."""

STEPS_ARE_POSITIONS: Final = f"""\
CREATE OR REPLACE VIEW {POSITIONS} AS SELECT *, step AS position FROM scalars
"""
"""A cheaper definition of the view, for files in which the position of each scalar is its step."""
