"""Latest lost records, firings, incidents and events of each run, as gauges of the service's metrics page.

Alert rules compare each age with a time window. The ages do not depend on the clocks of the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import Gauge

from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_ingest.runs.incident import Incident

REMEMBER_SECONDS: Final = 3600.0
"""Time in seconds for which the age of an incident is exported after the latest firing of the incident.

Alert rules compare the age with a time window that is shorter than this time.
"""


class Ages:
    """The times of the latest loss of records, firings, incidents and events of each run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create an object without any times. `clock` returns the current time in monotonic seconds."""
        self._clock = clock
        self._lost_at: dict[str, float] = {}  # by run
        self._fired_at: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)  # by run and label values
        self._incidents: dict[tuple[str, ...], Incident] = {}  # by label values
        self._events: defaultdict[str, dict[str, float]] = defaultdict(dict)  # UTC seconds by run and type

    def lost(self, run: str) -> None:
        """Record that records of a run were lost now."""
        self._lost_at[run] = self._clock()

    def fired(self, run: str, labels: tuple[str, ...]) -> None:
        """Record that the service received a firing now.

        `labels` are the label values of the counter that counts the firing: run, rank, rule and kind.
        """
        self._fired_at[run][labels] = self._clock()

    def happened(self, run: str, events: Mapping[str, float]) -> None:
        """Record the times of the latest events of a run, in UTC seconds by type of event."""
        known = self._events[run]
        known.update({kind: max(at, known.get(kind, at)) for kind, at in events.items()})

    def settled(self, incident: Incident) -> None:
        """Export the age of `incident` from now on, unless it is muted.

        The labels describe the first firing of the incident.
        """
        if incident.is_muted:
            return
        first = incident.first
        rank = catalogue.UNKNOWN_RANK if first.rank is None else str(first.rank)
        step = "" if first.step is None else str(first.step)
        tensor = (first.kind or "", first.tensor or "", first.op or "")
        self._incidents[first.run, rank, first.rule or "Anomaly", incident.severity, *tensor, step] = incident

    def keep(self, runs: set[str]) -> list[tuple[str, ...]]:
        """Forget the times of all runs that are not in `runs`.

        Return the label values (run, rank, rule and kind) of the forgotten firings.
        """
        self._lost_at = {run: at for run, at in self._lost_at.items() if run in runs}
        for run in self._events.keys() - runs:
            del self._events[run]
        oldest = self._clock() - REMEMBER_SECONDS
        self._incidents = {
            labels: incident
            for labels, incident in self._incidents.items()
            if incident.first.run in runs and incident.seen_at >= oldest
        }
        return [labels for run in self._fired_at.keys() - runs for labels in self._fired_at.pop(run)]

    def show(self, cleared: Callable[[MetricSpec], Gauge]) -> None:
        """Set the gauges of the ages. `cleared` removes all series of the gauge of a metric and returns the gauge."""
        now = self._clock()
        losses, firings = cleared(catalogue.LOST_RECORDS_AGE), cleared(catalogue.ANOMALIES_INGESTED_AGE)
        incidents = cleared(catalogue.INCIDENT_AGE)
        for run, at in self._lost_at.items():
            losses.labels(run).set(now - at)
        for labels, at in (item for fired in self._fired_at.values() for item in fired.items()):
            firings.labels(*labels).set(now - at)
        events = cleared(catalogue.EVENT_LAST)
        for run, times in self._events.items():
            for kind, at in times.items():
                events.labels(run, kind).set(at)
        for labels, incident in self._incidents.items():
            incidents.labels(*labels).set(now - incident.seen_at)
