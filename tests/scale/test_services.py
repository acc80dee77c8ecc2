"""Four services, 400 simulated ranks of 40 runs, services killed and N changed: part `services` of `make test-scale`.

RANKSCOPE_SERVICES_SECONDS is the duration in seconds, 1200 by default. The result is one line of JSON.
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

import aiohttp
import pytest
from tests.ingest.conftest import FakeRank
from tests.ingest.pipeline.test_exactly_once import ServiceProcess

from rankscope_storage.base.shards import Shard
from rankscope_storage.connection import connect

pytestmark = [
    pytest.mark.skipif("services" not in os.environ.get("RANKSCOPE_SCALE", ""), reason="make test-scale"),
    pytest.mark.timeout(3000),
]
SECONDS = float(os.environ.get("RANKSCOPE_SERVICES_SECONDS", "1200"))
RUNS, RANKS_PER_RUN, STEP_SECONDS, FLUSH_SECONDS, RECOVERY_SECONDS = 40, 10, 5.0, 10.0, 60.0
KILL_EVERY_SECONDS, AWAY_SECONDS = 90.0, 10.0


@dataclass
class Fleet:
    """All services and ranks, and the times at which services were killed, by number of the shard; all: N changed."""

    folder: object
    ports: list[int]
    services: list[ServiceProcess] = field(default_factory=list)
    killed: list[tuple[float, Shard | None]] = field(default_factory=list)

    async def start(self, count):
        made = [
            ServiceProcess(self.folder, port, shard=f"{number}/{count}", flush_seconds=FLUSH_SECONDS)
            for number, port in enumerate(self.ports[:count])
        ]
        await asyncio.gather(*(asyncio.to_thread(service.start) for service in made))
        self.services = made

    async def change(self, count):
        self.killed.append((time.time(), None))
        codes = await asyncio.gather(*(asyncio.to_thread(service.terminate) for service in self.services))
        assert {0} == set(codes)
        await self.start(count)

    async def kill(self, number):
        self.killed.append((time.time(), Shard(number, len(self.services))))
        await asyncio.to_thread(self.services[number].kill)
        await asyncio.sleep(AWAY_SECONDS)
        await asyncio.to_thread(self.services[number].start)

    def is_disturbed(self, run, published, committed):
        """Return whether the service of `run` was killed in the last minute, from the publication on."""
        return any(
            (shard is None or shard.owns(run)) and published - RECOVERY_SECONDS <= at <= committed
            for at, shard in self.killed
        )


class ScaleRank(FakeRank):
    """A rank that registers at any service, as behind the name of all of them, and notes the times of its records."""

    def begin(self):
        self.published_at = []

    def step(self):
        self.publish_steps(1)
        self.published_at.append(time.time())

    async def live(self, fleet, session):
        """Send heartbeats: to the service that has answered, after a failure to any service."""
        url = None
        while True:
            body = self.registration_body()
            base = url or random.choice(fleet.ports)
            try:
                target = base if isinstance(base, str) else f"http://127.0.0.1:{base}/api/v1/register"
                async with session.post(target, data=body, headers={"Content-Type": "application/json"}) as response:
                    if response.status == 200:
                        reply, url = await response.json(), str(response.url)
                        self.lease, pause = reply["lease"], 5.0
                    else:
                        url, pause = None, 2.0
            except (aiohttp.ClientError, TimeoutError):
                url, pause = None, 2.0
            await asyncio.sleep(pause * (0.75 + random.random() / 2))


async def train(ranks, until):
    """Publish a step of all ranks every STEP_SECONDS, spread over this time."""
    slots = [ranks[number::50] for number in range(50)]
    for slot in itertools.cycle(slots):
        began = time.monotonic()
        if began >= until and slot is slots[0]:
            return
        for rank in slot:
            rank.step()
        await asyncio.sleep(max(0.0, began + STEP_SECONDS / 50 - time.monotonic()))


async def disturb(fleet, until):
    """Kill one service after the other, and change N from four to two and back."""
    turn = 0
    while time.monotonic() + KILL_EVERY_SECONDS + RECOVERY_SECONDS < until:
        await asyncio.sleep(KILL_EVERY_SECONDS)
        turn += 1
        if turn % 4 == 0:
            await fleet.change(2 if len(fleet.services) == 4 else 4)
        else:
            await fleet.kill(turn % len(fleet.services))


def commit_times(store):
    """Return the times at which the records of each incarnation were committed, from the entries of the Delta log."""
    times = defaultdict(list)
    for path in sorted((store / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        at = next((action["commitInfo"]["timestamp"] / 1000 for action in actions if "commitInfo" in action), 0.0)
        for moved in (action["txn"] for action in actions if "txn" in action):
            found = times[moved["appId"].removeprefix("w:")]
            found += [at] * (moved["version"] + 1 - len(found))
    return times


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)] if values else 0.0


async def test_four_services_store_each_record_once_while_they_are_killed(tmp_path, free_port):
    fleet = Fleet(tmp_path, [free_port + number for number in range(4)])
    await fleet.start(4)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)))
        ranks = []
        for run, number in itertools.product(range(RUNS), range(RANKS_PER_RUN)):
            one = ScaleRank(run=f"run{run}", rank=number, world_size=RANKS_PER_RUN)
            one.begin()
            ranks.append(await stack.enter_async_context(one))
        beating = [asyncio.create_task(one.live(fleet, session)) for one in ranks]
        until = time.monotonic() + SECONDS
        await asyncio.gather(train(ranks, until), disturb(fleet, until))
        deadline = time.monotonic() + 120
        while any(one.committed < one.head for one in ranks) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        for task in beating:
            task.cancel()
        await asyncio.gather(*beating, return_exceptions=True)
        codes = await asyncio.gather(*(asyncio.to_thread(service.terminate) for service in fleet.services))
    with connect(tmp_path / "store") as connection:
        rows = connection.query(
            "SELECT run, rank, count(*) AS n, count(DISTINCT seq) AS keys FROM scalars GROUP BY 1, 2"
        ).to_pylist()
        (gaps,) = connection.query("SELECT count(*) AS n FROM events WHERE type = 'gap'").to_pylist()
    stored = {(row["run"], row["rank"]): (row["n"], row["keys"]) for row in rows}
    committed = commit_times(tmp_path / "store")
    lags = [
        (one.registration.run, begin, end)
        for one in ranks
        for begin, end in zip(one.published_at, committed[one.registration.incarnation], strict=True)
    ]
    calm = [end - begin for run, begin, end in lags if not fleet.is_disturbed(run, begin, end)]
    result = {
        "seconds": SECONDS,
        "ranks": len(ranks),
        "records": sum(one.head + 1 for one in ranks),
        "kills": sum(shard is not None for _, shard in fleet.killed),
        "changes_of_n": sum(shard is None for _, shard in fleet.killed),
        "calm_records": len(calm),
        "calm_lag_p50_s": round(statistics.median(calm), 2),
        "calm_lag_p99_s": round(percentile(calm, 0.99), 2),
        "calm_lag_max_s": round(max(calm), 2),
        "lag_max_s": round(max(end - begin for _, begin, end in lags), 2),
    }
    print(json.dumps(result), file=sys.stderr)

    assert {0} == set(codes)
    assert {(one.registration.run, one.registration.rank): (one.head + 1,) * 2 for one in ranks} == stored
    assert 0 == gaps["n"]
    assert max(calm) <= 2 * FLUSH_SECONDS, result
