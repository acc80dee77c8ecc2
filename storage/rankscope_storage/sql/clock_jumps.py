"""SQL text of the view of clock jumps, and of relations whose times are corrected by them.

A rank reports a jump if its wall clock and its monotonic clock move apart by more than 2 s from one record to the next.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.events import EventType
from rankscope_storage.sql.scalar_history import POSITIONS

JUMPS: Final = "clock_jumps"
"""Name of the view."""

IS_JUMP: Final = f"type = '{EventType.CLOCK}' AND incarnation IS NOT NULL AND seq IS NOT NULL"
"""SQL condition that selects the rows of `events` which are jumps of a rank's clock."""

_CLOCK_JUMPS: Final = f"""\
CREATE OR REPLACE VIEW {JUMPS} AS
SELECT run, attempt, rank, incarnation, seq, step, ts, value AS seconds, offset_us,
  lead(seq, 1, 9223372036854775807) OVER (PARTITION BY run, incarnation ORDER BY seq) AS next_seq
FROM (
  SELECT *, CASE WHEN json_valid(details) THEN TRY_CAST(details->>'$.offset_us' AS BIGINT) END AS offset_us
  FROM events WHERE {IS_JUMP}
) WHERE offset_us IS NOT NULL
"""
"""View with one row per jump of a rank's clock. `seconds` is negative if the clock was set back.

`offset_us` is the sum of the jumps of the process so far, in microseconds. It applies to the records of the process
with the numbers from `seq` up to, but not including, `next_seq`."""


TIMED: Final = {f"{name}_without_jumps": name for name in ("scalars", "events", POSITIONS)}
"""Views with the rows of another view, in which `ts` is the time without the jumps of the clock. The value is the name
of the other view."""


def _timed(name: str, source: str) -> str:
    return f"""\
CREATE OR REPLACE VIEW {name} AS
SELECT own.* REPLACE (
  CASE WHEN offset_us IS NULL THEN own.ts ELSE make_timestamptz(epoch_us(own.ts) - offset_us) END AS ts)
FROM {source} AS own LEFT JOIN {JUMPS} AS jump ON own.run = jump.run AND own.incarnation = jump.incarnation
  AND own.seq >= jump.seq AND own.seq < jump.next_seq
"""


_SCALARS, _EVENTS, TIMED_POSITIONS = (_timed(name, source) for name, source in TIMED.items())
STATEMENTS: Final = (_CLOCK_JUMPS, _SCALARS, _EVENTS)

NO_JUMPS: Final = {JUMPS: _CLOCK_JUMPS.replace(f"WHERE {IS_JUMP}", "WHERE false")} | {
    name: f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {source}" for name, source in TIMED.items()
}
"""Cheaper definitions of JUMPS and of the views in TIMED, for runs without a jump.

The join took a quarter of a query's time."""
