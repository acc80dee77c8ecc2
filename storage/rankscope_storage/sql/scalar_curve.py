"""SQL text of the table macro `scalar_curve`: one scalar of one run in at most as many points as a screen shows."""

from __future__ import annotations

from typing import Final

from rankscope_storage.sql.scalar_history import FOLLOWS, is_main_source

MOST_POINTS: Final = 32_767
"""Largest number of buckets in the result of `scalar_curve`.

The bucket numbers fit into 16 bits, so that DuckDB uses an array instead of a hash table."""

_NAMED: Final = "run = of_run AND name = of_name AND labels IS NOT DISTINCT FROM of_labels"
_CHOSEN: Final = f"{_NAMED} AND step IS NOT NULL AND value IS NOT NULL"
_WIDTH: Final = f"(final - origin) // least(points, {MOST_POINTS}) + 1 AS width"
_HEAD: Final = (
    "CREATE OR REPLACE MACRO scalar_curve(of_run, of_name := 'loss', of_labels := NULL, points := 4000) AS TABLE"
)
_READ: Final = "run = of_run AND name IN (of_name, 'loss')"
_BY_POSITION: Final = "(SELECT * REPLACE (position AS step) FROM scalars)"
_SCANNED_EXTENTS: Final = f"""\
SELECT name, labels, coalesce(attempt, 0) AS of_attempt, min(step) AS first_step, max(step) AS last_step
    FROM {_BY_POSITION} WHERE {_READ} AND step IS NOT NULL AND value IS NOT NULL GROUP BY name, labels, of_attempt"""
_ROLLED_EXTENTS: Final = f"""\
    SELECT name, labels, coalesce(attempt, 0), first_step, last_step
    FROM scalar_rollups WHERE {_READ} AND step IS NOT NULL"""

_SPAN: Final = f"""\
own AS (
  FROM extent WHERE name = of_name AND labels IS NOT DISTINCT FROM of_labels
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
 JOIN (FROM valid, span WHERE attempts > 1) ON coalesce(attempt, 0) = of_attempt AND step <= until"""

_ROLLED_BUCKETS: Final = f"""\
  SELECT (first_step - origin) // width, CASE WHEN value_count > 0 THEN value_avg
      WHEN value_nans > 0 THEN 'nan'::DOUBLE WHEN value_infs > 0 THEN 'inf'::DOUBLE END AS average,
    value_min, coalesce(value_max, average), greatest(value_count, 1)
  FROM scalar_rollups JOIN (FROM valid, span) ON coalesce(attempt, 0) = of_attempt AND last_step <= until
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


def scalar_curve(extents: str | None = None) -> str:
    """Return the statement that creates the macro `scalar_curve` over raw rows and rollups.

    `extents` is a table with the first and last step of each scalar, which `query.file_facts` fills, for scalars whose
    positions are their steps. Without this table, the macro finds the positions by a scan of the rows.
    """
    # First extents, then buckets: both are aggregates by integer groups, which DuckDB computes while it reads.
    return f"""\
{_HEAD}
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
{_raw_buckets("(step - origin) // width", _BY_POSITION if extents is None else "scalars")}
  UNION ALL
{_ROLLED_BUCKETS}
)
SELECT origin + number * width AS step, sum(mean * parts) / sum(parts) AS mean, min(lowest) AS lowest,
  max(highest) AS highest, sum(parts)::BIGINT AS parts
FROM bucket, span WHERE mean IS NOT NULL
GROUP BY ALL ORDER BY step
"""


SCALAR_CURVE: Final = scalar_curve()
"""Macro that divides the steps of a scalar into buckets of equal length, beginning at the first step.

A bucket has the mean and the range over all steps, ranks and micro-batches of all attempts, without superseded steps. A
value that one rank logged several times for a step counts each time. Steps are positions of the view
`scalar_positions`. NaN in a bucket appears in `mean` and `highest`. A
rollup row belongs to the bucket of its first step, and counts only if none of its steps is superseded."""


def sole_attempt_curve(extents: str) -> str:
    """Return the statement that creates the macro `scalar_curve` for a run that has only raw rows of attempt 0.

    The Delta log proves this for most runs. DuckDB needs about 5 ms to plan each use of `scalars` in a macro; this
    macro has only one use.
    """
    number = "((step - origin) // width)::SMALLINT"
    return f"""\
{_HEAD}
WITH span AS MATERIALIZED (
  SELECT origin, {_WIDTH}
  FROM (SELECT min(first_step) AS origin, max(last_step) AS final FROM {extents} WHERE {_NAMED})
)
SELECT origin + number * width AS step, mean, lowest, highest, parts
FROM (
{_BUCKETS.format(number=number, rows="scalars" + _ONE_ATTEMPT, chosen=_CHOSEN)}
), span ORDER BY step
"""
