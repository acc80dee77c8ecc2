"""SQL text of views of scalars over all attempts of a run, and of the table macro `scalar_curve`.

The views continue step numbers and mark superseded steps. The macro returns one scalar of one run in at most as many
points as a screen shows.

A step is superseded if a later attempt repeated it.

The position of a scalar is the place of its record on the axis of the run. For the records that ranks send, it is the
step. Imported logs may not contain a step, or may begin to count at each epoch. Only their records have other
positions.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_storage.base.datasets import IMPORT_PREFIX, IMPORTED_FROM
from rankscope_storage.sql.macros import Macro
from rankscope_storage.sql.rollups import ROLLED_STEPS

_BEHIND_PREFIX: Final = IMPORT_PREFIX[:-1] + chr(ord(IMPORT_PREFIX[-1]) + 1)
IS_IMPORTED: Final = f"incarnation >= '{IMPORT_PREFIX}' AND incarnation < '{_BEHIND_PREFIX}'"
"""SQL condition that selects rows of imported logs.

It is a range, so that DuckDB skips row groups without imported rows."""

_ENDED: Final = ", ".join(f"'{state}'" for state in (RunState.COMPLETED, RunState.STOPPED, RunState.FAILED))

# A rank that logs a step again within an attempt has gone back: only its last value counts.
_LAST_VALUES: Final = """\
  SELECT run, name, labels, coalesce(attempt, 0) AS attempt, position, min(step) AS step, rank, micro_step,
    max(ts) AS ts, max_by(value, coalesce(ordinal, seq, 0)) AS value
  FROM scalars WHERE position IS NOT NULL AND value IS NOT NULL
  GROUP BY run, name, labels, coalesce(attempt, 0), position, rank, micro_step"""


def is_main_source(labels: str = "labels") -> str:
    """Return an SQL condition for rows of scalars that are not from a log which was imported into a run with live data.

    `labels` is an SQL expression for the labels of the row.
    """
    return f"coalesce(NOT contains({labels}, '\"{IMPORTED_FROM}\":'), true)"


_LOGGED_LOSSES: Final = f"name = 'loss' AND value IS NOT NULL AND {is_main_source()}"

FOLLOWS: Final = """\
max_by({own}.last_step BETWEEN {training}.last_step / 2 AND 2 * {training}.last_step,
  ({own}.last_step, {training}.last_step))"""
"""SQL condition: true if the steps of a scalar are the steps of the training.

