"""Which failed attempts people must be told of, once each, and not before it is clear which rank was first. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rankscope_contract.events import RunState
from rankscope_ingest.alerting.incidents import Incident
from rankscope_ingest.alerting.messages import run_failed
from rankscope_ingest.lifecycle.lives import Attempt


class FailureBook:
    """Remembers what was told. `told` are the keys of former services."""

    def __init__(self, told: Iterable[str], *, wait_seconds: float) -> None:
        """Wait at most `wait_seconds` for the rank that was really first."""
        self._told = set(told)
        self._wait_seconds = wait_seconds

    def due(self, attempts: Iterable[Attempt], now: float) -> list[Incident]:
        """Return what to tell now: who lost its peer speaks up before the peer is found to be gone."""
        failed = (attempt for attempt in attempts if attempt.state is RunState.FAILED)
        return [failure for attempt in failed if self._is_clear(attempt, now) and (failure := self._tell(attempt, now))]

    def _is_clear(self, attempt: Attempt, now: float) -> bool:
        since = attempt.settled_at
        return attempt.is_culprit_sure or since is None or now - since >= self._wait_seconds

    def _tell(self, attempt: Attempt, now: float) -> Incident | None:
        incident = run_failed(
            run=attempt.run,
            attempt=attempt.number,
            rank=attempt.culprit or 0,
            step=attempt.last_step,
            reason=attempt.reason or "",
            opened_at=now,
        )
        if incident.key in self._told:
            return None
        self._told.add(incident.key)
        return incident
