"""Announces each failed attempt once, when no further report can change which rank failed first. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rankscope_contract.events import RunState
from rankscope_ingest.alerting.incidents import Incident
from rankscope_ingest.alerting.messages import run_failed
from rankscope_ingest.lifecycle.causes import CLOCKS_DIFFER_MICROSECONDS
from rankscope_ingest.lifecycle.last_reports import last_reports
from rankscope_ingest.lifecycle.lives import Attempt

CLEAR_SECONDS: Final = CLOCKS_DIFFER_MICROSECONDS / 1e6
"""A rank that is heard of so long after the failure was found did not fail at the same time."""


class FailureBook:
    """Remembers the announced failures. `told` are the keys of those that former services announced."""

    def __init__(self, told: Iterable[str], *, wait_seconds: float) -> None:
        """Wait at most `wait_seconds` for ranks that may have failed first or at the same time."""
        self._told = set(told)
        self._wait_seconds = wait_seconds

    def due(self, attempts: Iterable[Attempt], now: float) -> list[Incident]:
        """Return the failures to announce now, each once."""
        failed = (attempt for attempt in attempts if attempt.state is RunState.FAILED)
        return [failure for attempt in failed if self._is_clear(attempt, now) and (failure := self._tell(attempt, now))]

    def _is_clear(self, attempt: Attempt, now: float) -> bool:
        """Return whether no further report can change which rank was first."""
        since, live = attempt.settled_at, attempt.live_ranks
        if since is None or not live or now - since >= self._wait_seconds:
            return True
        found_at = since if attempt.judged_at is None else attempt.judged_at
        return attempt.culprit is not None and all(rank.vitals.last_sign - found_at >= CLEAR_SECONDS for rank in live)

    def _tell(self, attempt: Attempt, now: float) -> Incident | None:
        incident = run_failed(
            run=attempt.run,
            attempt=attempt.number,
            rank=attempt.culprit,
            step=attempt.last_step,
            reason=attempt.reason or "",
            cause=attempt.evidence or "unknown",
            reports=() if attempt.culprit is not None else last_reports(attempt, now),
            opened_at=now,
        )
        if incident.key in self._told:
            return None
        self._told.add(incident.key)
        return incident
