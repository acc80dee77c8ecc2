"""The view `collective_calls`: one row per collective, from the rows of all ranks of its process group.

The view classifies stored calls into the same states as `rankscope_ingest.runs.collective_calls`, which
classifies the latest reports of the ranks. A rank without a row of a call is reported as missing only if two
conditions hold: its flight record was read after the call, and the rank had not reached the call. In all other cases,
the row may have been overwritten, or may not have been read yet.
"""

from __future__ import annotations

import enum
from typing import Final

from rankscope_storage.base.escaping import sql_string


class CallState(enum.StrEnum):
    """Progress of the ranks of a group with one collective, combined from the flight records of all ranks."""

    NEVER_ENTERED = "never entered"  # at least one rank has not called it
    NEVER_LEFT = "entered, never left"  # all ranks have called it; some have completed it and some have not
    ALL_IN = "all in"  # all ranks have called it and none has completed it
    UNKNOWN = "not known of all"  # all ranks with a record are in it; some ranks have no record
    OVER = "over"  # all ranks with a record have completed it


EVEN: Final = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
"""Collectives in which every rank of the group transfers the same number of bytes."""

_EVEN: Final = "(" + " OR ".join(f"starts_with(trim(LEADING '_' FROM op), {sql_string(name)})" for name in EVEN) + ")"
_STATE: Final = {state.name: sql_string(state) for state in CallState}

COLLECTIVE_CALLS: Final = f"""\
CREATE OR REPLACE VIEW collective_calls AS
WITH entry AS (
  -- Coalesced calls of a group share one number, and numbers start again if the group is created again.
  SELECT *, row_number() OVER (
    PARTITION BY run, attempt, rank, group_id, collective_seq ORDER BY t_start NULLS LAST, call_seq NULLS LAST) AS nth
  FROM collectives
  WHERE group_id IS NOT NULL AND NOT coalesce(is_p2p, false)
),
call AS (
  SELECT run, attempt, group_id, collective_seq, nth,
    min_by("group", rank) FILTER (WHERE "group" IS NOT NULL) AS "group",
    min_by(group_ranks, rank) FILTER (WHERE group_ranks IS NOT NULL) AS group_ranks,
    max(group_size) AS group_size,
    min(step) AS step,
    min_by(op, rank) AS op,
    min_by(dtype, rank) FILTER (WHERE dtype IS NOT NULL) AS dtype,
    max(bytes) AS bytes,
    min_by(call_site, entry_order(t_start, rank)) FILTER (
      WHERE call_site IS NOT NULL AND t_start IS NOT NULL AND rank IS NOT NULL) AS call_site,
    sorted_list(array_agg(rank) FILTER (WHERE rank IS NOT NULL)) AS ranks_entered,
    sorted_list(array_agg(rank) FILTER (WHERE rank IS NOT NULL AND state = 'entered')) AS ranks_waiting,
    min_by(rank, entry_order(t_start, rank)) FILTER (WHERE t_start IS NOT NULL AND rank IS NOT NULL) AS first_rank,
    max_by(rank, entry_order(t_start, rank)) FILTER (WHERE t_start IS NOT NULL AND rank IS NOT NULL) AS last_rank,
    min(t_start) AS first_entered,
    max(t_start) AS last_entered,
    max(duration) AS longest,
    min(duration) AS shortest,
    count(DISTINCT op) > 1 OR count(DISTINCT dtype) > 1
      OR (bool_and({_EVEN}) AND count(DISTINCT bytes) > 1) AS is_mismatch
  FROM entry
  GROUP BY run, attempt, group_id, collective_seq, nth
),
progress AS (
  SELECT run, attempt, group_id, number_by_rank(array_agg(rank), array_agg(latest)) AS latest
  FROM (
    SELECT run, attempt, group_id, rank, coalesce(max(collective_seq), -1) AS latest FROM entry
    WHERE rank IS NOT NULL GROUP BY ALL
  )
  GROUP BY ALL
),
last_read AS (
  SELECT run, attempt, number_by_rank(array_agg(rank), array_agg(read_at)) AS read_at
  FROM (
    SELECT run, attempt, rank, coalesce(max(epoch_us(ts)), -1) AS read_at FROM collectives
    WHERE rank IS NOT NULL GROUP BY ALL
  )
  GROUP BY ALL
),
not_entered AS (
  SELECT call.*, latest, read_at, without(spanned_ranks(group_ranks), ranks_entered) AS others
  FROM call
  JOIN progress USING (run, attempt, group_id)
  JOIN last_read USING (run, attempt)
),
classified AS (
  SELECT *, ranks_behind(others, latest, read_at, collective_seq, epoch_us(last_entered)) AS ranks_missing
  FROM not_entered
)
SELECT run, attempt, group_id, "group", group_ranks, group_size, collective_seq, nth, step, op, dtype, bytes, call_site,
  CASE
    WHEN array_length(ranks_missing) > 0 THEN {_STATE["NEVER_ENTERED"]}
    WHEN array_length(ranks_waiting) = 0 THEN {_STATE["OVER"]}
    WHEN array_length(ranks_waiting) < array_length(ranks_entered) THEN {_STATE["NEVER_LEFT"]}
    WHEN array_length(others) > 0 THEN {_STATE["UNKNOWN"]}
    ELSE {_STATE["ALL_IN"]}
  END AS state,
  is_mismatch, ranks_entered, ranks_missing, ranks_waiting,
  without(others, ranks_missing) AS ranks_unread,
  first_rank, last_rank, first_entered, last_entered,
  (epoch_us(last_entered) - epoch_us(first_entered)) / 1e6 AS spread, shortest, longest
FROM classified
"""
