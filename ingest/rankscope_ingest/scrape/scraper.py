"""Scrape exporters, one task each at its own beat, and hand over rows; what is read at the same time is read together.

A scrape has no ring behind it: what is not taken is gone. So a service whose store is slow leaves scrapes out, and
counts them, rather than hold pages in memory. An exporter that hangs holds its place among those that are asked at once
until its time is over: one that failed the last time waits for a place among its like, and no healthy one for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import pyarrow as pa

from rankscope_ingest.base.errors import DecodeError, FetchError
from rankscope_ingest.scrape.discovery import ScrapeTarget
from rankscope_ingest.scrape.http import AT_ONCE, FAILING_AT_ONCE, TEXT, Document
from rankscope_ingest.scrape.parser import BATCH_BYTES, Page, PageReader, PageRows
from rankscope_ingest.scrape.reference_parser import OPENMETRICS
from rankscope_ingest.scrape.sample_table import Scrape
from rankscope_ingest.scrape.samples import Names, OwnTimes, Shown, Tabling, marks, own_scrape, page_rows

log = logging.getLogger(__name__)

T = TypeVar("T")


class Fetch(Protocol):
    """Where pages come from."""

    async def get_parsed(
        self, url: str, then: Callable[[Document], T], *, accept: str, timeout_seconds: float, max_bytes: int
    ) -> T:
        """Return what `then` makes of a document in the thread that got it. Raises FetchError."""
        ...


class Sink(Protocol):
    """Where rows go, and who counts. All methods are called on the event loop."""

    @property
    def is_full(self) -> bool:
        """Whether scraping has to wait for the store."""
        ...

    def samples(self, table: pa.Table) -> None:
        """Take rows of `samples`."""
        ...

    def scrape(self, scrape: Scrape) -> None:
        """Take the samples of one scrape."""
        ...

    def scraped(self, outcome: str) -> None:
        """Count a scrape: ok, failed or skipped."""
        ...

    def read(self, how: str, samples: int) -> None:
        """Count samples that were read by layout or by the rules (exact)."""
        ...

    def dropped(self, reason: str, samples: int) -> None:
        """Count samples that are not stored: doubled, repeated with the time they had, or out_of_bounds."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Followed:
    """An exporter under way, and how its last scrape went; `is_up` is None before the first.

    `read_at` is when the newest page that could be read was asked for, in monotonic seconds.
    """

    exporter: ScrapeTarget
    is_up: bool | None = None
    read_at: float | None = None
    last_error: str | None = None
    last_scrape_seconds: float | None = None
    last_samples: int | None = None
    own_times: OwnTimes = field(default_factory=OwnTimes)
    shown: Shown = field(default_factory=Shown)
    tabling: Tabling = field(init=False)

    def __post_init__(self) -> None:
        """Begin with no page seen."""
        self.tabling = Tabling(self.exporter)


