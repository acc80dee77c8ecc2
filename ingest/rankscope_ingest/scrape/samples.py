"""Build the samples of one exporter: those on its pages, samples about each scrape, and staleness markers.

If a sample has a time on the page, and this time is not newer than the latest time of its series, the sample is
dropped. As in Prometheus, every successful scrape adds `up`, `scrape_duration_seconds` and `scrape_samples_scraped`. A
failed scrape adds only `up` with the value 0 and `scrape_duration_seconds`, so that a series whose value does not
change can be distinguished from a series that could not be read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.tables import FROM_INGEST, NO_RUN, TIME, constant, samples_schema
from rankscope_ingest.scrape.discovery import ScrapeTarget
from rankscope_ingest.scrape.page_reader import PageRows
from rankscope_ingest.scrape.sample_table import Scrape, Series

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


class ScrapeTables:
    """Builds the scrapes of one exporter.

    To save time, the names of the page's series and those of the samples about the scrape, such as `up`, are combined
    only when the series of the page change.
    """

    def __init__(self, exporter: ScrapeTarget) -> None:
        self._exporter = exporter
        self._metrics: pa.Array | None = None  # those of the page from which the series were built
        self._series: Series | None = None

    def scrape(self, rows: PageRows, ts: int, seconds: float) -> Scrape:
        """Return the samples of a page that has no times, together with samples about the scrape, such as `up`.

        `ts` is the time of the scrape in UTC µs, `seconds` its duration.
        """
        own = np.array([1.0, seconds, rows.rows])
        if self._series is None or rows.metrics is not self._metrics:
            self._metrics = rows.metrics
            series = own_samples(self._exporter, ts, seconds, rows.rows).series
            self._series = Series(
                target=self._exporter.name,
                metrics=_joined(rows.metrics, series.metrics),
                labels=_joined(rows.labels, series.labels),
            )
        return Scrape(series=self._series, ts=ts, values=np.concatenate([rows.values.to_numpy(), own]))


def _joined(one: pa.DictionaryArray, other: pa.DictionaryArray) -> pa.DictionaryArray:
    joined = pa.chunked_array([one, other]).unify_dictionaries().combine_chunks()
    return joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined


def own_samples(exporter: ScrapeTarget, ts: int, seconds: float, samples: int | None = None) -> Scrape:
    """Return the samples about a scrape, such as `up`.

    `samples` is the number of samples on the page, or None after a failure. `ts` is the time of the scrape in UTC µs,
    `seconds` its duration.
    """
    values = {"up": float(samples is not None), "scrape_duration_seconds": seconds}
    if samples is not None:
        values["scrape_samples_scraped"] = float(samples)
    series = Series(
        target=exporter.name,
        metrics=pa.array(list(values), pa.string()).dictionary_encode(),
        labels=constant(canonical_labels(dict(exporter.labels)), len(values)),
    )
    return Scrape(series=series, ts=ts, values=np.array(list(values.values())))


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeriesNames:
    """A set of series, each identified by its metric name and its labels."""

    metrics: pa.Array
    labels: pa.Array

    @classmethod
    def of(cls, named: PageRows | Series) -> Self:
        """Return the series of a page or a scrape. Series whose samples have times on the page are left out."""
        names = cls(metrics=named.metrics, labels=named.labels)
        if isinstance(named, Series) or named.ts is None:
            return names
        return names._filtered(named.ts.is_null())

    def without(self, others: SeriesNames) -> Self:
        """Return the series that are in this set but not in `others`."""
        return self._filtered(pc.invert(pc.is_in(self._keys(), others._keys())))

    def _filtered(self, kept: pa.BooleanArray) -> Self:
        return type(self)(metrics=self.metrics.filter(kept), labels=self.labels.filter(kept))

    def _keys(self) -> pa.Array:
        texts = (column.cast(pa.string()) for column in (self.metrics, self.labels))
        return pc.binary_join_element_wise(*texts, "\n", null_handling="replace", null_replacement="")


class ActiveSeries:
    """The series on the latest page of one exporter, without those of which the samples have timestamps on the page."""

    def __init__(self) -> None:
        self._page: pa.Array | None = None  # its metrics: the same object for all pages with the same series
        self._names: SeriesNames | None = None

    def update(self, rows: PageRows) -> SeriesNames | None:
        """Replace the series by those of a newer page, which has the samples `rows`.

        Return the series of the previous page that are not on the newer page, or None if there are none.
        """
        if rows.metrics is self._page:
            return None
        before, self._page, self._names = self._names, rows.metrics, SeriesNames.of(rows)
        ended = None if before is None else before.without(self._names)
        return ended if ended is not None and len(ended.metrics) else None

    def clear(self) -> SeriesNames | None:
        """Remove all series, and return them as series that have ended. Return None if there were no series."""
        before, self._page, self._names = self._names, None, None
        return before if before is not None and len(before.metrics) else None


def staleness_markers(target: str, ended: SeriesNames, ts: int) -> pa.Table:
    """Return staleness markers as rows of `samples`: null values of the series `ended` of `target` at `ts` (UTC µs)."""
    count = len(ended.metrics)
    return _samples_table(
        constant(NO_RUN, count),
        pa.repeat(pa.scalar(ts, TIME), count),
        constant(FROM_INGEST, count),
        constant(target, count),
        ended.metrics,
        ended.labels,
        pa.nulls(count, pa.float64()),
    )
