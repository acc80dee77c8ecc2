"""Batcher and flusher: due batches, failed commits that are retried and never stored twice, and quarantined rows."""

import asyncio
import contextlib
import json
import os
import pickle
import threading
import time
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_ingest.base.errors import ServiceError
from rankscope_ingest.pipeline.flusher import FOLDER, Batcher, Flusher, PendingBatch, Quarantine
from rankscope_ingest.pipeline.rows import Stamp
from rankscope_storage.api.store import Store
from rankscope_storage.base.errors import BatchError, ShardLostError, StoreError
from rankscope_storage.log.delta import Log
from rankscope_storage.writer.writer import Writer

# When a batch is due, its content, and the limit of pending rows.


def batcher(**changes):
    return Batcher(**({"flush_rows": 10, "flush_after_seconds": 5.0, "max_pending_rows": 20} | changes))


def table(*values):
    return pa.table({"x": list(values)})


def test_batch_is_due_by_rows_by_age_and_on_demand():
    """A request to flush an empty batch does not affect the next one."""
    by_rows, by_age, wanted, early = batcher(), batcher(), batcher(), batcher()
    early.want_flush()
    empty = early.due(1e9)
    by_rows.add({"scalars": table(*range(10))}, 0.0)
    for one in (by_age, wanted, early):
        one.add({"scalars": table(1)}, 0.0)
    wanted.want_flush()

    assert [None, None, "rows", "wanted"] == [empty, early.due(0.0), by_rows.due(0.0), wanted.due(0.0)]
    assert [None, "age"] == [by_age.due(4.9), by_age.due(5.0)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "take", "settle"]), st.integers(0, 4)), max_size=40))
def test_no_row_is_lost_or_duplicated(actions):
    """Rows are returned in order, each exactly once, and the number of pending rows is always right."""
    queue, next_row, stored, taken = batcher(), 0, [], []
    for action, size in actions:
        if action == "add":
            rows = list(range(next_row, next_row + size))
            next_row += size
            queue.add({"scalars": pa.table({"x": pa.array(rows, pa.int64())})}, 0.0, watermarks={"a": next_row})
        elif action == "take" and not taken:
            taken.append(queue.take())
        elif action == "settle" and taken:
            batch = taken.pop()
            stored += batch.tables().get("scalars", table())["x"].to_pylist() if batch.rows else []
            queue.release(batch)
        assert next_row - len(stored) == queue.pending_rows
    for rest in (*taken, queue.take()):
        stored += rest.tables()["scalars"]["x"].to_pylist() if rest.rows else []

    assert list(range(next_row)) == stored


# Rows of failed commits are kept, retried, and never stored twice.


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


# Rows that the store always rejects are quarantined and reported, and all others are stored.


def poisoned(monkeypatch, is_bad):
    """Make the store reject batches with one bad value of loss, as it does with invalid rows."""
    genuine = Writer.append

    def append(writer, batch):
        table = batch.tables.get("scalars")
        if table is not None and any(map(is_bad, table["value"].to_pylist())):
            raise BatchError("scalars.value must be float64")
        return genuine(writer, batch)

    monkeypatch.setattr(Writer, "append", append)


def told(service) -> list[dict]:
    return service.rows("SELECT run, rank, message, details FROM events WHERE type = 'fault'")


