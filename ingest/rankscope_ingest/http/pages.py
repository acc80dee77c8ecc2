"""Routes of the pages of runs, which `rankscope_view` renders, and of their live updates (server-sent events)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import unquote

import duckdb
from aiohttp import web

from rankscope_storage.base.errors import StoreError
from rankscope_view.answers import Response
from rankscope_view.data.comparison import LETTERS
from rankscope_view.site import Site

WATCH_SECONDS: Final = 0.3
"""Interval in seconds at which the version of the store is read while a page is open."""

PING_SECONDS: Final = 15.0
"""Time in seconds without a commit after which a comment is sent, so that a closed connection is noticed."""

_THREADS: Final = 2
_PATTERNS: Final = ("/", "/runs/{tail:.*}", "/compare", "/data/{tail:.*}", "/assets/{tail:.*}")

log = logging.getLogger(__name__)


class Pages:
    """The pages of one store. Queries run in threads of this object; all live pages share one watch of the store."""

    def __init__(self, site: Site, base: str = "", *, alarms: Callable[[], Sequence[str]] = tuple) -> None:
        self._site = site
        self.base = base
        self._alarms = alarms
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="rankscope-pages")
        self._version = -1
        self._changed = asyncio.Condition()
        self._open = 0
        self._watch: asyncio.Task[None] | None = None
        self._is_stopping = False

    def add_to(self, application: web.Application) -> None:
        """Add the pages to an application. Its shutdown ends all live updates."""
        application.add_routes(self.routes())
        application.on_shutdown.append(self._stop)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of all pages, below `/` and below the prefix."""
        prefixes = dict.fromkeys(("", self.base))
        routes = [web.get(f"{prefix}/data/live", self.live) for prefix in prefixes]
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
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, self._site.respond, segments, query, self._alarms())
        except (StoreError, duckdb.Error, OSError) as error:
            log.warning("a page cannot be shown: %s", error)
            found = self._site.failure(str(error).partition("\n")[0])
        return _response(found)

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Send an event for each new version of the store until the reader closes the page."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        stream = web.StreamResponse(headers=headers)
        await stream.prepare(request)
        with self._watching(), contextlib.suppress(ConnectionResetError):  # the reader closed the page
            seen = -1
            while not self._is_stopping:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PING_SECONDS):
                        await self._newer_than(seen)
                is_new, seen = seen != self._version, self._version
                await stream.write(f"data: {seen}\n\n".encode() if is_new else b": no change\n\n")
        return stream

    async def _newer_than(self, seen: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: seen != self._version or self._is_stopping)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        self._open += 1
        if self._watch is None:
            self._watch = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            self._open -= 1
            if not self._open and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                version = await loop.run_in_executor(self._threads, self._site.version)
            except (StoreError, duckdb.Error, OSError) as error:
                log.warning("the version of the store cannot be read, retrying: %s", error)
            else:
                if version != self._version:
                    self._version = version
                    async with self._changed:
                        self._changed.notify_all()
            await asyncio.sleep(WATCH_SECONDS)

    async def _stop(self, _: web.Application) -> None:
        self._is_stopping = True
        async with self._changed:
            self._changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _response(found: Response) -> web.Response:
    headers = {**found.headers, "Content-Type": found.type}
    answer = web.Response(status=found.status, body=found.body, headers=headers)
    answer.enable_compression()
    return answer
