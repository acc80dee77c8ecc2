"""Curves of scalars over all attempts of a run: each attempt, steps counted on, and the one that stands. SQL text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_storage.sql.rollups import ROLLED_STEPS

_ENDED: Final = ", ".join(f"'{state}'" for state in (RunState.COMPLETED, RunState.STOPPED, RunState.FAILED))

# A rank that writes a step again within an attempt has gone back: its last word stands.
_LAST_WORDS: Final = """\
  SELECT run, name, labels, coalesce(attempt, 0) AS attempt, step, rank, micro_step, max(ts) AS ts,
    arg_max(value, coalesce(ordinal, seq, 0)) AS value
  FROM scalars WHERE step IS NOT NULL AND value IS NOT NULL
  GROUP BY run, name, labels, coalesce(attempt, 0), step, rank, micro_step"""

LOSSES: Final = "name = 'loss' AND step IS NOT NULL AND value IS NOT NULL"
"""Which rows of `scalars` make up `loss_curve`."""

_LOSSES_SAID_ONCE: Final = f"""\
  SELECT run, name, labels, coalesce(attempt, 0) AS attempt, step, ts, value FROM scalars WHERE {LOSSES}"""

_AND_ROLLED: Final = f"""
  UNION ALL
  {ROLLED_STEPS}"""


FOLLOWS: Final = """\
max_by({own}.last_step BETWEEN {training}.last_step / 2 AND 2 * {training}.last_step, {own}.last_step)"""
"""Whether a scalar goes by the steps of the training, over its extents and the training's in the same attempts."""

# Where a run's attempts begin and end, of each scalar. One that is logged seldom does not tell itself how far its
# attempt went back: the loss does. One that counts otherwise, in epochs or in samples, goes by its own steps: where it
# has come farthest, that is less than half or more than twice of what the loss has.
_SPANS_OF_SCALARS: Final = f"""\
extent AS NOT MATERIALIZED (  -- or a condition on the name would not reach the rows
  SELECT run, name, labels, attempt, min(first_step) AS first_step, max(step) AS last_step
  FROM per_step GROUP BY run, name, labels, attempt
),
training AS (
  SELECT run, attempt, min(first_step) AS first_step, max(last_step) AS last_step
  FROM (
    SELECT run, coalesce(attempt, 0) AS attempt, step AS first_step, step AS last_step FROM scalars WHERE {LOSSES}
    UNION ALL
    SELECT run, coalesce(attempt, 0), first_step, last_step FROM scalar_rollups WHERE name = 'loss' AND step IS NOT NULL
  )
  GROUP BY run, attempt
),
following AS (
  SELECT run, name, labels FROM extent JOIN training USING (run, attempt) GROUP BY run, name, labels
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
  SELECT run, attempt, min(first_step) AS goes_back_to, min(first_step) AS first_step, max(step) AS last_step
  FROM per_step GROUP BY run, attempt
)"""


def _history(said: str, and_rolled: str, spans: str, keys: Sequence[str]) -> str:
    """Return a query for the rows of `scalar_history` of what `said` selects, and of what is rolled up.

    `spans` is a query for where attempts begin and end, of what `keys` tell apart.
    """
    listed = ", ".join(keys)
    # An attempt that begins at or before the last step of an earlier one has gone back: what the earlier one has from
    # there on was trained anew.
    return f"""\
WITH said AS (
{said}
),
per_step AS (
  SELECT run, name, labels, attempt, step, step AS first_step, min(ts) AS ts, count(*) AS parts,
    avg(value) AS value, min(value) AS lowest, max(value) AS highest
  FROM said GROUP BY run, name, labels, attempt, step{and_rolled}
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
SELECT run, name, labels, attempt, step, step + steps_before AS cumulative_step, ts, parts, value, lowest, highest,
  coalesce(step < overwritten_from, true) AS stands, first_step
FROM per_step JOIN counted ON attempt = of_attempt AND {" AND ".join(map(_same, keys))}
"""


def _same(key: str) -> str:
    """Return a condition of the join; DuckDB takes a condition of the question over to its other side only by =."""
    return "labels IS NOT DISTINCT FROM of_labels" if key == "labels" else f"{key} = of_{key}"


