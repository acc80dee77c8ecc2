"""Times on a page: each is stored once, also after a series was missing, and only within bounds around the scrape."""

import pytest

from rankscope_ingest.scrape.page_reader import Page, PageReader
from rankscope_ingest.scrape.scraper import OwnTimes

NOW = 1_770_000_000_000  # ms
MINUTE = 60_000
DAY = 1440 * MINUTE


class Scraped:
    """One exporter; returns the stored samples of each page as (metric, labels, ms)."""

    def __init__(self):
        self.reader, self.own_times = PageReader(), OwnTimes()

    def page(self, *lines, at=NOW):
        body = "".join(f"{line}\n" for line in lines).encode()
        (rows,) = self.reader.read([Page(target="x", body=body)])
        self.fresh = self.own_times.fresh(rows, at * 1000)
        times = [None] * self.fresh.rows if self.fresh.ts is None else self.fresh.ts.cast("int64").to_pylist()
        return [
            (metric, None if ts is None else ts // 1000)
            for metric, ts in zip(self.fresh.metrics.to_pylist(), times, strict=True)
        ]


@pytest.mark.parametrize("meanwhile", [[f"b 2 {NOW}"], ["b 3"], []], ids=["others", "no times", "nothing"])
def test_series_that_returns_with_its_previous_time_is_not_stored_again(meanwhile):
    scraped = Scraped()
    first = scraped.page(f"a 1 {NOW}", f"b 2 {NOW}")
    for _ in range(10):
        scraped.page(*meanwhile)

    assert [("a", NOW), ("b", NOW)] == first
    assert [] == scraped.page(f"a 1 {NOW}", f"b 2 {NOW}")
    assert [("a", NOW + 1)] == scraped.page(f"a 1 {NOW + 1}")


def test_remembered_times_are_bounded_by_the_largest_page():
    """The most recent series are remembered, independent of the number of series that come and go."""
    scraped = Scraped()
    pages = [[f'a{{n="{number}"}} 1 {NOW}' for number in range(first, first + 70)] for first in range(0, 1_400, 70)]
    for page in pages:
        scraped.page(*page)

    assert [0, 70] == [len(scraped.page(*page)) for page in (pages[-2], pages[0])]


def test_several_times_of_one_series_on_a_page_are_each_stored_once():
    scraped = Scraped()
    page = [f"a 2 {NOW}", f"a 1 {NOW - 1}"]

    assert [("a", NOW), ("a", NOW - 1)] == scraped.page(*page)
    assert [] == scraped.page(*page)


@pytest.mark.parametrize(
    ("ms", "is_stored"),
    [
        (NOW - 62 * DAY, True),
        (NOW - 62 * DAY - 1, False),
        (NOW + 10 * MINUTE, True),
        (NOW + 10 * MINUTE + 1, False),
        (0, False),
        (253_402_300_799_000, False),
    ],
)
def test_time_out_of_bounds_is_counted_and_not_stored(ms, is_stored):
    """The other samples of the page are stored, as in Prometheus."""
    scraped = Scraped()
    stored = scraped.page(f"a 1 {ms}", "b 2", f"c 3 {NOW}")

    assert [*([("a", ms)] if is_stored else []), ("b", None), ("c", NOW)] == stored
    assert int(not is_stored) == scraped.fresh.out_of_bounds


def test_page_writes_at_most_one_file_per_day_within_bounds():
    half_days = range(2 * NOW // DAY - 300, 2 * NOW // DAY + 100)
    stored = Scraped().page(*(f'm{{n="{number}"}} 1 {number * DAY // 2}' for number in half_days))

    assert 63 == len({ms // DAY for _, ms in stored})


def test_time_far_in_the_future_does_not_hide_later_samples():
    """The clock of the exporter was wrong once."""
    scraped = Scraped()
    scraped.page(f"a 1 {NOW + 365 * DAY}")

    assert [("a", NOW + MINUTE)] == scraped.page(f"a 2 {NOW + MINUTE}", at=NOW + MINUTE)
