"""The service at work: follows ranks, flushes, judges, tells people, and drains when it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from aiohttp import web

from rankscope_contract.channel import Registration, RegistrationReply
from rankscope_contract.tls import Reloading
from rankscope_ingest.base.background import BackgroundFaults, WakeUp, run_forever
from rankscope_ingest.base.config import ServiceConfig, StaticTarget
from rankscope_ingest.base.errors import RegistrationError, ServiceError
from rankscope_ingest.base.memory import trim_periodically
from rankscope_ingest.base.tls import reload_certificates
from rankscope_ingest.detect.stall_handler import RankAnswer, StallHandler
from rankscope_ingest.http.routes import make_application
from rankscope_ingest.network.auth import own_names
from rankscope_ingest.network.dialing import parse_target_url
from rankscope_ingest.network.sockets import bind
from rankscope_ingest.notify.announcer import RESOLVED, Announcer
from rankscope_ingest.notify.incident import Incident
from rankscope_ingest.notify.notifiers import Notifier
from rankscope_ingest.pipeline.batcher import PendingBatch
from rankscope_ingest.pipeline.flusher import Committed, Flusher
from rankscope_ingest.pipeline.maintenance_schedule import retention_job, run_maintenance
from rankscope_ingest.pipeline.quarantine import Quarantine
from rankscope_ingest.record_channel.client import Fetcher
from rankscope_ingest.record_channel.loop import Pace, TargetLoop
from rankscope_ingest.record_channel.plans import PlanCache
from rankscope_ingest.recovery.orphan_spools import Spools, SpoolScanner
from rankscope_ingest.remote_read.handler import RemoteRead
from rankscope_ingest.remote_write.handler import RemoteWrite, answer
from rankscope_ingest.reporting.goodput import WITHOUT_TIME, GoodputReader, read_goodput
from rankscope_ingest.reporting.progress import Progress, RunProgress
from rankscope_ingest.reporting.rows import Stamp
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.runs.target import Health, Target
from rankscope_ingest.service.external_exporters import ExternalExporters
from rankscope_ingest.service.history import History
from rankscope_ingest.service.wiring import cancel, make_batcher, make_run_monitor
from rankscope_ingest.status_page.collect import StatusCollector
from rankscope_ingest.status_page.model import Status
from rankscope_ingest.targets.pollers import Pollers, watch
from rankscope_storage.errors import StoreError
from rankscope_storage.store import Writer

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK_SECONDS: Final = 0.1
"""How often it is asked whether incidents are settled, as long as there is one that is not."""
JUDGE_SECONDS: Final = 1.0


class Supervisor:
    """One run of the service; implements the `Backend` of the HTTP side."""

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
        self._config = config
        self._writer = writer
        self._history = history
        self._fetcher = fetcher
        self._spools = Spools(config.spool.folders, fetcher)
        self._plans = PlanCache()
        self._pace = Pace.of(
            poll_seconds=config.ingest.poll_seconds,
            max_backoff_seconds=config.ingest.max_backoff_seconds,
            flush_after_seconds=config.ingest.flush_after_seconds,
            targets=lambda: len(self._following),
        )
        self._following = Pollers(self._loop, self._watermark)
        self._alarm = WakeUp()
        self._background: set[asyncio.Task[Any]] = set()
        self._is_draining = False
        self._url = ""
        self._rows_stored = 0
        self._commits = 0
        self._commits_of_time = 0
        self._metrics = ServiceMetrics()
        self._tls = tls
        self._batcher = make_batcher(config)
        self._remote_read = RemoteRead(config.store.path, config.remote_read)
        aside = Quarantine(Path(config.store.path), stamp=self._stamp, count=self._metrics.set_aside)
        self._remote_write = RemoteWrite(
            config.remote_write, writer, self._metrics, on_commit=self._on_pushed, clock=time.monotonic, aside=aside
        )
        self._flusher = Flusher(writer, self._batcher, on_commit=self._on_commit, clock=time.monotonic, aside=aside)
        self._exporters = ExternalExporters(config, self._batcher, self._metrics)
        self._goodput = GoodputReader(lambda: read_goodput(config.store.path), lambda: self._commits_of_time)
        self._faults = BackgroundFaults()
        self._status = StatusCollector(
            self,
            config.store,
            url=lambda: self._url,
            rows_pending=self._rows_pending,
            goodput=lambda: self._goodput.ratios,
            total=self._metrics.total,
        )
        self._monitor = make_run_monitor(config, history, self._batcher, self._metrics, self._poll_now)
        self._spool_watch = SpoolScanner(
            self._spools, self._monitor, watermark=self._watermark, follow=self._follow_at_once
        )
        self._announcer = Announcer(
            notifiers,
            record=self._monitor.record_incident,
            commit=self._flusher.commit_now,
            count=self._metrics.notified,
        )
        self._stall_watch = StallHandler(
            self._monitor, self._announcer, fetcher, targets=self.targets, spawn=self._spawn
        )

    async def serve(
        self,
        stop: asyncio.Event,
        *,
        on_progress: Callable[[Progress], None] | None,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        """Do everything until `stop`, then drain."""
        await self._spool_watch.begin()  # before anybody can register: older launches are older attempts
        await self._remote_write.begin()
        async with self._listening():
            if on_ready is not None:
                on_ready(self._url)
            flushing = asyncio.create_task(self._flusher.run())
            pushing = asyncio.create_task(self._remote_write.run())
            others = [asyncio.create_task(work) for work in self._works(on_progress)]
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
                await cancel([stopping, *others, *self._following.tasks, *self._background, flushing, pushing])
                with contextlib.ExitStack() as stack:  # closes all of them, and then raises what one raised
                    for part in (self._status, self._remote_write, self._remote_read, self._spools):
                        stack.callback(part.close)
                if on_progress is not None:
                    on_progress(self.progress())

    # Backend of the HTTP side.

    async def register(self, registration: Registration) -> RegistrationReply:
        """Take a registration or heartbeat. Raises RegistrationError."""
        if self._is_draining:
            raise RegistrationError(503, "the service is being stopped: try again later")
        host, _ = parse_target_url(registration.url)
        try:
            addresses = await self._fetcher.resolver.addresses(host)
        except OSError as error:
            raise RegistrationError(400, f"{registration.url}: {host} cannot be resolved: {error}") from error
        target = self._following.follow(self._monitor.accept(registration, addresses).target)
        return self._monitor.registry.reply(target)

    def poke(self, incarnation: str) -> bool:
        """Pull a target at once; False when it is unknown."""
        if self._monitor.registry.get(incarnation) is None:
            return False
        self._following.poke(incarnation)
        return True

    async def ask_stacks(self, run: str, attempt: int, ranks: Collection[int] | None) -> list[RankAnswer]:
        """Have the live ranks of an attempt, or those named, say where they stand."""
        return await self._stall_watch.ask(run, attempt, ranks)

    async def remote_read(self, request: web.Request) -> web.StreamResponse:
        """Answer Prometheus' remote read."""
        return await self._remote_read.answer(request)

    async def remote_write(self, request: web.Request) -> web.Response:
        """Take what Prometheus' remote write pushes."""
        return await answer(self._remote_write, self._metrics, request)

    def targets(self) -> Iterable[Target]:
        """Return all targets."""
        return self._monitor.registry.targets

    def exporters(self) -> Iterable[Mapping[str, object]]:
        """Return how each exporter of others stands."""
        return self._exporters.described()

    def runs(self) -> Iterable[RunProgress]:
        """Return where each run stands."""
        return self._monitor.progress()

    async def standing(self) -> Status:
        """Return how everything stands."""
        return await self._status.standing()

    def metrics_page(self) -> bytes:
        """Return the page for Prometheus."""
        latest = self._monitor.runs.latest().values()
        self._exporters.show()
        self._metrics.show(self.targets(), latest, self._monitor.progress(), self._rows_pending())
        self._metrics.show_goodput(self._goodput.ratios, {attempt.run for attempt in latest})
        return self._metrics.page()

    def degraded(self) -> str | None:
        """Return why the service cannot do its work, or None."""
        if (trouble := self._flusher.trouble or self._remote_write.trouble) is not None:
            return trouble
        if self._batcher.is_full:
            return "rows come faster than the store takes them: pulling waits for commits"
        return self._faults.recent()

    def progress(self) -> Progress:
        """Return a snapshot."""
        return Progress(
            url=self._url,
            runs=self._monitor.progress(),
            targets=sum(target.health is not Health.GONE for target in self.targets()),
            rows_pending=self._rows_pending(),
            rows_stored=self._rows_stored,
            degraded=self.degraded(),
        )

    # Works that go on side by side.

    def _works(self, on_progress: Callable[[Progress], None] | None) -> list[Coroutine[Any, Any, None]]:
        works: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = [
            ("judging runs", self._tick),
            ("upkeep of the store", self._keep_in_order),
            ("reading goodput", self._goodput.run),
            ("giving memory back", trim_periodically),
        ]
        if (tls := self._tls) is not None:
            works.append(("reading certificates", lambda: reload_certificates(tls)))
        works += [
            (f"watching {static.url}", functools.partial(self._watch_static, static)) for static in self._config.targets
        ]
        if self._config.spool.folders:
            works.append(("reading spools", lambda: self._spool_watch.run(self._config.spool.scan_seconds)))
        if on_progress is not None:
            works.append(("telling progress", lambda: self._report(on_progress)))
        return [run_forever(what, work, self._faults) for what, work in works]

    def _keep_in_order(self) -> Coroutine[Any, Any, None]:
        every = self._config.retention.every_seconds
        return run_maintenance(
            self._writer, lambda: self._commits, retain=retention_job(self._config), retain_seconds=every
        )

    def _watch_static(self, static: StaticTarget) -> Coroutine[Any, Any, None]:
        poll_seconds = self._config.ingest.poll_seconds
        return watch(static, self._fetcher, self._accept_static, poll_seconds=poll_seconds)

    async def _tick(self) -> None:
        judge_at = time.monotonic() + TICK_SECONDS
        while True:
            rest = judge_at - time.monotonic()
            await self._alarm.wait(min(TICK_SECONDS, rest) if self._monitor.incidents.unsettled() else rest)
            self._faults.attempt("settling incidents", lambda: self._announce(self._monitor.due_incidents()))
            if time.monotonic() >= judge_at:
                judge_at = time.monotonic() + JUDGE_SECONDS
                self._faults.attempt("judging runs", lambda: self._announce(self._monitor.update_runs()))
                self._faults.attempt("resolving incidents", self._resolve)
                self._faults.attempt("looking for stalls", self._stall_watch.look)
                self._faults.attempt("measuring the lag of ranks", self._status.look)

    def _resolve(self) -> None:
        for incident in self._monitor.resolve():
            self._monitor.record_incident(incident, RESOLVED)

    async def _report(self, on_progress: Callable[[Progress], None]) -> None:
        while True:
            await asyncio.sleep(1.0)
            on_progress(self.progress())

    def _follow_at_once(self, target: Target) -> None:
        self._following.follow(target)
        self.poke(target.incarnation)

    def _loop(self, target: Target) -> TargetLoop:
        return TargetLoop(target, self._spools, self._plans, self._monitor, self._pace, clock=time.monotonic)

    async def _watermark(self, incarnation: str) -> int:
        while True:
            try:
                return await self._flusher.watermark(incarnation)
            except StoreError as error:
                # A rank must not be read from the beginning only because the store cannot be asked just now.
                log.warning("the store cannot be asked for a watermark, trying again: %s", error)
                await asyncio.sleep(JUDGE_SECONDS)

    def _accept_static(self, registration: Registration) -> Target:
        return self._following.follow(self._monitor.accept(registration, ()).target)

    def _announce(self, incidents: Iterable[Incident]) -> None:
        for incident in incidents:
            self._spawn(self._announcer.announce(incident))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _poll_now(self, run: str, rank: int | None) -> None:
        if rank is None:  # an incident was opened
            self._alarm.set()
        for target in self.targets():
            who = target.registration
            if who.run == run and rank in {None, who.rank} and target.health is not Health.GONE:
                self.poke(target.incarnation)

    def _on_commit(self, batch: PendingBatch, commit: Committed) -> None:
        self._count(commit)
        for target in self._monitor.committed(batch, commit.rows, commit.seconds):
            self.poke(target.incarnation)

    def _stamp(self) -> Stamp:
        return Stamp(time.time_ns() // 1000, self._monitor.ordinals(1))

    def _rows_pending(self) -> int:
        return self._batcher.pending_rows + self._remote_write.pending_rows

    def _on_pushed(self, _: PendingBatch, commit: Committed) -> None:
        self._count(commit)
        if commit.rows:
            self._metrics.committed(commit.rows, commit.seconds, time.time_ns() // 1000)

    def _count(self, commit: Committed) -> None:
        self._commits += 1
        self._commits_of_time += bool(commit.rows.keys() - WITHOUT_TIME)
        self._rows_stored += sum(commit.rows.values())

    # The end.

    async def _drain(self, flushing: asyncio.Task[None]) -> None:
        """Pull what the live ranks still have, store it, tell them, and deliver what is to be told."""
        self._is_draining = True
        await cancel(self._following.tasks)
        drained = asyncio.create_task(self._finish())
        limit = self._config.ingest.drain_seconds
        done, _ = await asyncio.wait([drained, flushing], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if drained in done:
            drained.result()
            return
        await cancel([drained])
        if flushing in done:
            flushing.result()
        if rows := self._batcher.pending_rows:
            why = self._flusher.trouble or f"that took more than {limit:g} s"
            raise ServiceError(
                f"stopped with {rows} rows not stored: {why}. "
                "Ranks that live still have them: start the service again with the same store"
            )
        log.warning("stopped before all notifications were delivered; the next start sends the others")

    async def _finish(self) -> None:
        alive = [target for target in self.targets() if target.health is not Health.GONE]
        live = await _all_that_succeed("finding a rank's watermark", map(self._following.loop_of, alive))
        await _all_that_succeed("pulling the rest of a rank", map(self._pull_rest, live))
        self._faults.attempt("comparing replicas", self._monitor.check_replicas)
        if self._monitor.incidents.unsettled():
            await asyncio.sleep(self._config.notify.group_wait_seconds + 2 * TICK_SECONDS)  # the tick announces them
        self._faults.attempt("judging runs", lambda: self._announce(self._monitor.update_runs()))
        await self._remote_write.finish()
        await self._flusher.commit_now()
        # Once more, so that the ranks hear what is committed and need not keep it for the next service.
        heard = [loop.poll_once() for loop in live if loop.target.failures_in_row == 0]
        await _all_that_succeed("the last poll of a rank", heard)
        while self._background:
            await asyncio.wait(self._background)
        await self._flusher.commit_now()

    async def _pull_rest(self, loop: TargetLoop) -> None:
        more = True
        while more:
            if self._batcher.is_full:
                await self._flusher.commit_now()
            more = await loop.poll_once() == 0.0

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        application = make_application(self, self._config.token, own_names(self._config.service))
        runner = web.AppRunner(application, access_log=None, handle_signals=False)
        await runner.setup()
        try:
            self._url = await bind(runner, self._config.service, self._tls)
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
