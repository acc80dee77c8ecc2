"""Background tasks of the service: each raises once, which the pages show, and the parts that depend on it recover."""

import asyncio
import json
import os
import re
from pathlib import Path

import aiohttp
import pytest
from tests.ingest.remote_write.messages import post, write_request
from tests.ingest.servers import FakeExporter

import rankscope_ingest
from rankscope_ingest.base import background
from rankscope_ingest.base.protobuf import packed
from rankscope_ingest.http.pages import Pages
from rankscope_ingest.live.tails import LiveTails
from rankscope_ingest.network.connections import _Connections
from rankscope_ingest.notify.announcer import Announcer
from rankscope_ingest.pipeline.maintenance_schedule import MaintenanceSchedule
from rankscope_ingest.record_channel.loop import TargetLoop
from rankscope_ingest.remote_write.handler import RemoteWrite
from rankscope_ingest.scrape.discovery import ExporterList
from rankscope_ingest.scrape.scraper import Scraper
from rankscope_ingest.spools.orphan_spools import Spools
from rankscope_ingest.watch.watcher import WatchSession

TASKS = {  # Each background task of the service, and a method of it that raises in the test
    "accepting connections": (_Connections, "_begin"),
    "closing late connections": (_Connections, "sweep"),
    "decoding a remote-write request": (RemoteWrite, "_decode_body"),
    "following logs": (WatchSession, "run"),
    "maintenance of the store": (MaintenanceSchedule, "run"),
    "notifying of an incident": (Announcer, "_commit_and_send"),
    "notifying of an incident of a log": (Announcer, "_commit_and_send"),
    "opening a connection": (_Connections, "_start"),
    "polling a rank": (TargetLoop, "run"),
    "reading a list of exporters": (ExporterList, "look"),
    "reading the version of the store": (Pages, "_version"),
    "scanning for spools": (Spools, "find"),
    "scraping the exporter ": (Scraper, "scrape"),
    "sending live updates to a page": (LiveTails, "changed"),
}

AWAITED = {"base/background.py": 1, "service/service.py": 6, "watch/watcher.py": 1}
"""Numbers of tasks by file that their function awaits, so that errors are raised there."""

SOURCES = Path(rankscope_ingest.__file__).parent
STARTS = r"\b(?:create_task|ensure_future|TaskGroup|Thread|Timer|start_new_thread|run_coroutine_threadsafe)\("


def test_every_task_of_the_service_is_listed_here():
    """A new task is started by `start_task` and gets a row in TASKS, or is awaited by the function that starts it."""
    sources = {path.relative_to(SOURCES).as_posix(): path.read_text() for path in SOURCES.rglob("*.py")}
    names = {name for text in sources.values() for name in re.findall(r'start_task\(\s*f?"([^"{]*)', text)}
    others = {file: len(found) for file, text in sources.items() if (found := re.findall(STARTS, text))}

    assert set(TASKS) == names
    assert AWAITED == others


class Raising:
    """Makes each task raise once in its method. `again` has the tasks whose method was called again afterwards."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.raised: set[str] = set()
        self.again: set[str] = set()
        for owner, method in set(TASKS.values()):
            tasks = [task for task, place in TASKS.items() if place == (owner, method)]
            patch.setattr(owner, method, self.wrapped(getattr(owner, method), tasks))

    def wrapped(self, function, tasks):
        def called(*arguments, **named):
            name = asyncio.current_task().get_name() if len(tasks) > 1 else tasks[0]
            if name in self.raised:
                self.again.add(name)
                return function(*arguments, **named)
            self.raised.add(name)
            raise RuntimeError(f"injected into {name}")

        async def awaited(*arguments, **named):
            return await called(*arguments, **named)

        return awaited if asyncio.iscoroutinefunction(function) else called


@pytest.fixture
def raising(monkeypatch):
    monkeypatch.setattr(background, "RETRY_SECONDS", 0.1)
    return Raising(monkeypatch)


async def requested(call):
    """Return the result of a request, which is repeated while the service closes the connection or reports an error."""
    for _ in range(20):
        try:
            if (found := await asyncio.wait_for(call(), 1)) is not None:
                return found
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(0.05)
    raise AssertionError("no answer in 20 attempts")


async def pushed(service):
    message = write_request(({"__name__": "pushed", "instance": "pusher"}, [(1_770_000_000_000, 4.0)]))
    status, _, _ = await post(service, packed(message))
    return status if status < 300 else None


async def first_rows(service):
    """Return the first rows that a page receives; None if the stream ends before."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{service.url}/data/live?run=r", timeout=aiohttp.ClientTimeout(total=5)) as stream,
    ):
        is_next = False
        async for line in stream.content:
            if is_next:
                return json.loads(line.partition(b": ")[2])
            is_next = line.startswith(b"event: rows")
    return None


async def test_each_task_raises_once_and_the_service_continues(raising, fake_rank, start_service, eventually, tmp_path):
    log, listed = tmp_path / "train.log", tmp_path / "targets.json"
    log.write_text("".join(f"step {step} loss 2.0\n" for step in range(1, 25)))
    os.utime(log, (1_740_759_937, 1_740_759_937))  # its training has stalled
    (tmp_path / "spools").mkdir()
    quick = {"every_seconds": 0.1, "timeout_seconds": 5}
    async with fake_rank() as rank, FakeExporter(b"named 1\n") as exporter, FakeExporter(b"listed 2\n") as other:
        listed.write_text(json.dumps([{"targets": [other.address]}]))
        changes = {
            "exporters": [{"url": exporter.url, "name": "named", **quick}],
            "exporter_lists": [{"file": str(listed), "refresh_seconds": 0.1, **quick}],
            "spool.folders": [str(tmp_path / "spools")],
            "spool.scan_seconds": 0.1,
            "watch": [{"log": str(log), "run": "log", "poll_seconds": 0.05, "settle_seconds": 0.0}],
        }
        async with start_service(**changes) as service:
            await requested(lambda: rank.register(service.url))
            rank.publish_steps(3)
            rank.publish(events=[{"type": "anomaly", "severity": "critical", "rule": "AnomalyNan", "tensor": "w"}])
            assert await requested(lambda: first_rows(service))
            await requested(lambda: pushed(service))
            await eventually(lambda: sorted(set(TASKS) - raising.raised) == [], seconds=20)
            stored = "SELECT metric FROM samples WHERE metric IN ('named', 'listed', 'pushed') GROUP BY metric"
            await eventually(lambda: len(service.rows(stored)) == 3, seconds=20)
            await eventually(lambda: len(service.rows("SELECT 1 FROM scalars WHERE run = 'log'")) == 24, seconds=20)
            await eventually(lambda: rank.committed == 3, seconds=20)
            _, page = await requested(lambda: service.get("/service"))
            _, metrics = await service.get("/metrics")

    unseen = [task for task in TASKS if f"errors in {task}" not in page or f'{{task="{task}' not in metrics]
    assert [] == unseen
    assert "injected into" in page
    once = {"notifying of an incident", "notifying of an incident of a log"}  # sent again by the next service
    assert set(TASKS) - once == raising.again - once
