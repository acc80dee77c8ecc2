"""The service's own page: families as the contract lists them, on a registry of our own."""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from rankscope_contract.metrics.catalogue import (
    ANOMALIES_INGESTED,
    BYTES_INGESTED,
    CATALOG,
    COMMIT_SECONDS,
    COMMITS,
    EXPORTER_SAMPLES,
    EXPORTER_SAMPLES_DROPPED,
    EXPORTER_SCRAPES,
    EXPORTERS,
    LAG_RECORDS,
    LAST_COMMIT,
    LOST_RECORDS,
    NOTIFICATIONS,
    RANK_VANISHED,
    RANKS_EXPECTED,
    RANKS_MISSING,
    RANKS_UP,
    RECORDS_INGESTED,
    REMOTE_WRITE_DROPPED,
    REMOTE_WRITE_REQUESTS,
    REMOTE_WRITE_SAMPLES,
    ROWS_COMMITTED,
    ROWS_PENDING,
    ROWS_SET_ASIDE,
    RUN_ATTEMPT,
    RUN_ETA,
    RUN_GOODPUT,
    RUN_LAST_STEP,
    RUN_PROGRESS,
    RUN_START,
    RUN_STATE,
    RUN_STEP,
    RUN_STEPS_PLANNED,
    SCRAPE_FAILURES,
    TARGETS,
    UNKNOWN_RANK,
    MetricSpec,
)
from rankscope_contract.model.events import RunState
from rankscope_ingest.reporting.progress import RunProgress
from rankscope_ingest.runs.target import Health, Target
from rankscope_ingest.runs.tracker import Attempt

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
"""Every value of the label, so that each counter exists at 0 before its first failure."""

OUTCOMES: Final = ("sent", "failed", "muted")

_FROM_THE_START: Final = {
    EXPORTER_SCRAPES: ("ok", "failed", "skipped"),
    EXPORTER_SAMPLES: ("layout", "exact"),
    EXPORTER_SAMPLES_DROPPED: ("doubled", "repeated", "out_of_bounds"),
    REMOTE_WRITE_REQUESTS: ("ok", "repeated", "busy", "malformed", "too_large", "unsupported"),
    REMOTE_WRITE_DROPPED: ("exemplar", "histogram", "metadata", "oversized", "repeated"),
}

MICROSECONDS: Final = 1e6


