"""Remote read answers one query at a time; a slow query or a disconnected client does not block the next query."""

import asyncio
import contextlib
import threading

import aiohttp
import pyarrow as pa
import pytest
from aiohttp import web

from rankscope_ingest.base.config import RemoteReadSection
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.base.protobuf import packed
from rankscope_ingest.remote_read import handler
from rankscope_ingest.remote_read.handler import RemoteRead
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.prometheus.query import SeriesQuery
from rankscope_storage.prometheus.read import read

ALWAYS = (0, 1 << 42)
pytestmark = pytest.mark.timeout(60)


class Endless(SeriesQuery):
    """A query that never ends; `begun` is set when the store executes it."""

    begun = threading.Event()

    def within(self):
        self.begun.set()
        return "(SELECT sum(hash(many.range)) FROM range(1_000_000_000_000) AS many) > 0"


def append(writer, ts, value):
    row = {"run": "", "ts": ts, "ts_origin": "ingest", "target": "t", "metric": "m", "value": value}
    samples = pa.Table.from_pylist([row], schema=dataset_schema("samples"))
    writer.append(Batch(tables={"samples": samples}, watermarks={}))


@contextlib.asynccontextmanager
async def asked(tmp_path, monkeypatch, questions, **more):
    """Yield the runner and the URL of a server that answers `questions` in order, independent of the request body."""
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        append(writer, 1_000, 1.0)
    coming = iter(questions)
    monkeypatch.setattr(handler, "read_request", lambda _: ((next(coming),), ()))
    Endless.begun.clear()
    remote_read = RemoteRead(str(tmp_path / "store"), RemoteReadSection(), **more)

    async def answer(request):
        try:
            return await remote_read.answer(request)
        except RegistrationError as error:
            return web.Response(status=error.status, text=str(error))

    application = web.Application()
    application.router.add_post("/read", answer)
    runner = web.AppRunner(application, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner, "http://{}:{}/read".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()
        await asyncio.get_running_loop().shutdown_default_executor()  # blocks forever if a query still runs


async def post(url):
    async with aiohttp.ClientSession() as session, session.post(url, data=packed(b"")) as response:
        return response.status, await response.read()


async def test_query_above_the_time_limit_is_rejected_with_a_recommendation(tmp_path, monkeypatch):
    questions = [Endless((), *ALWAYS), SeriesQuery((), *ALWAYS)]
    async with asked(tmp_path, monkeypatch, questions, read_seconds=2.0) as (_, url):
        refused = await post(url)
        status, answer = await post(url)

    text = b"the query was cancelled because it took longer than 2 s: ask for fewer series or a shorter time"
    assert (400, text) == refused
    assert 200 == status
    assert answer


async def test_query_of_a_disconnected_client_is_cancelled(tmp_path, monkeypatch):
    async with asked(tmp_path, monkeypatch, [Endless((), *ALWAYS), SeriesQuery((), *ALWAYS)]) as (_, url):
        asking = asyncio.create_task(post(url))
        await asyncio.to_thread(Endless.begun.wait)
        asking.cancel()

        assert 200 == (await post(url))[0]


async def test_stopping_service_does_not_wait_for_a_query(tmp_path, monkeypatch):
    async with asked(tmp_path, monkeypatch, [Endless((), *ALWAYS)]) as (runner, url):
        asking = asyncio.create_task(post(url))
        await asyncio.to_thread(Endless.begun.wait)
        await runner.cleanup()

        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_equal_queries_of_one_version_are_read_once(tmp_path, monkeypatch):
    """The functions of a panel, such as `max(x) - min(x)`, ask for the same series one after the other."""
    reads = []
    monkeypatch.setattr(handler, "read", lambda *given, **more: reads.append(given[1]) or read(*given, **more))
    questions = [SeriesQuery((), *ALWAYS), SeriesQuery((), *ALWAYS), SeriesQuery((), 5, 6), SeriesQuery((), *ALWAYS)]
    async with asked(tmp_path, monkeypatch, questions) as (_, url):
        first, second, other = [await post(url) for _ in range(3)]
        with Store.open(tmp_path / "store").claim(owner="test") as writer:
            append(writer, 2_000_000, 2.0)
        later = await post(url)

    assert (200, True, False) == (first[0], first == second, first == other)
    assert 3 == len(reads)
    assert len(later[1]) > len(first[1])
