"""Samples from what one scrape brought, and from the scrape itself. Pure but for what was seen before.

As in Prometheus every scrape has `up`, `scrape_duration_seconds` and `scrape_samples_scraped` of its own: a failed one
has `up` 0 and nothing else, so that a series that stands still can be told from one that nobody could read.
"""

from __future__ import annotations

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
from rankscope_ingest.scrape.parser import PageRows
from rankscope_ingest.scrape.sample_table import Scrape, Series

FROM_EXPORTER: Final = "exporter"

OLDEST_DAYS: Final = 62
"""How old a time on a page may be: each day is a file, and remote write takes no more of them at once either."""

AHEAD_MINUTES: Final = 10
"""How far a clock may be ahead, as in Prometheus; a time of years to come would hide all others until then."""

_MINUTE: Final = 60_000_000  # µs
_DAY: Final = 1440 * _MINUTE
_LEAST_REMEMBERED: Final = 1_000

_Series = tuple[str, str | None]


class Tabling:
    """Makes scrapes of one exporter, whose series are put together once for as long as its pages stay the same."""

    def __init__(self, exporter: ScrapeTarget) -> None:
        self._exporter = exporter
        self._metrics: pa.Array | None = None  # of the page that the series are of
        self._series: Series | None = None

    def scrape(self, rows: PageRows, ts: int, seconds: float) -> Scrape:
        """Return the samples of a page that tells no times, scraped at `ts` (UTC µs), and those of the scrape."""
        own = np.array([1.0, seconds, rows.rows])
        if self._series is None or rows.metrics is not self._metrics:
            self._metrics = rows.metrics
            series = own_scrape(self._exporter, ts, seconds, rows.rows).series
            self._series = Series(
                target=self._exporter.name,
                metrics=_joined(rows.metrics, series.metrics),
                labels=_joined(rows.labels, series.labels),
            )
        return Scrape(series=self._series, ts=ts, values=np.concatenate([rows.values.to_numpy(), own]))


def _joined(one: pa.DictionaryArray, other: pa.DictionaryArray) -> pa.DictionaryArray:
    joined = pa.chunked_array([one, other]).unify_dictionaries().combine_chunks()
    return joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined


def own_scrape(exporter: ScrapeTarget, ts: int, seconds: float | None = None, samples: int | None = None) -> Scrape:
    """Return what is said of a scrape: with `seconds` and `samples` of a good one, without of a failed one."""
    said = {"up": float(samples is not None)}
    said |= {} if seconds is None else {"scrape_duration_seconds": seconds}
    said |= {} if samples is None else {"scrape_samples_scraped": float(samples)}
    series = Series(
        target=exporter.name,
        metrics=pa.array(list(said), pa.string()).dictionary_encode(),
        labels=constant(canonical_labels(dict(exporter.labels)), len(said)),
    )
    return Scrape(series=series, ts=ts, values=np.array(list(said.values())))


def page_rows(exporter: ScrapeTarget, rows: PageRows, ts: int) -> pa.Table:
    """Return the samples of a page that tells times, and was scraped at `ts` (UTC µs), for those without."""
    assert rows.ts is not None
    origins = pc.if_else(rows.ts.is_valid(), FROM_EXPORTER, FROM_INGEST).dictionary_encode()
    times = pc.fill_null(rows.ts, pa.scalar(ts, TIME))
    named = (constant(exporter.name, rows.rows), rows.metrics, rows.labels, rows.values)
    columns = (constant(NO_RUN, rows.rows), times, origins, *named)
    schema = samples_schema()
    return pa.Table.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


