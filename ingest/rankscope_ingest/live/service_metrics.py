"""Metrics that the service exports on its `/metrics` page.

The metrics are defined in `rankscope_contract.metrics.catalogue`. They are in a separate Prometheus registry.

The latest lost records, firings, incidents and events of each run are gauges of this page. Alert rules compare each age
with a time window. The ages do not depend on the clocks of the ranks.
"""

from __future__ import annotations

import re
import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_contract.model.events import RULES_OF_MACHINES, RunState
from rankscope_ingest.live.progress import RunProgress
from rankscope_ingest.runs.incident import Incident, Symptom
from rankscope_ingest.runs.models import Attempt, Health, Target
from rankscope_storage.base import service_catalogue
from rankscope_storage.base.rule_names import RUN_FAILED
from rankscope_storage.maintenance.compaction import CompactionReport

REMEMBER_SECONDS: Final = 3600.0
"""Time in seconds for which the age of an incident is exported after the latest firing of the incident.

Alert rules compare the age with a time window that is shorter than this time.
"""


FAILURE_REASONS: Final = (
    "timeout",
    "refused",
    "connection",
    "cut",
    "garbage",
    "schema",
    "unauthorized",
    "tls",
    "redirect",
    "forbidden",
    "cursor",
    "busy",
    "replaced",
    "status",
    "spool",
)
"""All values of the label `reason` of the counter of failed polls."""

_INITIAL_LABELS: Final = {
    service_catalogue.COMPACTED_FILES: ("removed", "added"),
    service_catalogue.SCRAPE_FAILURES: FAILURE_REASONS,
    service_catalogue.NOTIFICATIONS: ("sent", "failed", "muted"),
    service_catalogue.NOTIFICATION_ATTEMPTS: ("sent", "failed"),
    service_catalogue.EXPORTER_SCRAPES: ("ok", "failed", "skipped"),
    service_catalogue.EXPORTER_SAMPLES: ("layout", "exact"),
    service_catalogue.EXPORTER_SAMPLES_DROPPED: ("doubled", "repeated", "out_of_bounds"),
    service_catalogue.REMOTE_WRITE_REQUESTS: (
        "ok",
        "repeated",
        "busy",
        "malformed",
        "too_large",
        "unsupported",
        "refused",
    ),
    service_catalogue.REMOTE_WRITE_DROPPED: ("exemplar", "histogram", "metadata", "oversized", "repeated"),
}
"""Label values with which counters are created at the start of the service, with value 0.

Otherwise Prometheus would miss the first increase of a counter.
"""


_RUN_GAUGES: Final[Mapping[MetricSpec, Callable[[RunProgress], float | None]]] = {
    service_catalogue.RUN_ATTEMPT: lambda run: run.attempt,
    service_catalogue.RUN_START: lambda run: _seconds(run.started_at),
    service_catalogue.RUN_END: lambda run: _seconds(run.ended_at),
    service_catalogue.RUN_STEP: lambda run: run.step,
    service_catalogue.RUN_LAST_STEP: lambda run: _seconds(run.last_step_at),
    service_catalogue.RUN_STEPS_PLANNED: lambda run: run.planned_steps,
    service_catalogue.RUN_PROGRESS: lambda run: (
        None if run.step is None or not run.planned_steps else run.step / run.planned_steps
    ),
    service_catalogue.RUN_LOSS: lambda run: run.loss if run.ended_at else None,  # before, ranks are at different steps
    service_catalogue.RUN_ETA: lambda run: run.eta_seconds,
    service_catalogue.RANKS_EXPECTED: lambda run: run.world_size,
    service_catalogue.RANKS_UP: lambda run: run.ranks_alive,
}
"""Gauges of a run, with the function that returns each value. If a value is unknown (None), the gauge has no sample."""


_REASON: Final = re.compile(r"ranks? (?:[^:]*: (\w{1,100})|.* (stopped responding|did not respond))")
"""Exception, signal or silence of the first ranks in the message of a failure."""


def _rank(first: Symptom) -> str:
    return service_catalogue.UNKNOWN_RANK if first.rank is None else str(first.rank)


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1e6


