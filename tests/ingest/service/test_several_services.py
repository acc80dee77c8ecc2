"""Services that share one store, as processes: ranks find their service, nothing is lost or doubled, N may change."""

import asyncio
import contextlib
import json
import urllib.request
from collections import Counter

import pytest
from tests.end_to_end.lives import until
from tests.ingest.pipeline.test_exactly_once import TENSORS, ServiceProcess, nan_event, open_channel, step_record
from tests.ingest.servers import FakeExporter, Receiver
from tests.ingest.spools.test_orphan_spools import make_spool

from rankscope_contract.model.events import Event
from rankscope_storage.base.shards import Shard

RUNS = [f"run-{number}" for number in range(6)]
SHARDS = {run: Shard(0, 2).of(run).number for run in RUNS}


def read(service, path):
    with urllib.request.urlopen(service.url + path, timeout=30) as answer:
        return answer.read().decode()


@pytest.fixture
def ranks():
    """Return a function that opens the channel of a rank of each run, all of which register at one service."""
    with contextlib.ExitStack() as stack:

        def open_them(service):
            opened = {run: open_channel(service, 0, world_size=1, launch_id=f"l-{run}", run=run) for run in RUNS}
            for channel in opened.values():
                stack.callback(channel.close)
            return opened

        yield open_them


@pytest.fixture
def start(tmp_path, free_port):
    """Return a function that starts the services of one store, on the same ports each time."""
    running = []

    def start_them(count, **settings):
        running[:] = [
            ServiceProcess(tmp_path, free_port + number, shard=f"{number}/{count}", **settings)
            for number in range(count)
        ]
        for service in running:
            service.start()
        return list(running)

    yield start_them
    for service in running:
        if service.process is not None and service.process.poll() is None:
            service.kill()


def train(channels, steps):
    for step in steps:
        for channel in channels.values():
            channel.publish(step_record(step))


def end(channels, services, step):
    """Publish the last records, and return the numbers of records that no service has committed."""
    for channel in channels.values():
        details = f'{{"reason": "completed", "last_step": {step}}}'
        channel.publish(step_record(step, Event(type="exit", details=details)))
    left = [channel.drain(60) for channel in channels.values()]
    for channel in channels.values():
        channel.close()
    return left + [service.terminate() for service in services]


async def test_number_of_services_changes_and_one_is_killed(start, ranks):
    """An incident of each shard is open meanwhile, and is one message. All ranks know only the first service."""
    async with Receiver() as receiver:
        found = await asyncio.to_thread(_change_services, start, ranks, receiver)
        titles = sorted(title.partition(",")[0] for title in receiver.titles)

    assert {0, 1} == set(SHARDS.values())
    assert [f"[critical] {run}: AnomalyNan in grad_unreduced of t1" for run in RUNS] == titles
    assert [0] * 7 == found["left"]
    names = [{"targets": 1, "instance": f"{run}/0"} for run in RUNS]
    assert [names, names] == found["discovered"]
    assert [{run: number == SHARDS[run] for run in RUNS} for number in range(2)] == found["metrics"]
    assert [{"run": run, "n": 201 * TENSORS, "keys": 201 * TENSORS, "last": 200} for run in RUNS] == found["rows"]
    assert [] == found["gaps"]
    assert [{"run": run, "attempts": 1, "state": "completed"} for run in RUNS] == found["states"]


def _change_services(start, ranks, receiver):
    found = {}
    services = start(1, notify=receiver.url)
    channels = ranks(services[0])
    train(channels, range(40))
    for channel in channels.values():
        channel.publish(step_record(40, nan_event("t1")))
    until(lambda: len(receiver.messages) == len(RUNS))
    services[0].terminate()

    services = start(2, notify=receiver.url)
    train(channels, range(41, 80))
    until(lambda: all(channel.ring.committed >= 79 for channel in channels.values()))
    until(lambda: all(len(json.loads(read(service, "/sd"))) == len(RUNS) for service in services))
    pages = [read(service, "/metrics") for service in services]
    found["metrics"] = [{run: f'run="{run}"' in page for run in RUNS} for page in pages]
    found["discovered"] = [
        sorted(
            ({"targets": len(one["targets"]), "instance": one["labels"]["instance"]} for one in json.loads(page)),
            key=lambda one: one["instance"],
        )
        for page in (read(service, "/sd") for service in services)
    ]
    train(channels, range(80, 100))
    services[1].kill()
    train(channels, range(100, 140))
    services[1].start()
    until(lambda: all(channel.ring.committed >= 139 for channel in channels.values()))
    assert [0, 0] == [service.terminate() for service in services]

    services = start(1, notify=receiver.url)
    train(channels, range(140, 200))
    found["left"] = end(channels, services, 200)
    found["rows"] = services[0].rows(
        "SELECT run, count(*) AS n, count(DISTINCT (seq, tensor)) AS keys, max(seq) AS last FROM tensor_stats"
        " GROUP BY 1 ORDER BY 1"
    )
    found["gaps"] = services[0].rows("SELECT * FROM events WHERE type = 'gap'")
    found["states"] = services[0].rows(
        "SELECT run, count(*) AS attempts, max(state) AS state FROM attempts GROUP BY 1 ORDER BY 1"
    )
    return found