async def test_rejected_rows_are_quarantined_and_all_others_are_stored_once(
    start_service, fake_rank, eventually, monkeypatch
):
    poisoned(monkeypatch, lambda value: value == 13.0)
    async with fake_rank(world_size=2) as good, fake_rank(rank=1, world_size=2) as bad, start_service() as service:
        for rank in (good, bad):
            await rank.register(service.url)
        for step in range(20):
            good.publish(step=step, scalars=[{"name": "loss", "value": 1.0}])
            bad.publish(step=step, scalars=[{"name": "loss", "value": float(step)}])
        await eventually(lambda: (good.committed, bad.committed) == (19, 19))
        await bad.deliver(service, 1)  # later records follow the rejected ones
        _, page = await service.get("/metrics")
    monkeypatch.undo()

    stored = service.rows("SELECT rank, step FROM scalars WHERE name = 'loss' ORDER BY ALL")
    (event,) = told(service)
    details = json.loads(event["details"])
    (folder,) = (service.store / FOLDER).iterdir()
    kept = pa.ipc.open_file(folder / "scalars.arrow").read_all()
    steps = [[row["step"] for row in stored if row["rank"] == rank] for rank in (0, 1)]
    assert [list(range(20)), list(range(21))] == [steps[0], sorted(steps[1] + kept["step"].to_pylist())]
    assert 13.0 in kept["value"].to_pylist()
    assert (1, details["folder"]) == (event["rank"], str(folder))
    assert f"rankscope_ingest_rows_set_aside_total {float(details['rows'])}" in page
    assert "scalars.value must be float64" == json.loads((folder / "why.json").read_text())["error"]


async def test_body_that_cannot_be_decoded_is_quarantined_as_received(start_service, fake_rank, monkeypatch):
    genuine = PendingBatch.tables

    def tables(batch):
        if any(body.context.rank == 1 for body in batch.bodies):
            raise KeyError("a column that nobody thought of")
        return genuine(batch)

    monkeypatch.setattr(PendingBatch, "tables", tables)
    async with fake_rank(world_size=2) as good, fake_rank(rank=1, world_size=2) as bad, start_service() as service:
        await asyncio.gather(*(rank.deliver(service, 1) for rank in (good, bad)))
    monkeypatch.undo()
    (kept,) = (service.store / FOLDER).glob("*/as_it_came.pickle")

    assert [0.0] == pickle.loads(kept.read_bytes()).tables()["scalars"]["value"].to_pylist()
    assert [{"rank": 0}] == service.rows("SELECT rank FROM scalars WHERE name = 'loss'")
    assert ["KeyError" in event["message"] for event in told(service)] == [True]


def test_quarantined_rows_survive_all_maintenance_of_the_store(tmp_path):
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        quarantine = Quarantine(tmp_path / "store", stamp=lambda: Stamp(0, 0), count=lambda rows: None)
        table = pa.table({"incarnation": ["a"], "seq": [0], "value": ["no number"]})
        folder = quarantine.keep(PendingBatch(pieces={"scalars": (table,)}, watermarks={"a": 0}, rows=1), "why")
        kept = sorted(folder.iterdir())
        for path in (*kept, folder, folder.parent):
            os.utime(path, (0, 0))
        report = writer.maintain()

    assert ["scalars.arrow", "why.json"] == [path.name for path in kept]
    assert (kept, 0, 0) == (sorted(folder.iterdir()), report.data_files, report.staged_files)


NAMES = st.sampled_from(["a", "b", None])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(NAMES, st.integers(0, 9) | st.none()), max_size=12), st.integers(0, 9), st.integers(0, 9))
def test_parts_have_all_rows_in_an_order_that_the_store_accepts(rows, last_of_a, last_of_b):
    """Each row occurs once; a row with a seq is in a part with a watermark that includes it."""
    lasts = {"a": last_of_a, "b": last_of_b}
    rows = [(name, None if seq is None else min(seq, lasts.get(name, seq)), n) for n, (name, seq) in enumerate(rows)]
    batcher = Batcher(flush_rows=1, flush_after_seconds=1.0, max_pending_rows=100)
    for name, seq, number in rows:
        columns = {"incarnation": pa.array([name], pa.string()), "seq": pa.array([seq], pa.int64()), "n": [number]}
        batcher.add({"events": pa.table(columns)}, time.monotonic())
    batcher.add({}, time.monotonic(), watermarks=lasts)
    batch = batcher.take()
    tables = [(part, table) for part in batch.parts() for table in part.pieces.get("events", ())]
    found = [(part, row) for part, table in tables for row in table.to_pylist()]

    assert list(range(len(rows))) == sorted(row["n"] for _, row in found)
    assert batch.rows == sum(part.rows for part in batch.parts())
    for part, row in found:
        if row["incarnation"] is not None and row["seq"] is not None:
            assert row["seq"] <= part.watermarks[row["incarnation"]]
