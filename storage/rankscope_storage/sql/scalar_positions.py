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
stepless AS (
  SELECT run, rank, incarnation, (sum(records) OVER earlier)::BIGINT AS records_before
  FROM (
    SELECT run, rank, incarnation, max(seq) + 1 AS records, min(attempt) AS attempt, min(ordinal) AS arrived
    FROM scalars WHERE {STEPLESS} GROUP BY run, rank, incarnation
  )
  WINDOW earlier AS (PARTITION BY run, rank ORDER BY attempt, arrived, incarnation
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
within_epochs AS (
  SELECT DISTINCT run, incarnation, seq, step FROM scalars
  WHERE step IS NOT NULL AND {IS_IMPORTED} AND run IN (SELECT run FROM epochs)
),
place AS (
  SELECT run, incarnation, seq, step + steps_before AS position
  FROM (
    SELECT within_epochs.*, with_epoch.epoch FROM within_epochs
    ASOF JOIN with_epoch ON within_epochs.run = with_epoch.run AND within_epochs.incarnation = with_epoch.incarnation
      AND within_epochs.seq >= with_epoch.seq
  ) JOIN epochs USING (run, epoch)
  UNION ALL
  SELECT DISTINCT run, incarnation, seq, coalesce(records_before, 0) + seq + 1
  FROM scalars JOIN stepless USING (run, incarnation)
  WHERE {STEPLESS} AND scalars.rank IS NOT DISTINCT FROM stepless.rank
)
SELECT *, step AS position FROM scalars WHERE NOT coalesce({IS_IMPORTED}, false)
UNION ALL
SELECT scalars.*, coalesce(position, step) AS position
FROM scalars LEFT JOIN place USING (run, incarnation, seq) WHERE {IS_IMPORTED}
"""
"""View of the scalars with the column `position`, by which the records of an attempt follow each other.

Usually, the position is the step. If the steps of a log restart with each epoch, the steps of the previous epochs are
added. The position of a record without a step is its number, from 1, in its log; earlier logs of the run count too. The
position of scalars without a step that ranks sent is null."""

STEPS_ARE_POSITIONS: Final = f"""\
CREATE OR REPLACE VIEW {POSITIONS} AS SELECT *, step AS position FROM scalars
"""
"""A cheaper definition of the view, for files in which the position of each scalar is its step."""
