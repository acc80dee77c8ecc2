"""What Prometheus pushes is answered when it is stored, taken once however often it comes, refused without room."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
import threading
from collections import Counter

import aiohttp
import pytest
from tests.ingest.remote_write.messages import write_request

from rankscope_ingest.base.config import RemoteWriteSection
from rankscope_ingest.base.errors import BusyError, DecodeError
from rankscope_ingest.base.protobuf import packed
from rankscope_ingest.pipeline.quarantine import Quarantine
from rankscope_ingest.remote_write import batcher, handler
from rankscope_ingest.remote_write.decoder import WriteReader
from rankscope_ingest.remote_write.handler import RemoteWrite
from rankscope_storage.base.errors import BatchError, StoreError
from rankscope_storage.writer.writer import Commit

NOW = 1_770_000_000_000
PROTOBUF = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}


def body(value, *, ms=NOW, **labels):
    return packed(write_request(({"__name__": "m", "instance": "a", **labels}, [(ms, value)])))


class Memory:
    """A store that keeps batches, and fails as long as it is told to."""

    def __init__(self):
        self.batches, self.fails = [], False

    def append(self, batch):
        if self.fails:
            raise StoreError("the disk is full")
        if not batch.tables:  # what was set aside: nothing is left to store
            return Commit(version=len(self.batches), rows={}, files=0, seconds=0)
        self.batches.append(batch)
        return Commit(version=len(self.batches), rows={"samples": batch.tables["samples"].num_rows}, files=1, seconds=0)

    def watermark(self, incarnation):
        raise NotImplementedError

    def commit_info(self, key, commits):
        return [batch.info[key] for batch in reversed(self.batches[-commits:])]

    @property
    def values(self):
        return [value for batch in self.batches for value in batch.tables["samples"]["value"].to_pylist()]


class Counts:
    def __init__(self):
        self.outcomes, self.samples, self.dropped = Counter(), 0, Counter()

    def write_answered(self, outcome):
        self.outcomes[outcome] += 1

    def written(self, samples):
        self.samples += samples

    def write_dropped(self, reason, count):
        self.dropped[reason] += count


@contextlib.asynccontextmanager
async def receiver(store, *, aside=None, **section):
    counts = Counts()
    section = RemoteWriteSection(**{"hold_seconds": 0.0, **section})
    clock = asyncio.get_running_loop().time
    one = RemoteWrite(section, store, counts, on_commit=lambda *_: None, clock=clock, aside=aside)
    one.counts = counts
    await one.begin()
    flushing = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)


async def test_a_request_is_answered_when_it_is_stored_and_not_before():
    store = Memory()
    async with receiver(store, hold_seconds=15.0) as one:
        first, second = (asyncio.create_task(one.take(body(value))) for value in (1.0, 2.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert ([], False, 2) == (store.batches, first.done(), one.pending_rows)

        await one.finish()
        await asyncio.gather(first, second)

        assert ([1.0, 2.0], 1, 0) == (store.values, len(store.batches), one.pending_rows)
        with pytest.raises(BusyError, match="being stopped"):
            await one.take(body(3.0))


async def test_a_request_that_no_store_takes_is_set_aside_and_all_others_are_stored(tmp_path, monkeypatch):
    """Else it would be tried for ever, and all that Prometheus sends behind it refused."""
    store, set_aside = Memory(), []
    quarantine = Quarantine(tmp_path, stamp=None, count=set_aside.append)
    genuine = batcher.samples_table

    def table(requests):
        rows = genuine(requests)
        if 13.0 in rows["value"].to_pylist():
            raise BatchError("rows cannot be written as Parquet: a fault of ours")
        return rows

    monkeypatch.setattr(batcher, "samples_table", table)
    async with receiver(store, aside=quarantine, hold_seconds=15.0) as one:
        waiting = [asyncio.create_task(one.take(body(float(value)))) for value in range(10, 17)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await one.finish()
        await asyncio.gather(*waiting)

        assert (None, 0) == (one.trouble, one.pending_rows)
    (folder,) = (tmp_path / "_quarantine").iterdir()
    kept = pickle.loads((folder / "as_it_came.pickle").read_bytes())

    assert [10.0, 11.0, 12.0, 14.0, 15.0, 16.0] == store.values
    assert [1] == set_aside
    assert [{"target": ["a"], "metric": ["m"], "labels": [None], "time_ms": [NOW], "value": [13.0]}] == kept
    assert "a fault of ours" in (folder / "why.json").read_text()


async def test_a_request_that_comes_again_is_stored_once_while_it_waits_and_later_and_after_a_restart(monkeypatch):
    """Prometheus gives up after half a minute, and sends the very same bytes again."""
    store = Memory()
    store.fails = True
    monkeypatch.setattr(handler, "ANSWER_SECONDS", 0.05)
    async with receiver(store) as one:
        for _ in range(2):
            with pytest.raises(BusyError, match="is kept, and not stored yet"):
                await one.take(body(1.0))
        store.fails = False
        monkeypatch.setattr(handler, "ANSWER_SECONDS", 30)
        await one.take(body(1.0))
        await one.take(body(1.0))
        outcomes = one.counts.outcomes
    async with receiver(store) as one:
        await one.take(body(1.0))
        await one.take(body(2.0))

    assert [1.0, 2.0] == store.values
    assert {"ok": 1, "repeated": 1} == outcomes
    assert {"repeated": 1, "ok": 1} == one.counts.outcomes


async def test_a_repeated_sample_in_another_request_waits_for_the_commit_of_the_first(monkeypatch):
    store = Memory()
    store.fails = True
    monkeypatch.setattr(handler, "ANSWER_SECONDS", 0.05)
    async with receiver(store) as one:
        again = packed(write_request(({"instance": "a", "__name__": "m"}, [(NOW, 1.0)])))
        for request in (body(1.0), again):
            with pytest.raises(BusyError):
                await one.take(request)
        store.fails = False
        monkeypatch.setattr(handler, "ANSWER_SECONDS", 30)
        await one.take(again)

    assert [1.0] == store.values
    assert 1 == one.counts.dropped["repeated"]


async def test_a_request_whose_sender_goes_while_it_is_read_is_stored_all_the_same(monkeypatch):
    """What was read counts as known: it would be left out when it is sent again."""
    read, goes_on, read_now = threading.Event(), threading.Event(), RemoteWrite._read_now

    def held(self, packed_body):
        written = read_now(self, packed_body)
        read.set()
        goes_on.wait(10)
        return written

    monkeypatch.setattr(handler, "_INLINE_BYTES", 0)
    monkeypatch.setattr(RemoteWrite, "_read_now", held)
    store = Memory()
    async with receiver(store) as one:
        gone = asyncio.create_task(one.take(body(1.0)))
        await asyncio.to_thread(read.wait, 10)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        goes_on.set()
        await one.take(body(1.0))

    assert [1.0] == store.values


async def test_a_small_request_for_which_a_full_book_is_gone_through_holds_up_nobody(monkeypatch):
    threads, read_now = [], RemoteWrite._read_now

    def noted(self, packed_body):
        threads.append(threading.current_thread())
        return read_now(self, packed_body)

    monkeypatch.setattr(RemoteWrite, "_read_now", noted)
    async with receiver(Memory()) as one:
        await one.take(body(1.0))
        monkeypatch.setattr(WriteReader, "is_to_tidy", True)
        await one.take(body(2.0))

    assert [True, False] == [thread is threading.main_thread() for thread in threads]


async def test_while_there_is_no_room_nothing_more_is_taken(monkeypatch):
    store = Memory()
    store.fails = True
    monkeypatch.setattr(handler, "ANSWER_SECONDS", 0.01)
    async with receiver(store, max_pending_samples=2, max_bytes=65_536) as one:
        for value in (1.0, 2.0, 3.0):
            with pytest.raises(BusyError):
                await one.take(body(value))
        with pytest.raises(BusyError, match="faster than they are stored"):
            one.reserve(100)

        assert 2 == one.pending_rows


async def test_who_waits_for_a_store_that_takes_nothing_is_let_go_at_the_end():
    store = Memory()
    store.fails = True
    async with receiver(store) as one:
        waiting = asyncio.create_task(one.take(body(1.0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        one.close()

        with pytest.raises(BusyError, match="was stopped before"):
            await waiting


async def test_bodies_on_their_way_in_are_bounded_together():
    async with receiver(Memory(), max_bytes=65_536) as one:
        reserved = [one.reserve(size) for size in (65_536, None, None, 60_000)]
        with pytest.raises(BusyError, match="on their way in"):
            one.reserve(10_000)
        one.release(reserved[0])

        assert 10_000 == one.reserve(10_000)


async def test_a_body_has_its_room_until_it_is_read_and_is_not_kept_while_the_store_is_slow(monkeypatch):
    goes_on, read_now = threading.Event(), RemoteWrite._read_now

    def held(self, packed_body):
        goes_on.wait(10)
        return read_now(self, packed_body)

    monkeypatch.setattr(handler, "_INLINE_BYTES", 0)
    monkeypatch.setattr(RemoteWrite, "_read_now", held)
    store, sent = Memory(), body(1.0)
    store.fails = True
    alone = sys.getrefcount(sent)
    async with receiver(store, max_bytes=65_536) as one:
        others = [one.reserve(None) for _ in range(3)]
        waiting = asyncio.create_task(one.take(sent, one.reserve(65_535)))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="on their way in"):
            one.reserve(2)
        goes_on.set()
        await asyncio.gather(*one._reading)
        await asyncio.sleep(0)

        assert [65_536] * 3 == others
        assert 65_536 == one.reserve(None)
        async with asyncio.timeout(5):  # the thread that read it lets go of it after it has told the result
            while alone != sys.getrefcount(sent):  # noqa: ASYNC110 - nobody tells when
                await asyncio.sleep(0.01)
        waiting.cancel()


async def test_what_is_malformed_leaves_nothing_behind_and_may_come_again():
    store = Memory()
    bad = packed(write_request(({"__name__": "m"}, [(NOW, 1.0)]), ({"job": "x"}, [(NOW, 1.0)])))
    async with receiver(store) as one:
        for _ in range(2):
            with pytest.raises(DecodeError, match="no __name__"):
                await one.take(bad)
        await one.take(body(1.0))

    assert [1.0] == store.values


async def test_the_service_takes_what_is_of_the_right_form_and_says_what_is_not(start_service):
    """Under the token of all others, on one port with them; the page counts by reason."""
    token = "for-ranks-and-readers"
    cases = [
        (body(1.5, job="j"), {}, 204, ""),
        (body(1.5, job="j"), {}, 204, ""),
        (body(2.0), {"Authorization": "Bearer other"}, 401, "token"),
        (b"\xff", {}, 400, "middle of a number"),
        (packed(b"x" * 70_000), {}, 400, "at most 65536"),
        (b"x" * 70_000, {}, 413, "max_bytes"),
        (body(2.0), {"Content-Type": "application/x-protobuf;proto=io.prometheus.write.v2.Request"}, 415, "2.0"),
        (body(2.0), {"Content-Type": "text/plain"}, 415, "JSON"),
        (body(2.0), {"Content-Encoding": "lz4"}, 415, "snappy"),
        (packed(write_request(metadata=["up"])), {}, 204, ""),
    ]
    limits = {"remote_write.hold_seconds": 0.0, "remote_write.max_bytes": 65_536, "service.token": token}
    async with start_service(**limits) as service, aiohttp.ClientSession() as session:
        for data, more, status, why in cases:
            headers = PROTOBUF | {"Authorization": f"Bearer {token}"} | more
            async with session.post(f"{service.url}/api/v1/write", data=data, headers=headers) as response:
                assert (status, True) == (response.status, why in await response.text())
        _, page = await service.get("/metrics", Authorization=f"Bearer {token}")
        rows = service.rows("SELECT run, target, metric, labels, value, ts_origin FROM samples")

    common = {"run": "", "ts_origin": "prometheus"}
    assert [{**common, "target": "a", "metric": "m", "labels": '{"job":"j"}', "value": 1.5}] == rows
    for outcome, count in {"ok": 2, "repeated": 1, "malformed": 2, "too_large": 1, "unsupported": 2}.items():
        assert f'remote_write_requests_total{{outcome="{outcome}"}} {count}.0' in page
    assert "rankscope_ingest_remote_write_samples_total 1.0" in page
    assert 'remote_write_dropped_total{reason="metadata"} 1.0' in page
