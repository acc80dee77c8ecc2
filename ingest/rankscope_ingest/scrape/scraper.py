"""Scrape exporters, each in a separate task at its own interval, and pass the samples to a sink.

An exporter keeps no history, so samples that are not scraped are lost. Nevertheless, scrapes are skipped while the
store is slow, because otherwise the memory for pages would have no limit. Skipped scrapes are counted. At most
`MAX_CONCURRENT` scrapes run at a time. Exporters whose last scrape failed have a separate limit, so that hanging
exporters do not delay healthy ones.

The samples of one exporter are those on its pages, samples about each scrape, and staleness markers. If a sample has a
time on the page, and this time is not newer than the latest time of its series, the sample is dropped. As in
Prometheus, every successful scrape adds `up`, `scrape_duration_seconds` and `scrape_samples_scraped`. A failed scrape
adds only `up` with the value 0 and `scrape_duration_seconds`, so that a series whose value does not change can be
distinguished from a series that could not be read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.metrics.spec import MetricSpec
from rankscope_contract.model.redaction import redacted_text
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.background import start_task
from rankscope_ingest.base.errors import DecodeError, FetchError
from rankscope_ingest.base.tables import FROM_INGEST, NO_RUN, TIME, constant, samples_schema
from rankscope_ingest.network.http_client import TEXT, PageFetcher
from rankscope_ingest.scrape.discovery import ScrapeTarget
from rankscope_ingest.scrape.page_reader import OPENMETRICS, PageReader, PageRows
from rankscope_ingest.scrape.sample_table import PageSeries, Scrape
from rankscope_storage.base.service_catalogue import EXPORTER_SAMPLES, EXPORTER_SAMPLES_DROPPED, EXPORTER_SCRAPES

log = logging.getLogger(__name__)

FROM_EXPORTER: Final = "exporter"
OLDEST_DAYS: Final = 62
"""Maximum age, in days, of the time of a sample on a page.

A limit is needed because the store writes a separate file for each day. The samples of a remote write request have the
same limit.
"""

AHEAD_MINUTES: Final = 10
"""Maximum number of minutes by which the time of a sample may be in the future, as in Prometheus.