class Scraper:
    """Follows whatever exporters the lists name. `clock` is monotonic seconds, `wall` UTC µs."""

    def __init__(self, fetch: Fetch, sink: Sink, *, clock: Callable[[], float], wall: Callable[[], int]) -> None:
        self._fetch = fetch
        self._sink = sink
        self._clock = clock
        self._wall = wall
        self._lists: dict[str, tuple[ScrapeTarget, ...]] = {}
        self._followed: dict[str, Followed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reading = _Reading()
        self._at_once, self._failing_at_once = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(FAILING_AT_ONCE)

    @property
    def followed(self) -> Iterable[Followed]:
        """Return the exporters under way."""
        return self._followed.values()

    @property
    def tasks(self) -> Iterable[asyncio.Task[None]]:
        """Return what is to be cancelled at the end."""
        return [*self._tasks.values(), *self._reading.tasks]

    def show(self, source: str, exporters: Iterable[ScrapeTarget]) -> None:
        """Let `source` name these exporters from now on; of two with one name, that of the first source is scraped."""
        self._lists[source] = tuple(exporters)
        wanted: dict[str, ScrapeTarget] = {}
        for one in (one for found in self._lists.values() for one in found):
            other = wanted.setdefault(one.name, one)
            if other.url != one.url:
                log.warning("two exporters are called %s: %s is scraped, %s is not", one.name, other.url, one.url)
        changed = [name for name, known in self._followed.items() if wanted.get(name) != known.exporter]
        shown = {name: self._leave(name, is_gone=name not in wanted) for name in changed}
        for name in [name for name in wanted if name not in self._followed]:
            # Under another address or with other labels: what was there and does not come again has ended.
            self._followed[name] = followed = Followed(exporter=wanted[name], shown=shown.get(name, Shown()))
            self._tasks[name] = asyncio.create_task(self._keep_scraping(followed))
        self._reading.keep(set(wanted))

    async def scrape(self, followed: Followed) -> None:
        """Scrape once; whatever goes wrong is said of the exporter and by its `up`."""
        exporter, sink = followed.exporter, self._sink
        if sink.is_full:
            sink.scraped("skipped")
            return
        async with self._failing_at_once if followed.is_up is False else self._at_once:
            ts, began = self._wall(), self._clock()
            try:
                rows = await self._page(exporter)
            except (FetchError, DecodeError) as error:
                self._failed(followed, error, ts, self._clock() - began)
                return
            seconds = self._clock() - began
        fresh = followed.own_times.fresh(rows, ts)
        self._count(rows, fresh)
        followed.is_up, followed.last_error, followed.read_at = True, None, began
        followed.last_scrape_seconds, followed.last_samples = seconds, rows.rows
        self._end(exporter, followed.shown.page(rows), ts)
        if rows.ts is None:
            sink.scrape(followed.tabling.scrape(rows, ts, seconds))
        else:
            sink.samples(page_rows(exporter, fresh, ts))
            sink.scrape(own_scrape(exporter, ts, seconds, rows.rows))

    async def _page(self, exporter: ScrapeTarget) -> PageRows:
        def read(document: Document) -> tuple[Page, PageRows | None]:
            is_openmetrics = document.content_type == OPENMETRICS
            page = Page(target=exporter.name, labels=exporter.labels, body=document.body, openmetrics=is_openmetrics)
            return page, self._reading.at_once(page)

        page, rows = await self._fetch.get_parsed(
            exporter.url, read, accept=TEXT, timeout_seconds=exporter.timeout_seconds, max_bytes=exporter.max_bytes
        )
        return await self._reading.read(page) if rows is None else rows

    def _failed(self, followed: Followed, error: Exception, ts: int, seconds: float) -> None:
        if followed.is_up is not False:
            log.warning("exporter %s cannot be scraped: %s", followed.exporter.name, error)
        self._end(followed.exporter, followed.shown.nothing(), ts)
        said = own_scrape(followed.exporter, ts, seconds)
        if followed.is_up:
            self._end(followed.exporter, _own(followed).without(Names.of(said.series)), ts)
        followed.is_up, followed.last_error = False, str(error)
        followed.last_scrape_seconds, followed.last_samples = seconds, None
        self._sink.scraped("failed")
        self._sink.scrape(said)

    def _end(self, exporter: ScrapeTarget, ended: Names | None, ts: int) -> None:
        if ended is not None:
            self._sink.samples(marks(exporter.name, ended, ts))

    def _count(self, rows: PageRows, fresh: PageRows) -> None:
        self._sink.scraped("ok")
        self._sink.read("exact" if rows.exact else "layout", rows.rows)
        repeated, outside = rows.rows - fresh.rows - fresh.out_of_bounds, fresh.out_of_bounds
        for reason, count in (("doubled", rows.doubled), ("repeated", repeated), ("out_of_bounds", outside)):
            if count:
                self._sink.dropped(reason, count)

    def _leave(self, name: str, *, is_gone: bool) -> Shown:
        followed = self._followed.pop(name)
        self._tasks.pop(name).cancel()
        if is_gone:  # nobody reads it any more
            ts = self._wall()
            self._end(followed.exporter, followed.shown.nothing(), ts)
            if followed.is_up is not None:
                self._end(followed.exporter, _own(followed), ts)
        return followed.shown

    async def _keep_scraping(self, followed: Followed) -> None:
        every = followed.exporter.every_seconds
        # Spread over the interval, at the same place after a restart.
        offset = int.from_bytes(hashlib.sha256(followed.exporter.name.encode()).digest()[:4], "big") / (1 << 32) * every
        while True:
            await asyncio.sleep(every - (self._clock() - offset) % every)
            began = self._clock()
            try:
                await self.scrape(followed)
            except Exception:  # pages may be anything, and one must neither end its own scrapes nor others'
                log.exception("scraping %s failed in a way nobody thought of; it goes on", followed.exporter.name)
            for _ in range(int((self._clock() - began) / every)):
                self._sink.scraped("skipped")  # it had to wait for others, or for an answer, for longer than its beat


def _own(followed: Followed) -> Names:
    """Return the series that the exporter's last scrape had of its own."""
    samples = 0 if followed.is_up else None
    return Names.of(own_scrape(followed.exporter, 0, seconds=0.0, samples=samples).series)


class _Reading:
    """Reads pages: large ones where they were got, others in one thread, those that come while it is busy together."""

    def __init__(self) -> None:
        self._reader = PageReader()
        self._waiting: list[tuple[Page, asyncio.Future[PageRows | DecodeError]]] = []
        self._kept: set[str] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [] if self._task is None else [self._task]

    def keep(self, targets: set[str]) -> None:
        """Forget the layouts of all but `targets`, with the next page."""
        self._kept = targets

    def at_once(self, page: Page) -> PageRows | None:
        """Return what a large page holds if it is as it was; None leaves it to `read`. In any thread."""
        if len(page.body) < BATCH_BYTES:
            return None  # small ones are cheaper together
        try:
            return self._reader.by_layout(page)
        except Exception:  # a fault of ours: the rules may know better
            log.exception("a page of %s could not be read by its layout", page.target)
            return None

    async def read(self, page: Page) -> PageRows:
        """Return what the page holds. Raises DecodeError."""
        future: asyncio.Future[PageRows | DecodeError] = asyncio.get_running_loop().create_future()
        self._waiting.append((page, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_all())
        result = await future
        if isinstance(result, DecodeError):
            raise result
        return result

    async def _read_all(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            results = await asyncio.to_thread(self._read, [page for page, _ in waiting])
            for (_, future), result in zip(waiting, results, strict=True):
                if not future.done():
                    future.set_result(result)

    def _read(self, pages: list[Page]) -> list[PageRows | DecodeError]:
        kept, self._kept = self._kept, None
        if kept is not None:
            self._reader.forget(kept)
        try:
            return self._reader.read(pages)
        except Exception:  # a fault of ours, in one of them; all others' scrapes wait for an answer
            log.exception("%d pages could not be read together", len(pages))
            return [self._alone(page) for page in pages]

    def _alone(self, page: Page) -> PageRows | DecodeError:
        try:
            return self._reader.read([page])[0]
        except Exception as error:
            log.exception("the page of %s could not be read", page.target)
            return DecodeError(f"the page cannot be read: {type(error).__name__}: {error}")


def described(followed: Followed, now: float) -> Mapping[str, object]:
    """Return how an exporter stands at `now`, in monotonic seconds, for the service's own pages."""
    return {
        "name": followed.exporter.name,
        "url": followed.exporter.url,
        "labels": dict(followed.exporter.labels),
        "up": followed.is_up,
        "last_error": followed.last_error,
        "last_scrape_seconds": followed.last_scrape_seconds,
        "lag_seconds": None if followed.read_at is None else round(now - followed.read_at, 3),
        "samples": followed.last_samples,
    }
