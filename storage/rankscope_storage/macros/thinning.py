"""`downsample`: as many points as a screen has, of which none that matters is missing. SQL text."""

from __future__ import annotations

from typing import Final

# A bucket keeps its lowest and its highest point and, since no number stands for it, its first NaN: three at most.
# With the first and the last point of the series that makes 3 * ((points - 2) // 3) + 2 <= points.
DOWNSAMPLE: Final = """\
CREATE OR REPLACE MACRO downsample(source, x, y, points, series := NULL) AS TABLE
WITH point AS (
  SELECT line, place, CASE WHEN NOT isnan(told) THEN told END AS number,
    CASE WHEN isnan(told) THEN place END AS nan_place
  FROM (SELECT series AS line, x AS place, y::DOUBLE AS told FROM query_table(source))
  WHERE place IS NOT NULL AND told IS NOT NULL
),
extent AS (
  SELECT line AS of_line, count(*) AS total, min(place) AS first_place, max(place) AS last_place,
    arg_min_null(number, place) AS first_number, arg_max_null(number, place) AS last_number,
    CASE WHEN points >= 5 THEN (points - 2) // 3 ELSE error('downsample: ask for at least 5 points') END AS buckets
  FROM point GROUP BY line
),
bucket AS (
  SELECT line, arg_min(place, number) AS low_place, min(number) AS low,
    arg_max(place, number) AS high_place, max(number) AS high, min(nan_place) AS nan_place
  FROM point JOIN extent ON line IS NOT DISTINCT FROM of_line
  WHERE total > points
  GROUP BY line, CASE WHEN last_place > first_place
    THEN least(floor((place - first_place)::DOUBLE / (last_place - first_place)::DOUBLE * buckets), buckets - 1)
    ELSE 0 END
),
kept AS (
  SELECT line, low_place AS place, low AS number FROM bucket WHERE low_place IS NOT NULL
  UNION
  SELECT line, high_place, high FROM bucket WHERE high_place IS NOT NULL
  UNION
  SELECT line, nan_place, NULL FROM bucket WHERE nan_place IS NOT NULL
  UNION
  SELECT of_line, first_place, first_number FROM extent WHERE total > points
  UNION
  SELECT of_line, last_place, last_number FROM extent WHERE total > points
  UNION
  SELECT line, place, number FROM point JOIN extent ON line IS NOT DISTINCT FROM of_line WHERE total <= points
)
SELECT line AS series, place AS x, coalesce(number, 'nan'::DOUBLE) AS y FROM kept
ORDER BY 1, 2
"""
"""At most `points` points of each series, all of them stored ones: x is a number, times go by `epoch(ts)`."""
