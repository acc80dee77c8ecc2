"""Real record channels, a real service process and kill -9: rows and notifications are stored and sent once."""

import asyncio
import contextlib
import signal
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from tests.end_to_end.lives import until
from tests.end_to_end.spool_ranks import record
from tests.ingest.servers import Receiver
from tests.programs import Started, start_module

from rankscope_contract.model.events import Event
from rankscope_contract.model.identity import Identity
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.publish.rank_server import RankServer
from rankscope_exporter.publish.serving_config import ServeConfig
from rankscope_ingest.detect.incidents import MESSAGES_PER_HOUR
from rankscope_ingest.runs.text import SENT_AGAIN
from rankscope_storage.connection import connect

STORED = "FROM events WHERE type = 'anomaly'"
NOTIFIED = "FROM events WHERE type = 'incident' AND details->>'$.state' = 'notified'"
KILLED_AT = {61: (15, STORED), 90: (1, NOTIFIED), 121: (30, STORED), 150: (2, NOTIFIED)}
"""Step, and numbers of rows before and after the notification of an incident."""
TENSORS = 7
step_record = partial(record, tensors=TENSORS)
TURBULENCE = {"type": "anomaly", "severity": "warning", "rule": "AnomalyTurbulence"}


class ServiceProcess:
    """A process of `python -m rankscope_ingest` that tests kill and restart."""

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        notify: str | None = None,
        shard: str = "0/1",
        flush_seconds: float = 0.3,
        store: str = "store",
    ) -> None:
        self.store = store if "://" in store else folder / store
        self.url = f"http://127.0.0.1:{port}"
        self._config = folder / f"service-{port}.toml"
        self._log = self._config.with_suffix(".log")
        self._config.write_text(
            f"[service]\nlisten = '127.0.0.1:{port}'\n[store]\npath = '{store}'\nshard = '{shard}'\n"
            f"[ingest]\npoll_seconds = {min(2.0, flush_seconds / 3)}\nflush_after_seconds = {flush_seconds}\n"
            "[runs]\nheartbeat_seconds = 0.3\nrefused_after_seconds = 1.0\n"
            f"[notify]\nurls = {[notify] if notify else []}\ngroup_wait_seconds = 2.0\n"
        )
        self.process: Started | None = None
        self._starts = self.log().splitlines().count(self.url) if self._log.exists() else 0

    def start(self) -> None:
        self.process = start_module("rankscope_ingest.__main__", self._config, log=self._log)
        self._starts += 1
        until(lambda: self.log().splitlines().count(self.url) == self._starts, 90)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def rows(self, query: str) -> list[dict]:
        with connect(self.store) as connection:
            return connection.query(query).to_pylist()

    def has(self, count: int, query: str) -> bool:
        return count == len(self.rows(query))

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def make_service(tmp_path, free_port):
    made = []

    def make(**changes):
        made.append(ServiceProcess(tmp_path, free_port, **changes))
        return made[-1]

    yield make
    for service in made:
        if service.process is not None and service.process.poll() is None:
            service.kill()


def open_channel(service, rank, *, world_size=2, launch_id="launch", run="r"):
    who = {"run": run, "launch_id": launch_id, "rank": rank, "world_size": world_size, "host": "h"}
    channel = RankServer(
        identity=Identity(**who, incarnation=f"{launch_id}-{rank}"),
        config=ServeConfig(ingest_url=service.url, spool_dir=None),
        rules=(),
        settings={},
        planned_steps=1000,
        boundary=ErrorBoundary(),
    )
    channel.start()
    return channel


@pytest.fixture
def open_channels():
    with contextlib.ExitStack() as stack:

        def open_them(service, **changes):
            channels = [open_channel(service, rank, **changes) for rank in range(changes.get("world_size", 2))]
            for channel in channels:
                stack.callback(channel.close)
            return channels

        yield open_them


def nan_event(tensor, kind="grad_unreduced"):
    return Event(type="anomaly", severity="critical", rule="AnomalyNan", kind=kind, tensor=tensor, op="nans", value=1.0)


def finish(channels, step):
    ended = Event(type="exit", details=f'{{"reason": "completed", "last_step": {step}}}')
    for channel in channels:
        channel.publish(step_record(step, ended))
    with contextlib.ExitStack() as stack:
        for channel in channels:
            stack.callback(channel.close)
        return [channel.drain(30) for channel in channels]