class OwnTimes:
    """The latest time of each series whose page says one: scraped again unchanged, it is no new sample.

    A series that leaves its page may come back with the time it had, so it is remembered: as many series as two of the
    largest pages had, those that were there last.
    """

    def __init__(self) -> None:
        self._latest: dict[_Series, int] = {}  # those of the last page come last
        self._largest = 0

    def fresh(self, rows: PageRows, scraped_at: int) -> PageRows:
        """Return `rows` without those whose own time is not newer than the last one of their series, or out of bounds.

        Bounds are those around `scraped_at` (UTC µs).
        """
        if rows.ts is None:
            return rows
        series = list(zip(rows.metrics.to_pylist(), rows.labels.to_pylist(), strict=True))
        times = rows.ts.cast(pa.int64()).to_pylist()
        within = [ts is None or _is_within(ts, scraped_at) for ts in times]
        told = list(zip(series, times, within, strict=True))
        kept = [is_within and (ts is None or ts > self._latest.get(one, -1)) for one, ts, is_within in told]
        self._remember((one, ts) for one, ts, is_within in told if is_within and ts is not None)
        mask = pa.array(kept, pa.bool_())
        return PageRows(
            metrics=rows.metrics.filter(mask),
            labels=rows.labels.filter(mask),
            values=rows.values.filter(mask),
            ts=rows.ts.filter(mask),
            doubled=rows.doubled,
            out_of_bounds=within.count(False),
            exact=rows.exact,
        )

    def _remember(self, told: Iterable[tuple[_Series, int]]) -> None:
        latest: dict[_Series, int] = {}
        for one, ts in told:  # a page may have several times of a series, in any order
            latest[one] = max(ts, latest.get(one, ts))
        for one, ts in latest.items():
            self._latest[one] = max(ts, self._latest.pop(one, ts))
        self._largest = max(self._largest, len(latest))
        most = max(2 * self._largest, _LEAST_REMEMBERED)
        for one in list(islice(self._latest, max(0, len(self._latest) - most))):
            del self._latest[one]


def _is_within(ts: int, scraped_at: int) -> bool:
    return scraped_at - OLDEST_DAYS * _DAY <= ts <= scraped_at + AHEAD_MINUTES * _MINUTE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Names:
    """Series by metric and labels."""

    metrics: pa.Array
    labels: pa.Array

    @classmethod
    def of(cls, named: PageRows | Series) -> Self:
        """Return the series of a page, or of a scrape, that tell no times of their own."""
        names = cls(metrics=named.metrics, labels=named.labels)
        if isinstance(named, Series) or named.ts is None:
            return names
        return names._filtered(named.ts.is_null())

    def without(self, others: Names) -> Self:
        """Return the series that `others` has not."""
        return self._filtered(pc.invert(pc.is_in(self._keys(), others._keys())))

    def _filtered(self, kept: pa.BooleanArray) -> Self:
        return type(self)(metrics=self.metrics.filter(kept), labels=self.labels.filter(kept))

    def _keys(self) -> pa.Array:
        texts = (column.cast(pa.string()) for column in (self.metrics, self.labels))
        return pc.binary_join_element_wise(*texts, "\n", null_handling="replace", null_replacement="")


class Shown:
    """The series of one exporter that are there."""

    def __init__(self) -> None:
        self._page: pa.Array | None = None  # its metrics: the same object for as long as it stays the same
        self._names: Names | None = None

    def page(self, rows: PageRows) -> Names | None:
        """Take a page; return the series that have ended with it, None where there are none."""
        if rows.metrics is self._page:
            return None
        before, self._page, self._names = self._names, rows.metrics, Names.of(rows)
        ended = None if before is None else before.without(self._names)
        return ended if ended is not None and len(ended.metrics) else None

    def nothing(self) -> Names | None:
        """Take it that there is no page; return the series that have ended, None where there are none."""
        before, self._page, self._names = self._names, None, None
        return before if before is not None and len(before.metrics) else None


def marks(target: str, ended: Names, ts: int) -> pa.Table:
    """Return the rows of `samples` that end series of `target` at `ts` (UTC µs)."""
    count = len(ended.metrics)
    columns = (
        constant(NO_RUN, count),
        pa.repeat(pa.scalar(ts, TIME), count),
        constant(FROM_INGEST, count),
        constant(target, count),
        ended.metrics,
        ended.labels,
        pa.nulls(count, pa.float64()),
    )
    schema = samples_schema()
    return pa.Table.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
