"""The scrapes of one flush become rows in storage order, equal to the rows of single scrapes."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_ingest.pipeline.batcher import Batcher
from rankscope_ingest.pipeline.flusher import halves
from rankscope_ingest.scrape.sample_table import Grid, Scrape, Series
from rankscope_storage.base.schema import conform
from rankscope_storage.files.sorting import SORT_KEYS, is_sorted

NAMES = st.lists(
    st.tuples(st.sampled_from(["b", "a", "up", "é", "Z"]), st.sampled_from([None, "{}", '{"x":"1"}', '{"a":"2"}'])),
    min_size=1,
    max_size=6,
    unique=True,
)


def series(target, names):
    metrics, labels = zip(*names, strict=True)
    text = [pa.array(column, pa.string()).dictionary_encode() for column in (metrics, labels)]
    return Series(target=target, metrics=text[0], labels=text[1])


def scraped(page, ts, first=0.0):
    return Scrape(series=page, ts=ts, values=first + np.arange(len(page.metrics)))


def rows_of(table):
    times = table["ts"].cast(pa.int64()).to_pylist()
    named = [table[name].to_pylist() for name in ("run", "target", "metric", "labels", "ts_origin", "value")]
    return list(zip(times, *named, strict=True))


def expected_of(scrapes):
    """Return the expected rows, in the order of the pages."""
    for one in scrapes:
        page = one.series
        names = zip(page.metrics.to_pylist(), page.labels.to_pylist(), one.values.tolist(), strict=True)
        for metric, labels, value in names:
            yield one.ts, "", page.target, metric, labels, "ingest", value


@given(pages=st.lists(NAMES, min_size=1, max_size=4), flushes=st.lists(st.lists(st.integers(0, 3)), max_size=3))
def test_rows_of_a_flush_equal_those_of_its_scrapes_in_storage_order(pages, flushes):
    """Independent of the series of the previous flush, and of names that two targets share."""
    known = [series(f"target-{number}", names) for number, names in reversed(list(enumerate(pages)))]
    grid, clock = Grid(), itertools.count(1_000, 7)
    for flush in [[0], *flushes]:
        scrapes = [scraped(known[place % len(known)], next(clock), place / 8) for place in [0, *flush]]
        table = grid.table(scrapes)

        assert sorted(map(repr, expected_of(scrapes))) == sorted(map(repr, rows_of(table)))
        assert is_sorted(conform(table, "samples"), SORT_KEYS["samples"], together=("labels",))


def test_page_that_changes_within_a_flush_loses_no_sample():
    before, after = series("t", [("a", None), ("b", None)]), series("t", [("b", None), ("c", '{"x":"1"}')])
    scrapes = [scraped(before, 1), scraped(after, 2), scraped(after, 3)]

    assert sorted(map(repr, expected_of(scrapes))) == sorted(map(repr, rows_of(Grid().table(scrapes))))


def test_three_exporter_samples_count_as_one_row_for_a_flush():
    """A flush stores all names again, so that more samples are gathered for it, up to the limit of pending rows."""
    page = series("x", [("a", None), ("b", "{}")])
    many, full = (Batcher(flush_rows=2, flush_after_seconds=10.0, max_pending_rows=limit) for limit in (100, 4))
    due = []
    for _ in range(3):
        for batcher in (many, full):
            batcher.add_scrape(scraped(page, 5), 0.0)
            due.append(batcher.due(0.0))

    assert [None, None, None, "rows", "rows", "rows"] == due


@pytest.mark.parametrize("others", [{}, {"samples": scraped(series("z", [("m", None)]), 9).table()}])
def test_scrapes_count_as_rows_and_are_taken_with_the_batch(others):
    batcher = Batcher(flush_rows=3, flush_after_seconds=10.0, max_pending_rows=4)
    batcher.add(others, 0.0)
    scrapes = [scraped(series(target, [("a", None), ("b", "{}")]), 5) for target in "xy"]
    for scrape in scrapes:
        batcher.add_scrape(scrape, 0.0)
    reason, is_full, batch = batcher.due(0.0), batcher.is_full, batcher.take()
    whole = rows_of(batch.tables()["samples"])
    first, second = (rows_of(half.tables()["samples"]) for half in halves(batch))
    batcher.release(batch)

    assert ("rows", True) == (reason, is_full)
    assert 4 + len(others) == len(whole) == batch.rows
    assert sorted(map(repr, whole)) == sorted(map(repr, first + second))
    assert 0 == batcher.pending_rows
    assert batcher.is_empty
