"""Scraping: samples, times, staleness markers and limits, also with real HTTP servers and a real store."""

import asyncio
import gzip
import json
import re
from collections import Counter

import aiohttp
import pyarrow as pa
import pytest
from aiohttp import web
from tests.ingest.servers import FakeExporter

from rankscope_ingest.base.config import ExporterListSection, ExporterSection
from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.base.errors import ConfigError, FetchError
from rankscope_ingest.scrape.discovery import configured, listed
from rankscope_ingest.scrape.page_reader import PageReader
from rankscope_ingest.scrape.scraper import MAX_CONCURRENT_FAILING, Followed, OwnTimes, Scraper

(ONE,) = configured([ExporterSection(url="http://a:1/metrics", labels={"dc": "east"})])
TEXT = "text/plain"


class Fake:
    """Fetcher and sink of a scraper, with recorded pages and both clocks under control of the test."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.tables = []
        self.counts = Counter()
        self.is_full = False
        self.now = 100.0

    async def get(self, url, *, accept, timeout_seconds, max_bytes):
        self.now += 0.5
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, tuple) else (answer, TEXT)

    def samples(self, table):
        self.tables.append(table)

    def scrape(self, scrape):
        self.tables.append(scrape.table())

    def count(self, spec, amount, *labels):
        self.counts[labels[0]] += amount

    def scraper(self):
        return Scraper(self, self, clock=lambda: self.now, wall=lambda: int(self.now * 1e6))

    def rows(self):
        table = pa.concat_tables(self.tables)
        columns = ("metric", "labels", "value", "ts", "ts_origin")
        ts = table["ts"].cast(pa.int64())
        return list(zip(*((ts if name == "ts" else table[name]).to_pylist() for name in columns), strict=True))


def samples_of(fake):
    return [(metric, value, ts) for metric, _, value, ts, _ in fake.rows()]


async def scrape(fake, times, exporter=ONE):
    scraper, followed = fake.scraper(), Followed(exporter=exporter)
    for _ in range(times):
        await scraper.scrape(followed)
    return followed


async def test_scrape_stores_the_page_and_samples_about_the_scrape():
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


@pytest.mark.parametrize("answer", [FetchError("refused", "connection refused"), b"no number here\n", b"\xff\n"])
async def test_failed_scrape_stores_up_0_and_ends_all_series_of_the_page(answer):
    """A constant series differs from one that could not be read."""
    fake = Fake(b"a 1\n", answer, answer)
    followed = await scrape(fake, 3)

    ended = [("a", None, 100_500_000), ("scrape_samples_scraped", None, 100_500_000)]
    failed = [("scrape_duration_seconds", 0.5), ("up", 0.0)]
    assert [*ended, *((*row, 100_500_000) for row in failed)] == samples_of(fake)[4:8]
    assert failed == [row[:2] for row in samples_of(fake)[8:]], "a series that has ended does not end again"
    assert followed.is_up is False
    assert followed.last_error
    assert 2 == fake.counts["failed"]


async def test_scrapes_are_skipped_while_the_store_is_full():
    fake = Fake()
    fake.is_full = True
    await scrape(fake, 3)

    assert not fake.tables
    assert Counter(skipped=3) == fake.counts


async def test_sample_with_an_unchanged_time_on_the_page_is_stored_once():
    """A page with times shows the same sample at each scrape until there is a new one."""
    fake = Fake(b"a 1 5000\nb 1\n", b"a 1 5000\nb 2\n", b"a 3 6000\nb 3\n", b"a 9 4000\nb 4\n")
    await scrape(fake, 4)

    stored = [(metric, value, ts, origin) for metric, _, value, ts, origin in fake.rows() if metric in {"a", "b"}]
    assert [("a", 1.0, 5_000_000, "exporter"), ("a", 3.0, 6_000_000, "exporter")] == [r for r in stored if r[0] == "a"]
    assert ["ingest"] * 4 == [origin for metric, _, _, origin in stored if metric == "b"]
    assert 2 == fake.counts["repeated"]


async def test_doubled_series_and_time_out_of_bounds_are_counted_and_not_stored():
    """The page is valid, and the sample counts as scraped, as in Prometheus."""
    fake = Fake(b"a 1 5000\na 2 9000000\nb 2\nb 3\n")
    followed = await scrape(fake, 1)

    assert [("a", 1.0, 5_000_000), ("b", 2.0, 100_000_000)] == [row for row in samples_of(fake) if row[0] in {"a", "b"}]
    assert Counter(ok=1, exact=3, out_of_bounds=1, doubled=1) == fake.counts
    assert 3 == followed.last_samples


async def test_openmetrics_page_is_parsed_by_its_content_type():
    fake = Fake((b"# TYPE a gauge\na 1 12.5\n# EOF\n", "application/openmetrics-text"))
    await scrape(fake, 1)

    assert ("a", '{"dc":"east"}', 1.0, 12_500_000, "exporter") == fake.rows()[0]


async def test_series_that_leaves_its_page_gets_a_staleness_marker():
    """A null row ends the series; a series with times on its page is not ended, and a returning series continues."""
    east = [b'a{x="1"} 1\na{x="2"} 1\n', b'a{x="2"} 2\n', b'a{x="1"} 3\na{x="2"} 3\n', b"b 1 5000\n", b"c 1\n"]
    fake = Fake(*east)
    await scrape(fake, 5)

    stored = [(metric, labels[-3:-2], value) for metric, labels, value, _, _ in fake.rows() if metric in "abc"]
    first, second = ("a", "1"), ("a", "2")
    assert [(*first, 1.0), (*second, 1.0), (*first, None), (*second, 2.0), (*first, 3.0), (*second, 3.0)] == stored[:6]
    assert {(*first, None), (*second, None)} == set(stored[6:8])
    assert ["b", "c"] == [metric for metric, _, _ in stored[8:]]


async def test_exporter_that_leaves_all_lists_ends_with_all_its_series(eventually):
    """The exporter is scraped as long as another list names it."""
    (quick,) = configured([ExporterSection(url="http://a:1/metrics", every_seconds=0.001, timeout_seconds=0.001)])
    fake = Fake(*[b"a 1\n"] * 100_000)
    scraper = Scraper(fake, fake, clock=asyncio.get_running_loop().time, wall=lambda: 1)
    scraper.show("one", [quick])
    scraper.show("two", [quick])
    await eventually(lambda: fake.tables)
    scraper.show("one", [])
    remaining = list(scraper.followed)
    scraper.show("two", [])

    assert [quick] == [followed.exporter for followed in remaining]
    assert [] == list(scraper.followed)
    of_scrapes = ["up", "scrape_duration_seconds", "scrape_samples_scraped"]
    assert [("a", None), *((name, None) for name in of_scrapes)] == [row[:2] for row in samples_of(fake)[-4:]]


async def test_series_missing_at_the_new_address_of_an_exporter_end(eventually):
    old, new = (ExporterSection(url=f"http://{host}:1/m", name="n", every_seconds=0.001) for host in "ab")
    fake = Fake(b"a 1\nb 1\n", *[b"b 2\n"] * 100_000)
    scraper = Scraper(fake, fake, clock=asyncio.get_running_loop().time, wall=lambda: 1)
    scraper.show("list", configured([old]))
    await eventually(lambda: fake.tables)
    scraper.show("list", configured([new]))
    await eventually(lambda: ("b", 2.0, 1) in samples_of(fake))
    scraper.show("list", [])

    ends = [metric for metric, value, _ in samples_of(fake) if value is None]
    assert "a" == ends[0]
    assert 1 == ends.count("a")


async def test_hanging_exporters_do_not_delay_a_healthy_one(eventually):
    """At most 32 of 200 failing exporters hang at the same time; missed scrapes of the others are counted."""
    released = asyncio.Event()

    class Hanging(Fake):
        failed, hanging = set(), 0

        async def get(self, url, **_):
            if "healthy" in url:
                self.counts["healthy"] += 1
                return b"a 1\n", TEXT
            if url in self.failed:
                self.hanging += 1
                await released.wait()
            self.failed.add(url)
            raise FetchError("timeout", "timed out")

    fake, time = Hanging(), asyncio.get_running_loop().time
    scraper = Scraper(fake, fake, clock=time, wall=lambda: int(time() * 1e6))
    names = [*(f"hanging-{number}" for number in range(200)), "healthy"]
    sections = (ExporterSection(url=f"http://{name}:1/m", every_seconds=0.01, timeout_seconds=0.01) for name in names)
    scraper.show("all", configured(sections))
    await eventually(lambda: fake.hanging == MAX_CONCURRENT_FAILING)
    before = fake.counts["healthy"]
    await eventually(lambda: fake.counts["healthy"] >= before + 8)
    hanging = fake.hanging
    released.set()
    await eventually(lambda: fake.counts["skipped"] > 200)
    scraper.show("all", [])

    assert MAX_CONCURRENT_FAILING == hanging


async def test_unexpected_error_in_parsing_a_page_is_a_failed_scrape(caplog, monkeypatch):
    fake = Fake(b"a 1\n", b"a 2\n")
    with monkeypatch.context() as patch:
        patch.setattr(PageReader, "read", lambda *_, **__: 1 // 0)
        failed = await scrape(fake, 1)
    followed = await scrape(fake, 1)

    because = "the page cannot be parsed: unexpected ZeroDivisionError: integer division or modulo by zero"
    assert (because, None) == (failed.last_error, followed.last_error)
    assert [0.0, 1.0] == [value for metric, value, _ in samples_of(fake) if metric == "up"]
    assert "unexpected error in parsing the page of exporter a:1" in caplog.text


async def test_first_of_two_exporters_with_one_name_is_scraped(caplog):
    (other,) = configured([ExporterSection(url="http://b:1/metrics", name="a:1")])
    fake = Fake()
    scraper = fake.scraper()
    scraper.show("one", [ONE])
    scraper.show("two", [other])
    for task in scraper.tasks:
        task.cancel()

    assert [ONE.url] == [followed.exporter.url for followed in scraper.followed]
    assert "two exporters have the name a:1" in caplog.text


# Times on a page: each is stored once, also after a series was missing, and only within bounds around the scrape.

NOW = 1_770_000_000_000  # ms
MINUTE = 60_000
DAY = 1440 * MINUTE


class Scraped:
    """One exporter; returns the stored samples of each page as (metric, labels, ms)."""

    def __init__(self):
        self.reader, self.own_times = PageReader(), OwnTimes()

    def page(self, *lines, at=NOW):
        body = "".join(f"{line}\n" for line in lines).encode()
        rows = self.reader.read(body)
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
        *((NOW - 62 * DAY, True), (NOW - 62 * DAY - 1, False), (NOW + 10 * MINUTE, True)),
        *((NOW + 10 * MINUTE + 1, False), (0, False), (253_402_300_799_000, False)),
    ],
)
def test_time_out_of_bounds_is_counted_and_not_stored(ms, is_stored):
    """The other samples of the page are stored, as in Prometheus."""
    scraped = Scraped()
    stored = scraped.page(f"a 1 {ms}", "b 2", f"c 3 {NOW}")

    assert [*([("a", ms)] if is_stored else []), ("b", None), ("c", NOW)] == stored
    assert int(not is_stored) == scraped.fresh.out_of_bounds


def test_time_far_in_the_future_does_not_hide_later_samples():
    """The clock of the exporter was wrong once."""
    scraped = Scraped()
    scraped.page(f"a 1 {NOW + 365 * DAY}")

    assert [("a", NOW + MINUTE)] == scraped.page(f"a 2 {NOW + MINUTE}", at=NOW + MINUTE)


# In the running service, and its targets.

PAGE = b'# HELP power Power.\n# TYPE power gauge\npower{gpu="0",model="NVIDIA H100 80GB"} 120.5\n'
UP = "SELECT value FROM samples WHERE metric = 'up' ORDER BY ts"


def section(exporter, **more):
    return {"url": exporter.url, "every_seconds": 0.1, "timeout_seconds": 5} | more


async def test_page_is_stored_and_the_token_is_not_sent_to_exporters(start_service, eventually):
    """Rows contain target, labels and the samples about the scrape. The metrics of the service count them."""
    token = {"Authorization": "Bearer secret"}
    async with FakeExporter(PAGE) as exporter:
        exporter.answer = packed(gzip.compress(PAGE))
        changes = {"exporters": [section(exporter, name="node-1", labels={"dc": "east"})], "service.token": "secret"}
        async with start_service(**changes) as service:

            async def is_shown():
                metrics = (await service.get("/metrics", **token))[1]
                return metrics if 'rankscope_ingest_exporter_samples_total{how="layout"} 0.0' not in metrics else None

            await eventually(lambda: service.rows("SELECT 1 FROM samples WHERE metric = 'power'"))
            metrics = await eventually(is_shown)

    row = service.rows("SELECT run, target, labels, value, ts_origin FROM samples WHERE metric = 'power'")[0]
    labels = '{"dc":"east","gpu":"0","model":"NVIDIA H100 80GB"}'
    assert {"run": "", "target": "node-1", "labels": labels, "value": 120.5, "ts_origin": "ingest"} == row
    assert {"value": 1.0} == service.rows(UP)[0]
    assert not any("Authorization" in request.headers for request in exporter.requests)
    assert {"identity"} == {request.headers["Accept-Encoding"] for request in exporter.requests}  # on this machine
    assert [] == service.rows("SELECT target, metric, labels, ts FROM samples GROUP BY ALL HAVING count(*) > 1")
    assert 'rankscope_ingest_exporters{health="up"} 1.0' in metrics
    assert 'rankscope_ingest_exporter_samples_total{how="exact"} 1.0' in metrics


async def test_page_with_quoted_names_and_without_a_content_type_is_stored(start_service, eventually):
    page = '{"http.req-dur","net.host"="ü"} 3\r\nplain{"a.b"="c"} 5\r\n'
    async with FakeExporter() as exporter:
        exporter.answer = lambda _: web.Response(body=page.encode(), headers={"Content-Type": ""})
        async with start_service(exporters=[section(exporter)]) as service:
            await eventually(lambda: service.rows("SELECT 1 FROM samples WHERE metric = 'plain'"))
            rows = service.rows("SELECT DISTINCT metric, labels, value FROM samples WHERE value >= 3")

    names = [("http.req-dur", '{"net.host":"ü"}', 3.0), ("plain", '{"a.b":"c"}', 5.0)]
    assert names == sorted(tuple(row.values()) for row in rows)


def packed(body):
    return lambda _: web.Response(body=body, headers={"Content-Encoding": "gzip", "Content-Type": "text/plain"})


async def test_exporter_outside_the_allowed_networks_stores_up_0(start_service, eventually):
    """Its address is not connected to."""
    async with start_service(exporters=[{"url": "http://192.0.2.1/metrics", "every_seconds": 0.1}]) as service:
        await eventually(lambda: service.rows(UP))
        (found,) = await described(service)

    assert "outside [service] allowed_networks" in found["last_error"]
    assert {"value": 0.0} == service.rows(UP)[0]


async def test_lists_in_files_and_at_a_url_are_followed(start_service, eventually, tmp_path):
    """An invalid edit changes nothing. When a file is removed, its exporters are removed and their series end."""
    file = tmp_path / "targets.json"
    async with FakeExporter(PAGE) as one, FakeExporter(PAGE) as two, FakeExporter(PAGE) as directory:
        directory.page = json.dumps([{"targets": [two.address], "labels": {"dc": "west"}}]).encode()
        file.write_text(json.dumps([{"targets": [one.address]}]))
        quick = {"every_seconds": 0.1, "refresh_seconds": 0.05, "timeout_seconds": 5}
        lists = [{"file": str(tmp_path / "*.json")} | quick, {"url": directory.url} | quick]
        async with start_service(exporter_lists=lists) as service:
            await eventually(lambda: one.requests and two.requests)
            file.write_text("[{")
            looks = len(directory.requests)
            await eventually(lambda: len(directory.requests) > looks + 3)
            names = [found["name"] for found in await described(service)]
            file.unlink()

            async def one_left():
                return [found["name"] for found in await described(service)] == [two.address]

            await eventually(one_left)

    assert {one.address, two.address} == set(names)
    last = f"SELECT value FROM samples WHERE metric = 'up' AND target = '{one.address}' ORDER BY ts DESC LIMIT 1"
    assert [{"value": None}] == service.rows(last)
    assert 1 <= len(service.rows("SELECT 1 FROM samples WHERE labels LIKE '%west%' AND metric = 'power'"))


async def test_lag_of_an_exporter_is_the_age_of_its_last_successful_scrape(start_service, eventually):
    """The lag increases while scrapes fail."""
    async with FakeExporter(PAGE) as exporter, start_service(exporters=[section(exporter)]) as service:

        async def state(up):
            (found,) = await described(service)
            return found["up"] is up and found

        async def lag_has_grown():
            found = await state(up=False)
            return found and found["lag_seconds"] > failing["lag_seconds"] + 0.05

        healthy = await eventually(lambda: state(up=True))
        exporter.answer = lambda _: web.Response(status=404)
        failing = await eventually(lambda: state(up=False))
        await eventually(lag_has_grown)

    assert 0 <= healthy["lag_seconds"] < 10
    assert "status 404" in failing["last_error"]


async def described(service):
    async with aiohttp.ClientSession() as session, session.get(f"{service.url}/api/v1/exporters") as response:
        return await response.json()


# Scrape targets of the configuration file, and of lists in the formats of Prometheus.

LIST = ExporterListSection(file="x.json", labels={"dc": "east", "job": "none"}, every_seconds=5)


def test_target_of_a_configured_exporter_is_its_name_or_address():
    url = "http://10.0.0.1:9100/metrics"
    sections = [{}, {"name": "node-1"}, {"labels": {"instance": "node-2", "dc": "east", "empty": ""}}]
    found = list(configured([ExporterSection(url=url, **section) for section in sections]))

    assert ["10.0.0.1:9100", "node-1", "node-2"] == [exporter.name for exporter in found]
    assert (("dc", "east"),) == found[2].labels


def test_list_in_the_format_of_prometheus_is_parsed():
    """Labels of the list take precedence over those of the section; labels for relabelling are dropped."""
    labels = {"job": "dcgm", "__scheme__": "https", "__metrics_path__": "/gpu", "__param_all": "a b", "__meta_x": "y"}
    groups = [{"targets": ["a:9400", "[::1]:9400"], "labels": labels}, {"targets": ["b"]}]
    found = listed(json.dumps(groups), LIST)

    assert [
        ("a:9400", "https://a:9400/gpu?all=a+b", (("dc", "east"), ("job", "dcgm"))),
        ("[::1]:9400", "https://[::1]:9400/gpu?all=a+b", (("dc", "east"), ("job", "dcgm"))),
        ("b", "http://b/metrics", (("dc", "east"), ("job", "none"))),
    ] == [(exporter.name, exporter.url, exporter.labels) for exporter in found]
    assert {(5.0, 10.0)} == {(exporter.every_seconds, exporter.timeout_seconds) for exporter in found}


def test_yaml_list_keeps_label_values_as_text():
    """Label values that look like numbers or booleans remain text, as in Prometheus."""
    text = "- targets: ['a:9400', b]\n  labels:\n    rack: 07\n    on: yes\n"
    found = listed(text, LIST, is_yaml=True)

    labels = (("dc", "east"), ("job", "none"), ("on", "yes"), ("rack", "07"))
    assert [("a:9400", labels), ("b", labels)] == [(exporter.name, exporter.labels) for exporter in found]


@pytest.mark.parametrize("text", ["", "- [", "a: b", "- targets: x", "- !!python/object:os.system {}", "\t- a"])
def test_invalid_yaml_list_is_rejected_with_the_reason(text):
    with pytest.raises(ConfigError, match=r'not valid YAML|not a list|has no "targets"'):
        listed(text, LIST, is_yaml=True)


NO_LISTS = [
    *("", "{}", "[1]", '[{"targets": "a"}]', '[{"targets": [1]}]', '[{"targets": ["a/b"]}]', '[{"targets": ["u@h"]}]'),
    *('[{"targets": ["a:b"]}]', '[{"targets": [""]}]', '[{"targets": [], "labels": {"a b": "x"}}]'),
    *('[{"targets": [], "labels": {"a": 1}}]', '[{"targets": ["a"], "labels": {"__scheme__": "file"}}]', "[" * 100_000),
]


@pytest.mark.parametrize("text", NO_LISTS, ids=lambda text: text[:30])
def test_invalid_json_list_is_rejected_with_the_reason(text):
    with pytest.raises(ConfigError, match=r"not valid|not a list|an entry|invalid labels|not host:port"):
        listed(text, LIST)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exporters": [{"url": "localhost:9100"}]}, "such as http://127.0.0.1:9100/metrics"),
        ({"exporters": [{"url": "http://a:port/"}]}, "such as http://127.0.0.1:9100/metrics"),
        ({"exporters": [{"url": "http://a", "labels": {"a-b": "x"}}]}, "labels"),
        ({"exporter_lists": [{}]}, "set either file"),
        ({"exporter_lists": [{"file": "a", "url": "http://b"}]}, "set either file"),
        ({"exporter_lists": [{"fil": "a"}]}, "did you mean file"),
    ],
)
def test_error_names_the_wrong_setting(changes, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_config(None, {"store.path": "x"} | changes)


def test_paths_of_list_files_are_relative_to_the_configuration(tmp_path):
    (tmp_path / "service.toml").write_text('[store]\npath = "s"\n[[exporter_lists]]\nfile = "targets/*.json"\n')
    config = load_config(tmp_path / "service.toml")

    assert str(tmp_path / "targets/*.json") == config.exporter_lists[0].file
