"""The view `tensor_global`: the statistics of whole tensors, combined from the shards of all ranks."""

from __future__ import annotations

from typing import Final

_OF_A_TENSOR: Final = 'run, attempt, step, micro_step, vpp_stage, kind, tensor, "index", call_seq'
TENSOR_GLOBAL: Final = f"""\
CREATE OR REPLACE VIEW tensor_global AS
WITH part AS (
  -- A rank that measures a step again within an attempt has gone back: only its last row counts.
  SELECT *, placement IS NOT DISTINCT FROM 'shard' AS sharded,
    numel - coalesce(nans, 0) - coalesce(infs, 0) AS finite
  FROM tensor_stats
  QUALIFY row_number() OVER (
    PARTITION BY {_OF_A_TENSOR}, rank ORDER BY coalesce(ordinal, seq) DESC NULLS LAST, ts DESC NULLS LAST) = 1
),
copy AS (
  -- A replica is the whole tensor, and so is a group of shards. Hybrid sharding has several groups.
  SELECT {_OF_A_TENSOR},
    CASE WHEN sharded THEN shard_group END AS of_group, CASE WHEN NOT sharded THEN rank END AS of_rank,
    max(placement) AS placement, count(*) AS parts, min(ts) AS ts,
    sqrt(sum(norm::DOUBLE * norm)) AS norm, min("min") AS "min", max("max") AS "max",
    sum(mean::DOUBLE * finite) FILTER (finite > 0) / sum(finite) FILTER (finite > 0 AND mean IS NOT NULL) AS mean,
    sum(nans)::BIGINT AS nans, sum(infs)::BIGINT AS infs, sum(zeros)::BIGINT AS zeros, sum(numel)::BIGINT AS numel
  FROM part GROUP BY ALL
)
SELECT {_OF_A_TENSOR}, placement,
  (sum(parts) OVER all_copies)::BIGINT AS parts,
  norm, "min", "max", mean,
  -- A NaN or infinity counts, whichever copy contains it.
  max(nans) OVER all_copies AS nans,
  max(infs) OVER all_copies AS infs,
  zeros, numel,
  min(ts) OVER all_copies AS ts
FROM copy
WINDOW all_copies AS (PARTITION BY {_OF_A_TENSOR})
-- A group with a missing rank has fewer elements than a complete one.
QUALIFY row_number() OVER (
  PARTITION BY {_OF_A_TENSOR} ORDER BY numel DESC NULLS LAST, of_group NULLS LAST, of_rank NULLS LAST) = 1
"""
