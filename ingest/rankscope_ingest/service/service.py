"""The running service: start its parts, do the periodic work, and drain when it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

from aiohttp import web

from rankscope_contract.security.tls import Reloading
from rankscope_ingest.base.background import BackgroundFaults, WakeUp, cancel, run_forever
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.errors import ServiceError
from rankscope_ingest.base.memory import trim_periodically
from rankscope_ingest.base.tls import reload_certificates
from rankscope_ingest.detect.stall_handler import StallHandler
from rankscope_ingest.http.routes import make_application
from rankscope_ingest.network.auth import own_names
from rankscope_ingest.network.sockets import bind
from rankscope_ingest.notify.announcer import RESOLVED, Announcer
from rankscope_ingest.notify.incident import Incident
from rankscope_ingest.notify.notifiers import Notifier
from rankscope_ingest.pipeline.batcher import PendingBatch
from rankscope_ingest.pipeline.flusher import Committed
from rankscope_ingest.record_channel.client import Fetcher
from rankscope_ingest.record_channel.loop import TargetLoop
from rankscope_ingest.reporting.progress import Progress
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.runs.target import Health
from rankscope_ingest.service.api import Api
from rankscope_ingest.service.external_exporters import ExternalExporters
from rankscope_ingest.service.history import History
from rankscope_ingest.service.pipeline import Pipeline
from rankscope_ingest.service.polling import Polling
from rankscope_ingest.service.wiring import make_batcher, make_run_monitor
from rankscope_storage.api.store import Writer

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK_SECONDS: Final = 0.1
"""Interval of the check for incidents to announce, as long as one of them waits for other ranks."""
UPDATE_SECONDS: Final = 1.0
"""Interval of the update of all runs."""


class Service:
    """One run of the service."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        writer: Writer,
        history: History,
        fetcher: Fetcher,
        notifiers: Sequence[Notifier],
        tls: Reloading | None,
    ) -> None:
        """Build the parts of the service; nothing runs before `serve`."""
        self._config = config
        self._history = history
        self._tls = tls
        self._wake_up = WakeUp()
        self._background: set[asyncio.Task[Any]] = set()
        self._faults = BackgroundFaults()
        metrics = ServiceMetrics()
        batcher = make_batcher(config)
        self._monitor = make_run_monitor(config, history, batcher, metrics, self._poll_now)
        self._pipeline = Pipeline(
            config, writer, batcher, metrics, stamp=self._monitor.stamp, on_commit=self._on_commit
        )
        self._polling = Polling(config, fetcher, self._monitor, self._pipeline.watermark)
        self._exporters = ExternalExporters(config, batcher, metrics)
        self._announcer = Announcer(
            notifiers,
            record=self._monitor.record_incident,
            commit=self._pipeline.flusher.commit_now,
            count=metrics.notified,
        )
        self._stalls = StallHandler(
            self._monitor, self._announcer, fetcher, targets=lambda: self._polling.targets, spawn=self._spawn
        )
        self._api = Api(
            config,
            metrics=metrics,
            monitor=self._monitor,
            polling=self._polling,
            pipeline=self._pipeline,
            exporters=self._exporters,
            stalls=self._stalls,
            faults=self._faults,
        )

    async def serve(
        self,
        stop: asyncio.Event,
        *,
        on_progress: Callable[[Progress], None] | None,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        """Do everything until `stop`, then drain."""
        await self._polling.spool_scanner.begin()  # before anybody can register: older launches are older attempts
        await self._pipeline.remote_write.begin()
        async with self._listening():
            if on_ready is not None:
                on_ready(self._api.url)
            flushing = asyncio.create_task(self._pipeline.flusher.run())
            pushing = asyncio.create_task(self._pipeline.remote_write.run())
            others = [asyncio.create_task(work) for work in self._tasks(on_progress)]
            stopping = asyncio.create_task(stop.wait())
            for incident in self._history.unsent:
                self._spawn(self._announcer.announce(incident, again=True))
            try:
                # Only flushing ends by itself, and only with an error that says why nothing more can be stored.
                async with self._exporters.scraping():
                    await asyncio.wait([flushing, pushing, stopping, *others], return_when=asyncio.FIRST_COMPLETED)
                for task in (flushing, pushing, *others):
                    if task.done():
                        task.result()
                await self._drain(flushing)
            finally:
                await cancel([stopping, *others, *self._polling.pollers.tasks, *self._background, flushing, pushing])
                with contextlib.ExitStack() as stack:  # closes all of them, and then raises what one raised
                    for part in (self._api.status, self._pipeline.remote_write, self._api.read, self._polling.spools):
                        stack.callback(part.close)
                if on_progress is not None:
                    on_progress(self._api.progress())

    def _tasks(self, on_progress: Callable[[Progress], None] | None) -> list[Coroutine[Any, Any, None]]:
        tasks: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = [
            ("judging runs", self._tick),
            ("upkeep of the store", self._pipeline.maintain),
            ("reading goodput", self._api.goodput.run),
            ("giving memory back", trim_periodically),
        ]
        if (tls := self._tls) is not None:
            tasks.append(("reading certificates", lambda: reload_certificates(tls)))
        tasks += self._polling.tasks()
        if on_progress is not None:
            tasks.append(("telling progress", lambda: self._report(on_progress)))
        return [run_forever(name, work, self._faults) for name, work in tasks]

    async def _tick(self) -> None:
        update_at = time.monotonic() + TICK_SECONDS
        while True:
            rest = update_at - time.monotonic()
            await self._wake_up.wait(min(TICK_SECONDS, rest) if self._monitor.incidents.unsettled() else rest)
            self._faults.attempt("settling incidents", lambda: self._announce(self._monitor.due_incidents()))
            if time.monotonic() >= update_at:
                update_at = time.monotonic() + UPDATE_SECONDS
                self._faults.attempt("judging runs", lambda: self._announce(self._monitor.update_runs()))
                self._faults.attempt("resolving incidents", self._resolve)
                self._faults.attempt("looking for stalls", self._stalls.look)
                self._faults.attempt("measuring the lag of ranks", self._api.status.look)

    def _resolve(self) -> None:
        for incident in self._monitor.resolve():
            self._monitor.record_incident(incident, RESOLVED)

    async def _report(self, on_progress: Callable[[Progress], None]) -> None:
        while True:
            await asyncio.sleep(1.0)
            on_progress(self._api.progress())

    def _announce(self, incidents: Iterable[Incident]) -> None:
        for incident in incidents:
            self._spawn(self._announcer.announce(incident))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _poll_now(self, run: str, rank: int | None) -> None:
        if rank is None:  # an incident was opened
            self._wake_up.set()
        self._polling.poll_now(run, rank)

    def _on_commit(self, batch: PendingBatch, commit: Committed) -> None:
        for target in self._monitor.committed(batch, commit.rows, commit.seconds):
            self._polling.poke(target.incarnation)

    async def _drain(self, flushing: asyncio.Task[None]) -> None:
        """Pull what the live ranks still have, store it, tell them, and deliver what is to be told."""
        self._api.is_draining = True
        await cancel(self._polling.pollers.tasks)
        drained = asyncio.create_task(self._finish())
        limit = self._config.ingest.drain_seconds
        done, _ = await asyncio.wait([drained, flushing], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if drained in done:
            drained.result()
            return
        await cancel([drained])
        if flushing in done:
            flushing.result()
        if rows := self._pipeline.batcher.pending_rows:
            why = self._pipeline.flusher.trouble or f"that took more than {limit:g} s"
            raise ServiceError(
                f"stopped with {rows} rows not stored: {why}. "
                "Ranks that live still have them: start the service again with the same store"
            )
        log.warning("stopped before all notifications were delivered; the next start sends the others")

    async def _finish(self) -> None:
        alive = [target for target in self._polling.targets if target.health is not Health.GONE]
        live = await _all_that_succeed("finding a rank's watermark", map(self._polling.pollers.loop_of, alive))
        await _all_that_succeed("pulling the rest of a rank", map(self._pull_rest, live))
        self._faults.attempt("comparing replicas", self._monitor.check_replicas)
        if self._monitor.incidents.unsettled():
            await asyncio.sleep(self._config.notify.group_wait_seconds + 2 * TICK_SECONDS)  # the tick announces them
        self._faults.attempt("judging runs", lambda: self._announce(self._monitor.update_runs()))
        await self._pipeline.remote_write.finish()
        await self._pipeline.flusher.commit_now()
        # Once more, so that the ranks hear what is committed and need not keep it for the next service.
        heard = [loop.poll_once() for loop in live if loop.target.failures_in_row == 0]
        await _all_that_succeed("the last poll of a rank", heard)
        while self._background:
            await asyncio.wait(self._background)
        await self._pipeline.flusher.commit_now()

    async def _pull_rest(self, loop: TargetLoop) -> None:
        more = True
        while more:
            if self._pipeline.batcher.is_full:
                await self._pipeline.flusher.commit_now()
            more = await loop.poll_once() == 0.0

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        application = make_application(self._api, self._config.token, own_names(self._config.service))
        runner = web.AppRunner(application, access_log=None, handle_signals=False)
        await runner.setup()
        try:
            self._api.url = await bind(runner, self._config.service, self._tls)
            yield
        finally:
            await runner.cleanup()


async def _all_that_succeed(what: str, works: Iterable[Awaitable[T]]) -> list[T]:
    """Await all works side by side and return the results of those that succeed; log the errors of the others."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for error in results:
        if isinstance(error, BaseException):
            log.error("unexpected error in %s; the others go on", what, exc_info=error)
    return [result for result in results if not isinstance(result, BaseException)]
