"""Scraping one exporter: what is stored of a good scrape, of a bad one, and while the store has no room."""

import asyncio
from collections import Counter

import pyarrow as pa
import pytest

from rankscope_ingest.base.config import ExporterSection
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.scrape.discovery import configured
from rankscope_ingest.scrape.http import Document
from rankscope_ingest.scrape.parser import BATCH_BYTES, PageReader
from rankscope_ingest.scrape.scraper import Followed, Scraper, _Reading

ONE = configured(ExporterSection(url="http://a:1/metrics", labels={"dc": "east"}))
TEXT = "text/plain"


class Fake:
    """Pages from a list, rows into a list, both clocks at hand; the far side and the sink of a scraper."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.tables = []
        self.counts = Counter()
        self.is_full = False
        self.now = 100.0
        self.asked = asyncio.Event()

    async def get_parsed(self, url, then, *, accept, timeout_seconds, max_bytes):
        self.asked.set()
        self.now += 0.5
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return then(answer if isinstance(answer, Document) else Document(answer, TEXT))

    def samples(self, table):
        self.tables.append(table)

    def scrape(self, scrape):
        self.tables.append(scrape.table())

    def scraped(self, outcome):
        self.counts[outcome] += 1

    def read(self, how, samples):
        self.counts[how] += samples

    def dropped(self, reason, samples):
        self.counts[reason] += samples

    def scraper(self):
        return Scraper(self, self, clock=lambda: self.now, wall=lambda: int(self.now * 1e6))

    def rows(self):
        table = pa.concat_tables(self.tables)
        columns = ("metric", "labels", "value", "ts", "ts_origin")
        ts = table["ts"].cast(pa.int64())
        return list(zip(*((ts if name == "ts" else table[name]).to_pylist() for name in columns), strict=True))


def said(fake):
    return [(metric, value, ts) for metric, _, value, ts, _ in fake.rows()]


async def scrape(fake, times, exporter=ONE):
    scraper, followed = fake.scraper(), Followed(exporter=exporter)
    for _ in range(times):
        await scraper.scrape(followed)
    return followed


async def test_a_large_page_is_read_where_it_was_got_as_long_as_it_stays_the_same(monkeypatch):
    """Small ones wait for each other, and a surprise for the rules."""
    count = BATCH_BYTES // 40
    large, other = (b"".join(b'metric{number="%020d"} %d\n' % (n, n * k) for n in range(count)) for k in (1, 2))
    fake, waited = Fake(large, other, other + b"more 1\n", b"a 1\n", b"a 2\n"), []
    monkeypatch.setattr(
        "rankscope_ingest.scrape.scraper._Reading.read",
        lambda self, page, read=_Reading.read: waited.append(len(page.body)) or read(self, page),
    )

    await scrape(fake, 5)

    assert [len(large), len(other) + 7, 4, 4] == waited
    assert Counter(ok=5, exact=2 * count + 2, layout=count + 1) == fake.counts
    assert {float(2 * n) for n in range(count)} <= set(fake.tables[1]["value"].to_pylist())


async def test_scrape_stores_the_page_and_how_it_went():
    fake = Fake(b'a{x="1"} 7\nb NaN\n')

    followed = await scrape(fake, 1)

    east = '{"dc":"east"}'
    assert [
        ("a", '{"dc":"east","x":"1"}', 7.0, 100_000_000, "ingest"),
        ("scrape_duration_seconds", east, 0.5, 100_000_000, "ingest"),
        ("scrape_samples_scraped", east, 2.0, 100_000_000, "ingest"),
        ("up", east, 1.0, 100_000_000, "ingest"),
    ] == [row for row in fake.rows() if row[0] != "b"]
    assert {"a:1"} == set(fake.tables[0]["target"].to_pylist())
    assert (True, None, 2) == (followed.is_up, followed.last_error, followed.last_samples)
    assert Counter(ok=1, exact=2) == fake.counts


@pytest.mark.parametrize("answer", [FetchError("refused", "nobody listens"), b"no number here\n", b"\xff\n"])
async def test_failed_scrape_is_up_0_and_the_end_of_all_that_was_on_the_page(answer):
    """A series that stands still can be told from one that nobody could read."""
    fake = Fake(b"a 1\n", answer, answer)

    followed = await scrape(fake, 3)

    ended = [("a", None, 100_500_000), ("scrape_samples_scraped", None, 100_500_000)]
    failed = [("scrape_duration_seconds", 0.5), ("up", 0.0)]
    assert [*ended, *((*row, 100_500_000) for row in failed)] == said(fake)[4:8]
    assert failed == [row[:2] for row in said(fake)[8:]], "what has ended once does not end again"
    assert followed.is_up is False
    assert followed.last_error
    assert 2 == fake.counts["failed"]


async def test_nothing_is_scraped_while_the_store_has_no_room():
    fake = Fake()
    fake.is_full = True

    await scrape(fake, 3)

    assert not fake.tables
    assert Counter(skipped=3) == fake.counts


async def test_time_of_the_page_is_stored_once():
    """An exporter that tells its own times gives the same sample at each scrape until it has a new one."""
    fake = Fake(b"a 1 5000\nb 1\n", b"a 1 5000\nb 2\n", b"a 3 6000\nb 3\n", b"a 9 4000\nb 4\n")

    await scrape(fake, 4)

    stored = [(metric, value, ts, origin) for metric, _, value, ts, origin in fake.rows() if metric in {"a", "b"}]
    assert [("a", 1.0, 5_000_000, "exporter"), ("a", 3.0, 6_000_000, "exporter")] == [r for r in stored if r[0] == "a"]
    assert ["ingest"] * 4 == [origin for metric, _, _, origin in stored if metric == "b"]
    assert 2 == fake.counts["repeated"]


async def test_sample_with_a_time_out_of_bounds_is_counted_as_that_and_not_stored():
    """Its page is good for all that; it counts among those that were scraped, as in Prometheus."""
    fake = Fake(b"a 1 5000\na 2 9000000\nb 2\n")

    followed = await scrape(fake, 1)

    assert [("a", 1.0, 5_000_000), ("b", 2.0, 100_000_000)] == [row for row in said(fake) if row[0] in {"a", "b"}]
    assert Counter(ok=1, exact=3, out_of_bounds=1) == fake.counts
    assert 3 == followed.last_samples


async def test_doubled_series_are_counted():
    fake = Fake(b"a 1\na 2\n")

    await scrape(fake, 1)

    assert 1 == fake.counts["doubled"]


async def test_openmetrics_is_read_as_what_it_says_it_is():
    fake = Fake(Document(b"# TYPE a gauge\na 1 12.5\n# EOF\n", "application/openmetrics-text"))

    await scrape(fake, 1)

    assert ("a", '{"dc":"east"}', 1.0, 12_500_000, "exporter") == fake.rows()[0]


async def test_series_that_leaves_its_page_ends():
    """With one more row, without a value; one that comes back goes on, and one that tells its own times just stands."""
    east = [b'a{x="1"} 1\na{x="2"} 1\n', b'a{x="2"} 2\n', b'a{x="1"} 3\na{x="2"} 3\n', b"b 1 5000\n", b"c 1\n"]
    fake = Fake(*east)

    await scrape(fake, 5)

    stored = [(metric, labels[-3:-2], value) for metric, labels, value, _, _ in fake.rows() if metric in "abc"]
    first, second = ("a", "1"), ("a", "2")
    assert [(*first, 1.0), (*second, 1.0), (*first, None), (*second, 2.0), (*first, 3.0), (*second, 3.0)] == stored[:6]
    assert {(*first, None), (*second, None)} == set(stored[6:8])
    assert ["b", "c"] == [metric for metric, _, _ in stored[8:]]


async def test_exporter_that_leaves_its_list_ends_with_all_its_series(eventually):
    """And is not asked again; another list may still name it."""
    quick = configured(ExporterSection(url="http://a:1/metrics", every_seconds=0.001, timeout_seconds=0.001))
    fake = Fake(*[b"a 1\n"] * 100_000)
    scraper = Scraper(fake, fake, clock=asyncio.get_running_loop().time, wall=lambda: 1)

    scraper.show("one", [quick])
    scraper.show("two", [quick])
    await eventually(lambda: fake.tables)
    scraper.show("one", [])
    still = list(scraper.followed)
    scraper.show("two", [])

    assert [quick] == [followed.exporter for followed in still]
    assert [] == list(scraper.followed)
    of_scrapes = ["up", "scrape_duration_seconds", "scrape_samples_scraped"]
    assert [("a", None), *((name, None) for name in of_scrapes)] == [row[:2] for row in said(fake)[-4:]]


async def test_what_an_exporter_under_a_new_address_does_not_show_has_ended(eventually):
    old, new = (ExporterSection(url=f"http://{host}:1/m", name="n", every_seconds=0.001) for host in "ab")
    fake = Fake(b"a 1\nb 1\n", *[b"b 2\n"] * 100_000)
    scraper = Scraper(fake, fake, clock=asyncio.get_running_loop().time, wall=lambda: 1)

    scraper.show("list", [configured(old)])
    await eventually(lambda: fake.tables)
    scraper.show("list", [configured(new)])
    await eventually(lambda: ("b", 2.0, 1) in said(fake))
    scraper.show("list", [])

    ends = [metric for metric, value, _ in said(fake) if value is None]
    assert "a" == ends[0]
    assert 1 == ends.count("a")


async def test_exporters_that_hang_keep_no_healthy_one_waiting(eventually):
    """All of two hundred hang; it costs one time-out, and then they wait for each other. What is left out counts."""

    class Hanging(Fake):
        async def get_parsed(self, url, then, *, accept, timeout_seconds, max_bytes):
            if "healthy" not in url:
                await asyncio.sleep(timeout_seconds)
                raise FetchError("timeout", "no answer")
            self.counts["healthy"] += 1
            return then(Document(b"a 1\n", TEXT))

    fake, time = Hanging(), asyncio.get_running_loop().time
    scraper = Scraper(fake, fake, clock=time, wall=lambda: int(time() * 1e6))
    names = [*(f"hanging-{number}" for number in range(200)), "healthy"]
    sections = (ExporterSection(url=f"http://{name}:1/m", every_seconds=0.1, timeout_seconds=0.1) for name in names)
    scraper.show("all", [configured(section) for section in sections])
    await eventually(lambda: all(followed.is_up is not None for followed in scraper.followed))
    before = fake.counts["healthy"]
    await asyncio.sleep(1.0)
    scraper.show("all", [])

    assert fake.counts["healthy"] - before >= 8
    assert fake.counts["skipped"] > 200


async def test_a_page_that_cannot_be_read_for_a_fault_of_ours_holds_up_no_other(monkeypatch, eventually, caplog):
    """They are read together; the fault is told as that of one exporter, which is asked again."""
    genuine = PageReader._exactly
    monkeypatch.setattr(
        PageReader, "_exactly", lambda self, page: 1 // 0 if b"bad" in page.body else genuine(self, page)
    )

    class Both(Fake):
        async def get_parsed(self, url, then, *, accept, timeout_seconds, max_bytes):
            return then(Document(b"bad 1\n" if "bad" in url else b"good 1\n", TEXT))

    fake, time = Both(), asyncio.get_running_loop().time
    scraper = Scraper(fake, fake, clock=time, wall=lambda: int(time() * 1e6))
    sections = (ExporterSection(url=f"http://{name}:1/m", every_seconds=0.1) for name in ("bad", "good", "better"))
    scraper.show("all", [configured(section) for section in sections])
    await eventually(lambda: fake.counts["ok"] >= 6 and fake.counts["failed"] >= 3)
    states = {one.exporter.name: (one.is_up, one.last_error) for one in scraper.followed}
    scraper.show("all", [])

    because = "the page cannot be read: ZeroDivisionError: integer division or modulo by zero"
    assert {"bad:1": (False, because), "good:1": (True, None), "better:1": (True, None)} == states
    assert "could not be read" in caplog.text


async def test_first_of_two_with_one_name_is_scraped(caplog):
    other = configured(ExporterSection(url="http://b:1/metrics", name="a:1"))
    fake = Fake()
    scraper = fake.scraper()

    scraper.show("one", [ONE])
    scraper.show("two", [other])
    for task in scraper.tasks:
        task.cancel()

    assert [ONE.url] == [followed.exporter.url for followed in scraper.followed]
    assert "two exporters are called a:1" in caplog.text
