"""The status of the service, its runs and targets as dataclasses.

The fields are those of the JSON API: names contain units, and unknown values are null. The status page shows only these
values, so the API contains everything that the page shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rankscope_ingest.remote_write.senders import RefusedSender
from rankscope_ingest.reporting.progress import RunProgress
from rankscope_ingest.runs.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """Status of the service. Counts are since its start; times are UTC microseconds."""

    status: str  # ok or degraded
    reason: str | None  # why it is degraded
    version: str
    schema_version: int
    store: str
    shard: str
    url: str
    started_at: int
    uptime_seconds: float
    targets: Mapping[str, int]  # by health
    rows_pending: int  # received, not committed yet
    rows_committed: int
    commits: int
    last_commit_ago_seconds: float | None
    records_lost: int  # of the known runs
    samples_dropped: int  # of exporters: repeated, doubled or out of bounds
    background_errors: Mapping[str, int] = field(default_factory=dict)  # unexpected ones, by task
    notifications: str | None = None  # those that could not be delivered, with the reason
    shared_names: Sequence[str] = ()  # sentences about runs of two trainings at the same time
    remote: Mapping[str, float] = field(default_factory=dict)  # counters of remote write and read, by their names
    refused_senders: Sequence[RefusedSender] = ()  # of remote write, the latest first


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Status of one run.

    The progress is computed from records of its ranks; goodput, tags and note are read from the store.
    """

    progress: RunProgress
    goodput_ratio: float | None = None
    last_seen_ago_seconds: float | None = None  # since the last sign of life of any of its ranks
    tags: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the status of the run as a JSON object."""
        known = asdict(self)
        return {**known.pop("progress"), **known}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus:
    """Status of one process of a rank."""

    run: str
    attempt: int
    rank: int
    world_size: int
    host: str
    pid: int
    url: str
    incarnation: str
    served_by: str | None  # URL that serves the spool of an ended process
    health: str  # pending, up, draining, failing, gone
    last_error: str | None
    last_scrape_seconds: float | None  # duration
    last_scrape_ago_seconds: float | None
    last_sign_ago_seconds: float  # heartbeat or response
    cursor: int
    committed: int
    head: int
    lag_records: int  # published and not committed yet
    lag_seconds: float  # age of the oldest of them
    ring_fill_ratio: float
    records_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of the service, its runs, targets and exporters."""

    service: ServiceStatus
    runs: Sequence[RunStatus]
    targets: Sequence[TargetStatus]
    exporters: Sequence[Mapping[str, object]]


def target_status(target: Target, now: float, lag_seconds: float) -> TargetStatus:
    """Return the status of `target` at `now`, in seconds of the service's monotonic clock."""
    registration = target.registration
    scraped = target.last_scrape
    return TargetStatus(
        run=registration.run,
        attempt=target.attempt,
        rank=registration.rank,
        world_size=registration.world_size,
        host=registration.host,
        pid=registration.pid,
        url=registration.url,
        incarnation=registration.incarnation,
        served_by=registration.served_by,
        health=target.health.value,
        last_error=target.last_error,
        last_scrape_seconds=_rounded(target.last_scrape_seconds),
        last_scrape_ago_seconds=None if scraped is None else _ago(now, scraped),
        last_sign_ago_seconds=_ago(now, target.liveness.last_sign),
        cursor=target.cursor,
        committed=target.committed,
        head=target.head,
        lag_records=0 if target.is_gone else target.lag_records,
        lag_seconds=0.0 if target.is_gone else round(lag_seconds, 3),
        ring_fill_ratio=target.ring_fill,
        records_lost=target.records_lost,
    )


def _ago(now: float, then: float) -> float:
    return round(max(0.0, now - then), 3)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
