"""How the parts of the service are put together from its configuration."""

from __future__ import annotations

import time

from rankscope_ingest.base.config import RunsSection, ServiceConfig
from rankscope_ingest.detect.divergence_tracker import DivergenceTracker
from rankscope_ingest.detect.incidents import IncidentTracker
from rankscope_ingest.detect.run_monitor import PollNow, RestoredState, RunMonitor
from rankscope_ingest.detect.stall_tracker import StallTracker
from rankscope_ingest.notify.notifiers import Notifier, make_notifiers
from rankscope_ingest.pipeline.batcher import Batcher
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.runs.models import Patience
from rankscope_ingest.runs.tracker import RunTracker, Timing
from rankscope_ingest.service.history import History
from rankscope_ingest.targets.registry import AttemptNumbers, Registry


def make_batcher(config: ServiceConfig) -> Batcher:
    """Return the batcher."""
    return Batcher(
        flush_rows=config.ingest.flush_rows,
        flush_after_seconds=config.ingest.flush_after_seconds,
        max_pending_rows=config.ingest.max_pending_rows,
    )


def make_run_monitor(
    config: ServiceConfig,
    history: History,
    batcher: Batcher,
    metrics: ServiceMetrics,
    urge: PollNow,
) -> RunMonitor:
    """Return the collector, with everything of `history` that had not ended put back."""
    runs = RunTracker(_timing(config.runs))
    incidents = IncidentTracker(
        group_wait_seconds=config.notify.group_wait_seconds, quiet_steps=config.notify.quiet_steps
    )
    history.restore(runs, incidents)
    registry = Registry(
        networks=config.service.allowed_networks,
        heartbeat_seconds=config.runs.heartbeat_seconds,
        ttl_seconds=3 * config.runs.heartbeat_seconds,
        attempts=AttemptNumbers(history.launches),
        lives=history.lives,
    )
    return RunMonitor(
        registry=registry,
        runs=runs,
        incidents=incidents,
        batcher=batcher,
        metrics=metrics,
        clock=time.monotonic,
        wall=lambda: time.time_ns() // 1000,
        urge=urge,
        restored=RestoredState(
            run_starts=history.run_starts,
            failures_told=history.failures_told,
            last_ordinal=history.last_ordinal,
            given_up=history.given_up,
            stalls=StallTracker(history.open_stalls),
            replicas=restored_replicas(history),
        ),
        max_bytes=config.ingest.max_bytes,
    )


def restored_replicas(history: History) -> DivergenceTracker:
    """Return what is known of replicas: the tensors that are apart, and the steps that some ranks had not reached."""
    book = DivergenceTracker(history.apart)
    book.heard(history.hashes, history.read_at)
    return book


def configured_notifiers(config: ServiceConfig) -> list[Notifier]:
    """Return the notifiers this process sends with. Raises ConfigError for an address that none understands."""
    urls = [url.get_secret_value() for url in config.notify.urls] if config.notify.mode == "embedded" else []
    return make_notifiers(urls, timeout_seconds=config.notify.timeout_seconds)


def _timing(section: RunsSection) -> Timing:
    return Timing(
        patience=Patience(
            refused_after_seconds=section.refused_after_seconds, failed_after_seconds=section.failed_after_seconds
        ),
        stalled_after_seconds=section.stalled_after_seconds,
        stalled_in_phase_after_seconds=section.stalled_in_phase_after_seconds,
    )
