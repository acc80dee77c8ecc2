"""Series that have ended: those that a page lacks while the page before had them, or all when it cannot be read.

As in Prometheus each gets one more sample, a mark of staleness, which the store keeps as a row without a value: without
it a question for a moment would be answered with the last value for five minutes more. Series whose page tells their
own times have none, there as here: they may stand still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.exposition.grid import Series
from rankscope_ingest.exposition.pages import PageRows
from rankscope_ingest.tables import FROM_INGEST, NO_RUN, TIME, constant, samples_schema


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
