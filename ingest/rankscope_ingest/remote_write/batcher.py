"""Collect decoded remote write requests in batches, and build the table of one flush.

The module performs no I/O. The sender gets its response after the commit, so a batch waits only for a short time. Each
request is identified by a receipt, which is a hash of its body. The receipts of a batch are stored in the metadata of
its commit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from rankscope_ingest.base.tables import NO_RUN, TIME, constant, samples_schema
from rankscope_ingest.pipeline.batcher import FlushClock, PendingBatch
from rankscope_ingest.remote_write.decoder import DecodedRequest
from rankscope_storage.prometheus.series import STALE_BITS

RECEIPTS: Final = "rankscopeWritten"
"""Key in the metadata of a commit.

The value lists the receipts (hashes of the bodies) of the committed remote write requests.
"""

FROM_PROMETHEUS: Final = "prometheus"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSamples(PendingBatch):
    """A batch of remote write requests that are stored in one commit. The flush thread builds their table."""

    requests: Sequence[DecodedRequest]

    @classmethod
    def of(cls, requests: Sequence[DecodedRequest], receipts: Sequence[str]) -> PendingSamples:
        """Return a batch of `requests`. `receipts` has the receipt of each request, in the same order."""
        rows = sum(request.rows for request in requests)
        return cls(pieces={}, watermarks={}, rows=rows, info={RECEIPTS: " ".join(receipts)}, requests=requests)

    def tables(self) -> dict[str, pa.Table]:
        """Return the samples of all requests as rows of `samples`."""
        return {"samples": samples_table(self.requests)}

    def as_it_came(self) -> object:
        """Return the samples of each request as plain lists, which can be written to the quarantine."""
        return [
            {
                "target": [series.target for series in request.series],
                "metric": [series.metric for series in request.series],
                "labels": [series.labels for series in request.series],
                "time_ms": request.times_ms.tolist(),
                "value": request.values.tolist(),
            }
            for request in self.requests
        ]


def halves(batch: PendingSamples) -> tuple[PendingSamples, PendingSamples] | None:
    """Return two batches, each with half of the requests of `batch`; None if it has a single request."""
    middle = len(batch.requests) // 2
    if not middle:
        return None
    receipts = batch.info[RECEIPTS].split()
    return (
        PendingSamples.of(batch.requests[:middle], receipts[:middle]),
        PendingSamples.of(batch.requests[middle:], receipts[middle:]),
    )


@dataclass(slots=True, kw_only=True)
class SampleBatcher(FlushClock):
    """Remote write requests that wait for a commit. Callers pass the current time, in seconds."""

    _requests: list[DecodedRequest] = field(default_factory=list)
    _receipts: list[str] = field(default_factory=list)

    def add(self, request: DecodedRequest, receipt: str, now: float) -> None:
        """Add a request.

        A request without samples is added too: its response also waits for the commit of the earlier requests.
        """
        self._requests.append(request)
        self._receipts.append(receipt)
        self._rows += request.rows
        self._opened(now)

    def take(self) -> PendingSamples:
        """Return all waiting requests as a batch. Its rows count as pending until `release` is called."""
        batch = PendingSamples.of(tuple(self._requests), self._receipts)
        self._requests, self._receipts = [], []
        self._taken()
        return batch


def samples_table(requests: Sequence[DecodedRequest]) -> pa.Table:
    """Return the samples of `requests` as rows of `samples`. A staleness marker becomes a null value."""
    if not requests:
        return samples_schema().empty_table()
    series = list(itertools.chain.from_iterable(request.series for request in requests))
    values = np.concatenate([request.values for request in requests])
    is_stale = values.view(np.int64) == STALE_BITS
    times_ms = np.concatenate([request.times_ms for request in requests])
    columns = [
        constant(NO_RUN, len(series)),
        pa.array(times_ms * 1000).cast(TIME),
        constant(FROM_PROMETHEUS, len(series)),
        pa.array([one.target for one in series], pa.string()).dictionary_encode(),
        pa.array([one.metric for one in series], pa.string()).dictionary_encode(),
        pa.array([one.labels for one in series], pa.string()).dictionary_encode(),
        pa.array(values, mask=is_stale if is_stale.any() else None),
    ]
    return pa.Table.from_arrays(columns, schema=samples_schema())