`own` and `training` are relations with the first and last position of the scalar and of the loss, per attempt. The
condition compares the last steps in the longest attempt of the scalar. A scalar that counts epochs or samples has less
than half or more than twice the last step of the loss."""

# First and last step of the attempts of each scalar. The loss defines how far an attempt went back, also for scalars
# that are logged seldom. Scalars that count epochs or samples use their own steps: see FOLLOWS.
_SPANS: Final = f"""\
extent AS NOT MATERIALIZED (  -- otherwise a condition on the name would not reach the rows
  SELECT run, name, labels, attempt, min(first_position) AS first_step, max(position) AS last_step
  FROM per_step GROUP BY run, name, labels, attempt
),
training AS (
  SELECT run, attempt, min(first_step) AS first_step, max(last_step) AS last_step
  FROM (
    SELECT run, coalesce(attempt, 0) AS attempt, position AS first_step, position AS last_step
    FROM scalars WHERE {_LOGGED_LOSSES} AND position IS NOT NULL
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
    coalesce(min(first_step) FILTER (WHERE is_training), min(first_step)) AS first_step,
    coalesce(max(last_step) FILTER (WHERE is_training), max(last_step)) AS last_step
  FROM (
    SELECT run, name, labels, attempt, first_step, last_step, false AS is_training FROM extent
    UNION ALL
    SELECT run, name, labels, attempt, first_step, last_step, true FROM following JOIN training USING (run)
  )
  GROUP BY run, name, labels, attempt
)"""

_SCALAR_HISTORY: Final = f"""\
CREATE OR REPLACE VIEW scalar_history AS
WITH logged AS (
{_LAST_VALUES}
),
per_step AS (
  SELECT run, name, labels, attempt, position, position AS first_position, min(step) AS step,
    min(step) AS first_step, min(ts) AS ts, count(*) AS parts,
    avg(value) AS value, min(value) AS lowest, max(value) AS highest
  FROM logged GROUP BY run, name, labels, attempt, position
  UNION ALL
  SELECT run, name, labels, attempt, step, first_step, step, first_step, ts, parts, value, lowest, highest FROM (
  {ROLLED_STEPS})
),
{_SPANS},
repeated AS (  -- an attempt that begins at or before the last step of an earlier one has gone back, and supersedes it
  SELECT *, greatest(0, last_step + 1 - lead(first_step, 1, last_step + 1) OVER by_attempt) AS steps_again,
    min(goes_back_to) OVER (PARTITION BY run, name, labels ORDER BY attempt
      ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS overwritten_from
  FROM span WINDOW by_attempt AS (PARTITION BY run, name, labels ORDER BY attempt)
),
counted AS (
  SELECT run AS of_run, name AS of_name, labels AS of_labels, attempt AS of_attempt, overwritten_from,
    coalesce(sum(steps_again) OVER (PARTITION BY run, name, labels ORDER BY attempt
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)::BIGINT AS steps_before
  FROM repeated
)
SELECT run, name, labels, attempt, step,
  position + steps_before AS cumulative_step, ts, parts, value, lowest, highest,
  coalesce(position < overwritten_from, true) AS stands, first_step
FROM per_step JOIN counted ON attempt = of_attempt AND run = of_run AND name = of_name
  AND labels IS NOT DISTINCT FROM of_labels  -- DuckDB applies filters to both sides of a join only through =
"""
"""View with one row per scalar, attempt and step: the mean of `parts` numbers, one per rank and micro-batch.

`cumulative_step` continues over all attempts and counts repeated steps again. It begins with the position of the
record, so it also continues over epochs, and counts the records of logs without steps. `stands` is false for superseded
steps, which a later attempt repeated. A row from rollups covers a hundred steps, from `first_step` to `step`. It is
superseded if any of these steps is superseded. In all other rows, `first_step` equals `step`."""

_LOSS_CURVE: Final = f"""\
CREATE OR REPLACE VIEW loss_curve AS
SELECT run, labels, attempt, step, cumulative_step, ts, parts, value AS loss, lowest, highest,
  exp(value) AS perplexity, first_step
FROM scalar_history WHERE name = 'loss' AND stands AND {is_main_source()}
"""
"""View of the loss without superseded steps: one row per step, from the last attempt that trained this step.

In a run with live data, it has only the loss that ranks reported. Imported losses are in `scalar_history`."""

LOSSES: Final = f"{_LOGGED_LOSSES} AND step IS NOT NULL"
"""SQL condition that selects the rows of `scalars` which are part of `loss_curve`, if their positions are steps."""

LOSS_OF_SOLE_ATTEMPT: Final = f"""\
CREATE OR REPLACE VIEW loss_curve AS
SELECT run, labels, 0::INTEGER AS attempt, step, step AS cumulative_step, min(ts) AS ts, count(*) AS parts,
  avg(value) AS loss, min(value) AS lowest, max(value) AS highest, exp(avg(value)) AS perplexity, step AS first_step
FROM scalars WHERE {LOSSES} GROUP BY run, labels, step
"""
"""A faster definition of the view `loss_curve`, which takes a fifth of the time of the general definition.

It requires that positions are steps, that no rank logged the loss twice for a step, that all rows are of attempt 0, and
that the run has no rollups."""

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
    FROM scalars
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
  SELECT run, max(newest_step) AS newest_step, max(last_seen_at) AS last_seen_at,
    median(seconds_per_step) AS seconds_per_step
  FROM (SELECT run, max(step) AS newest_step, max(ts) AS last_seen_at FROM pace GROUP BY run)
  LEFT JOIN parts USING (run) GROUP BY run
)
SELECT run, state, newest_step AS step, planned_steps, seconds_per_step, last_seen_at,
  CASE WHEN newest_step >= planned_steps THEN 0 WHEN state IN ({_ENDED}) THEN NULL
    ELSE (planned_steps - newest_step) * seconds_per_step END AS eta_seconds,
  CASE WHEN newest_step < planned_steps AND state NOT IN ({_ENDED})
      AND (planned_steps - newest_step) * seconds_per_step < {_MOST_SECONDS}
    THEN last_seen_at + to_microseconds(round((planned_steps - newest_step) * seconds_per_step * 1e6)::BIGINT) END
    AS expected_end
FROM speed LEFT JOIN runs USING (run)
"""
"""View of the expected end of each run, computed from the time per step of its last 100 steps.

The end is null for a run without a planned number of steps. Steps are positions."""

HISTORY_VIEWS: Final = (_SCALAR_HISTORY, _LOSS_CURVE, _RUN_ETA)

MOST_POINTS: Final = 32_767
"""Largest number of buckets in the result of `scalar_curve`.

The bucket numbers fit into 16 bits, so that DuckDB uses an array instead of a hash table."""

_NAMED: Final = "run = of_run AND name = of_name AND labels IS NOT DISTINCT FROM of_labels"
_CHOSEN: Final = f"{_NAMED} AND step IS NOT NULL AND value IS NOT NULL"
_WIDTH: Final = f"intdiv(final - origin, least(points, {MOST_POINTS})) + 1 AS width"
_PARAMETERS: Final = {"of_run": None, "of_name": "'loss'", "of_labels": "NULL", "points": "4000"}
_READ: Final = "run = of_run AND name IN (of_name, 'loss')"
_BY_POSITION: Final = "(SELECT run, name, labels, attempt, position AS step, value FROM scalars)"
_SCANNED_EXTENTS: Final = f"""\
SELECT name, labels, coalesce(attempt, 0) AS of_attempt, min(step) AS first_step, max(step) AS last_step
    FROM {_BY_POSITION} WHERE {_READ} AND step IS NOT NULL AND value IS NOT NULL GROUP BY name, labels, of_attempt"""
_ROLLED_EXTENTS: Final = f"""\
    SELECT name, labels, coalesce(attempt, 0), first_step, last_step
    FROM scalar_rollups WHERE {_READ} AND step IS NOT NULL"""

_SPAN: Final = f"""\
own AS (
  SELECT * FROM extent WHERE name = of_name AND labels IS NOT DISTINCT FROM of_labels
),
training AS (
  SELECT of_attempt, min(first_step) AS first_step, max(last_step) AS last_step
  FROM extent WHERE name = 'loss' AND {is_main_source()} GROUP BY of_attempt
),
attempt_extent AS (
  -- As in `scalar_history`: the loss defines where an attempt begins, for scalars that count the steps of the training.
  SELECT of_attempt, min(first_step) AS first_step, max(last_step) AS last_step
  FROM (
    SELECT of_attempt, first_step, last_step FROM own
    UNION ALL
    SELECT of_attempt, first_step, last_step
    FROM training WHERE {is_main_source("of_labels")} AND (of_name = 'loss' OR (
      SELECT coalesce({FOLLOWS.format(own="own", training="training")}, false)
      FROM own JOIN training USING (of_attempt)
    ))
  )
  GROUP BY of_attempt
),
valid AS (
  SELECT of_attempt, coalesce(min(first_step) OVER (ORDER BY of_attempt
    ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) - 1, last_step) AS until
  FROM attempt_extent
),
span AS (
  SELECT origin, {_WIDTH}, attempts
  FROM (SELECT min(first_step) AS origin, max(last_step) AS final FROM own),
    (SELECT count(*) AS attempts FROM attempt_extent)
)"""

_BUCKETS: Final = """\
  SELECT {number} AS number, avg(value) AS mean, min(value) AS lowest, max(value) AS highest, count(*) AS parts
  FROM {rows}
  WHERE {chosen} GROUP BY number"""
_ONE_ATTEMPT: Final = ", span"
_SEVERAL_ATTEMPTS: Final = """\
 JOIN (SELECT * FROM valid, span WHERE attempts > 1) ON coalesce(attempt, 0) = of_attempt AND step <= until"""

_ROLLED_BUCKETS: Final = f"""\
  SELECT intdiv(first_step - origin, width), CASE WHEN value_count > 0 THEN value_avg
      WHEN value_nans > 0 THEN 'nan'::DOUBLE WHEN value_infs > 0 THEN 'inf'::DOUBLE END AS average,
    value_min, coalesce(value_max, average), greatest(value_count, 1)
  FROM scalar_rollups JOIN (SELECT * FROM valid, span) ON coalesce(attempt, 0) = of_attempt AND last_step <= until
  WHERE {_NAMED} AND step IS NOT NULL"""


def _raw_buckets(number: str, source: str = "scalars") -> str:
    """Return the query that aggregates raw rows of the relation `source` to buckets.

    The query has two halves. The first half reads the run if it has one attempt. The second half reads the run if it
    has several attempts, and its join removes superseded steps (steps that a later attempt repeated). DuckDB reads no
    rows for the half that does not apply to the run.
    """
    one = _BUCKETS.format(number=number, rows=source + _ONE_ATTEMPT, chosen=f"{_CHOSEN} AND attempts = 1")
    return f"{one}\n  UNION ALL\n{_BUCKETS.format(number=number, rows=source + _SEVERAL_ATTEMPTS, chosen=_CHOSEN)}"


def _known(extents: str) -> str:
    return f"SELECT name, labels, attempt AS of_attempt, first_step, last_step FROM {extents} WHERE {_READ}"


def scalar_curve(extents: str | None = None) -> Macro:
    """Return the macro `scalar_curve` over raw rows and rollups.

    `extents` is a table with the first and last step of each scalar, which `query.file_facts` fills, for scalars whose
    positions are their steps. Without this table, the macro finds the positions by a scan of the rows.
    """
    # First extents, then buckets: both are aggregates by integer groups, which DuckDB computes while it reads.
    body = f"""\
WITH extent AS MATERIALIZED (
  SELECT name, labels, of_attempt, min(first_step) AS first_step, max(last_step) AS last_step
  FROM (
    {_SCANNED_EXTENTS if extents is None else _known(extents)}
    UNION ALL
{_ROLLED_EXTENTS}
  )
  GROUP BY name, labels, of_attempt
),
{_SPAN},
bucket AS (
{_raw_buckets("intdiv(step - origin, width)", _BY_POSITION if extents is None else "scalars")}
  UNION ALL
{_ROLLED_BUCKETS}
)
SELECT origin + number * width AS step, sum(mean * parts) / sum(parts) AS mean, min(lowest) AS lowest,
  max(highest) AS highest, sum(parts)::BIGINT AS parts
FROM bucket, span WHERE mean IS NOT NULL
GROUP BY ALL ORDER BY step
"""
    return Macro("scalar_curve", _PARAMETERS, body)


SCALAR_CURVE: Final = scalar_curve()
"""Macro that divides the steps of a scalar into buckets of equal length, beginning at the first step.

A bucket has the mean and the range over all steps, ranks and micro-batches of all attempts, without superseded steps. A
value that one rank logged several times for a step counts each time. Steps are positions of the view
`scalar_positions`. NaN in a bucket appears in `mean` and `highest`. A
rollup row belongs to the bucket of its first step, and counts only if none of its steps is superseded."""


def sole_attempt_curve(extents: str) -> Macro:
    """Return the macro `scalar_curve` for a run that has only raw rows of attempt 0.

    The Delta log proves this for most runs. DuckDB needs about 5 ms to plan each use of `scalars` in a macro; this
    macro has only one use.
    """
    number = "intdiv(step - origin, width)::SMALLINT"
    body = f"""\
WITH span AS MATERIALIZED (
  SELECT origin, {_WIDTH}
  FROM (SELECT min(first_step) AS origin, max(last_step) AS final FROM {extents} WHERE {_NAMED})
)
SELECT origin + number * width AS step, mean, lowest, highest, parts
FROM (
{_BUCKETS.format(number=number, rows="scalars" + _ONE_ATTEMPT, chosen=_CHOSEN)}
), span ORDER BY step
"""
    return Macro("scalar_curve", _PARAMETERS, body)
