"""Samples of several requests on their way to the store: when to flush, and the table that one flush brings. Pure.

A request is answered when its samples are stored, so a batch waits for others only for a moment; it knows the requests
in it by their receipts, which stand beside its commit in the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from rankscope_ingest.base.tables import NO_RUN, TIME, constant, samples_schema
from rankscope_ingest.pipeline.batcher import FlushClock, PendingBatch
from rankscope_ingest.remote_write.decoder import Part, Written
from rankscope_storage.prometheus.series import STALE_BITS

RECEIPTS: Final = "rankscopeWritten"
"""Under which word of a commit's information the requests stand that it stored."""

FROM_PROMETHEUS: Final = "prometheus"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSamples(PendingBatch):
    """What one commit will hold; the table is made by the flush thread."""

    requests: tuple[Written, ...]

    def tables(self) -> dict[str, pa.Table]:
        """Return the rows of all requests."""
        return {"samples": samples_table(self.requests)}

    def as_it_came(self) -> object:
        """Return the samples with the texts of their series, and of no other that their book knows."""
        return [
            {
                "target": part.book.targets.of(part.numbers).to_pylist(),
                "metric": part.book.metrics.of(part.numbers).to_pylist(),
                "labels": part.book.labels.of(part.numbers).to_pylist(),
                "time_ms": part.times_ms.tolist(),
                "value": part.values.tolist(),
            }
            for request in self.requests
            for part in request.parts
        ]


def halves(batch: PendingSamples) -> tuple[PendingSamples, PendingSamples] | None:
    """Return two batches of whole requests in the place of one, None for one of a single request."""
    middle = len(batch.requests) // 2
    if not middle:
        return None
    receipts = batch.info[RECEIPTS].split()
    first, second = (
        PendingSamples(
            pieces={},
            watermarks={},
            rows=sum(request.rows for request in batch.requests[part]),
            info={RECEIPTS: " ".join(receipts[part])},
            requests=batch.requests[part],
        )
        for part in (slice(middle), slice(middle, None))
    )
    return first, second


@dataclass(slots=True, kw_only=True)
class SampleBatcher(FlushClock):
    """Requests that wait for a commit. The clock is an argument."""

    _requests: list[Written] = field(default_factory=list)
    _receipts: list[str] = field(default_factory=list)

    def add(self, written: Written, receipt: str, now: float) -> None:
        """Take a request, also one without a sample: its sender waits for what came before it."""
        self._requests.append(written)
        self._receipts.append(receipt)
        self._rows += written.rows
        self._opened(now)

    def take(self) -> PendingSamples:
        """Return everything gathered; it stays counted until `settled`."""
        batch = PendingSamples(
            pieces={},
            watermarks={},
            rows=self._rows,
            info={RECEIPTS: " ".join(self._receipts)},
            requests=tuple(self._requests),
        )
        self._requests, self._receipts = [], []
        self._handed_over()
        return batch


def samples_table(requests: Iterable[Written]) -> pa.Table:
    """Return the rows of requests, those of each book together."""
    by_book: dict[int, list[Part]] = {}
    for part in (part for one in requests for part in one.parts):
        by_book.setdefault(id(part.book), []).append(part)
    tables = [_table(Part.joined(parts)) for parts in by_book.values()]
    return pa.concat_tables(tables) if tables else samples_schema().empty_table()


def _table(part: Part) -> pa.Table:
    """Return the rows of one book; a mark of staleness has no value: nothing was measured."""
    book, rows = part.book, len(part.numbers)
    is_stale = part.values.view(np.int64) == STALE_BITS
    columns = (
        constant(NO_RUN, rows),
        pa.array(part.times_ms * 1000).cast(TIME),
        constant(FROM_PROMETHEUS, rows),
        *(column.of(part.numbers) for column in (book.targets, book.metrics, book.labels)),
        pa.array(part.values, mask=is_stale if is_stale.any() else None),
    )
    return pa.Table.from_arrays(list(columns), schema=samples_schema())
