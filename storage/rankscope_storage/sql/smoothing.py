"""SQL text of macros for curves: moving averages, 10th percentile, perplexity, and downsampling.

Averages skip values that are not finite, as the anomaly rules do; the row of such a value has the previous average.
Rows with equal x are ordered by y, for example rows of a step that two attempts trained. `downsample` returns at most
as many points as a screen shows. It divides a series into ranges of x, and keeps the lowest point, the highest point
and the first NaN of each range.
"""

from __future__ import annotations

from typing import Final

from rankscope_storage.sql.macros import Macro

NO_SERIES: Final = "NULL::INTEGER"

# The recursion b = (1 - alpha) b + alpha y, with first b = first y, is a running sum of y / (1 - alpha)^i in a block.
# A block ends before these powers leave the range of a double (e^200). It inherits only the last value of the previous
# block, because older values have a weight below e^-200.
EMA: Final = Macro(
    "ema",
    {"source": None, "x": None, "y": None, "alpha": None, "series": NO_SERIES},
    """\
WITH numbered AS (
  SELECT *, row_number() OVER (PARTITION BY series ORDER BY x NULLS LAST, y NULLS LAST) AS ema_row,
    series AS ema_series, CASE WHEN isfinite(y) THEN y::DOUBLE END AS ema_y,
    CASE WHEN alpha > 0 AND alpha <= 1 THEN 1.0 - alpha::DOUBLE
      ELSE error('ema: alpha, the weight of a new value, must be above 0 and at most 1') END AS decay,
    CASE WHEN alpha < 1 THEN floor(greatest(1, 200 / greatest(-ln(1.0 - alpha::DOUBLE), 1e-13)))::BIGINT ELSE 1 END
      AS block_length
  FROM query_table(source)
),
placed AS (
  SELECT *, count(ema_y) OVER (PARTITION BY ema_series ORDER BY ema_row ROWS UNBOUNDED PRECEDING) - 1 AS ema_position,
    intdiv(greatest(ema_position, 0), block_length) AS block, greatest(ema_position, 0) % block_length AS place
  FROM numbered
),
summed AS (
  SELECT *, pow(decay, place) * sum(CASE WHEN ema_position = 0 THEN 1 ELSE alpha END * ema_y / pow(decay, place)) OVER (
    PARTITION BY ema_series, block ORDER BY ema_row ROWS UNBOUNDED PRECEDING) AS own
  FROM placed
),
block_end AS (
  SELECT ema_series AS of_series, block + 1 AS next_block, max_by(own, ema_row) AS inherited
  FROM summed GROUP BY ema_series, block
)
SELECT summed.* EXCLUDE (ema_row, ema_series, ema_y, decay, block_length, ema_position, block, place, own),
  own + coalesce(inherited * pow(decay, place + 1), 0) AS ema
FROM summed LEFT JOIN block_end ON ema_series IS NOT DISTINCT FROM of_series AND block = next_block
ORDER BY ema_series NULLS LAST, ema_row
""",
)

MOVING_AVERAGE: Final = Macro(
    "moving_average",
    {"source": None, "x": None, "y": None, "width": None, "series": NO_SERIES},
    """\
WITH numbered AS (
  SELECT *, row_number() OVER (PARTITION BY series ORDER BY x NULLS LAST, y NULLS LAST) AS average_row,
    series AS average_series, CASE WHEN isfinite(y) THEN y::DOUBLE END AS average_y
  FROM query_table(source)
)
SELECT * EXCLUDE (average_row, average_series, average_y),
  avg(average_y) OVER recent AS moving_average,
  min(average_y) OVER recent AS moving_min,
  max(average_y) OVER recent AS moving_max
FROM numbered
WINDOW recent AS (PARTITION BY average_series ORDER BY average_row ROWS BETWEEN (width - 1) PRECEDING AND CURRENT ROW)
ORDER BY average_series NULLS LAST, average_row
""",
)

P10: Final = Macro(
    "p10",
    {"source": None, "y": None, "series": NO_SERIES},
    """\
WITH p10_rows AS (
  SELECT *, series AS p10_series, y::DOUBLE AS p10_y FROM query_table(source)
),
p10_of_series AS (
  SELECT p10_series AS of_series, percentile_cont(0.1) WITHIN GROUP (ORDER BY p10_y) AS p10
  FROM p10_rows WHERE isfinite(p10_y) GROUP BY p10_series
)
SELECT p10_rows.* EXCLUDE (p10_series, p10_y), p10, p10_y < p10 AS is_below_p10
FROM p10_rows LEFT JOIN p10_of_series ON p10_series IS NOT DISTINCT FROM of_series
""",
)

# A bucket keeps at most three points: its lowest, its highest, and its first NaN, which has no order. With the first
# and the last point of the series, these are 3 * ((points - 2) // 3) + 2 <= points.
DOWNSAMPLE: Final = Macro(
    "downsample",
    {"source": None, "x": None, "y": None, "points": None, "series": NO_SERIES},
    """\
WITH point AS (
  SELECT line, place, logged, CASE WHEN NOT isnan(logged) THEN logged END AS number,
    CASE WHEN isnan(logged) THEN place END AS nan_place
  FROM (SELECT series AS line, x AS place, y::DOUBLE AS logged FROM query_table(source))
  WHERE place IS NOT NULL AND logged IS NOT NULL
),
extent AS (
  SELECT line AS of_line, count(*) AS total, min(place) AS first_place, max(place) AS last_place,
    CASE WHEN points >= 5 THEN intdiv(points - 2, 3) ELSE error('downsample: ask for at least 5 points') END AS buckets
  FROM point GROUP BY line
),
placed AS (
  SELECT *, CASE WHEN last_place > first_place
    THEN least(floor((place - first_place)::DOUBLE / (last_place - first_place)::DOUBLE * buckets), buckets - 1)
    ELSE 0 END AS bucket
  FROM point JOIN extent ON line IS NOT DISTINCT FROM of_line
),
bucket AS (
  SELECT line, lowest_at(place, number) AS low_place, min(number) AS low,
    highest_at(place, number) AS high_place, max(number) AS high, min(nan_place) AS nan_place
  FROM placed WHERE total > points GROUP BY line, bucket
),
kept AS (
  SELECT line, low_place AS place, low AS logged FROM bucket WHERE low_place IS NOT NULL
  UNION
  SELECT line, high_place, high FROM bucket WHERE high_place IS NOT NULL
  UNION
  SELECT line, nan_place, 'nan'::DOUBLE FROM bucket WHERE nan_place IS NOT NULL
  UNION
  SELECT line, place, min(logged) FROM placed WHERE total > points AND (place = first_place OR place = last_place)
  GROUP BY line, place
  UNION
  SELECT line, place, logged FROM placed WHERE total <= points
)
SELECT line AS "series", place AS "x", logged AS "y" FROM kept
ORDER BY 1 NULLS LAST, 2, 3
""",
)
"""Macro `downsample`: returns at most `points` of the stored points of each series.

x must be a number: convert times with `epoch(ts)`."""
