"""Routes of the pages of runs, which `rankscope_view` renders, in the service and without one (`serve_pages`).

Server-sent events update open pages: new rows of a viewed run, and versions of the store. A page of a run receives the
scalars of polled records before they are committed. It is loaded again only after a commit with other rows, such as
events, or every four minutes. All other pages are loaded again after commits, as often as a small share of one
processor permits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import unquote

import duckdb
import pyarrow as pa
from aiohttp import web

from rankscope_ingest.base.background import FAULTS, cancel, start_task
from rankscope_ingest.base.config import is_loopback, split_address
from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.base.stop_signals import stop_on_signals
from rankscope_ingest.http.routes import errors_as_text
from rankscope_ingest.live.tails import LiveTails
from rankscope_ingest.network.auth import own_names, refuse_web_pages, token_guard
from rankscope_ingest.network.connections import most_connections, raise_file_limit, serving
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.location import Location
from rankscope_view.data.comparison import LETTERS
from rankscope_view.pages.rendering import Place
from rankscope_view.site import BYTES, Response, Site, is_slow

PING_SECONDS: Final = 15.0
"""Time in seconds without an event after which a comment is sent, so that a closed connection is noticed."""

GATHER_SECONDS: Final = 0.2
"""Time in seconds for which rows are gathered before they are sent: the ranks of a run are polled together."""

RELOAD_SECONDS: Final = 240.0
"""Interval in seconds at which the page of a run is loaded again for numbers such as goodput."""

_OF_TRAINING: Final = frozenset(
    {"scalars", "tensor_stats", "features", "hashes", "samples", "tensors", "runs", "attempts"}
)
"""Datasets whose commits do not change the page of a run beyond its rows."""

log = logging.getLogger(__name__)

WATCH_SECONDS: Final = 0.5
"""Interval in seconds at which the version of the store is read while a page is open."""

OTHERS_SECONDS: Final = 5.0
"""The same interval for a service, which knows its own commits."""

PREPARE_SECONDS: Final = 2.0
"""Time in seconds after the start at which the pages are prepared: the ranks that register come first."""

_THREADS: Final = 2
_PATTERNS: Final = ("/", "/runs/{tail:.*}", "/compare", "/data/{tail:.*}", "/assets/{tail:.*}")


class LiveUpdates:
    """The open pages of one store. `read_version` returns its newest version.

    `most` is the maximum number of streams: the other connections are for the pages themselves. `owns` returns whether
    this service stores a run: the pages of other runs are loaded again after each commit.
    """

    def __init__(
        self,
        read_version: Callable[[], Awaitable[int]],
        tails: LiveTails | None,
        watch_seconds: float,
        most: int,
        owns: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._read_version = read_version
        self._owns = owns
        self._tails = tails
        self._watch_seconds = watch_seconds
        self._most = most
        self._version = -1
        self._notable = {"": -1}  # by run, and of all runs, the newest version that changes their pages beyond rows
        self._notable_at = -math.inf
        self._changed = asyncio.Event()
        self._open = 0
        self._watch: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def committed(self, version: int, datasets: Collection[str], runs: Collection[str] = ("",)) -> None:
        """Send the version to open pages after a commit with rows of `datasets`; "states" is a new state of a run.

        `runs` are the runs of these rows, by default all.
        """
        self._version = max(self._version, version)
        is_late = time.monotonic() - self._notable_at >= RELOAD_SECONDS
        if is_late or not _OF_TRAINING.issuperset(datasets):
            self._notable |= dict.fromkeys(("",) if is_late else runs, self._version)
            self._notable_at = time.monotonic() if is_late or "" in runs else self._notable_at
        self._changed.set()

    def newest(self, run: str) -> int:
        """Return the newest version for which the page of `run` must be loaded again; empty: a page without rows."""
        return max(self._notable.get(run, -1), self._notable[""]) if run and self._owns(run) else self._version

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send events for all pages of a browser until it closes the connection; it connects again after an error.

        The query has the name of the run of each page, which is empty for a page of several runs.
        """
        if self._open >= self._most:
            return web.Response(status=503, text="too many pages are open; retrying", headers={"Retry-After": "5"})
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        stream = web.StreamResponse(headers=headers)
        await stream.prepare(request)
        known, runs = request.query.get("version", ""), set(request.query.getall("run", [""]))
        seen = int(known) if known.isdecimal() and len(known) < 19 else -1
        senders = [functools.partial(self._send_versions, stream, seen, run) for run in runs]
        if self._tails is not None:
            senders += [functools.partial(self._send_rows, stream, self._tails, run) for run in runs - {""}]
        tasks = [start_task("sending live updates to a page", sender) for sender in senders]
        try:
            with self._watching():
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(tasks)
        return stream

    def stop(self) -> None:
        """End all streams."""
        self._stopped.set()
        self._changed.set()

    async def _send_rows(self, stream: web.StreamResponse, tails: LiveTails, run: str) -> None:
        with tails.viewing(run), contextlib.suppress(ConnectionResetError):  # the reader closed the page
            seen = 0
            while True:
                await tails.changed(run, seen)
                await asyncio.sleep(GATHER_SECONDS)
                seen, text = await tails.changed(run, seen)
                await stream.write(f"event: rows\ndata: [{json.dumps(run)},{text}]\n\n".encode())

    async def _send_versions(self, stream: web.StreamResponse, seen: int, run: str) -> None:
        with contextlib.suppress(ConnectionResetError):
            while not self._stopped.is_set():
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        while (newest := self.newest(run)) <= seen and not self._stopped.is_set():
                            self._changed.clear()
                            await self._changed.wait()
                except TimeoutError:
                    await stream.write(b"event: ping\ndata:\n\n")
                    continue
                if newest > seen:
                    seen = newest
                    await stream.write(f"data: {json.dumps([run, seen])}\n\n".encode())

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        self._open += 1
        if self._watch is None:
            self._watch = start_task("reading the version of the store", self._follow, is_repeated=True)
        try:
            yield
        finally:
            self._open -= 1
            if not self._open and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    async def _follow(self) -> None:
        """Read the version of the store, which other processes may write too."""
        while True:
            try:
                version = await self._read_version()
            except (StoreError, duckdb.Error, OSError) as error:
                log.warning("the version of the store cannot be read, retrying: %s", error)
            else:
                if version > self._version:  # of a service, a commit of its maintenance
                    self.committed(version, () if self._tails is not None else ("events",))
            await asyncio.sleep(self._watch_seconds)


