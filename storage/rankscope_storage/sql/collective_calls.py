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

_EVEN: Final = "(" + " OR ".join(f"starts_with(ltrim(op, '_'), {sql_string(name)})" for name in EVEN) + ")"
_STATE: Final = {state.name: sql_string(state) for state in CallState}

COLLECTIVE_CALLS: Final = f"""\
CREATE OR REPLACE VIEW collective_calls AS
WITH entry AS (
  -- Coalesced calls of a group share one number, and numbers start again if the group is created again.
  SELECT *, row_number() OVER (PARTITION BY run, attempt, rank, group_id, collective_seq ORDER BY t_start) AS nth
  FROM collectives
  WHERE group_id IS NOT NULL AND NOT coalesce(is_p2p, false)
),
call AS (
  SELECT run, attempt, group_id, collective_seq, nth,
    arg_min("group", rank) AS "group",
    arg_min(group_ranks, rank) AS group_ranks,
    max(group_size) AS group_size,
    min(step) AS step,
    arg_min(op, rank) AS op,
    arg_min(dtype, rank) AS dtype,
    max(bytes) AS bytes,
    arg_min(call_site, t_start) AS call_site,
    list_sort(list(rank)) AS ranks_entered,
    coalesce(list_sort(list(rank) FILTER (state = 'entered')), []) AS ranks_waiting,
    arg_min(rank, t_start) AS first_rank,
    arg_max(rank, t_start) AS last_rank,
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
  SELECT run, attempt, group_id, map(list(rank), list(latest)) AS latest
  FROM (SELECT run, attempt, group_id, rank, max(collective_seq) AS latest FROM entry GROUP BY ALL)
  GROUP BY ALL
),
last_read AS (
  SELECT run, attempt, map(list(rank), list(read_at)) AS read_at
  FROM (SELECT run, attempt, rank, max(ts) AS read_at FROM collectives WHERE rank IS NOT NULL GROUP BY ALL)
  GROUP BY ALL
),
not_entered AS (
  SELECT call.*, latest, read_at,
    list_filter(
      flatten(list_transform(string_split(coalesce(group_ranks, ''), ','), lambda span:
        range(try_cast(split_part(span, '-', 1) AS INTEGER),
          coalesce(try_cast(split_part(span, '-', 2) AS INTEGER), try_cast(span AS INTEGER)) + 1))),
      lambda member: NOT list_contains(ranks_entered, member::INTEGER)) AS others
  FROM call
  JOIN progress USING (run, attempt, group_id)
  JOIN last_read USING (run, attempt)
),
classified AS (
  SELECT * EXCLUDE (latest, read_at, others),
    list_filter(coalesce(others, []), lambda member: coalesce(latest[member::INTEGER], -1) < collective_seq
      AND coalesce(read_at[member::INTEGER] > last_entered, false))::INTEGER[] AS ranks_missing,
    coalesce(others, [])::INTEGER[] AS others
  FROM not_entered
)
SELECT run, attempt, group_id, "group", group_ranks, group_size, collective_seq, nth, step, op, dtype, bytes, call_site,
  CASE
    WHEN len(ranks_missing) > 0 THEN {_STATE["NEVER_ENTERED"]}
    WHEN len(ranks_waiting) = 0 THEN {_STATE["OVER"]}
    WHEN len(ranks_waiting) < len(ranks_entered) THEN {_STATE["NEVER_LEFT"]}
    WHEN len(others) > 0 THEN {_STATE["UNKNOWN"]}
    ELSE {_STATE["ALL_IN"]}
  END AS state,
  is_mismatch, ranks_entered, ranks_missing, ranks_waiting,
  list_filter(others, lambda member: NOT list_contains(ranks_missing, member)) AS ranks_unread,
  first_rank, last_rank, first_entered, last_entered,
  epoch(last_entered - first_entered) AS spread, shortest, longest
FROM classified
"""
