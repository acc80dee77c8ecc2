"""Poll and scrape all sources of data, and pass their rows to the store.

The sources are registered ranks, ranks at configured addresses (static targets), spools of dead processes, and external
exporters.

One poll loop runs per target. The loop starts when the target registers, and is deleted when the target is gone.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.wire.channel import NOTHING, Registration
from rankscope_ingest.base.background import Job, cancel, start_task
from rankscope_ingest.base.config import ServiceConfig, StaticTarget
from rankscope_ingest.base.errors import FetchError, RegistrationError
from rankscope_ingest.base.tls import client_tls
from rankscope_ingest.detect.run_monitor import RecordSink, RunMonitor
from rankscope_ingest.live.goodput import WITHOUT_TIME
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.network.http_client import PageFetcher, parse_target_url
from rankscope_ingest.pipeline.flusher import Batcher, Flusher, PendingBatch, Quarantine
from rankscope_ingest.pipeline.maintenance_schedule import MaintenanceSchedule, retention_job
from rankscope_ingest.pipeline.rows import Stamp
from rankscope_ingest.record_channel.bodies import PlanCache
from rankscope_ingest.record_channel.client import Fetcher, OtherProcess
from rankscope_ingest.record_channel.loop import Pace, TargetLoop
from rankscope_ingest.remote_write.handler import RemoteWrite
from rankscope_ingest.runs.models import Health, Target
from rankscope_ingest.scrape.discovery import ExporterList, ScrapeTarget, configured
from rankscope_ingest.scrape.sample_table import Scrape
from rankscope_ingest.scrape.scraper import Followed, Scraper
from rankscope_ingest.spools.orphan_spools import Spools
from rankscope_ingest.targets.shared_store import SharedStore
from rankscope_storage.api.store import Commit, Writer
from rankscope_storage.base.location import located
from rankscope_storage.base.service_catalogue import ROWS_SET_ASIDE

log = logging.getLogger(__name__)


class Pollers:
    """The poll loops of all targets.

    `make_loop` creates the loop of a target. `watermark` returns the last stored sequence number of an incarnation.
    """

    def __init__(self, make_loop: Callable[[Target], TargetLoop], watermark: Callable[[str], Awaitable[int]]) -> None:
        self._make_loop = make_loop
        self._watermark = watermark
        self._loops: dict[str, TargetLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the asyncio tasks of all poll loops."""
        return list(self._tasks.values())

    def __len__(self) -> int:
        """Return the number of polled targets."""
        return len(self._loops)

    def follow(self, target: Target) -> Target:
        """Start the poll loop of `target` unless it is already running. Return `target`."""
        task = self._tasks.get(target.incarnation)
        if task is None or task.done():
            self._loops.setdefault(target.incarnation, self._make_loop(target))
            polling = functools.partial(self._poll, target)
            self._tasks[target.incarnation] = start_task("polling a rank", polling, is_repeated=True)
        return target

    def poke(self, incarnation: str) -> None:
        """Poll the target with this incarnation immediately, or as soon as its last stored record is known."""
        if loop := self._loops.get(incarnation):
            loop.poke()

    async def loop_of(self, target: Target) -> TargetLoop:
        """Return the poll loop of `target`, which requests the records after the last stored sequence number."""
        mark = await self._watermark(target.incarnation)
        # For a process that was declared dead, received records may not be committed yet.
        target.cursor, target.committed = max(target.cursor, mark), max(target.committed, mark)
        return self._loops.setdefault(target.incarnation, self._make_loop(target))

    async def _poll(self, target: Target) -> None:
        loop = await self.loop_of(target)
        await loop.run()
        # The target is gone. A service can see thousands of them. If the process returns, it gets a new loop.
        del self._loops[target.incarnation], self._tasks[target.incarnation]


_NO_INCARNATION: Final = "-"
"""An incarnation id that no process has.

A rank rejects a request with this id, and its response contains the incarnation id of the rank.
"""


async def incarnation_at(static: StaticTarget, fetcher: Fetcher) -> str:
    """Return the incarnation of the process at the configured address of a rank (a static target).

    Raises FetchError if the process does not respond or does not report its incarnation.
    """
    answer = await fetcher.records(
        static.url, incarnation=_NO_INCARNATION, after=NOTHING, committed=NOTHING, lease=None, max_bytes=1, notice=False
    )
    if isinstance(answer, OtherProcess):
        return answer.incarnation
    raise FetchError("garbage", f"{static.url} does not report its incarnation")


def registration_of(static: StaticTarget, incarnation: str) -> Registration:
    """Return a registration for the process at the configured address of a rank (a static target).

    Run, rank, world size and launch id come from the configuration.
    """
    return Registration(
        run=static.run,
        rank=static.rank,
        world_size=max(static.world_size, static.rank + 1),
        local_rank=0,
        host=static.url.partition("://")[2],
        pid=0,
        incarnation=incarnation,
        launch_id=static.launch_id,
        url=static.url,
    )


