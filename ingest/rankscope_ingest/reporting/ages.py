"""Times since the latest lost records, firings and incidents of each run, as gauges of the service's metrics page.

Alerts compare these ages with a window. The ages do not depend on the clocks of the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final

from prometheus_client import Gauge

from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_ingest.runs.incident import Incident

REMEMBER_SECONDS: Final = 3600.0
"""Time in seconds after its latest firing for which an incident is exported. The window of an alert is shorter."""


class Ages:
    """Times of the latest lost records, firings and incidents."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._lost_at: dict[str, float] = {}  # by run
        self._fired_at: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)  # by run and label values
        self._incidents: dict[tuple[str, ...], Incident] = {}  # by label values

    def lost(self, run: str) -> None:
        """Record that records of a run were lost now."""
        self._lost_at[run] = self._clock()

    def fired(self, run: str, labels: tuple[str, ...]) -> None:
        """Record that the service received a firing now. `labels` are the label values of its counter."""
        self._fired_at[run][labels] = self._clock()

    def settled(self, incident: Incident) -> None:
        """Export `incident` from now on, with its first firing as labels, unless it is muted."""
        if incident.is_muted:
            return
        first = incident.first
        rank = catalogue.UNKNOWN_RANK if first.rank is None else str(first.rank)
        step = "" if first.step is None else str(first.step)
        tensor = (first.kind or "", first.tensor or "", first.op or "")
        self._incidents[first.run, rank, first.rule or "Anomaly", incident.severity, *tensor, step] = incident

    def keep(self, runs: set[str]) -> list[tuple[str, ...]]:
        """Forget all runs that are not in `runs`; return the label values of the firings that are forgotten."""
        self._lost_at = {run: at for run, at in self._lost_at.items() if run in runs}
        oldest = self._clock() - REMEMBER_SECONDS
        self._incidents = {
            labels: incident
            for labels, incident in self._incidents.items()
            if incident.first.run in runs and incident.seen_at >= oldest
        }
        return [labels for run in self._fired_at.keys() - runs for labels in self._fired_at.pop(run)]

    def show(self, cleared: Callable[[MetricSpec], Gauge]) -> None:
        """Set the gauges. `cleared` returns the gauge of a metric without series."""
        now = self._clock()
        losses, firings = cleared(catalogue.LOST_RECORDS_AGE), cleared(catalogue.ANOMALIES_INGESTED_AGE)
        incidents = cleared(catalogue.INCIDENT_AGE)
        for run, at in self._lost_at.items():
            losses.labels(run).set(now - at)
        for labels, at in (item for fired in self._fired_at.values() for item in fired.items()):
            firings.labels(*labels).set(now - at)
        for labels, incident in self._incidents.items():
            incidents.labels(*labels).set(now - incident.seen_at)
