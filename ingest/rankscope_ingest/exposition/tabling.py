"""Rows of `samples` from what one scrape brought, and from the scrape itself. Pure but for what was seen before.

As in Prometheus every scrape has `up`, `scrape_duration_seconds` and `scrape_samples_scraped` of its own: a failed one
has `up` 0 and nothing else, so that a series that stands still can be told from one that nobody could read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.records import canonical_labels
from rankscope_ingest.exposition.pages import PageRows
from rankscope_ingest.exposition.targets import Exporter
from rankscope_ingest.tables import FROM_INGEST, coded_schema

FROM_EXPORTER: Final = "exporter"
NO_RUN: Final = ""
"""An exporter beside the ranks measures a machine, whatever runs there."""

_COLUMNS: Final = ("run", "ts", "ts_origin", "target", "metric", "labels", "value")
_TIME: Final = pa.timestamp("us", "UTC")


@dataclass(frozen=True, slots=True)
class _Samples:
    metrics: pa.Array
    labels: pa.Array
    values: pa.Array


def own_rows(exporter: Exporter, ts: int, seconds: float | None = None, samples: int | None = None) -> pa.Table:
    """Return what is said of a scrape: with `seconds` and `samples` of a good one, without of a failed one."""
    said = {"up": float(samples is not None)}
    said |= {} if seconds is None else {"scrape_duration_seconds": seconds}
    said |= {} if samples is None else {"scrape_samples_scraped": float(samples)}
    columns = _Samples(
        pa.array(list(said), pa.string()).dictionary_encode(),
        _constant(canonical_labels(dict(exporter.labels)), len(said)),
        pa.array(list(said.values()), pa.float64()),
    )
    return _table(exporter, columns, _times(ts, len(said)), _constant(FROM_INGEST, len(said)))


def page_rows(exporter: Exporter, rows: PageRows, ts: int) -> pa.Table:
    """Return the samples of a page that was scraped at `ts` (UTC µs); a time of the page's own wins."""
    samples = _Samples(rows.metrics, rows.labels, rows.values)
    if rows.ts is None:
        return _table(exporter, samples, _times(ts, rows.rows), _constant(FROM_INGEST, rows.rows))
    origins = pc.if_else(rows.ts.is_valid(), FROM_EXPORTER, FROM_INGEST).dictionary_encode()
    return _table(exporter, samples, pc.fill_null(rows.ts, pa.scalar(ts, _TIME)), origins)


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


def _table(exporter: Exporter, samples: _Samples, times: pa.Array, origins: pa.Array) -> pa.Table:
    count = len(samples.values)
    schema = pa.schema([coded_schema("samples").field(name) for name in _COLUMNS])
    named = (_constant(exporter.name, count), samples.metrics, samples.labels, samples.values)
    columns = (_constant(NO_RUN, count), times, origins, *named)
    return pa.Table.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def _times(ts: int, count: int) -> pa.Array:
    return pa.array(np.full(count, ts, np.int64)).cast(_TIME)


def _constant(text: str | None, count: int) -> pa.DictionaryArray:
    if text is None:  # in the codes: dictionaries that hold a null cannot be joined
        return pa.nulls(count, pa.dictionary(pa.int32(), pa.string()))
    return pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), pa.array([text], pa.string()))
