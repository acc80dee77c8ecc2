CREATE OR REPLACE VIEW old_history AS
WITH logged AS (
  SELECT run, name, labels, coalesce(attempt, 0) AS attempt, step, rank, micro_step, max(ts) AS ts,
    arg_max(value, coalesce(ordinal, seq, 0)) AS value
  FROM scalars WHERE step IS NOT NULL AND value IS NOT NULL
  GROUP BY run, name, labels, coalesce(attempt, 0), step, rank, micro_step
),
per_step AS (
  SELECT run, name, labels, attempt, step, step AS first_step, min(ts) AS ts, count(*) AS parts,
    avg(value) AS value, min(value) AS lowest, max(value) AS highest
  FROM logged GROUP BY run, name, labels, attempt, step
  UNION ALL
  SELECT run, name, labels, coalesce(attempt, 0) AS attempt, max(last_step) AS step, min(first_step) AS first_step,
    max(ts) AS ts, count(*) AS parts,
    CASE WHEN sum(value_count) > 0 THEN sum(value_avg * value_count) / sum(value_count)
      WHEN sum(value_nans) > 0 THEN 'nan'::DOUBLE ELSE 'inf'::DOUBLE END AS value,
    min(value_min) AS lowest, max(value_max) AS highest
  FROM scalar_rollups WHERE step IS NOT NULL AND (value_count > 0 OR nonfinite_rows > 0)
  GROUP BY run, name, labels, coalesce(attempt, 0), scalar_rollups.step
),
extent AS NOT MATERIALIZED (  -- otherwise a condition on the name would not reach the rows
  SELECT run, name, labels, attempt, min(first_step) AS first_step, max(step) AS last_step
  FROM per_step GROUP BY run, name, labels, attempt
),
training AS (
  SELECT run, attempt, min(first_step) AS first_step, max(last_step) AS last_step
  FROM (
    SELECT run, coalesce(attempt, 0) AS attempt, step AS first_step, step AS last_step FROM scalars WHERE name = 'loss' AND step IS NOT NULL AND value IS NOT NULL AND coalesce(NOT contains(labels, '"imported_from":'), true)
    UNION ALL
    SELECT run, coalesce(attempt, 0), first_step, last_step FROM scalar_rollups
    WHERE name = 'loss' AND step IS NOT NULL AND coalesce(NOT contains(labels, '"imported_from":'), true)
  )
  GROUP BY run, attempt
),
following AS (
  SELECT run, name, labels FROM extent JOIN training USING (run, attempt)
  WHERE coalesce(NOT contains(labels, '"imported_from":'), true) GROUP BY run, name, labels
  HAVING name = 'loss' OR max_by(extent.last_step BETWEEN training.last_step / 2 AND 2 * training.last_step, extent.last_step)
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
),
repeated AS (
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
SELECT run, name, labels, attempt, step, step + steps_before AS cumulative_step, ts, parts, value, lowest, highest,
  coalesce(step < overwritten_from, true) AS stands, first_step
FROM per_step JOIN counted ON attempt = of_attempt AND run = of_run AND name = of_name AND labels IS NOT DISTINCT FROM of_labels
;
