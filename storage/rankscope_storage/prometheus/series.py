"""Prometheus series from sorted rows: one series per combination of labels, one sample per millisecond.

Numbers of series and samples beyond the limits of a request raise LimitError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_storage.base.errors import LimitError

STALE_BITS: Final = 0x7FF0_0000_0000_0002
"""Bits of the NaN that is the staleness marker of Prometheus. In the dataset `samples`, the marker is a null."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series: its sorted, non-empty labels, and its samples in ascending order of time."""

    labels: tuple[tuple[str, str], ...]
    times_ms: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def last(self) -> Series:
        """Return the series with its last sample alone."""
        return Series(self.labels, self.times_ms[-1:], self.values[-1:])

    def ended(self, ends_ms: Sequence[int]) -> Series:
        """Return the series with a staleness marker 1 ms after each of the times `ends_ms` that follows a sample.

        Without a marker, Prometheus repeats the last value for five minutes.
        """
        if not ends_ms:
            return self
        ends = np.unique(np.asarray(ends_ms, np.int64)) + 1
        ends = np.setdiff1d(ends[ends > self.times_ms[0]], self.times_ms)
        at, markers = np.searchsorted(self.times_ms, ends), np.full(len(ends), STALE_BITS).view(np.float64)
        return Series(self.labels, np.insert(self.times_ms, at, ends), np.insert(self.values, at, markers))


@dataclass(slots=True)
class ResultLimit:
    """Numbers of series and samples that the response to a request may still contain."""

    series: int
    samples: int
    _given: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Store the initial limits of series and samples, which error messages contain."""
        self._given = (self.series, self.samples)

    def take_samples(self, count: int) -> None:
        """Count `count` more samples of the request. Raises LimitError if it has more samples than allowed."""
        self.samples -= count
        if self.samples < 0:
            raise LimitError(
                f"the answer has more than {self._given[1]} samples: request a shorter time range, fewer ranks, "
                "tensors or ops, or raise [remote_read] max_samples"
            )

    def take_series(self, count: int) -> None:
        """Count `count` more series of the request. Raises LimitError if it has more series than allowed."""
        self.series -= count
        if self.series < 0:
            raise LimitError(
                f"the answer has more than {self._given[0]} series: request fewer ranks, tensors or ops, "
                "or raise [remote_read] max_series"
            )


def gathered(batches: Iterator[pa.RecordBatch], limit: ResultLimit) -> pa.Table | None:
    """Return the rows of all batches as one table, or None without rows.

    Raises LimitError if there are too many samples.
    """
    kept = []
    for batch in batches:
        limit.take_samples(batch.num_rows)
        if batch.num_rows:
            kept.append(batch)
    return pa.Table.from_batches(kept).combine_chunks() if kept else None


def split_series(
    rows: pa.Table, keys: Sequence[str], limit: ResultLimit
) -> Iterator[tuple[dict[str, object], npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
    """Yield the values of the columns `keys`, the times in ms, and the values of each series.

    Of several samples in one millisecond, only the last is returned.

    `rows` are sorted by `keys` and `ms`.
    """
    times = rows["ms"].to_numpy().astype(np.int64, copy=False)
    values = _values(rows["value"].combine_chunks())
    begins = np.zeros(len(times), np.bool_)
    begins[:1] = True
    for key in keys:
        codes = rows[key].combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
        begins[1:] |= codes[1:] != codes[:-1]
    starts = np.flatnonzero(begins)
    limit.take_series(len(starts))
    labels = rows.select(list(keys)).take(pa.array(starts)).to_pylist()
    last_of_moment = np.ones(len(times), np.bool_)
    last_of_moment[:-1] = begins[1:] | (times[1:] != times[:-1])
    for own, first, end in zip(labels, starts, [*starts[1:], len(times)], strict=True):
        kept = last_of_moment[first:end]
        yield own, times[first:end][kept], values[first:end][kept]


def _values(column: pa.Array) -> npt.NDArray[np.float64]:
    """Return the values with unchanged bits; a null becomes the staleness marker of Prometheus."""
    if not column.null_count:
        values: npt.NDArray[np.float64] = column.to_numpy()
        return values
    bits = column.view(pa.int64()).fill_null(STALE_BITS).to_numpy()
    return np.ascontiguousarray(bits).view(np.float64)


def labelled(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the non-empty labels, sorted by name."""
    return tuple(sorted((name, text) for name, text in labels.items() if text))


def merge_series(same: Sequence[Series]) -> Series:
    """Return one series from several with equal labels, for example of a run and of its imported live samples."""
    if len(same) == 1:
        return same[0]
    times = np.concatenate([series.times_ms for series in same])
    values = np.concatenate([series.values for series in same])
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    last_of_moment = np.append(times[1:] != times[:-1], True)
    return Series(same[0].labels, times[last_of_moment], values[last_of_moment])
