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

import hashlib
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from rankscope_ingest.alerting.symptoms import Symptom, urgency
from rankscope_ingest.lifecycle.runs import AttemptKey

ANNOUNCED_PER_HOUR: Final = 30
"""Per run. A rule with a poor threshold must not flood people; what is muted is still stored and counted."""

_HOUR_SECONDS: Final = 3600.0
_REMEMBERED: Final = 256
"""Incidents that are over, of all runs together."""


@dataclass(slots=True, kw_only=True)
class Incident:
    """Anomalies of one cause."""

    first: Symptom
    severity: str
    opened_at: float
    last_step: int | None
    events: int = 0
    ranks: set[int] = field(default_factory=set)
    is_settled: bool = False
    is_muted: bool = False
    is_last_before_mute: bool = False
    cause: str | None = None  # the evidence against the rank, or why none is singled out
    reports: tuple[str, ...] = ()  # the last step and report of each rank, where no rank is singled out
    lines: tuple[str, ...] = ()  # which ranks wait where
    fixed_key: str | None = None  # set when it settles, so that a later first cause does not rename it

    @property
    def attempt_key(self) -> AttemptKey:
        """Return the run and attempt it belongs to."""
        return self.first.run, self.first.attempt

    @property
    def key(self) -> str:
        """Return what identifies the incident, equal whenever the same records are judged again."""
        return self.fixed_key or incident_key(self.first)

    def awaited(self, live: Mapping[int, int | None]) -> list[int]:
        """Return the live ranks that have not delivered the first step yet."""
        step = self.first.step
        return [] if step is None else [rank for rank, last in live.items() if last is None or last < step]


def incident_key(first: Symptom) -> str:
    """Return a short text that the same first cause always has."""
    parts = (first.run, first.attempt, first.step, first.rank, first.kind, first.tensor, first.rule)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class IncidentBook:
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
