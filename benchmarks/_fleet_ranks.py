"""Simulate a thousand exporters in one process, each with a port, a ring, a lease, heartbeats and the record channel.

A simulated rank sends the same answers as a real rank (docs/record-channel.md) at the lowest possible cost, so that the
service has the processors. `fleet` starts this program with a JSON document as its argument. The program writes one
line of JSON for each report and, at the end, one line for each simulated process.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
import uuid
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from _fleet_bodies import SETS, Bodies

from rankscope_contract.wire.channel import ARROW_STREAM, REGISTER_PATH, Registration
from rankscope_exporter.publish.registration import next_heartbeat

RING_RECORDS = 256
HEARTBEATS_AT_ONCE = 32
_AWAY_SECONDS = 20.0
_SLOW_SECONDS = 6.0
_HANGING_SECONDS = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Size and behaviour of the fleet."""

    service: str
    ranks: int
    tensors: int
    step_seconds: float
    steps: int
    flapping: int
    report_seconds: float
    max_body_bytes: int = 8 << 20
    run: str = "fleet"


@dataclass(slots=True)
class Rank:
    """One rank, and the process that is it at the moment. Record n of the process is step `born` + n."""

    number: int
    born: int = 1
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    head: int = -1
    committed: int = -1
    lease: str | None = None
    heartbeat_seconds: float = 5.0  # until the service sends its interval
    spoke_at: float = 0.0
    polled_at: float = 0.0  # by the service that registered it
    is_up: bool = True
    is_draining: bool = False
    slow_until: float = 0.0
    delay: float = 0.0
    port: int = 0
    server: asyncio.Server | None = None
    connections: set[_Connection] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return self.is_draining and self.committed == self.head

    @property
    def next_heartbeat(self) -> float:
        """Return when the next heartbeat of the rank is due, in monotonic seconds."""
        interval, sent_at = self.heartbeat_seconds, self.spoke_at
        return next_heartbeat(sent_at + interval, sent_at=sent_at, polled_at=self.polled_at, interval_seconds=interval)

    def life(self) -> dict[str, Any]:
        return {
            "rank": self.number,
            "incarnation": self.incarnation,
            "born": self.born,
            "published": self.head + 1,
            "committed": self.committed + 1,
        }