class Pages:
    """The pages of one store. Queries run in threads of this object."""

    def __init__(
        self,
        site: Site,
        base: str = "",
        *,
        alarms: Callable[[], Sequence[str]] = tuple,
        tails: LiveTails | None = None,
        owns: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._site = site
        self.base = base
        self._alarms = alarms
        self._faults = FAULTS.get()
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="rankscope-pages")
        self._slow_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-reports")
        seconds = WATCH_SECONDS if tails is None else OTHERS_SECONDS
        self._preparation: asyncio.TimerHandle | None = None
        most = most_connections() // 2
        self._live = LiveUpdates(self._version, tails, seconds, most, owns)

    def committed(self, version: int, datasets: Collection[str], runs: Collection[str] = ("",)) -> None:
        """Update open pages after a commit of the service with rows of `datasets` of `runs`, by default all."""
        self._live.committed(version, datasets, runs)

    @property
    def place(self) -> Place:
        """Return the facts for pages that do not show the store, such as the status page."""
        return self._site.place

    def add_to(self, application: web.Application) -> None:
        """Add the pages to an application. Its shutdown ends all live updates."""
        application.add_routes(self.routes())
        application.on_startup.append(self._start)
        application.on_shutdown.append(self._stop)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of all pages, below `/` and below the prefix."""
        prefixes = dict.fromkeys(("", self.base))
        routes = [web.get(f"{prefix}/data/live", self._live.stream) for prefix in prefixes]
        return routes + [web.get(prefix + pattern, self.page) for prefix in prefixes for pattern in _PATTERNS]

    async def page(self, request: web.Request) -> web.Response:
        """Return a page, a file of the pages, or the data of a chart."""
        # The decoded path would not distinguish a slash in a name from one between names.
        path = request.rel_url.raw_path
        path = path.removeprefix(self.base) if path.startswith(f"{self.base}/") else path
        segments = [unquote(part) for part in path.split("/") if part]
        query = dict(request.query)
        if len(chosen := request.query.getall("run", [])) > 1:  # the list of runs selects several to compare
            query |= dict(zip(LETTERS, chosen, strict=False))
        threads = self._slow_thread if is_slow(segments) else self._threads
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(threads, self._site.respond, segments, query, self._alarms())
        except (StoreError, duckdb.Error, pa.ArrowInvalid, OSError) as error:
            log.warning("a page cannot be shown: %s", error)
            found = self._site.failure(error)
        return _response(found)

    async def _version(self) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._site.version)

    async def _start(self, _: web.Application) -> None:
        loop = asyncio.get_running_loop()
        self._preparation = loop.call_later(PREPARE_SECONDS, self._threads.submit, self._prepare)

    def _prepare(self) -> None:
        try:
            self._site.prepare()
        except (StoreError, duckdb.Error, pa.ArrowInvalid, OSError) as error:
            log.info("the pages are not prepared, the first request takes longer: %s", error)
        except Exception as error:  # noqa: BLE001 - it is logged and reported
            self._faults.report("preparing the pages", error)

    async def _stop(self, _: web.Application) -> None:
        if self._preparation is not None:
            self._preparation.cancel()
        self._live.stop()
        for threads in (self._threads, self._slow_thread):
            threads.shutdown(wait=False, cancel_futures=True)


def _response(found: Response) -> web.Response:
    headers = {**found.headers, "Content-Type": found.type}
    answer = web.Response(status=found.status, body=found.body, headers=headers)
    if found.type != BYTES:  # cells of a heat map hardly become smaller
        answer.enable_compression()
    return answer


async def serve_pages(
    store: Location,
    listen: str,
    *,
    environment: Mapping[str, str],
    on_ready: Callable[[str], None],
    named: Location | None = None,
) -> None:
    """Serve the pages of `store` at `listen` until a signal arrives. `on_ready` receives the address.

    Commands on the pages name the folder `named`, of which `store` may be a temporary copy. Other machines need the
    token in `environment`; processes on this machine need none. Raises ServiceError if the address cannot be used, and
    ConfigError if other machines can reach it and there is no token.
    """
    raise_file_limit()
    is_local = is_loopback(split_address(listen)[0])
    settings = {"store.path": str(store), "service.listen": listen}
    config = load_config(None, settings, environment={} if is_local else environment)
    section = config.service
    guards = [errors_as_text, token_guard(config.token), refuse_web_pages(own_names(section))]
    application = web.Application(middlewares=guards)
    Pages(Site(store, store=named)).add_to(application)
    stop = asyncio.Event()
    with stop_on_signals(stop):
        async with serving(application, section, None, shutdown_seconds=1.0) as url:
            on_ready(url)
            await stop.wait()
