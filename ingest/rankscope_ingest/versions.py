"""Rows of `runs`, `attempts` and `tensors`: a new version whenever something about them changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from rankscope_ingest.channel.plans import PlanColumns
from rankscope_ingest.lifecycle.runs import ENDED, Attempt, AttemptKey
from rankscope_ingest.rows import Stamp, attempt_row, run_row
from rankscope_ingest.tables import FROM_INGEST, rows_table
from rankscope_ingest.target import Target

REFRESH_MICROSECONDS: Final = 60_000_000
"""A run that goes on gets a new version this often, so that its last step is about right after a crash."""


class Versions:
    """Knows what was written last. `stamp` gives a moment and a place in the order of arrival."""

    def __init__(self, stamp: Callable[[], Stamp], run_starts: Mapping[str, int]) -> None:
        self._stamp = stamp
        self._run_starts = dict(run_starts)
        self._written_at: dict[AttemptKey, int] = {}
        self._known_plans: set[tuple[str, int, str]] = set()

    def of_attempt(self, attempt: Attempt, *, is_latest: bool) -> dict[str, pa.Table]:
        """Return a version of the attempt, and of its run when that is the run's latest."""
        stamp = self._stamp()
        self._written_at[attempt.key] = stamp.ts
        start = self._run_starts.setdefault(attempt.run, attempt.started_at)
        tables = {"attempts": rows_table("attempts", [attempt_row(attempt, stamp)])}
        if is_latest:
            tables["runs"] = rows_table("runs", [run_row(attempt, start, stamp)])
        return tables

    def due(self, attempts: Iterable[Attempt], wall: int) -> list[Attempt]:
        """Return the attempts that go on and were last written long ago."""
        return [
            attempt
            for attempt in attempts
            if attempt.state not in ENDED
            and wall - self._written_at.setdefault(attempt.key, wall) >= REFRESH_MICROSECONDS
        ]

    def of_tensors(self, target: Target, plans: Mapping[str, PlanColumns]) -> pa.Table | None:
        """Return the tensors of plans that are new in this attempt; the ranks of a launch mostly share theirs."""
        tables = []
        for plan_id, plan in plans.items():
            known = (target.registration.run, target.attempt, plan_id)
            if known not in self._known_plans:
                self._known_plans.add(known)
                # A place in the order of arrival for each: the plan has the order of the model, and of its calls.
                tables.append(plan.dimension_rows(lambda: self._tensor_columns(target)))
        return pa.concat_tables(tables) if tables else None

    def _tensor_columns(self, target: Target) -> dict[str, Any]:
        who, stamp = target.registration, self._stamp()
        place = {"run": who.run, "attempt": target.attempt, "rank": who.rank}
        return place | {"ts": stamp.ts, "ordinal": stamp.ordinal, "ts_origin": FROM_INGEST}
