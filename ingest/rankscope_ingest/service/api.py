"""Responses of the service to HTTP requests. Implements the `Backend` of the routes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from aiohttp import web

from rankscope_contract.protocol.channel import Registration, RegistrationReply
from rankscope_ingest.base.background import BackgroundFaults
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.detect.run_monitor import RunMonitor
from rankscope_ingest.detect.stall_handler import RankAnswer, StallHandler
from rankscope_ingest.remote_read.handler import RemoteRead
from rankscope_ingest.remote_write.handler import answer
from rankscope_ingest.reporting.goodput import GoodputReader, read_goodput
from rankscope_ingest.reporting.progress import Progress, RunProgress
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.runs.target import Health, Target
from rankscope_ingest.service.external_exporters import ExternalExporters
from rankscope_ingest.service.pipeline import Pipeline
from rankscope_ingest.service.polling import Polling
from rankscope_ingest.status_page.collect import StatusCollector
from rankscope_ingest.status_page.model import Status


class Api:
    """Reads the parts of the service. Its state is the URL and whether the service drains."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        metrics: ServiceMetrics,
        monitor: RunMonitor,
        polling: Polling,
        pipeline: Pipeline,
        exporters: ExternalExporters,
        stalls: StallHandler,
        faults: BackgroundFaults,
    ) -> None:
        """Take the parts of the service."""
        self._metrics = metrics
        self._monitor = monitor
        self._polling = polling
        self._pipeline = pipeline
        self._exporters = exporters
        self._stalls = stalls
        self._faults = faults
        self.url = ""
        self.is_draining = False
        self.read = RemoteRead(config.store.path, config.remote_read)
        self.goodput = GoodputReader(lambda: read_goodput(config.store.path), lambda: pipeline.commits_of_time)
        self.status = StatusCollector(
            self,
            config.store,
            url=lambda: self.url,
            rows_pending=lambda: pipeline.rows_pending,
            goodput=lambda: self.goodput.ratios,
            total=metrics.total,
        )

    async def register(self, registration: Registration) -> RegistrationReply:
        """Take a registration or heartbeat. Raises RegistrationError."""
        if self.is_draining:
            raise RegistrationError(503, "the service is being stopped: try again later")
        return self._monitor.registry.reply(await self._polling.register(registration))

    def poke(self, incarnation: str) -> bool:
        """Poll a target immediately; return False when it is unknown."""
        return self._polling.poke(incarnation)

    async def ask_stacks(self, run: str, attempt: int, ranks: Collection[int] | None) -> list[RankAnswer]:
        """Request the stacks of the live ranks of an attempt, or of those that `ranks` names."""
        return await self._stalls.ask(run, attempt, ranks)

    async def remote_read(self, request: web.Request) -> web.StreamResponse:
        """Respond to Prometheus' remote read."""
        return await self.read.answer(request)

    async def remote_write(self, request: web.Request) -> web.Response:
        """Take the samples of Prometheus' remote write."""
        return await answer(self._pipeline.remote_write, self._metrics, request)

    def targets(self) -> Iterable[Target]:
        """Return all targets."""
        return self._polling.targets

    def exporters(self) -> Iterable[Mapping[str, object]]:
        """Return the state of each external exporter."""
        return self._exporters.described()

    def runs(self) -> Iterable[RunProgress]:
        """Return the progress of each run."""
        return self._monitor.progress()

    async def current_status(self) -> Status:
        """Return the status of the service, its runs and its targets."""
        return await self.status.current()

    def metrics_page(self) -> bytes:
        """Return the page for Prometheus."""
        latest = self._monitor.runs.latest().values()
        self._exporters.show()
        self._metrics.show(self.targets(), latest, self._monitor.progress(), self._pipeline.rows_pending)
        self._metrics.show_goodput(self.goodput.ratios, {attempt.run for attempt in latest})
        return self._metrics.page()

    def degraded(self) -> str | None:
        """Return why the service cannot do its work, or None."""
        return self._pipeline.degraded or self._faults.recent()

    def progress(self) -> Progress:
        """Return a snapshot."""
        return Progress(
            url=self.url,
            runs=self._monitor.progress(),
            targets=sum(target.health is not Health.GONE for target in self.targets()),
            rows_pending=self._pipeline.rows_pending,
            rows_stored=self._pipeline.rows_stored,
            degraded=self.degraded(),
        )
