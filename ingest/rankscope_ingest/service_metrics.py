"""The service's own page: families as the contract lists them, on a registry of our own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from rankscope_contract.events import RunState
from rankscope_contract.metrics import (
    BYTES_INGESTED,
    CATALOG,
    COMMIT_SECONDS,
    COMMITS,
    LAG_RECORDS,
    LOST_RECORDS,
    NOTIFICATIONS,
    RANKS_MISSING,
    RECORDS_INGESTED,
    ROWS_COMMITTED,
    ROWS_PENDING,
    RUN_STATE,
    SCRAPE_FAILURES,
    TARGETS,
    MetricSpec,
)
from rankscope_ingest.runs import Attempt
from rankscope_ingest.target import Health, Target

FAILURE_REASONS: Final = (
    "timeout",
    "refused",
    "connection",
    "cut",
    "garbage",
    "schema",
    "unauthorized",
    "redirect",
    "forbidden",
    "cursor",
    "busy",
    "replaced",
    "status",
)
"""Every value of the label, so that each counter exists at 0 before its first failure."""

OUTCOMES: Final = ("sent", "failed", "muted")


class ServiceMetrics:
    """Counters that move as things happen, and gauges that are set from the service's state when the page is made."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._families: dict[str, Gauge | Counter] = {
            spec.name: self._family(spec) for spec in CATALOG.values() if spec.page == "service"
        }
        for reason in FAILURE_REASONS:
            self._counter(SCRAPE_FAILURES, reason)
        for outcome in OUTCOMES:
            self._counter(NOTIFICATIONS, outcome)

    def page(self) -> bytes:
        """Return the page as Prometheus reads it."""
        return generate_latest(self._registry)

    def body_taken(self, records: int, size: int) -> None:
        """Count one body."""
        self._counter(RECORDS_INGESTED).inc(records)
        self._counter(BYTES_INGESTED).inc(size)

    def committed(self, rows: Mapping[str, int], seconds: float) -> None:
        """Count one commit."""
        self._counter(COMMITS).inc()
        self._gauge(COMMIT_SECONDS).set(seconds)
        for dataset, count in rows.items():
            self._counter(ROWS_COMMITTED, dataset).inc(count)

    def poll_failed(self, reason: str) -> None:
        """Count a poll that brought nothing."""
        self._counter(SCRAPE_FAILURES, reason).inc()

    def lost(self, run: str, records: int) -> None:
        """Count records that can no longer be had."""
        self._counter(LOST_RECORDS, run).inc(records)

    def notified(self, outcome: str) -> None:
        """Count a notification."""
        self._counter(NOTIFICATIONS, outcome).inc()

    def show(self, targets: Iterable[Target], attempts: Iterable[Attempt], rows_pending: int) -> None:
        """Set the gauges; `attempts` are the latest of each run."""
        known = list(targets)
        health = Tally(target.health for target in known)
        for condition in Health:
            self._gauge(TARGETS, condition).set(health[condition])
        self._gauge(ROWS_PENDING).set(rows_pending)
        lag = self._clear(LAG_RECORDS)
        for target in known:
            if target.health is not Health.GONE:
                lag.labels(target.registration.run, str(target.registration.rank)).set(target.lag_records)
        states, missing = self._clear(RUN_STATE), self._clear(RANKS_MISSING)
        for attempt in attempts:
            missing.labels(attempt.run).set(attempt.ranks_missing)
            self._counter(LOST_RECORDS, attempt.run)
            for state in RunState:
                states.labels(attempt.run, state).set(state is attempt.state)

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

    def _clear(self, spec: MetricSpec) -> Gauge:
        """Return the family without its former series: what is gone must not stay on the page."""
        family = self._families[spec.name]
        assert isinstance(family, Gauge)
        family.clear()
        return family
