"""SQL text of views of scalars over all attempts of a run; they continue step numbers and mark superseded steps.

A step is superseded if a later attempt repeated it.

The view `scalar_positions` has scalars with the place of their record on the axis of the run. For the records that
ranks send, the position is the step. Imported logs may not contain a step, or may begin to count at each epoch; only
their records have other positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_storage.base.datasets import IMPORT_PREFIX, IMPORTED_FROM
from rankscope_storage.sql.rollups import ROLLED_STEPS

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


_ENDED: Final = ", ".join(f"'{state}'" for state in (RunState.COMPLETED, RunState.STOPPED, RunState.FAILED))

# A rank that logs a step again within an attempt has gone back: only its last value counts.
_LAST_VALUES: Final = f"""\
  SELECT run, name, labels, coalesce(attempt, 0) AS attempt, position, min(step) AS step, rank, micro_step,
    max(ts) AS ts, arg_max(value, coalesce(ordinal, seq, 0)) AS value
  FROM {POSITIONS} WHERE position IS NOT NULL AND value IS NOT NULL
  GROUP BY run, name, labels, coalesce(attempt, 0), position, rank, micro_step"""


def is_main_source(labels: str = "labels") -> str:
    """Return an SQL condition for rows of scalars that are not from a log which was imported into a run with live data.

    `labels` is an SQL expression for the labels of the row.
    """
    return f"coalesce(NOT contains({labels}, '\"{IMPORTED_FROM}\":'), true)"


_LOGGED_LOSSES: Final = f"name = 'loss' AND value IS NOT NULL AND {is_main_source()}"
LOSSES: Final = f"{_LOGGED_LOSSES} AND step IS NOT NULL"
"""SQL condition that selects the rows of `scalars` which are part of `loss_curve`, if their positions are steps."""

_LOSSES_LOGGED_ONCE: Final = f"""\
  SELECT run, name, labels, coalesce(attempt, 0) AS attempt, step AS position, step, ts, value
  FROM scalars WHERE {LOSSES}"""

_PLUS_ROLLUPS: Final = f"""
  UNION ALL BY NAME
  SELECT *, step AS position, first_step AS first_position FROM (
  {ROLLED_STEPS})"""


FOLLOWS: Final = """\
max_by({own}.last_step BETWEEN {training}.last_step / 2 AND 2 * {training}.last_step, {own}.last_step)"""
"""SQL condition: true if the steps of a scalar are the steps of the training.

`own` and `training` are relations with the first and last position of the scalar and of the loss, per attempt. The
condition compares the last steps in the longest attempt of the scalar. A scalar that counts epochs or samples has less
than half or more than twice the last step of the loss."""

# First and last step of the attempts of each scalar. The loss defines how far an attempt went back, also for scalars
# that are logged seldom. Scalars that count epochs or samples use their own steps: see FOLLOWS.
_SPANS_OF_SCALARS: Final = f"""\
extent AS NOT MATERIALIZED (  -- otherwise a condition on the name would not reach the rows
  SELECT run, name, labels, attempt, min(first_position) AS first_step, max(position) AS last_step
  FROM per_step GROUP BY run, name, labels, attempt
),
training AS (
  SELECT run, attempt, min(first_step) AS first_step, max(last_step) AS last_step
  FROM (
    SELECT run, coalesce(attempt, 0) AS attempt, position AS first_step, position AS last_step
    FROM {POSITIONS} WHERE {_LOGGED_LOSSES} AND position IS NOT NULL
    UNION ALL
    SELECT run, coalesce(attempt, 0), first_step, last_step FROM scalar_rollups
    WHERE name = 'loss' AND step IS NOT NULL AND {is_main_source()}
  )
  GROUP BY run, attempt
),
following AS (
  SELECT run, name, labels FROM extent JOIN training USING (run, attempt)
  WHERE {is_main_source()} GROUP BY run, name, labels
  HAVING name = 'loss' OR {FOLLOWS.format(own="extent", training="training")}
),
span AS (
  SELECT run, name, labels, attempt, min(first_step) AS goes_back_to,
    coalesce(min(first_step) FILTER (is_training), min(first_step)) AS first_step,
    coalesce(max(last_step) FILTER (is_training), max(last_step)) AS last_step
  FROM (
    SELECT *, false AS is_training FROM extent
    UNION ALL BY NAME
    SELECT *, true AS is_training FROM following JOIN training USING (run)
  )
  GROUP BY run, name, labels, attempt
)"""

_SPANS_OF_LOSSES: Final = """\
span AS (
  SELECT run, attempt, min(first_position) AS goes_back_to, min(first_position) AS first_step,
    max(position) AS last_step
  FROM per_step GROUP BY run, attempt
)"""


def _history(logged: str, rollups: str, spans: str, keys: Sequence[str]) -> str:
    """Return a query with the columns of `scalar_history`, for values of the query `logged` and for `rollups`.

    `spans` defines the relation `span` with the first and last step of each attempt. `keys` are the columns of `span`
    that identify a scalar.
    """
    listed = ", ".join(keys)
    # An attempt that begins at or before the last step of an earlier attempt has gone back: the later steps of the
    # earlier attempt are superseded.
    return f"""\
