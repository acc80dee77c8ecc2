"""The status of the service, its runs, targets and exporters, which the service collects on request.

Tags and notes of runs are read from the store, at most once every few seconds.

The fields of the dataclasses are those of the JSON API: names contain units, and unknown values are null. The status
page shows only these values, so the API contains everything that the page shows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_ingest.base.background import ReadBudget
from rankscope_ingest.live.progress import RunProgress
from rankscope_ingest.remote_write.senders import RefusedSender
from rankscope_ingest.runs.models import Target
from rankscope_storage.base.service_catalogue import (
    CATALOG,
    COMMITS,
    EXPORTER_SAMPLES_DROPPED,
    LAST_COMMIT,
    LOST_RECORDS,
    ROWS_COMMITTED,
)
from rankscope_storage.connection import connect
from rankscope_storage.runs.tags import parse_tags


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


REFRESH_SECONDS: Final = 5.0
TIMEOUT_SECONDS: Final = 1.0
"""Maximum time in seconds to wait for the store. After this time, the tags and notes of the previous read are shown."""

# The same as in the view `runs`, without the versions that have no tags and no note, which are nearly all.
_LABELS: Final = """\
SELECT run, max_by(tags, ts) FILTER (tags IS NOT NULL) AS tags, max_by(note, ts) FILTER (note IS NOT NULL) AS note
FROM runs_history WHERE tags IS NOT NULL OR note IS NOT NULL GROUP BY run"""

log = logging.getLogger(__name__)


class LabelReader:
    """Tags and notes of all runs of the store at `path`, as fields of `RunStatus` by run."""

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._budget = ReadBudget(REFRESH_SECONDS, clock=clock)
        self._query: asyncio.Future[None] | None = None
        self.labels: Mapping[str, dict[str, Any]] = {}

    async def fresh(self) -> Mapping[str, dict[str, Any]]:
        """Return the current tags and notes by run.

        If the store does not respond in time, return the tags and notes of the previous read.
        """
        if self._query is None and self._budget.is_due:
            self._query = asyncio.get_running_loop().run_in_executor(None, self._read)
        if self._query is not None:
            await asyncio.wait([self._query], timeout=TIMEOUT_SECONDS)
            if self._query.done():
                if error := self._query.exception():
                    log.warning("tags of runs cannot be read, retrying at the next request: %s", error)
                self._query = None
        return self.labels

    def _read(self) -> None:
        with self._budget.reading(), connect(self._path, single_threaded=True) as connection:
            rows = connection.query(_LABELS).to_pylist()
        self.labels = {row["run"]: {"tags": parse_tags(row["tags"]), "note": row["note"] or None} for row in rows}


MAX_OBSERVATIONS: Final = 256
"""Maximum number of observations per rank.

An observation is the newest sequence number of the rank at one time. If commits fail for hours and the limit is
reached, every second observation is dropped, but the oldest one is kept.
"""

_Observations = deque[tuple[int, float]]


class LagClock:
    """Derives the age of uncommitted records from observations of each rank.

    An observation is the seq of the newest record of the rank (head), and the time.
    """

    def __init__(self) -> None:
        self._observations: dict[str, _Observations] = {}

    def look(self, targets: Iterable[Target], now: float) -> None:
        """Record the newest seq of each rank at `now`. Delete the observations of ranks that are not in `targets`."""
        self._observations = {target.incarnation: self._updated(target, now) for target in targets}

    def seconds(self, target: Target, now: float) -> float:
        """Return the age in seconds of the oldest uncommitted record of a rank, or 0 if all records are committed."""
        waiting = [at for head, at in self._observations.get(target.incarnation, ()) if head > target.committed]
        return max(0.0, now - waiting[0]) if waiting else 0.0

    def _updated(self, target: Target, now: float) -> _Observations:
        observed = self._observations.get(target.incarnation) or deque()
        while observed and observed[0][0] <= target.committed:
            observed.popleft()
        if target.head > target.committed and (not observed or target.head > observed[-1][0]):
            observed.append((target.head, now))
        return observed if len(observed) <= MAX_OBSERVATIONS else deque(list(observed)[::2])


_REMOTE: Final = tuple(
    spec for spec in CATALOG.values() if spec.name.startswith("rankscope_ingest_remote_") and spec.type == "counter"
)


def counters(total: Callable[[MetricSpec], float], wall: int) -> dict[str, Any]:
    """Return the fields of `ServiceStatus` that come from the metrics of the service.

    `total` returns the sum over all series of a metric. `wall` is the time in UTC µs.
    """
    last_commit = total(LAST_COMMIT)
    return {
        "rows_committed": int(total(ROWS_COMMITTED)),
        "commits": int(total(COMMITS)),
        "last_commit_ago_seconds": _ago(wall / 1e6, last_commit) if last_commit else None,
        "records_lost": int(total(LOST_RECORDS)),
        "samples_dropped": int(total(EXPORTER_SAMPLES_DROPPED)),
        "remote": {spec.name: total(spec) for spec in _REMOTE},
    }


def run_statuses(
    runs: Iterable[RunProgress],
    targets: Iterable[Target],
    now: float,
    *,
    goodput: Mapping[str, float],
    labels: Mapping[str, dict[str, Any]],
) -> list[RunStatus]:
    """Return the status of each run at `now`, in seconds of the service's monotonic clock."""
    seen: dict[str, float] = {}
    for target in targets:
        run = target.registration.run
        seen[run] = max(seen.get(run, 0.0), target.liveness.last_sign)
    return [
        RunStatus(
            progress=one,
            goodput_ratio=goodput.get(one.run),
            last_seen_ago_seconds=_ago(now, seen[one.run]) if one.run in seen else None,
            **labels.get(one.run, {}),
        )
        for one in runs
    ]