@dataclass(slots=True)
class Told:
    """Seconds from the publication of the oldest record of a poll to the confirmation that it is durable."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    reported: int = 0

    def worst(self) -> float:
        """Return the worst since the last report."""
        lately, self.reported = self.seconds[self.reported :], len(self.seconds)
        return max(lately, default=0.0)


class Fleet:
    """All ranks, the clock of their steps, and their counters."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        now = time.time_ns() // 1000
        self.bodies = Bodies(plan.tensors, min(plan.ranks, SETS), int(plan.step_seconds * 1e6), now)
        self.record_bytes = len(self.bodies.stretch(0, 1, 0, 0))
        self.ranks = [Rank(number) for number in range(plan.ranks)]
        self.dead: list[dict[str, Any]] = []
        self.published_at: list[float] = [0.0]  # by step
        self.counts: Counter[str] = Counter()
        self.told = Told(), Told()  # of steady ranks, of those that flap
        self.is_draining = False
        self.speaking = asyncio.Semaphore(HEARTBEATS_AT_ONCE)
        where = urlsplit(plan.service)
        self._service = where.hostname, where.port

    async def run(self) -> None:
        """Train all steps, drain, and end when everything is committed or nothing moves any more."""
        for rank in self.ranks:
            await self.listen(rank)
        await asyncio.gather(*(self.speak(rank) for rank in self.ranks))
        works = [asyncio.create_task(self._heartbeats(rank)) for rank in self.ranks]
        works += [asyncio.create_task(self._flap(rank)) for rank in self.ranks[: self.plan.flapping]]
        works.append(asyncio.create_task(self._report()))
        began = time.monotonic()
        for step in range(1, self.plan.steps + 1):
            await asyncio.sleep(max(0.0, began + step * self.plan.step_seconds - time.monotonic()))
            self._publish()
        await asyncio.sleep(self.plan.step_seconds)
        self.tell(self._figures())
        self.is_draining = True
        await self._drain()
        for work in works:
            work.cancel()
        lives = self.dead + [rank.life() for rank in self.ranks]
        self.tell(self._figures() | {"lives": lives, "told_seconds": list(self.told[0].seconds)})

    def _publish(self) -> None:
        self.published_at.append(time.monotonic())
        for rank in self.ranks:
            if rank.is_up:
                rank.head += 1

    async def _drain(self) -> None:
        for rank in self.ranks:
            await self._rise(rank)
            rank.is_draining = True
        await asyncio.gather(*(self.speak(rank) for rank in self.ranks))
        for _ in range(900):  # three minutes
            if all(rank.is_done for rank in self.ranks):
                return
            await asyncio.sleep(0.2)

    async def listen(self, rank: Rank) -> None:
        """Open the rank's port, the same one again after an absence."""
        listening = functools.partial(
            asyncio.get_running_loop().create_server, lambda: _Connection(self, rank), "127.0.0.1", backlog=8
        )
        try:
            rank.server = await listening(port=rank.port, reuse_address=True)
        except OSError:  # another connection uses the port now
            rank.server = await listening(port=0)
        rank.port = rank.server.sockets[0].getsockname()[1]

    def hang_up(self, rank: Rank) -> None:
        """Close port and connections, as the end of a process or of its network does."""
        if rank.server is not None:
            rank.server.close()
            rank.server = None
        for connection in list(rank.connections):
            connection.close()

    # The faults of flapping ranks, in this order.

    async def _flap(self, rank: Rank) -> None:
        spells = (self._die, self._be_unreachable, self._be_slow)
        turn = rank.number
        pause = 3 * _AWAY_SECONDS
        await asyncio.sleep(pause * (rank.number + 1) / self.plan.flapping)
        while not rank.is_draining:
            self.counts[spells[turn % 3].__name__.strip("_")] += 1
            await spells[turn % 3](rank)
            turn += 1
            await asyncio.sleep(pause - _AWAY_SECONDS)

    async def _die(self, rank: Rank) -> None:
        """Exit without a message and restart as another process. Records that were not fetched are lost."""
        self.hang_up(rank)
        rank.is_up = False
        self.dead.append(rank.life())
        await asyncio.sleep(_AWAY_SECONDS)
        await self._rise(rank)

    async def _rise(self, rank: Rank) -> None:
        if not rank.is_up:
            rank.incarnation, rank.lease = uuid.uuid4().hex, None
            rank.born, rank.head, rank.committed, rank.is_up = len(self.published_at), -1, -1, True
        if rank.server is None:
            await self.listen(rank)
            await self.speak(rank)

    async def _be_unreachable(self, rank: Rank) -> None:
        """Refuse connections for a while; training and heartbeats go on."""
        self.hang_up(rank)
        await asyncio.sleep(_AWAY_SECONDS)
        await self._rise(rank)

    async def _be_slow(self, rank: Rank) -> None:
        """Answer late, every second time later than the service waits."""
        rank.delay = _HANGING_SECONDS if rank.delay == _SLOW_SECONDS else _SLOW_SECONDS
        rank.slow_until = time.monotonic() + _AWAY_SECONDS
        await asyncio.sleep(_AWAY_SECONDS)

    # The rank's side of registration.

    async def _heartbeats(self, rank: Rank) -> None:
        await asyncio.sleep(rank.heartbeat_seconds * rank.number / len(self.ranks))
        while True:
            await asyncio.sleep(max(0.0, rank.next_heartbeat - time.monotonic()))
            if time.monotonic() >= rank.next_heartbeat:
                rank.spoke_at = time.monotonic()
                if rank.is_up:
                    await self.speak(rank)

    async def speak(self, rank: Rank) -> None:
        """Register, or send the heartbeat: a connection each time, as a rank does."""
        body = self._registration(rank).to_json().encode()
        request = (
            f"POST {REGISTER_PATH} HTTP/1.1\r\nHost: {self._service[0]}:{self._service[1]}\r\n"
            "Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self.counts["heartbeats"] += 1
        async with self.speaking:
            try:
                async with asyncio.timeout(10):
                    reader, writer = await asyncio.open_connection(*self._service)
                    writer.write(request.encode() + body)
                    answer = await reader.read()
                    writer.close()
            except (OSError, TimeoutError):
                self.counts["heartbeats_failed"] += 1
                return
        head, _, text = answer.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 200"):
            reply = json.loads(text)
            rank.lease = reply["lease"]
            self.hear(rank, reply["committed"])
            rank.heartbeat_seconds = reply["heartbeat_seconds"]
        elif rank.lease is None and not self.published_at[1:]:
            raise RuntimeError(f"the service takes no rank: {answer.decode()}")
        else:
            self.counts["heartbeats_refused"] += 1

    def _registration(self, rank: Rank) -> Registration:
        return Registration(
            run=self.plan.run,
            rank=rank.number,
            world_size=len(self.ranks),
            local_rank=rank.number % 8,
            host=f"node-{rank.number // 8}",
            pid=10_000 + rank.number,
            incarnation=rank.incarnation,
            launch_id=self.plan.run,
            url=f"http://127.0.0.1:{rank.port}",
            state="draining" if rank.is_draining else "running",
            head=rank.head,
            step=rank.born + rank.head if rank.head >= 0 else None,
            planned_steps=self.plan.steps,
            config={f"setting_{number}": "value" for number in range(30)},
            versions={"rankscope": "0", "python": "3", "pyarrow": "0", "torch": "2"},
        )

    # Reports.

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self.plan.report_seconds)
            self.tell(self._figures())

    def _figures(self) -> dict[str, Any]:
        now = time.monotonic()
        lags = [(rank.head - rank.committed, self._oldest_wait(rank, now)) for rank in self.ranks]
        steady, shaky = lags[self.plan.flapping :], lags[: self.plan.flapping]
        told, told_shaky = (one.worst() for one in self.told)
        return {
            "is_draining": self.is_draining,
            "step": len(self.published_at) - 1,
            "lag_steps": max((steps for steps, _ in steady), default=0),
            "lag_seconds": max(0.0, told, *(seconds for _, seconds in steady)),
            "lag_seconds_flapping": max(0.0, told_shaky, *(seconds for _, seconds in shaky)),
            "cpu_seconds": time.process_time(),
            "counts": dict(self.counts),
        }

    def hear(self, rank: Rank, committed: int) -> None:
        """Record the sequence number that the service confirmed to a rank as durable."""
        if committed > rank.committed:
            if not self.is_draining:
                self.told[rank.number < self.plan.flapping].seconds.append(self._oldest_wait(rank, time.monotonic()))
            rank.committed = committed

    def _oldest_wait(self, rank: Rank, now: float) -> float:
        """Return how long the rank's first record that is not committed has been published."""
        if rank.committed >= rank.head:
            return 0.0
        return now - self.published_at[rank.born + rank.committed + 1]

    def tell(self, figures: dict[str, Any]) -> None:
        """Write one line of JSON to standard output."""
        print(json.dumps(figures), flush=True)


