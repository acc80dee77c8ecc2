"""Build the responses of the service to HTTP requests. `Api` implements the protocol `Backend` of the HTTP routes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from aiohttp import web

from rankscope_contract.protocol.channel import Registration, RegistrationReply
from rankscope_ingest.base.background import BackgroundFaults
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.detect.run_monitor import RunMonitor
from rankscope_ingest.detect.stall_handler import RankAnswer, StallHandler
from rankscope_ingest.notify.deliveries import Deliveries
from rankscope_ingest.remote_read.handler import RemoteRead
from rankscope_ingest.remote_write.handler import answer
from rankscope_ingest.reporting.goodput import GoodputReader, read_goodput
from rankscope_ingest.reporting.progress import Progress, RunProgress
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.runs.target import Target
from rankscope_ingest.service.pipeline import Pipeline
from rankscope_ingest.service.polling import ExternalExporters, Polling
from rankscope_ingest.status_page.collect import StatusCollector
from rankscope_ingest.status_page.model import Status


@dataclass(kw_only=True)
class Api:
    """Implementation of the HTTP API of the service.

    An instance holds the components of the service, its URL, and whether it is draining.
    """

    config: ServiceConfig
    metrics: ServiceMetrics
    monitor: RunMonitor
    polling: Polling
    pipeline: Pipeline
    external_exporters: ExternalExporters
    stalls: StallHandler
    faults: BackgroundFaults
    deliveries: Deliveries
    url: str = ""
    is_draining: bool = False

    def __post_init__(self) -> None:
        """Create the readers of the store: remote read, goodput, and the status of the service."""
        store, pipeline = self.config.store, self.pipeline
        self.read = RemoteRead(store.path, self.config.remote_read)
        self.goodput = GoodputReader(lambda: read_goodput(store.path), lambda: pipeline.commits_of_time)
        self.status = StatusCollector(
            self,
            store,
            url=lambda: self.url,
            rows_pending=lambda: pipeline.rows_pending,
            goodput=lambda: self.goodput.ratios,
            total=self.metrics.total,
            refused_senders=pipeline.remote_write.senders.listed,
        )

    async def register(self, registration: Registration) -> RegistrationReply:
        """Accept a registration or heartbeat of a rank and return the reply.

        Raises RegistrationError if it is rejected.
        """
        if self.is_draining:
            raise RegistrationError(503, "the service is stopping: retry later")
        reply = self.monitor.registry.reply(await self.polling.register(registration))
        return replace(reply, notice=self.monitor.shared_names.get(registration.run))

    def poke(self, incarnation: str) -> bool:
        """Poll the target with this incarnation id immediately; return False if the service has no such target."""
        return self.polling.poke(incarnation)

    async def ask_stacks(self, run: str, attempt: int, ranks: Collection[int] | None) -> list[RankAnswer]:
        """Request the stacks of the live ranks of an attempt; return one result per rank.

        `ranks` are the ranks from which stacks are requested; None means all live ranks.
        """
        return await self.stalls.request(run, attempt, ranks)

    async def remote_read(self, request: web.Request) -> web.StreamResponse:
        """Respond to a remote-read request of Prometheus."""
        return await self.read.answer(request)

    async def remote_write(self, request: web.Request) -> web.Response:
        """Store the samples of a remote-write request of Prometheus."""
        return await answer(self.pipeline.remote_write, self.metrics, request)

    def targets(self) -> Iterable[Target]:
        """Return all targets that the service polls or has polled recently."""
        return self.polling.targets

    def exporters(self) -> Iterable[Mapping[str, object]]:
        """Return the scrape state of each external exporter, as one JSON object per exporter."""
        return self.external_exporters.described()

    def runs(self) -> tuple[RunProgress, ...]:
        """Return the progress of each run."""
        return self.monitor.progress()

    async def current_status(self) -> Status:
        """Return the status of the service, its runs and its targets."""
        return await self.status.current()

    def metrics_page(self) -> bytes:
        """Return the service's metrics in the Prometheus text format."""
        latest = list(self.monitor.runs.latest().values())
        self.metrics.show_exporters(exporter.is_up for exporter in self.external_exporters.followed)
        self.metrics.show(self.targets(), latest, self.runs(), self.pipeline.rows_pending)
        self.metrics.show_goodput(self.goodput.ratios, {attempt.run for attempt in latest})
        return self.metrics.page()

    def degraded(self) -> str | None:
        """Return the reason why the service is degraded, or None if it works normally."""
        return self.pipeline.degraded or self.faults.recent()

    def undelivered(self) -> str | None:
        """Return the number of notifications that could not be delivered, with the reason; None without such ones."""
        return self.deliveries.trouble()

    def progress(self) -> Progress:
        """Return a snapshot of the service: its URL, the progress of runs, and the numbers of targets and rows."""
        return Progress(
            url=self.url,
            runs=self.runs(),
            targets=sum(not target.is_gone for target in self.targets()),
            rows_pending=self.pipeline.rows_pending,
            rows_stored=self.pipeline.rows_stored,
            degraded=self.degraded(),
        )
