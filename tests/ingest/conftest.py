"""Fixtures for the tests of ingest: an encoder that is independent of the decoder, a fake rank, and a service."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
import pyarrow as pa
import pytest
import pytest_asyncio
from aiohttp import web
from tests.ingest import builders

from rankscope_contract.model.schema import WIRE_FIELDS, WIRE_METADATA, Plan, arrow_schema
from rankscope_contract.wire.channel import ARROW_STREAM
from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.live.progress import Progress
from rankscope_ingest.service.main import run
from rankscope_storage.connection import connect

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


def encode_records(
    records: Sequence[Mapping[str, Any]],
    *,
    schema: pa.Schema | None = None,
    compression: str | None = "lz4",
    max_chunksize: int | None = None,
) -> bytes:
    schema = schema or arrow_schema(pa, WIRE_FIELDS, WIRE_METADATA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(pa.Table.from_pylist(list(records), schema=schema), max_chunksize=max_chunksize)
    return sink.getvalue().to_pybytes()


class FakeRank:
    """A rank without training: a real HTTP server that follows the protocol in docs/record-channel.md."""

    # It shares no code with the exporter. If `behave` is set, it may return a different response to a request.

    def __init__(self, *, run: str = "r", rank: int = 0, world_size: int = 1, **registration: Any) -> None:
        who = {"run": run, "rank": rank, "world_size": world_size, "host": "here", "pid": 1000 + rank, "url": ""}
        incarnation = f"inc-{run}-{rank}" if run.isalnum() else uuid.uuid4().hex
        self.registration = builders.registration(
            **({"incarnation": incarnation, "launch_id": "launch"} | who | registration)
        )
        self.records: dict[int, dict[str, Any]] = {}
        self.plans: dict[str, str] = {}
        self.head = -1
        self.committed = -1
        self.lease: str | None = None
        self.attempt: int | None = None
        self.state = "running"
        self.ring = 1 << 30
        self.max_rows = 1 << 30
        self.polls: list[float] = []
        self.requests: list[web.BaseRequest] = []
        self.behave: Behaviour | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.add_routes([web.get("/records", self._records), web.get("/plan/{hash}", self._plan)])
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        self.registration = dataclasses.replace(self.registration, url=f"http://127.0.0.1:{port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Close the port, as at the end of the process."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def publish(self, **record: Any) -> int:
        self.head += 1
        step = record.pop("step", self.head)
        self.records[self.head] = {"seq": self.head, "step": step, "ts": 1_000_000 + self.head, **record}
        self.records.pop(self.head - self.ring, None)
        return self.head

    def publish_steps(self, count: int, **record: Any) -> None:
        for _ in range(count):
            self.publish(scalars=[{"name": "loss", "value": float(self.head + 1)}], **record)

    async def deliver(self, service: RunningService, steps: int = 0, **record: Any) -> None:
        """Publish `steps`, register, and wait until the service has committed all records."""
        self.publish_steps(steps, **record)
        await self.register(service.url)
        await eventually(lambda: self.committed == self.head)

    def add_plan(self, plan: Plan) -> str:
        self.plans[plan.hash] = plan.to_json()
        return plan.hash

    def registration_body(self) -> str:
        return dataclasses.replace(self.registration, head=self.head, state=self.state).to_json()

    async def register(self, service: str, *, token: str | None = None) -> tuple[int, str]:
        """Register or send a heartbeat, and return status and text of the response."""
        body = self.registration_body()
        headers = {"Content-Type": "application/json"}
        headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{service}/api/v1/register", data=body, headers=headers) as response,
        ):
            if response.status == 200:
                reply = await response.json()
                self.lease, self.attempt = reply["lease"], reply["attempt"]
            return response.status, await response.text()

    def headers(self) -> dict[str, str]:
        return {
            "Rankscope-Schema": "1",
            "Rankscope-Incarnation": self.registration.incarnation,
            "Rankscope-Head": str(self.head),
            "Rankscope-Ring-Fill": "0.000",
            "Rankscope-State": self.state,
        }

    def window(self, after: int) -> list[dict[str, Any]]:
        return [self.records[seq] for seq in sorted(self.records) if seq > after][: self.max_rows]

    async def _records(self, request: web.Request) -> web.StreamResponse:
        self.polls.append(time.monotonic())
        self.requests.append(request)
        if self.behave is not None and (answer := await self.behave(request)) is not None:
            return answer
        if request.query["incarnation"] != self.registration.incarnation:
            return web.Response(status=409, headers=self.headers())
        if self.lease is not None and request.headers.get("Rankscope-Lease") == self.lease:
            self.committed = max(self.committed, int(request.query["committed"]))
        after = int(request.query["after"])
        if after > self.head:
            return web.Response(status=416, text="above the head", headers=self.headers())
        chosen = self.window(after)
        if not chosen:
            done = self.state == "draining" and self.committed == self.head
            return web.Response(status=503 if done else 204, headers=self.headers())
        return web.Response(body=encode_records(chosen), headers=self.body_headers(chosen, after))

    def body_headers(self, chosen: Sequence[Mapping[str, Any]], after: int) -> dict[str, str]:
        headers = self.headers() | {
            "Content-Type": ARROW_STREAM,
            "Rankscope-First": str(chosen[0]["seq"]),
            "Rankscope-Last": str(chosen[-1]["seq"]),
            "Rankscope-Rows": str(len(chosen)),
        }
        if chosen[0]["seq"] > after + 1:
            headers["Rankscope-Lost"] = f"{after + 1}-{chosen[0]['seq'] - 1}"
        return headers

    async def _plan(self, request: web.Request) -> web.Response:
        text = self.plans.get(request.match_info["hash"])
        return web.Response(status=404) if text is None else web.Response(text=text)


class RunningService:
    """A service in this process with its own port."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.url = ""
        self.snapshots: list[Progress] = []
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()

    async def targets(self) -> list[dict[str, Any]]:
        return json.loads((await self.get("/api/v1/targets"))[1])

    async def run_state(self, run: str = "r") -> dict[str, Any]:
        runs = json.loads((await self.get("/api/v1/runs"))[1])
        return next((found for found in runs if found["run"] == run), {"state": None})

    async def end(self) -> None:
        self.stop.set()
        assert self.task is not None
        await self.task

    def rows(self, query: str) -> list[dict[str, Any]]:
        with connect(self.store) as connection:
            return connection.query(query).to_pylist()