WITH logged AS (
{logged}
),
per_step AS (
  SELECT run, name, labels, attempt, position, position AS first_position, min(step) AS step,
    min(step) AS first_step, min(ts) AS ts, count(*) AS parts,
    avg(value) AS value, min(value) AS lowest, max(value) AS highest
  FROM logged GROUP BY run, name, labels, attempt, position{rollups}
),
{spans},
repeated AS (
  SELECT *, greatest(0, last_step + 1 - lead(first_step, 1, last_step + 1) OVER by_attempt) AS steps_again,
    min(goes_back_to) OVER (PARTITION BY {listed} ORDER BY attempt
      ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS overwritten_from
  FROM span WINDOW by_attempt AS (PARTITION BY {listed} ORDER BY attempt)
),
counted AS (
  SELECT {", ".join(f"{key} AS of_{key}" for key in keys)}, attempt AS of_attempt, overwritten_from,
    coalesce(sum(steps_again) OVER (PARTITION BY {listed} ORDER BY attempt
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)::BIGINT AS steps_before
  FROM repeated
)
SELECT run, name, labels, attempt, step,
  position + steps_before AS cumulative_step, ts, parts, value, lowest, highest,
  coalesce(position < overwritten_from, true) AS stands, first_step
FROM per_step JOIN counted ON attempt = of_attempt AND {" AND ".join(map(_same, keys))}
"""


def _same(key: str) -> str:
    """Return the join condition for column `key`.

    It uses = where possible, because DuckDB applies the caller's filters to both sides of a join only through =.
    """
    return "labels IS NOT DISTINCT FROM of_labels" if key == "labels" else f"{key} = of_{key}"


_SCALAR_HISTORY: Final = f"""\
CREATE OR REPLACE VIEW scalar_history AS
{_history(_LAST_VALUES, _PLUS_ROLLUPS, _SPANS_OF_SCALARS, ("run", "name", "labels"))}"""
"""View with one row per scalar, attempt and step: the mean of `parts` numbers, one per rank and micro-batch.

`cumulative_step` continues over all attempts and counts repeated steps again. It begins with the position of the view
`scalar_positions`, so it also continues over epochs, and counts the records of logs without steps. `stands` is false
for superseded steps, which a later attempt repeated. A row from rollups covers a hundred steps, from `first_step` to
`step`. It is superseded if any of these steps is superseded. In all other rows, `first_step` equals `step`."""

_LOSS_CURVE_OF: Final = """\
CREATE OR REPLACE VIEW loss_curve AS
SELECT run, labels, attempt, step, cumulative_step, ts, parts, value AS loss, lowest, highest,
  exp(value) AS perplexity, first_step
FROM"""
_LOSS_CURVE: Final = f"{_LOSS_CURVE_OF} scalar_history WHERE name = 'loss' AND stands AND {is_main_source()}\n"
"""View of the loss without superseded steps: one row per step, from the last attempt that trained this step.

In a run with live data, it has only the loss that ranks reported. Imported losses are in `scalar_history`."""

LOSS_LOGGED_ONCE: Final = f"""\
{_LOSS_CURVE_OF} (
{_history(_LOSSES_LOGGED_ONCE, "", _SPANS_OF_LOSSES, ("run",))}) WHERE stands
"""
"""A faster definition of the view `loss_curve`, for losses that no rank logged twice for a step of an attempt.

The definition also requires that the run has no rollups. It takes a third of the time of the general definition,
because it need not distinguish ranks and micro-batches."""

LOSS_OF_SOLE_ATTEMPT: Final = f"""\
CREATE OR REPLACE VIEW loss_curve AS
SELECT run, labels, 0::INTEGER AS attempt, step, step AS cumulative_step, min(ts) AS ts, count(*) AS parts,
  avg(value) AS loss, min(value) AS lowest, max(value) AS highest, exp(avg(value)) AS perplexity, step AS first_step
FROM scalars WHERE {LOSSES} GROUP BY run, labels, step
"""
"""The fastest definition of the view `loss_curve`, which takes a fifth of the time of the general definition.

It requires that no rank logged the loss twice for a step, that all rows are of attempt 0, and that the run has no
rollups."""

# A thousand years. Scripts that stop by another criterion plan 2^63 - 1 steps, for which no date exists.
_MOST_SECONDS: Final = 31_556_952_000

# From the clock, not from `step_seconds`: evaluation and checkpoints take time too. The pace is the median over five
# parts of the newest steps: it follows a change immediately, and one pause does not change it.
_RUN_ETA: Final = f"""\
CREATE OR REPLACE VIEW run_eta AS
WITH pace AS (
  SELECT run, attempt, step, max(ts) AS ts
  FROM (
    SELECT run, coalesce(attempt, 0) AS attempt, position AS step, ts
    FROM {POSITIONS}_without_jumps
    WHERE step IS NOT NULL AND ts_origin IS DISTINCT FROM 'ingest' AND {is_main_source()}
  )
  GROUP BY run, attempt, step
  QUALIFY attempt = max(attempt) OVER (PARTITION BY run) AND step > max(step) OVER (PARTITION BY run, attempt) - 100
),
recent AS (
  SELECT run, step, step - lag(step) OVER by_step AS steps, epoch_us(ts) - lag(epoch_us(ts)) OVER by_step AS micros
  FROM pace WHERE ts IS NOT NULL
  WINDOW by_step AS (PARTITION BY run ORDER BY step)
  QUALIFY steps IS NOT NULL AND (ts > max(ts) OVER (PARTITION BY run) - INTERVAL 30 SECOND
    OR row_number() OVER (PARTITION BY run ORDER BY step DESC) <= 10)
),
parts AS (
  SELECT run, sum(micros) / sum(steps) / 1e6 AS seconds_per_step
  FROM (SELECT *, ntile(5) OVER (PARTITION BY run ORDER BY step) AS part FROM recent) GROUP BY run, part
),
speed AS (
  SELECT run, any_value(newest_step) AS newest_step, any_value(last_seen_at) AS last_seen_at,
    median(seconds_per_step) AS seconds_per_step
  FROM (SELECT run, max(step) AS newest_step, max(ts) AS last_seen_at FROM pace GROUP BY run)
  LEFT JOIN parts USING (run) GROUP BY run
)
SELECT run, state, newest_step AS step, planned_steps, seconds_per_step, last_seen_at,
  CASE WHEN newest_step >= planned_steps THEN 0 WHEN state IN ({_ENDED}) THEN NULL
    ELSE (planned_steps - newest_step) * seconds_per_step END AS eta_seconds,
  CASE WHEN newest_step < planned_steps AND state NOT IN ({_ENDED})
      AND (planned_steps - newest_step) * seconds_per_step < {_MOST_SECONDS}
    THEN last_seen_at + to_microseconds(((planned_steps - newest_step) * seconds_per_step * 1e6)::BIGINT) END
    AS expected_end
FROM speed LEFT JOIN runs USING (run)
"""
"""View of the expected end of each run, computed from the time per step of its last 100 steps.

The end is null for a run without a planned number of steps. Steps are positions of the view `scalar_positions`."""

HISTORY_VIEWS: Final = (_SCALAR_HISTORY, _LOSS_CURVE, _RUN_ETA)