@pytest.mark.thorough
async def test_each_incident_is_notified_once_also_across_kills(make_service, open_channels):
    """Step 60: the local gradient of one tensor on one rank, then all reduced ones. Step 120: another tensor."""
    async with Receiver() as receiver:
        service = make_service(notify=receiver.url)
        await asyncio.to_thread(service.start)
        channels = await asyncio.to_thread(open_channels, service)
        for step in range(180):
            faulty = {60: "t3", 120: "t5"}.get(step)
            if faulty:
                receiver.refuse = 1_000_000  # no notification is delivered before the kill
            for rank, channel in enumerate(channels):
                events = [nan_event(f"t{n}", "grad_reduced") for n in range(TENSORS)] if faulty else []
                if faulty and rank == 1:
                    events.append(nan_event(faulty))
                channel.publish(step_record(step, *events))
            if step in KILLED_AT:
                await asyncio.to_thread(until, lambda moment=KILLED_AT[step]: service.has(*moment))
                await asyncio.to_thread(service.kill)
                await asyncio.to_thread(service.start)
                receiver.refuse = 0
            await asyncio.sleep(0.005)
        left = await asyncio.to_thread(finish, channels, 180)
        status = await asyncio.to_thread(service.terminate)
        titles = sorted(":".join(title.split(":")[:2]) for title in receiver.titles)

    assert ([0, 0], 0) == (left, status)
    assert [
        "[critical] r: AnomalyNan in grad_unreduced of t3, rank 1, step 60",
        "[critical] r: AnomalyNan in grad_unreduced of t5, rank 1, step 120",
    ] == titles
    keys = [message["message"].partition("incident: ")[2][:16] for message in receiver.messages]
    assert 2 == len(set(keys))


@pytest.mark.thorough
async def test_list_of_a_killed_service_is_sent_once_by_the_next_one(make_service, open_channels):
    """The service is killed in the minute in which it waits for further incidents; the listed ones are over."""
    async with Receiver() as receiver:
        service = make_service(notify=receiver.url)
        await asyncio.to_thread(service.start)
        (channel,) = await asyncio.to_thread(open_channels, service, world_size=1)
        for number in range(MESSAGES_PER_HOUR + 4):
            faulty = [nan_event(f"t{number}")] if number < MESSAGES_PER_HOUR + 3 else []
            channel.publish(step_record(100 * number, *faulty))
        resolved = "FROM events WHERE type = 'incident' AND details->>'$.state' = 'resolved'"
        await asyncio.to_thread(until, lambda: service.has(MESSAGES_PER_HOUR + 3, resolved))
        await asyncio.to_thread(until, lambda: service.has(MESSAGES_PER_HOUR, NOTIFIED))
        await asyncio.to_thread(service.kill)
        for _ in range(2):  # it sends the list when it stops
            await asyncio.to_thread(service.start)
            assert 0 == await asyncio.to_thread(service.terminate)
        listed = receiver.messages[MESSAGES_PER_HOUR:]

    assert ["[critical] r: 3 more incidents"] == [message["title"] for message in listed]
    assert SENT_AGAIN in listed[0]["message"]
    assert service.has(MESSAGES_PER_HOUR + 3, NOTIFIED)


async def test_notification_does_not_wait_for_a_poll_or_a_flush(tmp_path, start_service, fake_rank, eventually):
    changes = {"ingest.poll_seconds": 120.0, "ingest.flush_after_seconds": 120.0, "notify.group_wait_seconds": 1.0}
    async with (
        Receiver() as receiver,
        fake_rank() as rank,
        start_service(**changes, **{"notify.urls": [receiver.url]}) as service,
    ):
        await rank.register(service.url)
        await eventually(service.targets)
        rank.publish(events=[TURBULENCE])
        async with aiohttp.ClientSession() as session:
            await session.post(f"{service.url}/api/v1/poke", json={"incarnation": rank.registration.incarnation})
        await eventually(lambda: receiver.messages, seconds=30)


async def test_rejected_notification_is_retried_and_delivered_once(start_service, fake_rank, eventually):
    async with Receiver() as receiver, fake_rank() as rank:
        receiver.refuse = 2
        async with start_service(**{"notify.urls": [receiver.url]}) as service:
            await rank.register(service.url)
            rank.publish(events=[TURBULENCE])
            await eventually(lambda: receiver.messages)
    states = service.rows("SELECT details->>'$.state' AS state FROM events WHERE type = 'incident' ORDER BY ordinal")

    assert 1 == len(receiver.messages)
    assert ["opened", "notified"] == [row["state"] for row in states][:2]


async def test_failed_run_is_notified_once(start_service, fake_rank, eventually):
    async with Receiver() as receiver, fake_rank() as rank:
        rank.publish_steps(3)
        details = '{"reason": "exception", "last_step": 2, "error": "boom"}'
        rank.publish(events=[{"type": "exit", "severity": "critical", "details": details}])
        for _ in range(2):
            async with start_service(**{"notify.urls": [receiver.url]}) as service:
                await rank.register(service.url)
                polls = len(rank.polls)
                await eventually(lambda polls=polls: len(rank.polls) > polls + 3)
                await eventually(lambda: receiver.messages)
                state = await service.run_state()

    titles = [title.partition(", step")[0] for title in receiver.titles]
    assert ["[critical] r: RunFailed, rank 0"] == titles
    assert "message: rank 0: boom" in receiver.messages[0]["message"]
    assert 2 == state["step"]  # the last completed one of the exit report


@pytest.mark.parametrize("mode", ["alertmanager", "off"])
async def test_other_modes_store_the_incident_and_send_nothing(start_service, fake_rank, eventually, mode):
    async with Receiver() as receiver, fake_rank() as rank:
        async with start_service(**{"notify.urls": [receiver.url], "notify.mode": mode}) as service:
            await rank.register(service.url)
            rank.publish(events=[TURBULENCE])
            await eventually(lambda: service.rows("SELECT rule FROM events WHERE type = 'incident'"))

        assert [] == receiver.messages