FAST = {
    "service.listen": "127.0.0.1:0",
    "ingest.poll_seconds": 0.1,
    "ingest.timeout_seconds": 2.0,
    "ingest.flush_after_seconds": 0.2,
    "ingest.max_backoff_seconds": 0.3,
    "runs.heartbeat_seconds": 0.2,
    "runs.refused_after_seconds": 0.5,
    "runs.failed_after_seconds": 30.0,
    "notify.group_wait_seconds": 0.3,
}


@contextlib.asynccontextmanager
async def running_service(store: Path, **changes: Any) -> AsyncIterator[RunningService]:
    service = RunningService(store)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = load_config(None, FAST | {"store.path": str(store)} | changes)
    service.task = asyncio.create_task(
        run(config, on_ready=ready.set_result, on_progress=service.snapshots.append, stop=service.stop)
    )
    await asyncio.wait([ready, service.task], return_when=asyncio.FIRST_COMPLETED)
    if service.task.done():
        service.task.result()
    service.url = await ready
    try:
        yield service
    finally:
        if not service.task.done():
            await service.end()


@pytest.fixture(autouse=True, scope="session")
def untuned_test_process() -> Iterator[None]:
    """Keep allocator and garbage collector of the test process: to tune them takes a second at each start."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tune_allocator", "unfreeze_gc"):
            patch.setattr(f"rankscope_ingest.service.main.{name}", lambda: None)
        yield


@pytest.fixture
def start_service(tmp_path: Path) -> Callable[..., contextlib.AbstractAsyncContextManager[RunningService]]:
    """Return a function that returns a context manager, which runs a service. All services of a test use one store."""
    return lambda **changes: running_service(tmp_path / "store", **changes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningService]:
    """Return the service of all tests of a module that need no settings. Each of these tests has other runs."""
    async with running_service(tmp_path_factory.mktemp("shared") / "store") as service:
        yield service


@pytest.fixture
def fake_rank() -> type[FakeRank]:
    return FakeRank


async def eventually(condition: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """Poll `condition`, which may be asynchronous, and return its first true value. Fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        found = await found if asyncio.iscoroutine(found) else found
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s; last seen: {found!r}")
        await asyncio.sleep(0.02)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Awaitable[Any]]:
    return eventually
