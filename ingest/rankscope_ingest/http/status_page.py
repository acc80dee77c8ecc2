"""The status of the service, its runs, targets and exporters, and the values of the status page at `/service`.

Tags and notes of runs are read from the store, at most once every few seconds. The fields of the dataclasses are those
of the JSON API: names contain units, and unknown values are null. The page shows only these values, so the API contains
everything that the page shows. `rankscope_view` has the template of the page.

The page shows the state of the service, then the runs, newest first, each with its ranks. It works without scripts. The
number of rows is limited; the page shows how many rows are left out. Live ranks that are not healthy are always
visible; healthy and ended ranks are in collapsed sections.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_contract.model.events import RunState
from rankscope_contract.wire.channel import EXPORTERS_PATH, METRICS_PATH, RUNS_PATH, STATUS_PATH, TARGETS_PATH
from rankscope_ingest.base.background import ReadBudget
from rankscope_ingest.live.progress import RunProgress
from rankscope_ingest.remote_write.senders import RefusedSender
from rankscope_ingest.runs.models import ENDED, Health, Target
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
from rankscope_view.pages.format import ago, count, duration, measure, number, percent
from rankscope_view.pages.rendering import Place, is_nonfinite, render

log = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 5.0
TIMEOUT_SECONDS: Final = 1.0
"""Maximum time in seconds to wait for the store. After this time, the tags and notes of the previous read are shown."""

# The same as in the view `runs`, without the versions that have no tags and no note, which are nearly all.
_LABELS: Final = """\
SELECT run, max_by(tags, ts) FILTER (tags IS NOT NULL) AS tags, max_by(note, ts) FILTER (note IS NOT NULL) AS note
FROM runs_history WHERE tags IS NOT NULL OR note IS NOT NULL GROUP BY run"""

MAX_OBSERVATIONS: Final = 256
"""Maximum number of observations per rank.

An observation is the newest sequence number of the rank at one time. If commits fail for hours and the limit is
reached, every second observation is dropped, but the oldest one is kept.
"""

_Observations = deque[tuple[int, float]]

_REMOTE: Final = tuple(
    spec for spec in CATALOG.values() if spec.name.startswith("rankscope_ingest_remote_") and spec.type == "counter"
)

MAX_LAG_SECONDS: Final = 60.0
"""Age in seconds of the oldest uncommitted record above which a rank is not healthy, even if it responds."""

FULL_RING: Final = 0.9
MAX_RUNS: Final = 100
MAX_SENDERS: Final = 10  # of refused senders of remote write
MAX_ROWS: Final = 2000
"""Maximum number of targets on the status page. The maximum number of exporters is the same."""

HEALTH_KINDS: Final = {
    Health.PENDING: "stopped",
    Health.UP: "running",
    Health.DRAINING: "completed",
    Health.FAILING: "failed",
    Health.GONE: "stopped",
}
"""Kinds of colour in the style sheet, which are the states of runs."""

_WORST_FIRST: Final = {Health.FAILING: 0, Health.UP: 1, Health.DRAINING: 1, Health.PENDING: 2, Health.GONE: 3}


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


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and a value; `kind` is the class of a value that needs attention."""

    name: str
    value: str
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTable:
    """Ranks of a run: the rows that are shown, and the number of those left out. A table with a title is collapsed."""

    rows: Sequence[TargetStatus]
    left: int
    title: str = ""
    key: str = ""  # id of the element, which is always the same, so that it remains open after a reload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """A run and its ranks. `status` is None for earlier launches of a run whose newest launch ended long ago."""

    run: str
    status: RunStatus | None
    tables: Sequence[TargetTable]
    facts: Sequence[Fact] = ()
    kind: str = ""  # of the colour
    progress: str = ""
    share: float | None = None  # of the planned steps
    left_seconds: float | None = None