class ServiceMetrics(Collector):
    """Metrics of the service.

    Counters are increased when events happen; gauges are set when the metrics are scraped.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the metrics of the service. `clock` returns the current time in monotonic seconds."""
        self._clock = clock
        self._lost_at: dict[str, float] = {}  # time of the latest loss of records, by run
        self._fired_at: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)  # by run and label values
        self._incidents: dict[tuple[str, ...], Incident] = {}  # by label values
        self._events: defaultdict[str, dict[str, float]] = defaultdict(dict)  # UTC seconds by run and type
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._counters: dict[MetricSpec, Counter] = {}
        self._gauges: dict[MetricSpec, dict[tuple[str, ...], float]] = {}  # by label values
        for spec in (spec for spec in service_catalogue.CATALOG.values() if spec.page == "service"):
            if spec.type == "counter":
                self._counters[spec] = Counter(spec.name, spec.help, spec.labels, registry=None)
            else:
                self._gauges[spec] = {} if spec.labels else {(): 0.0}
        self._lost_runs: set[str] = set()
        for spec, values in _INITIAL_LABELS.items():
            for value in values:
                self.count(spec, 0, value)

    def collect(self) -> Iterator[Metric]:
        for spec in service_catalogue.CATALOG.values():
            if spec in self._counters:
                yield from self._counters[spec].collect()
            elif spec in self._gauges:
                family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
                for labels, value in self._gauges[spec].items():
                    family.add_metric(labels, value)
                yield family

    def page(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def total(self, spec: MetricSpec) -> float:
        """Return the sum of the values of all series of the metric `spec`."""
        if spec in self._gauges:
            return sum(self._gauges[spec].values())
        samples = (sample for family in self._counters[spec].collect() for sample in family.samples)
        return float(sum(sample.value for sample in samples if sample.name == spec.name))

    def count(self, spec: MetricSpec, amount: float, *labels: str) -> None:
        """Increase the counter `spec` by `amount`. `labels` are the values of its labels."""
        counter = self._counters[spec]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def committed(self, rows: Mapping[str, int], seconds: float, wall: int) -> None:
        """Count one commit that took `seconds` and ended at `wall` (UTC µs).

        `rows` contains the number of rows by dataset.
        """
        self.count(service_catalogue.COMMITS, 1)
        self._gauges[service_catalogue.LAST_COMMIT] = {(): wall / 1e6}
        self._gauges[service_catalogue.COMMIT_SECONDS] = {(): seconds}
        for dataset, count in rows.items():
            self.count(service_catalogue.ROWS_COMMITTED, count, dataset)

    def compacted(self, report: CompactionReport) -> None:
        """Count the files that one compaction removed and added."""
        self.count(service_catalogue.COMPACTED_FILES, report.files_removed, "removed")
        self.count(service_catalogue.COMPACTED_FILES, report.files_added, "added")

    def lost(self, run: str, records: int) -> None:
        """Add the number `records` to the counter of the lost records of a run."""
        self.count(service_catalogue.LOST_RECORDS, records, run)
        self._lost_runs.add(run)
        self._lost_at[run] = self._clock()

    def fired(self, run: str, rank: int | None, firings: Mapping[tuple[str, str], int]) -> None:
        """Count firings by rule and kind.

        These counters remain available to Prometheus after the process of the rank has ended. The label `rank` is
        `UNKNOWN_RANK` if the firing concerns no single rank, because dashboards and alerts require a rank label.
        """
        for (rule, kind), count in firings.items():
            labels = (run, service_catalogue.UNKNOWN_RANK if rank is None else str(rank), rule, kind)
            self.count(service_catalogue.ANOMALIES_INGESTED, count, *labels)
            self._fired_at[run][labels] = self._clock()

    def happened(self, run: str, events: Mapping[str, float]) -> None:
        """Record the times of the latest events of a run, in UTC seconds by type of event."""
        known = self._events[run]
        known.update({kind: max(at, known.get(kind, at)) for kind, at in events.items()})

    def settled(self, incident: Incident) -> None:
        """Export the age of `incident` from now on, unless it is muted, or its rule has an alert of its own.

        The labels describe the first firing of the incident.
        """
        first = incident.first
        if incident.is_muted or first.rule in RULES_OF_MACHINES:
            return
        step = "" if first.step is None else str(first.step)
        tensor = (first.kind or "", first.tensor or "", first.op or "")
        self._incidents[first.run, _rank(first), first.rule or "Anomaly", incident.severity, *tensor, step] = incident

    def show_exporters(self, up: Iterable[bool | None]) -> None:
        """Set the gauges of the numbers of external exporters, by the result of the last scrape.

        The result is True if the exporter was up, False if it was down, and None if it was not scraped yet.
        """
        tally = Tally(up)
        states = {"up": True, "down": False, "pending": None}
        self._gauges[service_catalogue.EXPORTERS] = {(name,): tally[state] for name, state in states.items()}

    def show(
        self, targets: Iterable[Target], attempts: Sequence[Attempt], progress: Iterable[RunProgress], rows_pending: int
    ) -> None:
        """Set the gauges of targets, runs and ranks.

        `attempts` and `progress` describe the latest launch of each run. The series of all other runs are removed.
        """
        known, runs = list(targets), list(progress)
        health = Tally(target.health for target in known)
        followed = [(target.registration, target.lag_records) for target in known if not target.is_gone]
        ranks = [(attempt.run, rank) for attempt in attempts for rank in attempt.ranks.values()]
        self._keep({attempt.run for attempt in attempts})
        now = self._clock()
        self._gauges |= {
            service_catalogue.LOST_RECORDS_AGE: {(run,): now - at for run, at in self._lost_at.items()},
            service_catalogue.ANOMALIES_INGESTED_AGE: {
                labels: now - at for fired in self._fired_at.values() for labels, at in fired.items()
            },
            service_catalogue.EVENT_LAST: {
                (run, kind): at for run, times in self._events.items() for kind, at in times.items()
            },
            service_catalogue.INCIDENT_AGE: {
                labels: now - incident.seen_at for labels, incident in self._incidents.items()
            },
            service_catalogue.TARGETS: {(condition,): health[condition] for condition in Health},
            service_catalogue.ROWS_PENDING: {(): rows_pending},
            service_catalogue.LAG_RECORDS: {(rank.run, str(rank.rank)): lag for rank, lag in followed},
            service_catalogue.RANKS_MISSING: {(attempt.run,): attempt.ranks_missing for attempt in attempts},
            service_catalogue.RUN_STATE: {
                (attempt.run, state): state is attempt.state for attempt in attempts for state in RunState
            },
            service_catalogue.RANK_VANISHED: {(run, str(rank.number)): rank.is_vanished for run, rank in ranks},
        }
        for spec, value_of in _RUN_GAUGES.items():
            values = ((run.run, value_of(run)) for run in runs)
            self._gauges[spec] = {(run,): value for run, value in values if value is not None}

    def show_failures(self, incidents: Iterable[Incident]) -> None:
        """Set the gauge of failed runs. `incidents` contains the announced incidents of runs that have failed."""
        failures = self._gauges[service_catalogue.RUN_FAILURE] = {}
        for first in (incident.first for incident in incidents if incident.first.rule == RUN_FAILED):
            found = _REASON.match(first.message or "")
            reason = service_catalogue.UNKNOWN_RANK if found is None else found[1] or found[2]
            failures[first.run, _rank(first), reason] = 1.0

    def show_goodput(self, ratios: Mapping[str, float], runs: Collection[str]) -> None:
        """Set the gauge of the goodput for each run in `runs` whose goodput is in `ratios`."""
        self._gauges[service_catalogue.RUN_GOODPUT] = {(run,): ratios[run] for run in ratios.keys() & runs}

    def _keep(self, runs: set[str]) -> None:
        """Remove the counters and times of all runs that are not in `runs`, and old incidents."""
        for run in runs:
            self.count(service_catalogue.LOST_RECORDS, 0, run)  # so that increase() sees the first loss
        for run in self._lost_runs - runs:
            self._counters[service_catalogue.LOST_RECORDS].remove(run)
        self._lost_runs = runs
        for run in self._fired_at.keys() - runs:
            for labels in self._fired_at.pop(run):
                self._counters[service_catalogue.ANOMALIES_INGESTED].remove(*labels)
        for times in (self._lost_at, self._events):
            for run in times.keys() - runs:
                del times[run]
        oldest = self._clock() - REMEMBER_SECONDS
        self._incidents = {
            labels: incident
            for labels, incident in self._incidents.items()
            if incident.first.run in runs and incident.seen_at >= oldest
        }