A sample far in the future would hide all later samples of its series until that time.
"""

_MINUTE: Final = 60_000_000  # µs
_DAY: Final = 1440 * _MINUTE
_MIN_REMEMBERED: Final = 1_000

_Series = tuple[str, str | None]


OWN: Final = ("up", "scrape_duration_seconds", "scrape_samples_scraped")
"""Names of the samples about a scrape. The last one is absent after a failed scrape."""

MAX_CONCURRENT: Final = 64
"""Maximum number of concurrent scrapes. Together with the size limit of a page, it bounds the memory for responses."""

MAX_CONCURRENT_FAILING: Final = 32


def _joined(one: pa.DictionaryArray, other: pa.DictionaryArray) -> pa.DictionaryArray:
    joined = pa.chunked_array([one, other]).unify_dictionaries().combine_chunks()
    return joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined


def page_rows(exporter: ScrapeTarget, rows: PageRows, ts: int) -> pa.Table:
    """Return the samples of a page as rows of `samples`. At least one sample has a time on the page.

    Samples without a time get `ts`, the time of the scrape in UTC µs.
    """
    assert rows.ts is not None
    origins = pc.if_else(rows.ts.is_valid(), FROM_EXPORTER, FROM_INGEST).dictionary_encode()
    times = pc.fill_null(rows.ts, pa.scalar(ts, TIME))
    named = (constant(exporter.name, rows.rows), rows.metrics, rows.labels, rows.values)
    return _samples_table(constant(NO_RUN, rows.rows), times, origins, *named)


def _samples_table(*columns: pa.Array) -> pa.Table:
    schema = samples_schema()
    return pa.Table.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


class OwnTimes:
    """The latest time of each series of an exporter whose samples have times on the page.

    If a sample has the same time as in the previous scrape, it is the same sample and is not stored again. A series may
    disappear from the page and return with its previous time. The latest times of removed series are therefore kept, up
    to twice the number of series of the largest page; the oldest are removed first.
    """

    def __init__(self) -> None:
        self._latest: dict[_Series, int] = {}  # in the order of their last page
        self._largest = 0

    def fresh(self, rows: PageRows, scraped_at: int) -> PageRows:
        """Return `rows` without old samples and without samples whose time is out of bounds.

        A sample is old if it is not newer than the latest sample of its series. The bounds of a time are 62 days before
        and 10 minutes after `scraped_at`, the time of the scrape in UTC µs.
        """
        if rows.ts is None:
            return rows
        series = list(zip(rows.metrics.to_pylist(), rows.labels.to_pylist(), strict=True))
        times = rows.ts.cast(pa.int64()).to_pylist()
        within = [ts is None or _is_within(ts, scraped_at) for ts in times]
        timed = list(zip(series, times, within, strict=True))
        kept = [is_within and (ts is None or ts > self._latest.get(one, -1)) for one, ts, is_within in timed]
        self._remember((one, ts) for one, ts, is_within in timed if is_within and ts is not None)
        mask = pa.array(kept, pa.bool_())
        columns = {name: getattr(rows, name).filter(mask) for name in ("metrics", "labels", "values", "ts")}
        return dataclasses.replace(rows, **columns, out_of_bounds=within.count(False))

    def _remember(self, timed: Iterable[tuple[_Series, int]]) -> None:
        latest: dict[_Series, int] = {}
        for one, ts in timed:  # a page may have several times of a series, in any order
            latest[one] = max(ts, latest.get(one, ts))
        for one, ts in latest.items():
            self._latest[one] = max(ts, self._latest.pop(one, ts))
        self._largest = max(self._largest, len(latest))
        limit = max(2 * self._largest, _MIN_REMEMBERED)
        for one in list(islice(self._latest, max(0, len(self._latest) - limit))):
            del self._latest[one]


def _is_within(ts: int, scraped_at: int) -> bool:
    return scraped_at - OLDEST_DAYS * _DAY <= ts <= scraped_at + AHEAD_MINUTES * _MINUTE


def staleness_markers(ended: PageSeries, ts: int) -> pa.Table:
    """Return staleness markers as rows of `samples`: null values of the series `ended` at `ts` (UTC µs)."""
    count = len(ended.metrics)
    return _samples_table(
        constant(NO_RUN, count),
        pa.repeat(pa.scalar(ts, TIME), count),
        constant(FROM_INGEST, count),
        constant(ended.target, count),
        ended.metrics,
        ended.labels,
        pa.nulls(count, pa.float64()),
    )


class SampleReceiver(Protocol):
    """Receiver of scraped samples, and of the numbers of scrapes and samples for metrics.

    The scraper calls all methods on the event loop.
    """

    @property
    def is_full(self) -> bool:
        """Return whether scrapes must be skipped until the next commit, because too many rows are waiting."""

    def samples(self, table: pa.Table) -> None:
        """Add the rows of `table`, which has the columns of `samples`, to the current batch."""

    def scrape(self, scrape: Scrape) -> None:
        """Add the samples of one scrape to the current batch."""

    def count(self, spec: MetricSpec, amount: float, *labels: str) -> None:
        """Increase the counter `spec`, whose labels have the values `labels`: that of scrapes, or of samples.

        Scrapes are ok, failed or skipped. Samples are counted by the parser that read them: `layout` if only the
        numbers of the page were parsed, because its other bytes were those of an earlier page, and otherwise `exact`.
        """


@dataclass(slots=True, kw_only=True, eq=False)
class Followed:
    """One exporter that is scraped, and the result of its last scrape.

    `is_up` is None before the first scrape. `read_at` is the start of the last successful scrape, in monotonic seconds.
    `active` are the series of the last scrape, without those of which the samples have times on the page.
    """

    exporter: ScrapeTarget
    is_up: bool | None = None
    read_at: float | None = None
    last_error: str | None = None
    last_scrape_seconds: float | None = None
    last_samples: int | None = None
    own_times: OwnTimes = field(default_factory=OwnTimes)
    active: PageSeries | None = None
    reader: PageReader = field(init=False)
    _page: tuple[pa.Array, PageSeries] | None = None  # metrics of the last page, and its series

    def __post_init__(self) -> None:
        self.reader = PageReader(self.exporter.labels)

    def own_series(self, *, is_failed: bool = False) -> PageSeries:
        """Return the series about a scrape."""
        names = OWN[:-1] if is_failed else OWN
        return PageSeries(
            target=self.exporter.name,
            metrics=pa.array(names, pa.string()).dictionary_encode(),
            labels=constant(canonical_labels(dict(self.exporter.labels)), len(names)),
        )

    def page_series(self, rows: PageRows) -> PageSeries:
        """Return the series of a page whose samples have no times on the page, and those about the scrape.

        To save time, they are combined only when the series of the page change.
        """
        if self._page is None or rows.metrics is not self._page[0]:
            own, columns = self.own_series(), {"metrics": rows.metrics, "labels": rows.labels}
            if rows.ts is not None:
                columns = {name: column.filter(rows.ts.is_null()) for name, column in columns.items()}
            joined = {name: _joined(column, getattr(own, name)) for name, column in columns.items()}
            self._page = rows.metrics, PageSeries(target=own.target, **joined)
        return self._page[1]

    def described(self, now: float) -> Mapping[str, object]:
        """Return this exporter and its last scrape as JSON values for the status page.

        `now` is in monotonic seconds.
        """
        return {
            "name": self.exporter.name,
            "url": redacted_text(self.exporter.url),
            "labels": dict(self.exporter.labels),
            "up": self.is_up,
            "last_error": self.last_error,
            "last_scrape_seconds": self.last_scrape_seconds,
            "lag_seconds": None if self.read_at is None else round(now - self.read_at, 3),
            "samples": self.last_samples,
        }


class Scraper:
    """Scrapes the exporters of all sources, such as the configuration file and lists of exporters.

    `clock` returns monotonic seconds; `wall` returns the time as UTC µs.
    """

    def __init__(
        self, fetch: PageFetcher, sink: SampleReceiver, *, clock: Callable[[], float], wall: Callable[[], int]
    ) -> None:
        self._fetch = fetch
        self._sink = sink
        self._clock = clock
        self._wall = wall
        self._lists: dict[str, tuple[ScrapeTarget, ...]] = {}
        self._followed: dict[str, Followed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._parsing = asyncio.Lock()  # one thread, so that many complete pages leave threads to the store
        self._slots, self._failing_slots = asyncio.Semaphore(MAX_CONCURRENT), asyncio.Semaphore(MAX_CONCURRENT_FAILING)

    @property
    def followed(self) -> Iterable[Followed]:
        """Return the exporters that are currently scraped, with the results of their last scrapes."""
        return self._followed.values()

    @property
    def tasks(self) -> Iterable[asyncio.Task[None]]:
        """Return the tasks that scrape exporters. The caller must cancel them when the service ends."""
        return self._tasks.values()

    def show(self, source: str, exporters: Iterable[ScrapeTarget]) -> None:
        """Replace the exporters of `source`, and start or stop the scrapes of those that were added or removed.

        If several exporters have the same name, only the exporter of the first source is scraped.
        """
        self._lists[source] = tuple(exporters)
        wanted: dict[str, ScrapeTarget] = {}
        for one in (one for found in self._lists.values() for one in found):
            other = wanted.setdefault(one.name, one)
            if other.url != one.url:
                log.warning(
                    "two exporters have the name %s: %s is scraped, %s is not; rename one of them",
                    one.name,
                    other.url,
                    one.url,
                )
        changed = [name for name, known in self._followed.items() if wanted.get(name) != known.exporter]
        active = {name: self._stop(name, is_gone=name not in wanted) for name in changed}
        for name in [name for name in wanted if name not in self._followed]:
            # With a new address or new labels, series that do not occur again get staleness markers.
            followed = Followed(exporter=wanted[name], active=active.get(name))
            self._followed[name] = followed
            scraping = functools.partial(self._scrape_forever, followed)
            self._tasks[name] = start_task(f"scraping the exporter {name}", scraping, is_repeated=True)

    async def scrape(self, followed: Followed) -> None:
        """Scrape the exporter once, and pass its samples to the sink.

        A failed scrape raises no error: it is stored as the sample `up` with the value 0 and recorded in `followed`,
        the state of the exporter.
        """
        exporter, sink = followed.exporter, self._sink
        if sink.is_full:
            sink.count(EXPORTER_SCRAPES, 1, "skipped")
            return
        async with self._failing_slots if followed.is_up is False else self._slots:
            ts, started = self._wall(), self._clock()
            try:
                rows = await self._page(exporter, followed.reader)
            except (FetchError, DecodeError) as error:
                self._failed(followed, error, ts, self._clock() - started)
                return
            seconds = self._clock() - started
        fresh = followed.own_times.fresh(rows, ts)
        self._count(rows, fresh)
        followed.is_up, followed.last_error, followed.read_at = True, None, started
        followed.last_scrape_seconds, followed.last_samples = seconds, rows.rows
        series, own = followed.page_series(rows), np.array([1.0, seconds, rows.rows])
        self._replace(followed, series, ts)
        if rows.ts is None:
            sink.scrape(Scrape(series=series, ts=ts, values=np.concatenate([rows.values.to_numpy(), own])))
        else:
            sink.samples(page_rows(exporter, fresh, ts))
            sink.scrape(Scrape(series=followed.own_series(), ts=ts, values=own))

    async def _page(self, exporter: ScrapeTarget, reader: PageReader) -> PageRows:
        body, content_type = await self._fetch.get(
            exporter.url, accept=TEXT, timeout_seconds=exporter.timeout_seconds, max_bytes=exporter.max_bytes
        )
        try:
            async with self._parsing:
                return await asyncio.to_thread(reader.read, body, openmetrics=content_type == OPENMETRICS)
        except DecodeError:
            raise
        except Exception as error:  # a defect of the parser: the scrape is stored as failed
            log.exception("unexpected error in parsing the page of exporter %s", exporter.name)
            raise DecodeError(f"the page cannot be parsed: unexpected {type(error).__name__}: {error}") from error

    def _failed(self, followed: Followed, error: Exception, ts: int, seconds: float) -> None:
        if followed.is_up is not False:
            log.warning(
                "scrape of exporter %s failed, retrying at the scrape interval: %s", followed.exporter.name, error
            )
        series = followed.own_series(is_failed=True)
        self._replace(followed, series, ts)
        followed.is_up, followed.last_error = False, str(error)
        followed.last_scrape_seconds, followed.last_samples = seconds, None
        self._sink.count(EXPORTER_SCRAPES, 1, "failed")
        self._sink.scrape(Scrape(series=series, ts=ts, values=np.array([0.0, seconds])))

    def _replace(self, followed: Followed, series: PageSeries | None, ts: int) -> None:
        """Replace the series of an exporter. Those that have ended get staleness markers at `ts` (UTC µs)."""
        before, followed.active = followed.active, series
        if before is None or before is series:
            return
        ended = before if series is None else before.without(series)
        if len(ended.metrics):
            self._sink.samples(staleness_markers(ended, ts))

    def _count(self, rows: PageRows, fresh: PageRows) -> None:
        self._sink.count(EXPORTER_SCRAPES, 1, "ok")
        self._sink.count(EXPORTER_SAMPLES, rows.rows, "exact" if rows.exact else "layout")
        repeated, outside = rows.rows - fresh.rows - fresh.out_of_bounds, fresh.out_of_bounds
        for reason, count in (("doubled", rows.doubled), ("repeated", repeated), ("out_of_bounds", outside)):
            if count:
                self._sink.count(EXPORTER_SAMPLES_DROPPED, count, reason)

    def _stop(self, name: str, *, is_gone: bool) -> PageSeries | None:
        """Stop scraping the exporter `name`, and return the series of its last scrape.

        With `is_gone`, the exporter is no longer in any list, and staleness markers are written for all its series.
        """
        followed = self._followed.pop(name)
        self._tasks.pop(name).cancel()
        if is_gone:
            self._replace(followed, None, self._wall())
        return followed.active

    async def _scrape_forever(self, followed: Followed) -> None:
        every = followed.exporter.every_seconds
        # The hash spreads the exporters over the interval. The offset is the same after a restart.
        offset = int.from_bytes(hashlib.sha256(followed.exporter.name.encode()).digest()[:4], "big") / (1 << 32) * every
        while True:
            await asyncio.sleep(every - (self._clock() - offset) % every)
            started = self._clock()
            await self.scrape(followed)
            for _ in range(int((self._clock() - started) / every)):
                self._sink.count(
                    EXPORTER_SCRAPES, 1, "skipped"
                )  # the scrape, with its waiting time, took longer than the interval