class ServiceMetrics:
    """Counters that move as things happen, and gauges that are set from the service's state when the page is made."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._families: dict[str, Gauge | Counter] = {
            spec.name: self._family(spec) for spec in CATALOG.values() if spec.page == "service"
        }
        self._children: defaultdict[str, dict[tuple[str, str], Gauge]] = defaultdict(dict)
        self._lost_runs: set[str] = set()
        self._fired: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)  # label values by run
        for reason in FAILURE_REASONS:
            self._counter(SCRAPE_FAILURES, reason)
        for outcome in OUTCOMES:
            self._counter(NOTIFICATIONS, outcome)
        for spec, values in _FROM_THE_START.items():
            for value in values:
                self._counter(spec, value)

    def page(self) -> bytes:
        """Return the page as Prometheus reads it."""
        return generate_latest(self._registry)

    def total(self, spec: MetricSpec) -> float:
        """Return the sum over all series of a family."""
        samples = (sample for family in self._families[spec.name].collect() for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == spec.name)

    def body_taken(self, records: int, size: int) -> None:
        """Count one body."""
        self._counter(RECORDS_INGESTED).inc(records)
        self._counter(BYTES_INGESTED).inc(size)

    def committed(self, rows: Mapping[str, int], seconds: float, wall: int) -> None:
        """Count one commit that took `seconds` and ended at `wall` (UTC µs)."""
        self._counter(COMMITS).inc()
        self._gauge(LAST_COMMIT).set(wall / MICROSECONDS)
        self._gauge(COMMIT_SECONDS).set(seconds)
        for dataset, count in rows.items():
            self._counter(ROWS_COMMITTED, dataset).inc(count)

    def set_aside(self, rows: int) -> None:
        """Count rows that no store takes."""
        self._counter(ROWS_SET_ASIDE).inc(rows)

    def poll_failed(self, reason: str) -> None:
        """Count a poll that brought nothing."""
        self._counter(SCRAPE_FAILURES, reason).inc()

    def lost(self, run: str, records: int) -> None:
        """Count records that can no longer be had."""
        self._counter(LOST_RECORDS, run).inc(records)
        self._lost_runs.add(run)

    def fired(self, run: str, rank: int | None, firings: Mapping[tuple[str, str], int]) -> None:
        """Count firings by rule and kind: the page of a rank that ended no longer shows them to Prometheus.

        The label `rank` is `UNKNOWN_RANK` where no single rank is meant: boards and alerts choose series that have one.
        """
        for (rule, kind), count in firings.items():
            labels = (run, UNKNOWN_RANK if rank is None else str(rank), rule, kind)
            self._counter(ANOMALIES_INGESTED, *labels).inc(count)
            self._fired[run].add(labels)

    def scraped(self, outcome: str) -> None:
        """Count a scrape of an exporter that is not ours."""
        self._counter(EXPORTER_SCRAPES, outcome).inc()

    def read(self, how: str, samples: int) -> None:
        """Count samples of its page."""
        self._counter(EXPORTER_SAMPLES, how).inc(samples)

    def dropped(self, reason: str, samples: int) -> None:
        """Count samples of its page that are not stored."""
        self._counter(EXPORTER_SAMPLES_DROPPED, reason).inc(samples)

    def write_answered(self, outcome: str) -> None:
        """Count a request of remote write."""
        self._counter(REMOTE_WRITE_REQUESTS, outcome).inc()

    def written(self, samples: int) -> None:
        """Count samples that it brought."""
        self._counter(REMOTE_WRITE_SAMPLES).inc(samples)

    def write_dropped(self, reason: str, count: int) -> None:
        """Count what it brought and is not stored."""
        self._counter(REMOTE_WRITE_DROPPED, reason).inc(count)

    def show_exporters(self, up: Iterable[bool | None]) -> None:
        """Set how many exporters are up, down, or not scraped yet."""
        tally = Tally(up)
        for health, state in (("up", True), ("down", False), ("pending", None)):
            self._gauge(EXPORTERS, health).set(tally[state])

    def notified(self, outcome: str) -> None:
        """Count a notification."""
        self._counter(NOTIFICATIONS, outcome).inc()

    def show(
        self, targets: Iterable[Target], attempts: Iterable[Attempt], progress: Iterable[RunProgress], rows_pending: int
    ) -> None:
        """Set the gauges; `attempts` and `progress` are of the latest launch of each run.

        A run that is no longer among them leaves the page with all its series.
        """
        known = list(targets)
        health = Tally(target.health for target in known)
        for condition in Health:
            self._gauge(TARGETS, condition).set(health[condition])
        self._gauge(ROWS_PENDING).set(rows_pending)
        followed = [target for target in known if target.health is not Health.GONE]
        lag = {(who.registration.run, str(who.registration.rank)): who.lag_records for who in followed}
        self._show_series(LAG_RECORDS, lag)
        self._show_states(list(attempts))
        self._show_progress(progress)

    def show_goodput(self, ratios: Mapping[str, float], runs: Collection[str]) -> None:
        """Set the goodput of those of `runs` that have one."""
        family = self._clear(RUN_GOODPUT)
        for run in ratios.keys() & runs:
            family.labels(run).set(ratios[run])

    def _show_states(self, attempts: Sequence[Attempt]) -> None:
        states, missing = self._clear(RUN_STATE), self._clear(RANKS_MISSING)
        for attempt in attempts:
            missing.labels(attempt.run).set(attempt.ranks_missing)
            for state in RunState:
                states.labels(attempt.run, state).set(state is attempt.state)
        ranks = ((attempt.run, rank) for attempt in attempts for rank in attempt.ranks.values())
        self._show_series(RANK_VANISHED, {(run, str(rank.number)): rank.is_vanished for run, rank in ranks})
        self._keep_counters_of({attempt.run for attempt in attempts})

    def _keep_counters_of(self, runs: set[str]) -> None:
        for run in runs:
            self._counter(LOST_RECORDS, run)  # at 0, so that increase() sees the first loss
        for run in self._lost_runs - runs:
            self._families[LOST_RECORDS.name].remove(run)
        self._lost_runs = runs
        for run in self._fired.keys() - runs:
            for labels in self._fired.pop(run):
                self._families[ANOMALIES_INGESTED.name].remove(*labels)

    def _show_progress(self, progress: Iterable[RunProgress]) -> None:
        families = {spec: self._clear(spec) for spec in _OF_A_RUN}
        for run in progress:
            for spec, value in _figures(run).items():
                if value is not None:
                    families[spec].labels(run.run).set(value)

    def _family(self, spec: MetricSpec) -> Gauge | Counter:
        kind = Counter if spec.type == "counter" else Gauge
        return kind(spec.name, spec.help, spec.labels, registry=self._registry)

    def _gauge(self, spec: MetricSpec, *labels: str) -> Gauge:
        family = self._families[spec.name]
        child = family.labels(*labels) if labels else family
        assert isinstance(child, Gauge)
        return child

    def _counter(self, spec: MetricSpec, *labels: str) -> Counter:
        family = self._families[spec.name]
        child = family.labels(*labels) if labels else family
        assert isinstance(child, Counter)
        return child

    def _show_series(self, spec: MetricSpec, values: Mapping[tuple[str, str], float]) -> None:
        """Set a gauge of many ranks. Their series are kept: making one costs twenty times what setting it does."""
        children = self._children[spec.name]
        for labels in children.keys() - values.keys():
            self._families[spec.name].remove(*labels)
            del children[labels]
        for labels, value in values.items():
            child = children.get(labels)
            if child is None:
                child = children[labels] = self._gauge(spec, *labels)
            child.set(value)

    def _clear(self, spec: MetricSpec) -> Gauge:
        """Return the family without its former series: what is gone must not stay on the page."""
        family = self._families[spec.name]
        assert isinstance(family, Gauge)
        family.clear()
        return family


_OF_A_RUN: Final = (
    RUN_ATTEMPT,
    RUN_START,
    RUN_STEP,
    RUN_LAST_STEP,
    RUN_STEPS_PLANNED,
    RUN_PROGRESS,
    RUN_ETA,
    RUN_GOODPUT,
    RANKS_EXPECTED,
    RANKS_UP,
)


def _figures(run: RunProgress) -> dict[MetricSpec, float | None]:
    """Return what the page says of a run; None is absent, never 0."""
    return {
        RUN_ATTEMPT: run.attempt,
        RUN_START: None if run.started_at is None else run.started_at / MICROSECONDS,
        RUN_STEP: run.step,
        RUN_LAST_STEP: None if run.last_step_at is None else run.last_step_at / MICROSECONDS,
        RUN_STEPS_PLANNED: run.planned_steps,
        RUN_PROGRESS: run.step / run.planned_steps if run.step is not None and run.planned_steps else None,
        RUN_ETA: run.eta_seconds,
        RANKS_EXPECTED: run.world_size,
        RANKS_UP: run.ranks_alive,
    }
