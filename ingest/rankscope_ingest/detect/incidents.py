"""From thousands of anomaly events to the few messages a person wants: one incident per cause. Pure, clock injected.

All anomalies of an attempt whose steps lie within `quiet_steps` of each other belong to one incident, whatever rule,
tensor or rank they name: one bad gradient shows in every reduced gradient and moment after it. Two things open another
incident: a pause of more than `quiet_steps`, and a later step that is worse than what was announced.
An incident is named by its causally first event. It settles when all live ranks have passed its first step, or after
`group_wait_seconds`, and is announced once. After a restart it also waits for ranks that have not come back yet: the
first cause may be theirs. One that is over is remembered: what a rank tells of it that could not be read in all that
time is an echo, no news.

**Never twice.** Settling writes a row (`incident`, state `opened`) and commits it together with the records that caused
it, then the message goes out, then a row `notified` follows. A service that starts reads these rows back: records at or
below the watermark are never fetched again, so they cannot open an incident again; what comes later joins the restored
one. A message is repeated only if the service was killed between its delivery and the commit of `notified` (some ten
milliseconds), and then it says so, under the same key.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_ingest.notify.incident import Incident, Symptom, incident_key, urgency
from rankscope_ingest.notify.text import run_failed
from rankscope_ingest.runs.models import Attempt
from rankscope_ingest.runs.root_cause import CLOCKS_DIFFER_MICROSECONDS, last_reports
from rankscope_ingest.runs.tracker import AttemptKey

ANNOUNCED_PER_HOUR: Final = 30
"""Per run. A rule with a poor threshold must not flood people; what is muted is still stored and counted."""

_HOUR_SECONDS: Final = 3600.0
_REMEMBERED: Final = 256
"""Incidents that are over, of all runs together."""


class IncidentTracker:
    """Open incidents by attempt."""

    def __init__(self, *, group_wait_seconds: float, quiet_steps: int) -> None:
        self._group_wait_seconds = group_wait_seconds
        self._quiet_steps = quiet_steps
        self._open: dict[AttemptKey, list[Incident]] = defaultdict(list)
        self._over: deque[Incident] = deque(maxlen=_REMEMBERED)
        self._announced_at: dict[str, deque[float]] = defaultdict(deque)

    def observe(self, symptom: Symptom, now: float) -> Incident | None:
        """Take a symptom; return the incident it opened, or None when it joined one."""
        key = symptom.run, symptom.attempt
        incidents = self._open[key]
        for incident in reversed(incidents):
            if self._belongs(symptom, incident):
                _join(incident, symptom)
                return None
        if any(incident.attempt_key == key and self._belongs(symptom, incident) for incident in self._over):
            return None
        incident = Incident(
            first=symptom,
            severity=symptom.severity,
            opened_at=now,
            last_step=symptom.step,
            ranks=set() if symptom.rank is None else {symptom.rank},
        )
        incident.events = symptom.events
        incidents.append(incident)
        return incident

    def restore(self, incident: Incident) -> None:
        """Put back an incident that was open when a former service stopped."""
        self._open[incident.attempt_key].append(incident)

    def remember(self, incident: Incident) -> None:
        """Know of an incident that is over. All live ranks have passed it: only one that is late can tell of it."""
        if incident.last_step is not None:
            self._over.append(incident)

    def unsettled(self) -> list[Incident]:
        """Return the incidents that still wait for other ranks."""
        return [incident for incidents in self._open.values() for incident in incidents if not incident.is_settled]

    def settle(
        self,
        now: float,
        steps: Mapping[AttemptKey, Mapping[int, int | None]],
        arriving: Collection[AttemptKey] = (),
    ) -> list[Incident]:
        """Return the incidents to announce now. `steps` holds the last step of each live rank by attempt.

        `arriving` are the attempts some of whose ranks are known but could not be read yet.
        """
        settled = []
        for incident in self.unsettled():
            key = incident.attempt_key
            waited = now - incident.opened_at >= self._group_wait_seconds and key not in arriving
            if waited or _all_passed(steps.get(key, {}), incident.first.step):
                incident.is_settled, incident.fixed_key = True, incident_key(incident.first)
                self._spend(incident, now)
                settled.append(incident)
        return settled

    def resolve(self, steps: Mapping[AttemptKey, Mapping[int, int | None]]) -> list[Incident]:
        """Return and drop the settled incidents that are over: quiet on all live ranks, or no rank lives any more."""
        resolved = []
        for key, incidents in list(self._open.items()):
            live = steps.get(key, {})
            over = [incident for incident in incidents if incident.is_settled and self._is_over(incident, live)]
            self._open[key] = [incident for incident in incidents if incident not in over]
            if not self._open[key]:
                del self._open[key]
            resolved += over
        for incident in resolved:
            self.remember(incident)
        return resolved

    def _belongs(self, symptom: Symptom, incident: Incident) -> bool:
        first, last = incident.first.step, incident.last_step
        if symptom.step is None or first is None or last is None:
            return True  # without steps nothing tells causes apart
        if not first - self._quiet_steps <= symptom.step <= last + self._quiet_steps:
            return False
        # People were told of something milder: what is worse and later is news. Before that it is part of the message.
        return not incident.is_settled or symptom.step <= first or not _is_worse(symptom, incident)

    def _is_over(self, incident: Incident, live: Mapping[int, int | None]) -> bool:
        if incident.last_step is None:
            return not live
        return _all_passed(live, incident.last_step + self._quiet_steps + 1)

    def _spend(self, incident: Incident, now: float) -> None:
        """Mute the incident when its run had its share of messages within the hour."""
        times = self._announced_at[incident.first.run]
        while times and now - times[0] >= _HOUR_SECONDS:
            times.popleft()
        incident.is_muted = len(times) >= ANNOUNCED_PER_HOUR
        if not incident.is_muted:
            times.append(now)
            incident.is_last_before_mute = len(times) == ANNOUNCED_PER_HOUR


def _is_worse(symptom: Symptom, incident: Incident) -> bool:
    return symptom.urgency > urgency(incident.severity)


def _join(incident: Incident, symptom: Symptom) -> None:
    incident.events += symptom.events
    if symptom.rank is not None:
        incident.ranks.add(symptom.rank)
    if symptom.step is not None:
        incident.last_step = symptom.step if incident.last_step is None else max(incident.last_step, symptom.step)
    if not incident.is_settled and symptom.causal < incident.first.causal:
        incident.first = symptom
    if not incident.is_settled and _is_worse(symptom, incident):
        incident.severity = symptom.severity


def _all_passed(live: Mapping[int, int | None], step: int | None) -> bool:
    """Return whether every live rank delivered `step`; vacuously so when none lives."""
    if step is None:
        return not live
    return all(last is not None and last >= step for last in live.values())


CLEAR_SECONDS: Final = CLOCKS_DIFFER_MICROSECONDS / 1e6
"""A rank that is heard of so long after the failure was found did not fail at the same time."""


class FailureAlerts:
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
        return attempt.culprit is not None and all(rank.liveness.last_sign - found_at >= CLEAR_SECONDS for rank in live)

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
