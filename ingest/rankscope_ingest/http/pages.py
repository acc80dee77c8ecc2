"""Routes of the pages of runs, which `rankscope_view` renders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import unquote

import duckdb
import pyarrow as pa
from aiohttp import web

from rankscope_ingest.base.background import FAULTS
from rankscope_ingest.http.live import LiveUpdates
from rankscope_ingest.network.connections import most_connections
from rankscope_ingest.reporting.live_tail import LiveTails
from rankscope_storage.base.errors import StoreError
from rankscope_view.answers import BYTES, Response
from rankscope_view.data.comparison import LETTERS
from rankscope_view.site import Site, is_slow

WATCH_SECONDS: Final = 0.5
"""Interval in seconds at which the version of the store is read while a page is open."""

OTHERS_SECONDS: Final = 5.0
"""The same interval for a service, which knows its own commits."""

PREPARE_SECONDS: Final = 2.0
"""Time in seconds after the start at which the pages are prepared: the ranks that register come first."""

_THREADS: Final = 2
_PATTERNS: Final = ("/", "/runs/{tail:.*}", "/compare", "/data/{tail:.*}", "/assets/{tail:.*}")

log = logging.getLogger(__name__)


class Pages:
    """The pages of one store. Queries run in threads of this object."""

    def __init__(
        self,
        site: Site,
        base: str = "",
        *,
        alarms: Callable[[], Sequence[str]] = tuple,
        tails: LiveTails | None = None,
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
        self._live = LiveUpdates(self._version, lambda: site.reload_seconds, tails, seconds, most)

    def committed(self, version: int, datasets: Collection[str]) -> None:
        """Update open pages after a commit of the service with rows of `datasets`."""
        self._live.committed(version, datasets)

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
            log.warning("the pages are not prepared, the first request takes longer: %s", error)
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
