"""`scalar_curve`: one scalar of one run over its steps, in as many points as a screen has. SQL text."""

from __future__ import annotations

from typing import Final

from rankscope_storage.sql.scalar_history import FOLLOWS

MOST_POINTS: Final = 32_767
"""A curve has no more buckets: their numbers are of 16 bits, which DuckDB takes for places in an array of groups."""

_NAMED: Final = "run = of_run AND name = of_name AND labels IS NOT DISTINCT FROM of_labels"
_CHOSEN: Final = f"{_NAMED} AND step IS NOT NULL"
_WIDTH: Final = f"(final - origin) // least(points, {MOST_POINTS}) + 1 AS width"
_HEAD: Final = (
    "CREATE OR REPLACE MACRO scalar_curve(of_run, of_name := 'loss', of_labels := NULL, points := 4000) AS TABLE"
)

_TELLING: Final = "run = of_run AND name IN (of_name, 'loss')"
_SCANNED: Final = f"""\
SELECT name, labels, coalesce(attempt, 0) AS of_attempt, min(step) AS first_step, max(step) AS last_step
    FROM scalars WHERE {_TELLING} AND step IS NOT NULL AND value IS NOT NULL GROUP BY name, labels, of_attempt"""

_STANDING: Final = f"""\
own AS (
  FROM told WHERE name = of_name AND labels IS NOT DISTINCT FROM of_labels
),
training AS (
  SELECT of_attempt, min(first_step) AS first_step, max(last_step) AS last_step
  FROM told WHERE name = 'loss' GROUP BY of_attempt
),
attempt_extent AS (
  -- As `scalar_history` has it: where an attempt begins the loss tells, of what goes by the steps of the training.
  SELECT of_attempt, min(first_step) AS first_step, max(last_step) AS last_step
  FROM (
    SELECT of_attempt, first_step, last_step FROM own
    UNION ALL
    FROM training WHERE of_name = 'loss' OR (
      SELECT coalesce({FOLLOWS.format(own="own", training="training")}, false)
      FROM own JOIN training USING (of_attempt)
    )
  )
  GROUP BY of_attempt
),
standing AS (
  SELECT of_attempt, coalesce(min(first_step) OVER (ORDER BY of_attempt
    ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) - 1, last_step) AS until
  FROM attempt_extent
),
span AS (
  SELECT origin, {_WIDTH}, attempts
  FROM (SELECT min(first_step) AS origin, max(last_step) AS final FROM own),
    (SELECT count(*) AS attempts FROM attempt_extent)
)"""


def scalar_curve(extents: str | None = None) -> str:
    """Return the macro's statement; `extents` names a table of where scalars begin and end, as `asking.extents` has it.

    Without one they are looked up in the rows, for whoever reads these without our connection.
    """
    # Extents first, then buckets: both are sums over groups of integers, which DuckDB does while it reads. The join
    # that leaves out what a later attempt trained anew is taken only by runs that have one; its other side is empty
    # otherwise, and nothing is read for it.
    return f"""\
{_HEAD}
WITH told AS MATERIALIZED (
  SELECT name, labels, of_attempt, min(first_step) AS first_step, max(last_step) AS last_step
  FROM (
    {_SCANNED if extents is None else _known(extents)}
    UNION ALL
    SELECT name, labels, coalesce(attempt, 0), first_step, last_step
    FROM scalar_rollups WHERE {_TELLING} AND step IS NOT NULL
  )
  GROUP BY name, labels, of_attempt
),
{_STANDING},
bucket AS (
  SELECT (step - origin) // width AS number, avg(value) AS average, min(value) AS least, max(value) AS most,
    count(*) AS weight
  FROM scalars, span WHERE {_CHOSEN} AND value IS NOT NULL AND attempts = 1
  GROUP BY number
  UNION ALL
  SELECT (step - origin) // width AS number, avg(value), min(value), max(value), count(*)
  FROM scalars JOIN (FROM standing, span WHERE attempts > 1) ON coalesce(attempt, 0) = of_attempt AND step <= until
  WHERE {_CHOSEN} AND value IS NOT NULL
  GROUP BY number
  UNION ALL
  SELECT (first_step - origin) // width, CASE WHEN value_count > 0 THEN value_avg
      WHEN value_nans > 0 THEN 'nan'::DOUBLE WHEN value_infs > 0 THEN 'inf'::DOUBLE END AS average,
    value_min, coalesce(value_max, average), greatest(value_count, 1)
  FROM scalar_rollups JOIN (FROM standing, span) ON coalesce(attempt, 0) = of_attempt AND last_step <= until
  WHERE {_CHOSEN}
)
SELECT origin + number * width AS step, sum(average * weight) / sum(weight) AS mean, min(least) AS lowest,
  max(most) AS highest, sum(weight)::BIGINT AS parts
FROM bucket, span WHERE average IS NOT NULL
GROUP BY ALL ORDER BY step
"""


SCALAR_CURVE: Final = scalar_curve()
"""Buckets of equal length from the first step on: mean and range over all steps, ranks and micro-batches in each, of
the attempts that stand; what one of them said again counts each time. NaN in a bucket shows in `mean` and `highest`;
what is rolled up lies where its first step was, and stands while all of its steps do."""


def raw_curve(extents: str) -> str:
    """Return the statement for where nothing is rolled up: it takes two thirds of the time."""
    return f"""\
{_HEAD}
WITH told AS MATERIALIZED (
  {_known(extents)}
),
{_STANDING},
bucket AS (
  SELECT ((step - origin) // width)::SMALLINT AS number, avg(value) AS mean, min(value) AS lowest,
    max(value) AS highest, count(*) AS parts
  FROM scalars, span WHERE {_CHOSEN} AND value IS NOT NULL AND attempts = 1
  GROUP BY number
  UNION ALL
  SELECT ((step - origin) // width)::SMALLINT AS number, avg(value), min(value), max(value), count(*)
  FROM scalars JOIN (FROM standing, span WHERE attempts > 1) ON coalesce(attempt, 0) = of_attempt AND step <= until
  WHERE {_CHOSEN} AND value IS NOT NULL
  GROUP BY number
)
SELECT origin + number * width AS step, mean, lowest, highest, parts FROM bucket, span ORDER BY step
"""


def sole_attempt_curve(extents: str) -> str:
    """Return the same for where all that is read is of attempt 0 as well, as the log knows of most runs.

    Every mention of the scalars costs some 5 ms to plan, and here is one.
    """
    return f"""\
{_HEAD}
WITH span AS MATERIALIZED (
  SELECT origin, {_WIDTH}
  FROM (SELECT min(first_step) AS origin, max(last_step) AS final FROM {extents} WHERE {_NAMED})
)
SELECT origin + number * width AS step, mean, lowest, highest, parts
FROM (
  SELECT ((step - origin) // width)::SMALLINT AS number, avg(value) AS mean, min(value) AS lowest,
    max(value) AS highest, count(*) AS parts
  FROM scalars, span WHERE {_CHOSEN} AND value IS NOT NULL GROUP BY number
), span ORDER BY step
"""


def _known(extents: str) -> str:
    return f"SELECT name, labels, attempt AS of_attempt, first_step, last_step FROM {extents} WHERE {_TELLING}"