class Polling:
    """Polls all targets, with one loop for each target. Polled records update the run states in `monitor`."""

    def __init__(
        self,
        config: ServiceConfig,
        fetcher: Fetcher,
        monitor: RunMonitor,
        watermark: Callable[[str], Awaitable[int]],
    ) -> None:
        """Create the polling component and the objects that all polling loops share.

        `watermark` returns the sequence number of the last committed record of a process.
        """
        self._config = config
        self._fetcher = fetcher
        self._monitor = monitor
        self._static: dict[StaticTarget, Target] = {}  # the latest process at the address of each
        pace = Pace(
            poll_seconds=config.ingest.poll_seconds,
            max_backoff_seconds=config.ingest.max_backoff_seconds,
            flush_after_seconds=config.ingest.flush_after_seconds,
            targets=lambda: len(self.pollers),
            is_viewed=monitor.tails.is_viewed,
        )
        sink, plans = RecordSink(monitor), PlanCache()

        def make_loop(target: Target) -> TargetLoop:
            return TargetLoop(target, self.spools, plans, sink, pace, clock=time.monotonic)

        self.pollers = Pollers(make_loop, watermark)
        self.spools = Spools(
            config.spool.folders,
            fetcher,
            monitor.registry,
            accept=monitor.accept,
            watermark=watermark,
            follow=self._follow_now,
            owns=config.store.owned.owns,
        )

    @property
    def targets(self) -> Iterable[Target]:
        """Return all targets that the service polls or has polled recently."""
        return self._monitor.registry.targets

    async def register(self, registration: Registration) -> Target:
        """Accept a registration or heartbeat, and start polling the target.

        Raises RegistrationError if it is rejected.
        """
        host, _ = parse_target_url(registration.url)
        try:
            addresses = await self._fetcher.resolver.addresses(host)
        except OSError as error:
            raise RegistrationError(400, f"{registration.url}: {host} cannot be resolved: {error}") from error
        return self.pollers.follow(self._monitor.accept(registration, addresses).target)

    def poke(self, incarnation: str) -> bool:
        """Poll the target with this incarnation id immediately; return False if the service has no such target."""
        if self._monitor.registry.get(incarnation) is None:
            return False
        self.pollers.poke(incarnation)
        return True

    def poll_now(self, run: str, rank: int | None) -> None:
        """Poll one rank of a run immediately, or all ranks of the run if `rank` is None."""
        for target in self.targets:
            registration = target.registration
            if registration.run == run and rank in {None, registration.rank} and not target.is_gone:
                self.poke(target.incarnation)

    def jobs(self) -> list[Job]:
        """Return the periodic jobs that find targets.

        There is one job for each configured address of a rank (static target), and one that scans the spool folders.
        """
        interval = self._config.ingest.poll_seconds
        jobs = [
            Job(f"watching {static.url}", interval, functools.partial(self._look_at, static), starts_immediately=True)
            for static in self._config.targets
            if self._config.store.owned.owns(static.run)
        ]
        if self._config.spool.folders:
            jobs.append(Job("scanning for spools", self._config.spool.scan_seconds, self.spools.scan))
        return jobs

    async def _look_at(self, static: StaticTarget) -> None:
        """Register the process at the address of a static target, which is a rank with a configured address."""
        target = self._static.get(static)
        if target is not None and target.health not in {Health.GONE, Health.FAILING}:
            return
        try:
            incarnation = await incarnation_at(static, self._fetcher)
            if target is None or target.incarnation != incarnation:
                accepted = self._monitor.accept(registration_of(static, incarnation), ())
                self._static[static] = self.pollers.follow(accepted.target)
        except (FetchError, RegistrationError) as error:
            log.info(
                "static target cannot be polled yet, retrying in %g s: %s",
                self._config.ingest.poll_seconds,
                error,
                extra={"target": static.url},
            )

    def _follow_now(self, target: Target) -> None:
        self.pollers.follow(target)
        self.poke(target.incarnation)


