"""Samples from what one scrape brought, and from the scrape itself. Pure but for what was seen before.

As in Prometheus every scrape has `up`, `scrape_duration_seconds` and `scrape_samples_scraped` of its own: a failed one
has `up` 0 and nothing else, so that a series that stands still can be told from one that nobody could read.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.records import canonical_labels
from rankscope_ingest.exposition.grid import Scrape, Series
from rankscope_ingest.exposition.pages import PageRows
from rankscope_ingest.exposition.targets import Exporter
from rankscope_ingest.tables import FROM_INGEST, NO_RUN, TIME, constant, samples_schema

FROM_EXPORTER: Final = "exporter"


class Tabling:
    """Makes scrapes of one exporter, whose series are put together once for as long as its pages stay the same."""

    def __init__(self, exporter: Exporter) -> None:
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


def own_scrape(exporter: Exporter, ts: int, seconds: float | None = None, samples: int | None = None) -> Scrape:
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


def page_rows(exporter: Exporter, rows: PageRows, ts: int) -> pa.Table:
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
    """The latest time of each series whose page says one: scraped again unchanged, it is no new sample."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str | None], int] = {}

    def fresh(self, rows: PageRows) -> PageRows:
        """Return `rows` without those whose own time is not newer than the last one of their series."""
        if rows.ts is None:
            self._latest.clear()
            return rows
        keys = list(zip(rows.metrics.to_pylist(), rows.labels.to_pylist(), strict=True))
        times = rows.ts.cast(pa.int64()).to_pylist()
        kept = [ts is None or ts > self._latest.get(key, -1) for key, ts in zip(keys, times, strict=True)]
        present = {key: ts for key, ts in zip(keys, times, strict=True) if ts is not None}
        self._latest = {key: max(ts, self._latest.get(key, -1)) for key, ts in present.items()}
        mask = pa.array(kept, pa.bool_())
        return PageRows(
            metrics=rows.metrics.filter(mask),
            labels=rows.labels.filter(mask),
            values=rows.values.filter(mask),
            ts=rows.ts.filter(mask),
            doubled=rows.doubled,
            exact=rows.exact,
        )
