"""Build rows of the dataset `samples` for many scrapes, already in the sort order of the store.

The names of the series of a target are kept in memory once for all scrapes; each scrape then consists only of its time
and its values. The scrapes of one flush form a grid of series and times. The grid needs no sorting, because it is
written series by series. Names are dictionary codes; the dictionary is rebuilt only when the set of series changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.base.tables import FROM_INGEST, NO_RUN, TIME, constant, samples_schema

Codes = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageSeries:
    """The series of one scrape of `target`, in the order of its values.

    Consecutive scrapes with the same series share one object, so that equal series can be recognized with `is`.
    """

    target: str
    metrics: pa.DictionaryArray
    labels: pa.DictionaryArray

    def without(self, others: PageSeries) -> PageSeries:
        """Return the series that are in this set but not in `others`."""
        is_left = pc.invert(pc.is_in(self._keys(), others._keys()))
        return PageSeries(target=self.target, metrics=self.metrics.filter(is_left), labels=self.labels.filter(is_left))

    def _keys(self) -> pa.Array:
        texts = (column.cast(pa.string()) for column in (self.metrics, self.labels))
        return pc.binary_join_element_wise(*texts, "\n", null_handling="replace", null_replacement="")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scrape:
    """One scrape: the values of `series` at the time `ts` (UTC µs). The order of the values is that of the series."""

    series: PageSeries
    ts: int
    values: Numbers

    @property
    def rows(self) -> int:
        """Return the number of samples of this scrape."""
        return len(self.values)

    def table(self) -> pa.Table:
        """Return this scrape as rows of `samples`."""
        return Grid().table([self])


@dataclass(frozen=True, slots=True)
class _Block:
    """The series of one page in the sort order of the store.

    The fields are the positions of the series on the page, and the dictionary codes of their metric names and labels.
    """

    order: npt.NDArray[np.int64]
    metrics: Codes
    labels: Codes


@dataclass(frozen=True, slots=True)
class _Names:
    """Dictionaries of metric names and labels that several pages share. Series without labels have the code -1."""

    metrics: pa.Array
    labels: pa.Array
    blocks: tuple[_Block, ...]

    @classmethod
    def of(cls, pages: Sequence[PageSeries]) -> Self:
        metrics, metric_codes = _unified([page.metrics for page in pages])
        labels, label_codes = _unified([page.labels for page in pages])
        ranks = pc.rank(metrics, tiebreaker="dense").to_numpy()
        found = zip(metric_codes, label_codes, strict=True)
        return cls(metrics, labels, tuple(_block(ranks, *codes) for codes in found))


def _unified(columns: Sequence[pa.DictionaryArray]) -> tuple[pa.Array, list[Codes]]:
    chunks = pa.chunked_array(columns).unify_dictionaries().chunks
    return chunks[-1].dictionary, [pc.fill_null(chunk.indices, -1).to_numpy() for chunk in chunks]


def _block(ranks: npt.NDArray[np.uint64], metrics: Codes, labels: Codes) -> _Block:
    order = np.lexsort((labels.astype(np.uint32), ranks[metrics]))  # nulls last, as in the store
    return _Block(order, metrics[order], labels[order])


class Grid:
    """Builds the rows of a flush from its scrapes.

    The dictionaries of the last flush are reused, because the next flush usually has the same series.
    """

    def __init__(self) -> None:
        self._pages: tuple[PageSeries, ...] = ()
        self._names = _Names(pa.array([], pa.string()), pa.array([], pa.string()), ())

    def table(self, scrapes: Iterable[Scrape]) -> pa.Table:
        """Return the rows of `scrapes`, sorted by target, metric, labels and time.

        There must be at least one scrape.
        """
        by_page: dict[PageSeries, list[Scrape]] = {}
        for scrape in scrapes:
            by_page.setdefault(scrape.series, []).append(scrape)
        pages = tuple(sorted(by_page, key=lambda page: page.target))
        if pages != self._pages:
            self._pages, self._names = pages, _Names.of(pages)
        return _table(self._names, [by_page[page] for page in pages])


def _table(names: _Names, groups: Sequence[Sequence[Scrape]]) -> pa.Table:
    count = sum(len(group) * group[0].rows for group in groups)
    values, times = np.empty(count, np.float64), np.empty(count, np.int64)
    targets, metrics, labels = (np.empty(count, np.int32) for _ in range(3))
    start = 0
    for number, (block, group) in enumerate(zip(names.blocks, groups, strict=True)):
        rows = slice(start, start := start + len(group) * len(block.order))
        shape = (len(block.order), len(group))
        targets[rows] = number
        metrics[rows].reshape(shape)[:] = block.metrics[:, np.newaxis]
        labels[rows].reshape(shape)[:] = block.labels[:, np.newaxis]
        times[rows].reshape(shape)[:] = [scrape.ts for scrape in group]
        by_series = np.stack([scrape.values for scrape in group], axis=1)
        # All positions are valid. With mode="raise", NumPy would write to a temporary buffer first.
        np.take(by_series, block.order, axis=0, out=values[rows].reshape(shape), mode="clip")
    columns = (
        constant(NO_RUN, count),
        pa.array(times).view(TIME),
        constant(FROM_INGEST, count),
        _coded(targets, pa.array([group[0].series.target for group in groups])),
        _coded(metrics, names.metrics),
        _coded(labels, names.labels),
        pa.array(values),
    )
    return pa.Table.from_arrays(list(columns), schema=samples_schema())


def _coded(codes: Codes, texts: pa.Array) -> pa.DictionaryArray:
    missing = codes < 0
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=missing if missing.any() else None), texts)
