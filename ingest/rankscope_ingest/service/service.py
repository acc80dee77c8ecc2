"""The running service: start its components, run the periodic jobs, answer HTTP requests, and drain at the end.

`following` follows the logs in the sections [[watch]] of the configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from aiohttp import web

from rankscope_contract import SCHEMA_VERSION, __version__
from rankscope_contract.model.events import RunState
from rankscope_contract.wire import channel
from rankscope_contract.wire.tls import Reloading
from rankscope_ingest.base import memory, tls
from rankscope_ingest.base.background import FAULTS, BackgroundFaults, Job, cancel, run_jobs, start_task
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.errors import RegistrationError, ServiceError
from rankscope_ingest.detect.history import History
from rankscope_ingest.detect.run_monitor import RunMonitor
from rankscope_ingest.detect.stall_tracker import RankAnswer, parse_stacks_request, request_stacks
from rankscope_ingest.http.pages import Pages
from rankscope_ingest.http.routes import (
    MAX_REQUEST_BYTES,
    Handler,
    errors_as_text,
    json_response,
    per_rank,
    refuse_compressed,
)
from rankscope_ingest.http.status_page import (
    LabelReader,
    LagClock,
    ServiceStatus,
    Status,
    counters,
    page,
    run_statuses,
    target_status,
)
from rankscope_ingest.live.goodput import GoodputReader
from rankscope_ingest.live.progress import Progress
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.network.auth import OwnName, own_names, refuse_web_pages, token_guard
from rankscope_ingest.network.connections import serving
from rankscope_ingest.notify.announcer import Announcer, Deliveries, Notifier, resolved_message
from rankscope_ingest.pipeline.flusher import PendingBatch
from rankscope_ingest.record_channel.client import Fetcher
from rankscope_ingest.record_channel.loop import TargetLoop
from rankscope_ingest.remote_read.handler import RemoteRead
from rankscope_ingest.remote_write.handler import answer
from rankscope_ingest.remote_write.senders import recording
from rankscope_ingest.runs.incident import RESOLVED, Incident
from rankscope_ingest.runs.models import AttemptKey, Health, Target
from rankscope_ingest.runs.text import Place, title
from rankscope_ingest.service.polling import ExternalExporters, Pipeline, Polling, make_batcher
from rankscope_ingest.targets.registry import parse_registration
from rankscope_ingest.targets.shared_store import SharedStore
from rankscope_ingest.watch.watcher import Hooks, LogStatus, check_logs, watching
from rankscope_storage.api.store import Commit, Writer
from rankscope_storage.base import service_catalogue
from rankscope_storage.base.location import located
from rankscope_storage.base.rule_names import RULES_OF_RUNS
from rankscope_storage.runs.silences import Silences
from rankscope_view.site import HEADERS, Site

_PAGE_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_STACKS_REFUSED: Final = (
    "stacks show the code that processes execute, and this service accepts requests of all machines: set [service]"
    " token, and RANKSCOPE_TOKEN for the ranks and for this command"
)


@dataclass(kw_only=True)
class Api:
    """The components of the service that answer HTTP requests, its URL, and whether it is draining."""

    config: ServiceConfig
    metrics: ServiceMetrics
    monitor: RunMonitor
    polling: Polling
    pipeline: Pipeline
    external_exporters: ExternalExporters
    fetcher: Fetcher
    faults: BackgroundFaults
    deliveries: Deliveries
    shared: SharedStore
    url: str = ""
    is_draining: bool = False

    def __post_init__(self) -> None:
        """Create the readers of the store: remote read, goodput, and the status of the service."""
        store, pipeline = self.config.store, self.pipeline
        self.read = RemoteRead(store.path, self.config.remote_read)
        self.goodput = GoodputReader(store.path, lambda: pipeline.commits_of_time)
        self._labels, self._lag = LabelReader(store.path), LagClock()
        self._started, self._started_at = time.monotonic(), time.time_ns() // 1000

    def application(self, pages: Pages, is_own_name: OwnName | None) -> web.Application:
        """Return the aiohttp application of the service.

        If the service has a token, all paths except the health page require the token. `is_own_name` returns whether a
        host name in a request is a name of this service. If it is None, all host names are accepted.
        """
        guards = [
            recording(self.pipeline.remote_write.senders, self.metrics),
            errors_as_text,
            token_guard(self.config.token),
            refuse_web_pages(is_own_name),
            refuse_compressed,
        ]
        place = replace(pages.place, is_live=True)

        def shown(part: Callable[[Status], Any]) -> Handler:
            async def handler(_: web.Request) -> web.Response:
                return json_response(part(await self.current_status()))

            return handler

        async def status_page(_: web.Request) -> web.Response:
            text = await asyncio.to_thread(page, place, await self.current_status())
            return web.Response(text=text, content_type="text/html", headers=HEADERS)

        application = web.Application(middlewares=guards, client_max_size=MAX_REQUEST_BYTES)
        application.add_routes(
            [
                web.post(channel.REGISTER_PATH, self.register),
                web.post(channel.POKE_PATH, self.poke),
                web.post(channel.RUN_STACKS_PATH, self.stacks),
                web.post(channel.REMOTE_READ_PATH, self.read.answer),
                web.post(channel.REMOTE_WRITE_PATH, self.remote_write),
                web.get(channel.SERVICE_DISCOVERY_PATH, self.discovery),
                *(web.get(base + channel.SERVICE_PAGE_PATH, status_page) for base in dict.fromkeys(("", pages.base))),
                web.get(channel.STATUS_PATH, shown(lambda status: asdict(status.service))),
                web.get(channel.TARGETS_PATH, shown(lambda status: [asdict(target) for target in status.targets])),
                web.get(channel.RUNS_PATH, shown(lambda status: [run.document() for run in status.runs])),
                web.get(channel.EXPORTERS_PATH, shown(lambda status: list(status.exporters))),
                web.get(channel.HEALTH_PATH, self.health),
                web.get(channel.METRICS_PATH, self.metrics_page),
            ]
        )
        pages.add_to(application)
        return application

    async def register(self, request: web.Request) -> web.Response:
        """Accept a registration or heartbeat of a rank."""
        registration = parse_registration(await request.read())
        if self.is_draining:
            raise RegistrationError(503, "the service is stopping: retry later")
        self.shared.check_owner(registration.run, channel.REGISTER_PATH)
        target = await self.polling.register(registration)
        reply, target.has_notice = self.monitor.registry.reply(target), False
        reply = replace(reply, notice=self.monitor.shared_names.get(registration.run))
        return web.Response(text=reply.to_json(), content_type="application/json")

    async def poke(self, request: web.Request) -> web.Response:
        """Poll a rank immediately."""
        try:
            incarnation = json.loads(await request.read())["incarnation"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RegistrationError(
                400, 'a poke (a request to poll a rank now) must be a JSON object such as {"incarnation": "…"}'
            ) from error
        if not self.polling.poke(str(incarnation)):
            raise RegistrationError(
                404, f"no process with incarnation {incarnation!r} is registered: register the process first"
            )
        return web.Response(status=204)

    async def stacks(self, request: web.Request) -> web.Response:
        """Respond with the Python stacks of ranks, unless other machines can send requests without a token."""
        if not self.config.service.is_guarded:
            raise RegistrationError(403, _STACKS_REFUSED)
        run, ranks = parse_stacks_request(await request.read())
        self.shared.check_owner(run, channel.RUN_STACKS_PATH)
        progress = {progress.run: progress for progress in self.monitor.progress()}
        if run not in progress:
            raise RegistrationError(404, f"run {run!r} is unknown; known runs: {', '.join(progress) or 'none'}")
        known = progress[run]
        answers = await self.request_stacks((run, known.attempt), ranks)
        return json_response(asdict(known) | {"ranks": [answer.to_document() for answer in answers]})

    async def request_stacks(self, key: AttemptKey, ranks: Collection[int] | None) -> list[RankAnswer]:
        """Request the stacks of the live ranks of an attempt, of all if `ranks` is None."""
        return await request_stacks(self.fetcher.stacks, self.polling.targets, key, ranks)

    async def remote_write(self, request: web.Request) -> web.Response:
        """Store the samples of a remote-write request of Prometheus."""
        return await answer(self.pipeline.remote_write, self.metrics, request)

    async def discovery(self, request: web.Request) -> web.Response:
        """Respond with the metrics pages of the ranks of all services, for Prometheus."""
        if (per := request.query.get("per", "rank")) != "rank":
            raise RegistrationError(400, f"per={per} is not supported: use /sd, which lists each rank")
        return json_response(per_rank(self.polling.targets, await self.shared.other_ranks()))

    async def health(self, _: web.Request) -> web.Response:
        """Respond whether the service works normally."""
        trouble = self.degraded()
        status = {"status": "ok"} if trouble is None else {"status": "degraded", "reason": trouble}
        return json_response(status, status=200 if trouble is None else 503)

    async def metrics_page(self, _: web.Request) -> web.Response:
        """Respond with the service's metrics in the Prometheus text format."""
        latest = list(self.monitor.runs.latest().values())
        self.metrics.show_exporters(exporter.is_up for exporter in self.external_exporters.followed)
        self.metrics.show(self.polling.targets, latest, self.monitor.progress(), self.pipeline.rows_pending)
        failed = {attempt.key for attempt in latest if attempt.state is RunState.FAILED}
        self.metrics.show_failures(one for one in self.monitor.incidents.open() if one.attempt_key in failed)
        self.metrics.show_goodput(self.goodput.ratios, {attempt.run for attempt in latest})
        return web.Response(body=self.metrics.page(), headers={"Content-Type": _PAGE_TYPE})

    def look(self) -> None:
        """Record the sequence number of the newest record of each rank. The service calls this once per second."""
        self._lag.look(self.polling.targets, time.monotonic())

    async def current_status(self) -> Status:
        """Return the current status of the service, its runs, targets and exporters."""
        labels = await self._labels.fresh()
        self.look()
        targets, now = list(self.polling.targets), time.monotonic()
        return Status(
            service=self._service_status(targets, now),
            runs=run_statuses(self.monitor.progress(), targets, now, goodput=self.goodput.ratios, labels=labels),
            targets=[target_status(target, now, self._lag.seconds(target, now)) for target in targets],
            exporters=[exporter.described(now) for exporter in self.external_exporters.followed],
        )

    def _service_status(self, targets: Iterable[Target], now: float) -> ServiceStatus:
        reason, health = self.degraded(), Counter(target.health for target in targets)
        return ServiceStatus(
            status="ok" if reason is None else "degraded",
            reason=reason,
            version=__version__,
            schema_version=SCHEMA_VERSION,
            store=self.config.store.path,
            shard=self.config.store.shard,
            url=self.url,
            started_at=self._started_at,
            uptime_seconds=round(now - self._started, 3),
            targets={condition.value: health[condition] for condition in Health},
            rows_pending=self.pipeline.rows_pending,
            background_errors=dict(self.faults.counts),
            notifications=self.deliveries.trouble(),
            shared_names=[run.notice for run in self.monitor.progress() if run.notice],
            refused_senders=self.pipeline.remote_write.senders.listed(),
            **counters(self.metrics.total, time.time_ns() // 1000),
        )

    def degraded(self) -> str | None:
        """Return the reason why the service is degraded, or None if it works normally."""
        return self.pipeline.degraded or self.shared.trouble or self.faults.recent()

    def alarms(self) -> list[str]:
        """Return the problems of the service that the list of runs shows at its top."""
        found = []
        if reason := self.degraded():
            found.append(f"The service is degraded: {reason}")
        if undelivered := self.deliveries.trouble():
            found.append(f"Notifications: {undelivered}")
        found += [f"Run names: {run.notice}" for run in self.monitor.progress() if run.notice]
        if failing := [target for target in self.polling.targets if target.health is Health.FAILING]:
            names = ", ".join(target.name for target in failing[:3])
            found.append(f"{len(failing):,} rank{'' if len(failing) == 1 else 's'} cannot be polled: {names}")
        if lost := sum(progress.records_lost for progress in self.monitor.progress()):
            found.append(f"{lost:,} {'record was' if lost == 1 else 'records were'} lost")
        return found

    def progress(self) -> Progress:
        """Return a snapshot of the service: its URL, the progress of runs, and the numbers of targets and rows."""
        return Progress(
            url=self.url,
            runs=self.monitor.progress(),
            targets=sum(not target.is_gone for target in self.polling.targets),
            rows_pending=self.pipeline.rows_pending,
            rows_stored=self.pipeline.rows_stored,
            degraded=self.degraded(),
        )


log = logging.getLogger(__name__)

FINISH_SECONDS: Final = 5.0


@contextlib.asynccontextmanager
async def following(
    config: ServiceConfig, writer: Writer, notifiers: Sequence[Notifier], hooks: Hooks
) -> AsyncIterator[None]:
    """Follow the logs in the configuration whose runs this service owns, in the body of the context.

    Their rows are written with `writer`. At its end, pending rows are stored and pending messages are sent.
    """
    owned = [
        (section, name)
        for section, (_, name) in zip(config.watch, check_logs(config.watch), strict=True)
        if config.store.owned.owns(name)
    ]
    if not owned:
        yield
        return
    stop, states = asyncio.Event(), dict[str, str]()  # states by address

    def changed(status: LogStatus) -> None:
        """Print a line if the state of a log has changed."""
        if status.state != states.get(status.address):
            states[status.address] = status.state
            level = logging.INFO if status.is_normal else logging.WARNING
            log.log(level, "%s  %s  %s", status.run, status.state, status.unreadable or status.reason)

    async def follow() -> None:
        for section, name in owned:
            log.info("following %s as the run %s, every %g s", section.log, name, section.poll_seconds)
        async with watching(
            [section for section, _ in owned],
            writer,
            located(config.store.path),
            notifiers,
            hooks=replace(hooks, on_change=changed),
            is_alone=False,
            finish_seconds=FINISH_SECONDS,
        ) as session:
            await session.run(stop)

    task = start_task("following logs", follow, is_repeated=True)
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait([task], timeout=2 * FINISH_SECONDS)
        await cancel([task])


T = TypeVar("T")

SETTLE_SECONDS: Final = 0.1
"""Interval in seconds at which the service checks which incidents it can announce."""

UPDATE_SECONDS: Final = 1.0
"""Interval in seconds at which the states of all runs are updated. Most other jobs have the same interval."""


class Service:
    """The service from start to stop. `serve` runs it once."""

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
        """Create the components of the service. No task starts before `serve` is called."""
        self._config = config
        self._history = history
        self._tls = tls
        self._background: set[asyncio.Task[Any]] = set()
        metrics = ServiceMetrics()
        self._faults = BackgroundFaults(
            on_fault=lambda task: metrics.count(service_catalogue.BACKGROUND_ERRORS, 1, task)
        )
        FAULTS.set(self._faults)
        batcher = make_batcher(config)
        self._monitor = RunMonitor(config, history, batcher=batcher, metrics=metrics, poll_now=self._poll_now)
        self._pipeline = Pipeline(
            config, writer, batcher, metrics, stamp=self._monitor.stamp, on_commit=self._on_commit
        )
        self._shared = SharedStore(config.store, writer)
        self._polling = Polling(config, fetcher, self._monitor, self._pipeline.flusher.watermark)

        deliveries = Deliveries(lambda spec, outcome: metrics.count(spec, 1, outcome))
        self._announcer = Announcer(
            notifiers,
            record=self._monitor.record_incident,
            commit=self._pipeline.flusher.commit_now,
            deliveries=deliveries,
            place=lambda: Place.of(located(config.store.path), f"{self._api.url}{config.service.base_path}"),
            silences=Silences(located(config.store.path)),
        )
        hooks = Hooks(deliveries=deliveries, on_commit=self._on_commit_of_log)
        self._following = partial(following, config, writer, notifiers, hooks)
        self._exporters = ExternalExporters(config, batcher, metrics)
        self._api = Api(
            config=config,
            metrics=metrics,
            monitor=self._monitor,
            polling=self._polling,
            pipeline=self._pipeline,
            external_exporters=self._exporters,
            fetcher=fetcher,
            faults=self._faults,
            deliveries=deliveries,
            shared=self._shared,
        )

        section = config.service
        site = Site(located(config.store.path), base=section.base_path, has_service=True)
        self._pages = Pages(
            site, section.base_path, alarms=self._api.alarms, tails=self._monitor.tails, owns=config.store.owned.owns
        )

    async def serve(
        self,
        stop: asyncio.Event,
        *,
        on_progress: Callable[[Progress], None] | None,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        """Run the service until `stop` is set, then drain the service."""
        # Before ranks can register: older launches must get lower attempt numbers.
        await self._polling.spools.begin()
        await self._pipeline.remote_write.begin()
        async with self._listening():
            if on_ready is not None:
                on_ready(self._api.url)
            flushing = asyncio.create_task(self._pipeline.flusher.run())
            work = [
                flushing,
                asyncio.create_task(self._pipeline.remote_write.run()),
                asyncio.create_task(self._shared.run(self._api.url)),
                asyncio.create_task(run_jobs(self._jobs(on_progress), self._faults)),
            ]
            stopping = asyncio.create_task(stop.wait())
            for incident in self._history.unsent:
                self._spawn(self._announcer.announce(incident, is_repeated=True))
            try:
                # Without `stop`, only a flusher ends, with the error that prevents further commits.
                async with self._exporters.scraping(), self._following():
                    await asyncio.wait([*work, stopping], return_when=asyncio.FIRST_COMPLETED)
                for task in work:
                    if task.done():
                        task.result()
                await self._drain(flushing)
            finally:
                await cancel([stopping, *reversed(work), *self._polling.pollers.tasks, *self._background])
                with contextlib.ExitStack() as stack:  # closes all parts, and then raises the first exception
                    for part in (self._pipeline.remote_write, self._polling.spools):
                        stack.callback(part.close)
                if on_progress is not None:
                    on_progress(self._api.progress())

    def _jobs(self, on_progress: Callable[[Progress], None] | None) -> list[Job]:
        jobs = [
            Job("settling incidents", SETTLE_SECONDS, self._settle_incidents),
            Job("updating runs", UPDATE_SECONDS, self._update_runs),
            Job("resolving incidents", UPDATE_SECONDS, self._resolve_incidents),
            Job("reminding of incidents", UPDATE_SECONDS, self._remind),
            Job("checking for stalls", UPDATE_SECONDS, self._check_stalls),
            Job("measuring the lag of ranks", UPDATE_SECONDS, self._api.look),
            Job("reading goodput", UPDATE_SECONDS, self._api.goodput.read_if_due, starts_immediately=True),
            Job(
                "maintenance of the store",
                UPDATE_SECONDS,
                lambda: self._pipeline.maintain(self._shared),
                starts_immediately=True,
            ),
            Job("trimming memory", memory.TRIM_SECONDS, lambda: asyncio.to_thread(memory.trim)),
            *self._polling.jobs(),
        ]
        if self._tls is not None:
            jobs.append(Job("reloading certificates", tls.RELOAD_SECONDS, self._tls))
        if on_progress is not None:
            jobs.append(Job("reporting progress", UPDATE_SECONDS, lambda: on_progress(self._api.progress())))
        return jobs

    def _settle_incidents(self) -> None:
        self._announce(self._monitor.due_incidents())

    def _update_runs(self) -> None:
        if failures := self._monitor.update_runs():
            self._announce(failures)
            self._resolve_incidents()  # the failures that these replace, in the same commit

    def _resolve_incidents(self) -> None:
        for incident in self._monitor.resolve_incidents():
            ended_at, place = incident.seen_at, self._announcer.place()
            notice = resolved_message(incident, has_continued=True, ended_at=ended_at, place=place)
            self._spawn(self._announcer.tell_end(incident, notice))

    def _remind(self) -> None:
        for incident, open_seconds in self._monitor.due_reminders():
            self._spawn(self._announcer.remind(incident, open_seconds))

    def _check_stalls(self) -> None:
        """Start the requests for stacks and the notifications that are due for stalled attempts."""
        actions = self._monitor.stalls.check(self._monitor.runs.attempts(), self._monitor.clock())
        for key, ranks in actions.to_request:
            self._spawn(self._collect_stacks(key, ranks))
        for incident in actions.due:
            self._spawn(self._announcer.announce(incident))
        for incident, has_continued in actions.over:
            ended_at, place = self._monitor.clock(), self._announcer.place()
            notice = resolved_message(incident, has_continued=has_continued, ended_at=ended_at, place=place)
            self._monitor.record_incident(incident, RESOLVED)
            self._spawn(self._announcer.tell_end(incident, notice))

    async def _collect_stacks(self, key: AttemptKey, ranks: Collection[int]) -> None:
        # Stacks also arrive as events in the records, and only these are evaluated.
        for response in await self._api.request_stacks(key, ranks):
            if response.error is not None:
                self._monitor.stalls.add_refusal(key, response.rank, response.error, self._monitor.clock())

    def _announce(self, incidents: Iterable[Incident]) -> None:
        for incident in incidents:
            # A state of a run has its own line. Commands that read the records of ended processes print none.
            if incident.first.rule not in RULES_OF_RUNS and not incident.is_muted and incident.first.at is None:
                level = logging.getLevelNamesMapping()[incident.severity.upper()]
                log.log(level, "%s", title(incident).partition("] ")[2])
            self._spawn(self._announcer.announce(incident))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = start_task("notifying of an incident", lambda: work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _poll_now(self, run: str, rank: int | None) -> None:
        self._polling.poll_now(run, rank)

    def _on_commit(self, batch: PendingBatch, commit: Commit) -> None:
        states = ["states"] if self._monitor.may_have_states(commit.rows) else []
        self._pages.committed(commit.version, [*commit.rows, *states])
        for target in self._monitor.committed(batch, commit.rows, commit.seconds):
            self._polling.poke(target.incarnation)

    def _on_commit_of_log(self, commit: Commit, runs: Collection[str]) -> None:
        # As a commit with events, because nothing sends the rows of followed logs to their pages.
        self._pages.committed(commit.version, ["events"], runs)
        self._pipeline.rows_stored += sum(commit.rows.values())

    async def _drain(self, flushing: asyncio.Task[None]) -> None:
        """Poll the remaining records of live ranks, commit them, acknowledge them to the ranks, and send notifications.

        Raises ServiceError if rows could not be committed within the time limit.
        """
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
            reason = self._pipeline.flusher.trouble or f"the drain timed out after {limit:g} s"
            raise ServiceError(
                f"the service stopped before it stored {rows} rows: {reason}. "
                "Live ranks still have their records: start the service again with the same store"
            )
        log.warning("the service stopped before all notifications were delivered; they are sent at the next start")

    async def _finish(self) -> None:
        alive = [target for target in self._polling.targets if not target.is_gone]
        live = await _results("reading the watermark of a rank", map(self._polling.pollers.loop_of, alive))
        await _results("polling the remaining records of a rank", map(self._poll_rest, live))
        self._faults.attempt("comparing replicas", self._monitor.check_replicas)
        if self._monitor.incidents.unsettled():
            await asyncio.sleep(self._config.notify.group_wait_seconds + 2 * SETTLE_SECONDS)  # a job announces them
        self._faults.attempt("updating runs", self._update_runs)
        await self._pipeline.remote_write.finish()
        await self._pipeline.flusher.commit_now()
        # One more poll reports the commit to the ranks, so that they need not keep the records for the next service.
        reached = [loop.poll_once() for loop in live if loop.target.failures_in_row == 0]
        await _results("the last poll of a rank", reached)
        while self._background:
            self._announcer.send_lists()
            await asyncio.wait(self._background, timeout=UPDATE_SECONDS)
        self._faults.attempt("resolving incidents", self._monitor.resolve_incidents)
        await self._pipeline.flusher.commit_now()

    async def _poll_rest(self, loop: TargetLoop) -> None:
        has_more = True
        while has_more:
            if self._pipeline.batcher.is_full:
                await self._pipeline.flusher.commit_now()
            has_more = await loop.poll_once() == 0.0

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        section = self._config.service
        application = self._api.application(self._pages, own_names(section))
        async with serving(application, section, self._tls) as self._api.url:
            yield


async def _results(task: str, works: Iterable[Awaitable[T]]) -> list[T]:
    """Await all coroutines and futures in `works` concurrently, and return their results.

    `task` is a text that names the work in log messages. If an element of `works` raises an exception, the exception is
    logged, and the returned list has no result for the element.
    """
    results = await asyncio.gather(*works, return_exceptions=True)
    for error in results:
        if isinstance(error, BaseException):
            log.error("unexpected error in %s, continuing with the other ranks", task, exc_info=error)
    return [result for result in results if not isinstance(result, BaseException)]