_SCALAR_HISTORY: Final = f"""\
CREATE OR REPLACE VIEW scalar_history AS
{_history(_LAST_WORDS, _AND_ROLLED, _SPANS_OF_SCALARS, ("run", "name", "labels"))}"""
"""A row per attempt and step, the mean of `parts` numbers, one of each rank and micro-batch; `cumulative_step` counts
steps that were trained twice twice; `stands` is false for what a later attempt trained anew. Where steps are rolled up
it is a row per hundred of them, `first_step` to `step`, which stands while all of them do; elsewhere the two are
equal."""

_LOSS_CURVE_OF: Final = """\
CREATE OR REPLACE VIEW loss_curve AS
SELECT run, labels, attempt, step, cumulative_step, ts, parts, value AS loss, lowest, highest,
  exp(value) AS perplexity, first_step
FROM"""
_LOSS_CURVE: Final = f"{_LOSS_CURVE_OF} scalar_history WHERE name = 'loss' AND stands\n"
"""The loss as it stands: one row per step, of the last attempt that trained it."""

LOSS_SAID_ONCE: Final = f"""\
{_LOSS_CURVE_OF} (
{_history(_LOSSES_SAID_ONCE, "", _SPANS_OF_LOSSES, ("run",))}) WHERE stands
"""
"""The same where no rank said the loss of a step twice within an attempt, and nothing is rolled up: in a third of the
time, for which rank and micro-batch a number is of need not be told apart."""

LOSS_OF_SOLE_ATTEMPT: Final = f"""\
CREATE OR REPLACE VIEW loss_curve AS
SELECT run, labels, 0::INTEGER AS attempt, step, step AS cumulative_step, min(ts) AS ts, count(*) AS parts,
  avg(value) AS loss, min(value) AS lowest, max(value) AS highest, exp(avg(value)) AS perplexity, step AS first_step
FROM scalars WHERE {LOSSES} GROUP BY run, labels, step
"""
"""The same where besides all is of attempt 0: in a fifth."""

# Many plan 2^63 - 1 steps and stop when they have seen enough: there is no such date. A thousand years.
_TOLD_SECONDS: Final = 31_556_952_000

# From the clock, not from `step_seconds`: evaluation and checkpoints take their time too.
_RUN_ETA: Final = f"""\
CREATE OR REPLACE VIEW run_eta AS
WITH pace AS (
  SELECT run, attempt, step, max(ts) AS ts
  FROM (
    SELECT run, coalesce(attempt, 0) AS attempt, step, ts
    FROM scalars WHERE step IS NOT NULL AND ts_origin IS DISTINCT FROM 'ingest'
  )
  GROUP BY run, attempt, step
  QUALIFY attempt = max(attempt) OVER (PARTITION BY run) AND step > max(step) OVER (PARTITION BY run, attempt) - 100
),
speed AS (
  SELECT run, max(step) AS newest_step, max(ts) AS last_seen_at,
    epoch(max(ts) - min(ts)) / nullif(max(step) - min(step), 0) AS seconds_per_step
  FROM pace GROUP BY run
)
SELECT run, state, newest_step AS step, planned_steps, seconds_per_step, last_seen_at,
  CASE WHEN newest_step >= planned_steps THEN 0 WHEN state IN ({_ENDED}) THEN NULL
    ELSE (planned_steps - newest_step) * seconds_per_step END AS eta_seconds,
  CASE WHEN newest_step < planned_steps AND state NOT IN ({_ENDED})
      AND (planned_steps - newest_step) * seconds_per_step < {_TOLD_SECONDS}
    THEN last_seen_at + to_microseconds(((planned_steps - newest_step) * seconds_per_step * 1e6)::BIGINT) END
    AS expected_end
FROM speed LEFT JOIN runs USING (run)
"""
"""When a run will be through, by the pace of its last 100 steps; null where nobody said how many it has to do."""

HISTORY_VIEWS: Final = (_SCALAR_HISTORY, _LOSS_CURVE, _RUN_ETA)