class _Connection(asyncio.Protocol):
    """One connection of the service to one rank."""

    def __init__(self, fleet: Fleet, rank: Rank) -> None:
        self._fleet = fleet
        self._rank = rank
        self._transport: asyncio.Transport | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a TCP server's transports are both ways
        self._rank.connections.add(self)
        self._fleet.counts["connections"] += 1

    def connection_lost(self, _: Exception | None) -> None:
        self._rank.connections.discard(self)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._received.endswith(b"\r\n\r\n"):
            return
        request, self._received = self._received, b""
        if time.monotonic() < self._rank.slow_until:
            asyncio.get_running_loop().call_later(self._rank.delay, self._answer, request)
        else:
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_answer(self._fleet, self._rank, request))


def _answer(fleet: Fleet, rank: Rank, request: bytes) -> bytes:
    lines = request.decode("latin-1").split("\r\n")
    path, _, query = lines[0].split(" ")[1].partition("?")
    if path.startswith("/plan/"):
        fleet.counts["plans"] += 1
        return _said(200, fleet.bodies.plan.json.encode(), "Content-Type: application/json")
    asked = dict(parse_qsl(query))
    if f"Rankscope-Lease: {rank.lease}" not in lines:
        asked.pop("committed", None)
    return _records(fleet, rank, asked)


def _records(fleet: Fleet, rank: Rank, asked: dict[str, str]) -> bytes:
    fleet.counts["polls"] += 1
    standing = (
        f"Rankscope-Schema: 1\r\nRankscope-Incarnation: {rank.incarnation}\r\nRankscope-Head: {rank.head}\r\n"
        f"Rankscope-Ring-Fill: {min(1.0, (rank.head - rank.committed) / RING_RECORDS):.3f}\r\n"
        f"Rankscope-State: {'draining' if rank.is_draining else 'running'}"
    )
    if asked["incarnation"] != rank.incarnation:
        return _said(409, b"another process\n", standing)
    if "committed" in asked:
        rank.polled_at = time.monotonic()
        fleet.hear(rank, int(asked["committed"]))
    after = int(asked["after"])
    if after > rank.head:
        return _said(416, b"above the head\n", standing)
    if after == rank.head:
        return _said(503, b"drained\n", standing) if rank.is_done else _said(204, b"", standing)
    oldest = max(0, rank.head - RING_RECORDS + 1)
    first = max(after + 1, oldest)
    at_most = max(1, min(int(asked["max_bytes"]), fleet.plan.max_body_bytes) // fleet.record_bytes)
    last = min(rank.head, first + at_most - 1)
    body = fleet.bodies.stretch(rank.number, rank.born, first, last)
    fleet.counts["bodies"] += 1
    fleet.counts["records"] += last - first + 1
    lost = f"\r\nRankscope-Lost: {after + 1}-{first - 1}" if first > after + 1 else ""
    held = f"Rankscope-First: {first}\r\nRankscope-Last: {last}\r\nRankscope-Rows: {last - first + 1}{lost}"
    return _said(200, body, f"{standing}\r\n{held}\r\nContent-Type: {ARROW_STREAM}")


def _said(status: int, body: bytes, headers: str) -> bytes:
    length = "" if status == 204 else f"Content-Length: {len(body)}\r\n"
    return f"HTTP/1.1 {status} said\r\n{length}{headers}\r\n\r\n".encode() + body


if __name__ == "__main__":
    asyncio.run(Fleet(Plan(**json.loads(sys.argv[1]))).run())
