"""Foreign exporters as a part of the service: everything that scrapes them, put together from its configuration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import pyarrow as pa

from rankscope_ingest.base.background import cancel
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.tls import client_tls
from rankscope_ingest.pipeline.batcher import Batcher
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.scrape.discovery import ExporterList, configured
from rankscope_ingest.scrape.http import PageFetcher
from rankscope_ingest.scrape.sample_table import Scrape
from rankscope_ingest.scrape.scraper import Scraper


class ExternalExporters:
    """Scrapes what the configuration names, and says how that goes. Implements the `Sink` of the scraper."""

    def __init__(self, config: ServiceConfig, batcher: Batcher, metrics: ServiceMetrics) -> None:
        """Scrape into `batcher`."""
        self._config = config
        self._batcher = batcher
        # No certificate of ours is shown to others; theirs are checked against the same CA as the ranks'.
        self._fetcher = PageFetcher(
            networks=config.service.allowed_networks, tls=client_tls(config.service.ca_file, None, None)
        )
        self.scraped, self.read, self.dropped = metrics.scraped, metrics.read, metrics.dropped
        self._metrics = metrics
        self._scraper = Scraper(self._fetcher, self, clock=time.monotonic, wall=lambda: time.time_ns() // 1000)

    @property
    def is_full(self) -> bool:
        """Return whether scraping has to wait for the store."""
        return self._batcher.is_full

    def samples(self, table: pa.Table) -> None:
        """Take rows of `samples`."""
        self._batcher.add({"samples": table}, time.monotonic())

    def scrape(self, scrape: Scrape) -> None:
        """Take the samples of one scrape."""
        self._batcher.add_scrape(scrape, time.monotonic())

    def described(self) -> Iterable[Mapping[str, object]]:
        """Return how each exporter stands."""
        now = time.monotonic()
        return [one.described(now) for one in self._scraper.followed]

    def show(self) -> None:
        """Bring the service's page up to date."""
        self._metrics.show_exporters(one.is_up for one in self._scraper.followed)

    @asynccontextmanager
    async def scraping(self) -> AsyncIterator[None]:
        """Scrape while inside."""
        async with self._fetcher:
            self._scraper.show("[[exporters]]", map(configured, self._config.exporters))
            lists = [ExporterList(one, self._fetcher, self._scraper.show) for one in self._config.exporter_lists]
            watching = [asyncio.create_task(one.run()) for one in lists]
            try:
                yield
            finally:
                await cancel([*watching, *self._scraper.tasks])
