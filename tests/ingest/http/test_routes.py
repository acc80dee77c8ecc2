"""Pages and routes of a running service: prefix, live updates, unknown paths, and HTTP service discovery."""

import asyncio
import json
import threading
import time

import aiohttp
import pytest
from tests.ingest import builders
from tests.view.served import served

from rankscope_contract.wire import channel
from rankscope_ingest.base.config import ServiceSection
from rankscope_ingest.http.pages import LiveUpdates
from rankscope_ingest.http.routes import per_rank
from rankscope_ingest.live.tails import LiveTails
from rankscope_ingest.runs.models import Health
from rankscope_storage.api.store import Store
from rankscope_view.site import Site


async def test_pages_are_below_the_root_and_below_the_prefix(start_service):
    async with start_service(**{"service.base_path": "/prefix"}) as service:
        for path in ("/", "/prefix/", "/service", "/prefix/service"):
            status, text = await service.get(path)
            assert 200 == status, text
        _, text = await service.get("/")

    assert 'href="/prefix/service"' in text
    assert "Nothing has been stored here" in text


async def test_live_updates_follow_the_versions_and_end_with_the_service(start_service):
    async with aiohttp.ClientSession() as session:
        async with start_service() as service:
            answer = await session.get(service.url + "/data/live")
            first = await asyncio.wait_for(answer.content.readline(), 10)
            began = time.monotonic()

        assert first.startswith(b'data: ["",')
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("path", ["prefix", "/prefix/", "/a b", "//", "/../x"])
def test_bad_prefix_is_rejected(path):
    with pytest.raises(ValueError, match="is not a path prefix"):
        ServiceSection(base_path=path)


async def test_value_of_a_viewed_run_is_sent_before_its_commit(start_service, fake_rank, eventually):
    settings = {"ingest.flush_after_seconds": 3600.0, "ingest.poll_seconds": 3.0}
    async with fake_rank() as rank, start_service(**settings) as service, aiohttp.ClientSession() as session:
        await rank.register(service.url)
        async with session.get(f"{service.url}/data/live?run=r&version=0") as stream:
            rank.publish_steps(2)
            await _event(stream, "rows", lambda found: found[0] == "r" and [row[1] for row in found[1]] == [0, 1])
            await eventually(
                lambda: service.rows("FROM scalars WHERE step = 1")
            )  # a new state of a run is committed immediately
            published = time.monotonic()
            rank.publish_steps(1)
            _, rows = await _event(stream, "rows", lambda found: found[1][-1][1] == 2)

        assert {"loss": [2.0, 2.0, 2.0, 1]} == rows[-1][3]  # mean, lowest and highest of one rank
        assert time.monotonic() - published < 3
        assert [] == service.rows("FROM scalars WHERE step = 2")


async def _event(stream, kind, is_wanted):
    """Return the data of the next event of this kind that is wanted."""
    name = ""
    async with asyncio.timeout(20):
        async for line in stream.content:
            word, _, text = line.decode().strip().partition(": ")
            name = text if word == "event" else name if word == "data" else ""
            if word == "data" and name == kind and is_wanted(data := json.loads(text)):
                return data
    raise AssertionError("the stream ended")


async def test_page_is_loaded_again_after_an_event_but_not_after_each_step():
    tails = LiveTails()
    updates = LiveUpdates(read_version=None, tails=tails, watch_seconds=1.0, most=1)
    updates.committed(3, ["scalars"])  # the first one after a long time
    updates.committed(4, ["scalars", "tensor_stats"])
    assert (4, 3) == (updates.newest(""), updates.newest("r"))

    updates.committed(5, ["scalars", "events"])
    assert 5 == updates.newest("r")

    updates.committed(6, ["scalars", "events"], {"log"})  # followed logs commit often
    assert [6, 6, 5] == [updates.newest(run) for run in ("", "log", "r")]


async def test_page_of_a_run_of_another_service_is_loaded_again_after_each_commit():
    updates = LiveUpdates(read_version=None, tails=LiveTails(), watch_seconds=1.0, most=1, owns=lambda run: run == "r")
    updates.committed(3, ["scalars"])
    updates.committed(4, ["scalars"])

    assert [3, 4] == [updates.newest(run) for run in ("r", "of another service")]


@pytest.fixture
def slow_site(tmp_path):
    """Return a site with reports that wait until the event `may_end` is set."""

    class SlowSite(Site):
        may_end = threading.Event()

        def respond(self, segments, query, alarms=()):
            assert segments[2:] != ["report"] or self.may_end.wait(30)
            return super().respond(segments, query, alarms)

    Store.open(tmp_path / "store", create=True)
    yield (site := SlowSite(tmp_path / "store"))
    site.may_end.set()


async def test_pages_wait_neither_for_reports_nor_for_streams_beyond_the_limit(slow_site, monkeypatch):
    monkeypatch.setattr("rankscope_ingest.http.pages.most_connections", lambda: 40)
    connector = aiohttp.TCPConnector(limit=0)
    with served(slow_site) as url:
        async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(20)) as session:
            reports = [asyncio.ensure_future(_get(session, "/runs/my-run/report")) for _ in range(12)]
            streams = [await session.get("/data/live") for _ in range(30)]
            listed, page = await _get(session, "/"), await _get(session, "/runs/my-run")
            slow_site.may_end.set()
            reported = await asyncio.gather(*reports)

    assert [200] * 20 + [503] * 10 == [stream.status for stream in streams]
    assert "5" == streams[-1].headers["Retry-After"]
    assert (200, 404, [404] * 12) == (listed, page, reported)  # the store has no run


async def _get(session, path):
    async with session.get(path) as answer:
        await answer.read()
        return answer.status


async def test_unknown_path_gets_all_paths_and_the_removed_one_its_replacement(start_service):
    async with start_service() as service:
        status, text = await service.get("/unknown")
        removed = await service.get("/sd?per=node")

    names = "SERVICE_PAGE STATUS REGISTER POKE RUN_STACKS SERVICE_DISCOVERY TARGETS RUNS EXPORTERS REMOTE_READ"
    paths = [getattr(channel, f"{name}_PATH") for name in (*names.split(), "REMOTE_WRITE", "HEALTH", "METRICS")]
    paths += ["/", "/assets/{tail}", "/compare", "/data/live", "/data/{tail}", "/runs/{tail}"]
    assert (400, {"error": "per=node is not supported: use /sd, which lists each rank"}) == (
        removed[0],
        json.loads(removed[1]),
    )
    assert 404 == status
    assert f"/unknown does not exist; the paths are {', '.join(sorted(paths))}" == json.loads(text)["error"]


# HTTP service discovery: one target per live rank.


def target(rank=0, health=Health.UP, **changes):
    fields = {"world_size": 8, "host": "h0", "launch_id": "l0", "url": f"http://h0:940{rank}"}
    return builders.target(builders.registration(rank=rank, **(fields | changes)), health=health)


def test_per_rank_lists_each_live_rank_with_its_scheme():
    found = per_rank([target(0), target(1, url="https://[::1]:9401"), target(2, Health.GONE), target(3, served_by="x")])

    plain, secure = found
    assert {"targets": ["h0:9400"], "labels": {"job": "rankscope", "instance": "r/0"}} == plain
    labels = {"job": "rankscope", "instance": "r/1", "__scheme__": "https"}
    assert {"targets": ["[::1]:9401"], "labels": labels} == secure
