"""Poll and scrape all sources of data.

The sources are registered ranks, ranks at configured addresses (static targets), spools of dead processes, and external
exporters.

One poll loop runs per target. The loop starts when the target registers, and is deleted when the target is gone.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import pyarrow as pa

from rankscope_contract.wire.channel import NOTHING, Registration
from rankscope_ingest.base.background import Job, cancel, start_task
from rankscope_ingest.base.config import ServiceConfig, StaticTarget
from rankscope_ingest.base.errors import FetchError, RegistrationError
from rankscope_ingest.base.tls import client_tls
from rankscope_ingest.detect.run_monitor import RecordSink, RunMonitor
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.network.http_client import PageFetcher, parse_target_url
from rankscope_ingest.pipeline.batcher import Batcher
from rankscope_ingest.record_channel.bodies import PlanCache
from rankscope_ingest.record_channel.client import Fetcher, OtherProcess
from rankscope_ingest.record_channel.loop import Pace, TargetLoop
from rankscope_ingest.runs.models import Health, Target
from rankscope_ingest.scrape.discovery import ExporterList, configured
from rankscope_ingest.scrape.sample_table import Scrape
from rankscope_ingest.scrape.scraper import Followed, Scraper
from rankscope_ingest.spools.orphan_spools import Spools, SpoolScanner

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
        self._poked_early: set[str] = set()

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
            polling = functools.partial(self._poll, target)
            self._tasks[target.incarnation] = start_task("polling a rank", polling, is_repeated=True)
        return target

    def poke(self, incarnation: str) -> None:
        """Poll the target with this incarnation immediately, or as soon as its poll loop has started."""
        if loop := self._loops.get(incarnation):
            loop.poke()
        else:
            self._poked_early.add(incarnation)

    async def loop_of(self, target: Target) -> TargetLoop:
        """Return the poll loop of `target`.

        If there is no loop yet, create one that requests the records after the last stored sequence number.
        """
        if target.incarnation not in self._loops:
            mark = await self._watermark(target.incarnation)
            # For a process that was declared dead, received records may not be committed yet.
            target.cursor, target.committed = max(target.cursor, mark), max(target.committed, mark)
            self._loops[target.incarnation] = self._make_loop(target)
            if target.incarnation in self._poked_early:
                self.poke(target.incarnation)
        self._poked_early.discard(target.incarnation)
        return self._loops[target.incarnation]

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
        self.spools = Spools(config.spool.folders, fetcher)
        sink, plans = RecordSink(monitor), PlanCache()

        def make_loop(target: Target) -> TargetLoop:
            return TargetLoop(target, self.spools, plans, sink, pace, clock=time.monotonic)

        self.pollers = Pollers(make_loop, watermark)
        self.spool_scanner = SpoolScanner(
            self.spools, monitor.registry, accept=monitor.accept, watermark=watermark, follow=self._follow_now
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
        ]
        if self._config.spool.folders:
            jobs.append(Job("scanning for spools", self._config.spool.scan_seconds, self.spool_scanner.scan))
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

    def described(self) -> Iterable[Mapping[str, object]]:
        """Return the scrape state of each external exporter, as one JSON object per exporter."""
        now = time.monotonic()
        return [exporter.described(now) for exporter in self.followed]

    @asynccontextmanager
    async def scraping(self) -> AsyncIterator[None]:
        """Return a context manager that scrapes the exporters until its `with` block is left."""
        async with self._fetcher:
            self._scraper.show("[[exporters]]", configured(self._config.exporters))
            lists = [
                ExporterList(section, self._fetcher, self._scraper.show) for section in self._config.exporter_lists
            ]
            tasks = [start_task("reading a list of exporters", one.run, is_repeated=True) for one in lists]
            try:
                yield
            finally:
                await cancel([*tasks, *self._scraper.tasks])