COMPLETED = Event(type="exit", details='{"reason": "completed", "last_step": 40}')
CORPUS = {
    "run-0": {20: [nan_event("t1"), nan_event("t3", "grad_reduced")], 40: [COMPLETED]},
    "run-1": {10: [Event(type="anomaly", severity="warning", rule="AnomalyTurbulence", tensor="t0")], 40: [COMPLETED]},
    "run-2": {40: [Event(type="exit", severity="critical", details='{"reason": "exception", "error": "boom"}')]},
    "run-3": {15: [Event(type="note", severity="warning", message="slow disk")], 40: [COMPLETED]},
    "run-4": {},
    "run-5": {40: [nan_event("t2"), COMPLETED]},
}
"""Events by run and step. run-4 vanishes without an exit event."""


async def _faults(start, ranks, count):
    """Train all runs of CORPUS with `count` services; return messages, and events without times and addresses."""
    async with Receiver() as receiver:
        services = await asyncio.to_thread(start, count, notify=receiver.url)
        channels = await asyncio.to_thread(ranks, services[0])
        for step in range(41):
            for run, channel in channels.items():
                channel.publish(step_record(step, *CORPUS[run].get(step, [])))
        await asyncio.to_thread(until, lambda: all(one.ring.committed >= 40 for one in channels.values()))
        for channel in channels.values():
            await asyncio.to_thread(channel.close)
        await asyncio.to_thread(until, lambda: len(receiver.messages) == 5)
        assert [0] * count == [await asyncio.to_thread(service.terminate) for service in services]
        titles = sorted(receiver.titles)
    columns = "run, attempt, rank, step, type, severity, rule, kind, tensor, op, value, details->>'$.state' AS state"
    return titles, services[0].rows(
        f"SELECT {columns} FROM events WHERE type IN ('anomaly', 'incident', 'exit', 'note') ORDER BY ALL"
    )


async def test_faults_give_equal_events_incidents_and_messages(start, ranks, tmp_path):
    titles, events = await _faults(start, ranks, 1)
    (tmp_path / "store").rename(tmp_path / "first")

    assert {0, 1, 2, 3} == {Shard(0, 4).of(run).number for run in CORPUS}
    assert (titles, events) == await _faults(start, ranks, 4)
    assert 5 == len(titles)
    assert {"anomaly": 4, "exit": 5, "note": 1, "opened": 5, "notified": 5}.items() <= Counter(
        event["state"] or event["type"] for event in events
    ).items()


async def test_sources_of_one_configuration_are_divided(tmp_path, start_service, fake_rank, eventually):
    """Ranks at fixed addresses, spools and logs belong to the service of their run, exporters to that of their name."""
    logs = {run: tmp_path / f"{run}.log" for run in ("log-0", "log-3")}
    for path in logs.values():
        path.write_text("".join(f"step {step}: loss = {1 + step / 10}\n" for step in range(20)))
    for run in RUNS:
        make_spool(tmp_path / "spool", f"spool-{run}", 3, run=run)
    runs = ("static-0", "static-1")
    async with (
        FakeExporter(b"up 1\n") as one,
        FakeExporter(b"up 1\n") as two,
        fake_rank(run=runs[0]) as rank,
        fake_rank(run=runs[1]) as other,
    ):
        changes = {
            "targets": [
                {"url": each.registration.url, "run": run} for each, run in zip((rank, other), runs, strict=True)
            ],
            "watch": [{"log": str(path), "settle_seconds": 0.1, "poll_seconds": 0.1} for path in logs.values()],
            "exporters": [{"url": each.url, "name": each.address, "every_seconds": 0.2} for each in (one, two)],
            "spool.folders": [str(tmp_path / "spool")],
        }
        rank.publish_steps(3)
        other.publish_steps(3)
        async with (
            start_service(**changes, **{"store.shard": "0/2"}) as first,
            start_service(**changes, **{"store.shard": "1/2"}) as second,
        ):
            stored = "SELECT run, count(*) AS n FROM scalars WHERE name = 'loss' GROUP BY 1 ORDER BY 1"
            await eventually(lambda: len(first.rows(stored)) == 10)
            await eventually(lambda: not list((tmp_path / "spool").iterdir()))
            listed = [json.loads((await service.get("/api/v1/exporters"))[1]) for service in (first, second)]
            found = [{target["run"] for target in await service.targets()} for service in (first, second)]
        rows = {row["run"]: row["n"] for row in first.rows(stored)}

    assert dict.fromkeys(logs, 20) | dict.fromkeys([*RUNS, *runs], 3) == rows
    assert sorted([one.address, two.address]) == sorted(item["name"] for items in listed for item in items)
    assert [True, True] == [{Shard(0, 2).of(run).number for run in found[n]} <= {n} for n in range(2)]