class Budget:
    """Number of table rows that may still be added to the page."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def take(self, wanted: int) -> int:
        """Reserve table rows; return how many of the `wanted` rows may be added to the page."""
        taken = min(wanted, self._rows)
        self._rows -= taken
        return taken


def page(place: Place, status: Status) -> str:
    """Return the complete HTML document of the status page."""
    service = status.service
    runs = sorted(status.runs, key=lambda run: (run.progress.started_at or 0, run.progress.run), reverse=True)
    exporters = sorted(status.exporters, key=lambda one: (one["up"] is not False, str(one["name"])))
    found = [("Degraded", service.reason), ("Notifications", service.notifications)]
    return render(
        "status.html",
        place=place,
        title=_title(status),
        service=service,
        alarms=[*((name, line) for name, line in found if line), *(("Run names", one) for one in service.shared_names)],
        senders=service.refused_senders[:MAX_SENDERS],
        senders_left=len(service.refused_senders[MAX_SENDERS:]),
        facts=_service_facts(service, status.targets),
        runs=len(runs),
        active=sum(run.progress.state not in ENDED for run in runs),
        sections=_sections(runs, status.targets),
        older=_tally(run.progress.state for run in runs[MAX_RUNS:]),
        older_runs=len(runs[MAX_RUNS:]),
        exporters=exporters[:MAX_ROWS],
        exporters_left=len(exporters[MAX_ROWS:]),
        exporter_kinds={True: ("up", "running"), False: ("down", "failed")},
        health_kinds=HEALTH_KINDS,
        paths=(STATUS_PATH, RUNS_PATH, TARGETS_PATH, EXPORTERS_PATH, METRICS_PATH),
        targets_path=TARGETS_PATH,
        runs_path=RUNS_PATH,
        exporters_path=EXPORTERS_PATH,
    )


def is_healthy(target: TargetStatus) -> bool:
    """Return whether a rank is healthy.

    A healthy rank responds and has no lost records. The age of its oldest uncommitted record is below MAX_LAG_SECONDS,
    and the fill ratio of its ring is below FULL_RING.
    """
    if target.health not in (Health.UP, Health.DRAINING) or target.records_lost:
        return False
    return target.lag_seconds < MAX_LAG_SECONDS and target.ring_fill_ratio < FULL_RING


def _title(status: Status) -> str:
    """Return the title of the page: `degraded`, or the numbers of failed, stalled, diverged and running runs.

    A diverged run is one that has not ended and whose latest loss is NaN or infinite.
    """
    if status.service.reason is not None:
        return "degraded"
    states = Counter(run.progress.state for run in status.runs)
    bad = [f"{states[state]} {state}" for state in (RunState.FAILED, RunState.STALLED) if states[state]]
    diverged = sum(run.progress.nonfinite_loss is not None and run.progress.state not in ENDED for run in status.runs)
    bad += [f"{diverged} with NaN or infinite loss"] if diverged else []
    return ", ".join([*bad, f"{states[RunState.RUNNING]} running"])


def _service_facts(service: ServiceStatus, targets: Sequence[TargetStatus]) -> list[Fact]:
    health = ", ".join(f"{count(number)} {name}" for name, number in service.targets.items() if number)
    return [
        Fact("last commit", ago(service.last_commit_ago_seconds)),
        Fact("rows committed", count(service.rows_committed)),
        Fact("rows waiting", count(service.rows_pending)),
        Fact("ranks", health or "none"),
        Fact("largest lag", duration(max((target.lag_seconds for target in targets), default=0.0))),
        _bad("records lost", service.records_lost),
        Fact("samples dropped", count(service.samples_dropped)),
        *(_bad(f"errors in {task}", number) for task, number in service.background_errors.items()),
        *(Fact(_remote_name(name), count(value)) for name, value in service.remote.items()),
    ]


def _bad(name: str, number: int) -> Fact:
    return Fact(name, count(number), "bad" if number else "")


def _remote_name(name: str) -> str:
    return name.removeprefix("rankscope_ingest_").removesuffix("_total").replace("_", " ")


def _sections(runs: Sequence[RunStatus], targets: Iterable[TargetStatus]) -> list[RunSection]:
    """Return the runs in this order, each with the ranks of all its launches, and then ranks of no known run."""
    by_run: dict[str, list[TargetStatus]] = {}
    for target in targets:
        by_run.setdefault(target.run, []).append(target)
    budget = Budget(MAX_ROWS)
    found = [_section(one, by_run.pop(one.progress.run, ()), budget) for one in runs[:MAX_RUNS]]
    for older in runs[MAX_RUNS:]:
        by_run.pop(older.progress.run, None)
    for run, listed in sorted(by_run.items())[:MAX_RUNS]:
        found.append(RunSection(run=run, status=None, tables=_tables(run, listed, budget)))
    return found


def _section(status: RunStatus, targets: Sequence[TargetStatus], budget: Budget) -> RunSection:
    progress = status.progress
    share, left, words = None, None, "no step yet"
    if progress.step is not None and progress.planned_steps:
        share = min(1.0, progress.step / progress.planned_steps)
        words = f"step {count(progress.step)} of {count(progress.planned_steps)}, {percent(share)}"
        left = progress.eta_seconds if progress.state not in ENDED else None
    elif progress.step is not None:
        words = f"step {count(progress.step)}, no end planned"
    # A run with a loss of NaN runs, but its training has failed.
    has_failed = progress.state == RunState.RUNNING and progress.nonfinite_loss is not None
    return RunSection(
        run=progress.run,
        status=status,
        tables=_tables(progress.run, targets, budget),
        facts=_run_facts(status, progress),
        kind=RunState.FAILED if has_failed else progress.state,
        progress=words,
        share=share,
        left_seconds=left,
    )


def _run_facts(run: RunStatus, progress: RunProgress) -> list[Fact]:
    """Return the properties of a run whose value is known."""
    is_active = progress.state not in ENDED
    is_short = is_active and progress.ranks_alive < progress.world_size
    ranks = f"{count(progress.ranks_alive)} of {count(progress.world_size)}"
    found = [Fact("ranks", ranks, "warn" if is_short else "")]
    if run.last_seen_ago_seconds is not None:
        found.append(Fact("last seen", ago(run.last_seen_ago_seconds)))
    if progress.loss is not None:
        is_bad = is_nonfinite(progress.loss)
        found.append(Fact("loss", measure(progress.loss) + progress.loss_note, "bad" if is_bad else ""))
    if progress.steps_per_second is not None and is_active:
        found.append(Fact("speed", _speed(progress.steps_per_second)))
    if progress.tokens_per_second is not None and is_active:
        found.append(Fact("tokens/s", count(progress.tokens_per_second)))
    if run.goodput_ratio is not None:
        found.append(Fact("goodput", percent(run.goodput_ratio)))
    found += [Fact("rows stored", count(progress.rows_stored)), Fact("lag", f"{count(progress.lag_records)} records")]
    return [*found, _bad("records lost", progress.records_lost)] if progress.records_lost else found


def _speed(steps_per_second: float) -> str:
    if 0 < steps_per_second < 1:
        return f"{duration(1 / steps_per_second)} a step"
    return f"{number(steps_per_second)} steps/s"


def _tables(run: str, targets: Sequence[TargetStatus], budget: Budget) -> list[TargetTable]:
    """Return the ranks of a run: live ones that are not healthy, and collapsed the healthy and the ended ones."""
    healthy = [target for target in targets if is_healthy(target)]
    gone = [target for target in targets if target.health == Health.GONE]
    others = [target for target in targets if not is_healthy(target) and target.health != Health.GONE]
    key = hashlib.sha256(run.encode(errors="surrogatepass")).hexdigest()[:12]
    tables = []
    for name, listed in (("", sorted(others, key=_badness)), ("well", healthy), ("gone", gone)):
        ordered = sorted(listed, key=_place) if name else listed
        shown = budget.take(len(ordered))
        if ordered:
            title = _tally(target.health for target in ordered) if name else ""
            rows, left = ordered[:shown], len(ordered) - shown
            tables.append(TargetTable(rows=rows, left=left, title=title, key=f"{name}-{key}"))
    return tables


def _tally(words: Iterable[str]) -> str:
    return ", ".join(f"{count(number)} {word}" for word, number in Counter(words).items())


def _badness(target: TargetStatus) -> tuple[float, ...]:
    return (_WORST_FIRST.get(Health(target.health), 0), -target.lag_seconds, *_place(target))


def _place(target: TargetStatus) -> tuple[int, int]:
    return -target.attempt, target.rank
