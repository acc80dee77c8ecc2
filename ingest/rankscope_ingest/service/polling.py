"""Poll and scrape all sources of data.

The sources are registered ranks, ranks at configured addresses (static targets), spools of dead processes, and external
exporters.
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa

from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.base.background import Job, cancel, start_task
from rankscope_ingest.base.config import ServiceConfig, StaticTarget
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.base.tls import client_tls
from rankscope_ingest.detect.record_sink import RecordSink
from rankscope_ingest.detect.run_monitor import RunMonitor
from rankscope_ingest.network.dialing import parse_target_url
from rankscope_ingest.pipeline.batcher import Batcher
from rankscope_ingest.record_channel.client import Fetcher
from rankscope_ingest.record_channel.loop import Pace, TargetLoop
from rankscope_ingest.record_channel.plans import PlanCache
from rankscope_ingest.recovery.orphan_spools import Spools, SpoolScanner
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.runs.target import Target
from rankscope_ingest.scrape.discovery import ExporterList, configured
from rankscope_ingest.scrape.http import PageFetcher
from rankscope_ingest.scrape.sample_table import Scrape
from rankscope_ingest.scrape.scraper import Followed, Scraper
from rankscope_ingest.targets.pollers import Pollers, watch


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
            Job(f"watching {static.url}", interval, functools.partial(self._watch, static), starts_immediately=True)
            for static in self._config.targets
        ]
        if self._config.spool.folders:
            jobs.append(Job("scanning for spools", self._config.spool.scan_seconds, self.spool_scanner.scan))
        return jobs

    def _watch(self, static: StaticTarget) -> Coroutine[Any, Any, None]:
        def accept(registration: Registration) -> Target:
            return self.pollers.follow(self._monitor.accept(registration, ()).target)

        return watch(static, self._fetcher, accept, poll_seconds=self._config.ingest.poll_seconds)

    def _follow_now(self, target: Target) -> None:
        self.pollers.follow(target)
        self.poke(target.incarnation)


class ExternalExporters:
    """Scrapes the configured external exporters into a batcher. Implements the protocol `Sink` of the scraper."""

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
