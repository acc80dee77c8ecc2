"""The view of what should be equal on several ranks and is not, step by step. SQL text, like all views."""

from __future__ import annotations

from typing import Final

DESYNC: Final = """\
CREATE OR REPLACE VIEW desync AS
WITH latest AS (
  SELECT * FROM hashes WHERE rank IS NOT NULL AND replicas IS NOT NULL
  QUALIFY row_number() OVER (
    PARTITION BY run, attempt, step, vpp_stage, kind, tensor, replicas, rank ORDER BY ordinal DESC NULLS LAST) = 1
),
camp AS (
  SELECT run, attempt, step, vpp_stage, kind, tensor, replicas, hash, list(rank ORDER BY rank) AS members,
    count(*) AS size, min(norm) AS least, max(norm) AS most, min(ts) AS ts
  FROM latest GROUP BY run, attempt, step, vpp_stage, kind, tensor, replicas, hash
),
told AS (
  SELECT run, attempt, step, vpp_stage, kind, tensor, replicas, count(*) AS hashes, sum(size)::BIGINT AS ranks,
    list({hash: hash, members: members, size: size} ORDER BY size DESC, members) AS camps,
    min(least) AS norm_min, max(most) AS norm_max, min(ts) AS ts
  FROM camp GROUP BY run, attempt, step, vpp_stage, kind, tensor, replicas
)
SELECT run, attempt, step, vpp_stage, kind, tensor, replicas, hashes, ranks,
  -- The largest camp is right where there is one; two ranks that differ are both named.
  CASE WHEN camps[1].size > camps[2].size
    THEN list_sort(flatten(list_transform(camps[2:], lambda camp: camp.members)))
    ELSE list_sort(flatten(list_transform(camps, lambda camp: camp.members))) END AS apart,
  CASE WHEN camps[1].size > camps[2].size THEN camps[1].hash END AS majority,
  norm_min, norm_max, ts
FROM told WHERE hashes > 1
"""
"""A row for each tensor and step: the ranks that disagree with the others, all of them where no camp is the largest."""
