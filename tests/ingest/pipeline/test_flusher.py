"""The flusher: rows of failed commits are kept, retried, and never stored twice."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from rankscope_ingest.base.errors import ServiceError
from rankscope_ingest.pipeline.batcher import Batcher
from rankscope_ingest.pipeline.flusher import Flusher
from rankscope_storage.base.errors import ShardLostError, StoreError
from rankscope_storage.log.delta import Log


@dataclass
class Stored:
    rows: dict
    seconds: float = 0.0


@dataclass
class ListAppender:
    """A store in memory that rejects a given number of appends."""

    refuse: list[Exception] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    watermarks: list[dict] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    may_return: threading.Event = field(default_factory=threading.Event)
    is_held: bool = False

    def append(self, batch):
        self.started.set()
        if self.is_held:
            self.may_return.wait(10)
        if self.refuse:
            raise self.refuse.pop(0)
        self.values += batch.tables["scalars"]["x"].to_pylist() if "scalars" in batch.tables else []
        self.watermarks.append(dict(batch.watermarks))
        return Stored({name: table.num_rows for name, table in batch.tables.items()})

    def watermark(self, incarnation):
        return -1


@contextlib.asynccontextmanager
async def flushing(appender, **changes):
    batcher = Batcher(**({"flush_rows": 1000, "flush_after_seconds": 1000.0, "max_pending_rows": 1000} | changes))
    commits = []
    flusher = Flusher(
        appender,
        batcher,
        on_commit=lambda batch, commit: commits.append(dict(batch.watermarks)),
        clock=time.monotonic,
        retry_seconds=(0.05,),
    )
    task = asyncio.create_task(flusher.run())
    try:
        yield batcher, flusher, commits, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def add(batcher, *values):
    batcher.add({"scalars": pa.table({"x": list(values)})}, time.monotonic(), watermarks={"a": values[-1]})


async def test_commit_now_waits_for_gathered_rows_and_a_batch_in_flight_only():
    appender = ListAppender(is_held=True)
    async with flushing(appender) as (batcher, flusher, commits, _):
        await flusher.commit_now()
        add(batcher, 1, 2)
        batcher.want_flush()
        await asyncio.to_thread(appender.started.wait, 10)
        assert batcher.is_empty
        waiting = asyncio.create_task(flusher.commit_now())
        await asyncio.sleep(0)
        assert not waiting.done()
        add(batcher, 3)
        appender.may_return.set()
        await asyncio.wait_for(waiting, 5)

        assert ([1, 2], [{"a": 2}], 1) == (appender.values, commits, batcher.pending_rows)
        await flusher.commit_now()
        assert ([1, 2, 3], 0) == (appender.values, batcher.pending_rows)


@pytest.mark.parametrize("changes", [{"flush_rows": 2}, {"flush_after_seconds": 0.1}])
async def test_full_or_old_batch_is_stored_without_a_request(changes, eventually):
    appender = ListAppender()
    async with flushing(appender, **changes) as (batcher, _, _, _):
        await asyncio.sleep(0)  # the flusher waits already
        add(batcher, 1)
        add(batcher, 2)
        await eventually(lambda: [1, 2] == appender.values)


async def test_full_batch_is_stored_immediately_after_a_retried_one(eventually):
    appender = ListAppender(refuse=[StoreError("disk full")])
    async with flushing(appender, flush_rows=2) as (batcher, flusher, _, _):
        add(batcher, 1)
        batcher.want_flush()
        await eventually(lambda: flusher.trouble)
        add(batcher, 2)
        add(batcher, 3)
        await eventually(lambda: [1, 2, 3] == appender.values)


async def test_failed_batch_is_reported_and_retried_unchanged_before_later_rows(eventually):
    """The store checks the result of a commit without a response only for the same batch."""
    appender = ListAppender(refuse=[StoreError("disk full"), StoreError("disk full")])
    seen = []
    genuine = appender.append
    appender.append = lambda batch: seen.append(batch) or genuine(batch)
    async with flushing(appender) as (batcher, flusher, commits, _):
        add(batcher, 1)
        waiting = asyncio.create_task(flusher.commit_now())
        trouble = await eventually(lambda: flusher.trouble)
        add(batcher, 2)
        held = batcher.pending_rows
        await waiting
        await flusher.commit_now()

    assert ("commits fail: disk full", None) == (trouble, flusher.trouble)
    assert ([1, 2], [{"a": 1}, {"a": 2}], 2, 0) == (appender.values, commits, held, batcher.pending_rows)
    assert [True, True, False] == [batch is seen[0] for batch in seen[1:]]


async def test_rows_without_seq_are_stored_once_if_a_commit_response_is_lost(
    start_service, fake_rank, eventually, monkeypatch
):
    """Every commit succeeds, and its first response is lost. Launches, incidents and versions of a run have no seq."""
    genuine, answered = Log.commit, []

    def unanswered(log, change):
        version = genuine(log, change)
        answered.append(version)
        if len(answered) % 2:
            raise StoreError("the disk hiccuped")
        return version

    async with fake_rank() as rank, start_service() as service:
        monkeypatch.setattr(Log, "commit", unanswered)
        await rank.register(service.url)
        rank.publish(
            scalars=[{"name": "loss", "value": 1.0}],
            events=[{"type": "anomaly", "severity": "critical", "rule": "AnomalyNan", "tensor": "w"}],
        )
        await eventually(lambda: rank.committed == 0)
        await eventually(lambda: service.rows("SELECT 1 FROM events WHERE type = 'incident'"))
    monkeypatch.undo()

    for dataset in ("events", "runs_history", "attempts_history", "scalars"):
        doubled = f"SELECT ordinal FROM {dataset} GROUP BY ALL HAVING count(*) > 1"
        assert (dataset, []) == (dataset, service.rows(doubled))
    assert [{"n": 1}] == service.rows("SELECT count(*) AS n FROM events WHERE type = 'launch'")
    assert len(answered) > 1


async def test_lost_shard_ends_the_flusher_with_the_error():
    appender = ListAppender(refuse=[ShardLostError("taken over by process 7")])
    async with flushing(appender) as (batcher, flusher, _, task):
        add(batcher, 1)
        waiting = asyncio.create_task(flusher.commit_now())
        with pytest.raises(ShardLostError, match="taken over by process 7"):
            await task
        waiting.cancel()


async def test_unwritable_store_pauses_polls_and_loses_no_row(start_service, fake_rank, eventually):
    """The folder for new files is unwritable for a while, as with a full or broken disk."""
    changes = {"ingest.flush_rows": 10, "ingest.max_pending_rows": 20}
    async with fake_rank() as rank, start_service(**changes) as service:
        rank.max_rows = 5
        await rank.deliver(service, 5)
        staging = service.store / "_staging"
        for leftover in staging.iterdir():
            leftover.unlink()
        staging.rmdir()
        staging.write_text("in the way")
        rank.publish_steps(100)

        async def degraded():
            status, text = await service.get("/healthz")
            return text if (status == 503 and "pulling waits" in text) or "commits fail" in text else None

        await eventually(degraded)
        await eventually(lambda: service.snapshots and service.snapshots[-1].rows_pending >= 20)
        held_back = (await service.targets())[0]["cursor"]
        staging.unlink()
        staging.mkdir()
        await eventually(lambda: rank.committed == 104)
        health = await service.get("/healthz")

    assert held_back < 60
    assert (200, '{"status": "ok"}') == health
    assert [{"n": 105, "seqs": 105}] == service.rows("SELECT count(*) AS n, count(DISTINCT seq) AS seqs FROM scalars")


async def test_error_for_a_used_port_names_the_setting(start_service):
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    async with server:
        with pytest.raises(ServiceError, match=rf"cannot listen at {address}.*\[service\] listen"):
            async with start_service(**{"service.listen": address}):
                pass


@pytest.mark.parametrize("fault", [pa.ArrowInvalid("offset overflow"), KeyError("run"), MemoryError()])
async def test_unexpected_error_does_not_stop_the_flusher_or_lose_rows(fault, eventually):
    appender = ListAppender(refuse=[fault])
    async with flushing(appender) as (batcher, flusher, commits, task):
        add(batcher, 1, 2)
        waiting = asyncio.create_task(flusher.commit_now())
        trouble = await eventually(lambda: flusher.trouble)
        await waiting
        add(batcher, 3)
        await flusher.commit_now()
        assert not task.done()

    assert type(fault).__name__ in trouble
    assert ([1, 2, 3], None) == (appender.values, flusher.trouble)
    assert ([{"a": 2}, {"a": 3}], 0) == (commits, batcher.pending_rows)
