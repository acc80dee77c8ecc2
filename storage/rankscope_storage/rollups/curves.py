"""What stays of a curve whose steps are rolled up: a point per bucket, where its last step was. SQL text."""

from __future__ import annotations

from typing import Final

ROLLED_STEPS: Final = """\
SELECT run, name, labels, coalesce(attempt, 0) AS attempt, max(last_step) AS step, min(first_step) AS first_step,
    max(ts) AS ts, count(*) AS parts,
    CASE WHEN sum(value_count) > 0 THEN sum(value_avg * value_count) / sum(value_count)
      WHEN sum(value_nans) > 0 THEN 'nan'::DOUBLE ELSE 'inf'::DOUBLE END AS value,
    min(value_min) AS lowest, max(value_max) AS highest
  FROM scalar_rollups WHERE step IS NOT NULL AND (value_count > 0 OR nonfinite_rows > 0)
  GROUP BY run, name, labels, coalesce(attempt, 0), scalar_rollups.step"""
"""The mean of a bucket over the finite numbers of all ranks and micro-batches, and not finite where none is."""