class ExternalExporters:
    """Scrapes the configured external exporters into a batcher. Implements `SampleReceiver`."""

    def __init__(self, config: ServiceConfig, batcher: Batcher, metrics: ServiceMetrics) -> None:
        self._config = config
        self._owns = config.store.owned.owns
        self._batcher = batcher
        # Exporters receive no certificate of this service. Theirs are verified with the CA of the ranks.
        self._fetcher = PageFetcher(
            networks=config.service.allowed_networks, tls=client_tls(config.service.ca_file, None, None)
        )
        self.count = metrics.count
        self._scraper = Scraper(self._fetcher, self, clock=time.monotonic, wall=lambda: time.time_ns() // 1000)

    @property
    def is_full(self) -> bool:
        """Return whether scraping must wait because too many rows are not committed yet."""
        return self._batcher.is_full

    @property
    def followed(self) -> Iterable[Followed]:
        """Return the external exporters that are scraped at present."""
        return self._scraper.followed

    def samples(self, table: pa.Table) -> None:
        """Add a table of rows of the dataset `samples` to the current batch."""
        self._batcher.add({"samples": table}, time.monotonic())

    def scrape(self, scrape: Scrape) -> None:
        """Add the samples of one scrape to the current batch."""
        self._batcher.add_scrape(scrape, time.monotonic())

    def _show(self, source: str, exporters: Iterable[ScrapeTarget]) -> None:
        """Scrape the exporters of `source` whose names belong to the shard of this service, and no other ones of it."""
        self._scraper.show(source, [one for one in exporters if self._owns(one.name)])

    @asynccontextmanager
    async def scraping(self) -> AsyncIterator[None]:
        """Return a context manager that scrapes the exporters until its `with` block is left."""
        async with self._fetcher:
            self._show("[[exporters]]", configured(self._config.exporters))
            lists = [ExporterList(section, self._fetcher, self._show) for section in self._config.exporter_lists]
            tasks = [start_task("reading a list of exporters", one.run, is_repeated=True) for one in lists]
            try:
                yield
            finally:
                await cancel([*tasks, *self._scraper.tasks])


def make_batcher(config: ServiceConfig) -> Batcher:
    """Return a batcher that uses the limits of the configuration section [ingest]."""
    return Batcher(
        flush_rows=config.ingest.flush_rows,
        flush_after_seconds=config.ingest.flush_after_seconds,
        max_pending_rows=config.ingest.max_pending_rows,
    )


class Pipeline:
    """The component that writes to the store, and the components that pass rows to it.

    Other components add rows to `batcher`.
    """

    def __init__(
        self,
        config: ServiceConfig,
        writer: Writer,
        batcher: Batcher,
        metrics: ServiceMetrics,
        *,
        stamp: Callable[[], Stamp],
        on_commit: Callable[[PendingBatch, Commit], None],
    ) -> None:
        """Create the flusher and the remote-write receiver.

        `on_commit` is called after each commit of a batch. `stamp` returns the time and arrival number of a row that
        the pipeline itself creates, such as a quarantine event.
        """
        self._config = config
        self._writer = writer
        self._metrics = metrics
        self._on_commit = on_commit
        self.batcher = batcher
        self.commits = 0
        self.commits_of_time = 0
        self.rows_stored = 0
        aside = Quarantine(
            located(config.store.path), stamp=stamp, count=lambda rows: metrics.count(ROWS_SET_ASIDE, rows)
        )
        self.flusher = Flusher(writer, batcher, on_commit=self._on_batch, clock=time.monotonic, aside=aside)
        self.remote_write = RemoteWrite(
            config.remote_write, writer, metrics, on_commit=self._on_remote_write, clock=time.monotonic, aside=aside
        )

    @property
    def rows_pending(self) -> int:
        """Return the number of rows that are not committed yet."""
        return self.batcher.pending_rows + self.remote_write.pending_rows

    @property
    def degraded(self) -> str | None:
        """Return the reason why the store accepts rows more slowly than they arrive.

        Return None if the store is fast enough.
        """
        is_full = "rows arrive faster than the store commits them: polling waits for commits"
        return self.flusher.trouble or self.remote_write.trouble or (is_full if self.batcher.is_full else None)

    def maintain(self, shared: SharedStore) -> Coroutine[Any, Any, None]:
        """Run compaction, vacuum and retention of the store until the coroutine is cancelled.

        Of several services that share the store, one runs them, after the commits of all.
        """
        schedule = MaintenanceSchedule(
            self._writer,
            time.monotonic(),
            retain=retention_job(self._config),
            retain_seconds=self._config.retention.every_seconds,
            on_compaction=self._metrics.compacted,
            is_maintaining=lambda: shared.membership.is_maintaining,
        )
        return schedule.run(lambda: shared.membership.version or self.commits)

    def _on_batch(self, batch: PendingBatch, commit: Commit) -> None:
        self._count(commit)
        self._on_commit(batch, commit)

    def _on_remote_write(self, _: PendingBatch, commit: Commit) -> None:
        self._count(commit)
        if commit.rows:
            self._metrics.committed(commit.rows, commit.seconds, time.time_ns() // 1000)

    def _count(self, commit: Commit) -> None:
        self.commits += 1
        self.commits_of_time += bool(commit.rows.keys() - WITHOUT_TIME)
        self.rows_stored += sum(commit.rows.values())
