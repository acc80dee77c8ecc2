"""Remote write: the response follows the commit, a repeated request is stored once, back-pressure rejects requests."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
import threading
from collections import Counter

import pytest
from tests.ingest.remote_write.messages import post, write_request

from rankscope_contract.metrics.catalogue import REMOTE_WRITE_DROPPED, REMOTE_WRITE_REQUESTS
from rankscope_ingest.base.config import RemoteWriteSection
from rankscope_ingest.base.errors import BusyError, DecodeError
from rankscope_ingest.base.protobuf import packed
from rankscope_ingest.remote_write.decoder import WriteReader
from rankscope_ingest.remote_write.handler import RemoteWrite
from rankscope_storage.base.errors import StoreError
from rankscope_storage.writer.writer import Commit

NOW = 1_770_000_000_000


def body(value, *, ms=NOW, **labels):
    return packed(write_request(({"__name__": "m", "instance": "a", **labels}, [(ms, value)])))


class Memory:
    """A store that keeps batches in memory, and fails while `fails` is set."""

    def __init__(self, *, fails=False):
        self.batches, self.fails = [], fails

    def append(self, batch):
        if self.fails:
            raise StoreError("the disk is full")
        rows = {name: table.num_rows for name, table in batch.tables.items()}
        if rows:  # otherwise the batch is in quarantine
            self.batches.append(batch)
        return Commit(version=len(self.batches), rows=rows, files=len(rows), seconds=0)

    def watermark(self, incarnation):
        raise NotImplementedError

    def commit_info(self, key, commits):
        return [batch.info[key] for batch in reversed(self.batches[-commits:])]

    @property
    def values(self):
        return [value for batch in self.batches for value in batch.tables["samples"]["value"].to_pylist()]


class Counts:
    def __init__(self):
        self.outcomes, self.samples, self.dropped = Counter(), Counter(), Counter()

    def count(self, spec, amount, *labels):
        by_spec = {REMOTE_WRITE_REQUESTS: self.outcomes, REMOTE_WRITE_DROPPED: self.dropped}
        by_spec.get(spec, self.samples)["".join(labels)] += amount


class HeldReader(WriteReader):
    """A reader that sets `has_decoded` after each request, and then waits for `may_return`."""

    def __init__(self):
        super().__init__()
        self.has_decoded, self.may_return = threading.Event(), threading.Event()

    def read(self, data):
        decoded = super().read(data)
        self.has_decoded.set()
        self.may_return.wait(10)
        return decoded


@contextlib.asynccontextmanager
async def receiver(store, *, aside=None, reader=None, answer_seconds=30.0, inline_bytes=65_536, **section):
    counts, clock = Counts(), asyncio.get_running_loop().time
    settings = RemoteWriteSection(**{"hold_seconds": 0.0, **section})
    limits = {"answer_seconds": answer_seconds, "inline_bytes": inline_bytes}
    changed = {"on_commit": lambda *_: None, "clock": clock, "aside": aside, "reader": reader}
    one = RemoteWrite(settings, store, counts, **changed, **limits)
    one.counts = counts
    await one.begin()
    flushing = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - no event is set for it
            await asyncio.sleep(0)


async def take_when_possible(one, request):
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(BusyError):
                return await one.take(request)


async def test_response_follows_the_commit():
    store = Memory()
    async with receiver(store, hold_seconds=15.0) as one:
        first, second = (asyncio.create_task(one.take(body(value))) for value in (1.0, 2.0))
        await until(lambda: one.pending_rows == 2)
        assert ([], False, 2) == (store.batches, first.done(), one.pending_rows)

        await one.finish()
        await asyncio.gather(first, second)

        assert ([1.0, 2.0], 1, 0) == (store.values, len(store.batches), one.pending_rows)
        with pytest.raises(BusyError, match="is stopping"):
            await one.take(body(3.0))


async def test_request_that_cannot_be_stored_is_quarantined_and_others_are_stored(tmp_path, rejecting):
    """Otherwise it would be retried forever, and all later requests would be rejected."""
    store, set_aside = Memory(), []
    quarantine = rejecting(lambda values: 13.0 in values, set_aside.append)
    async with receiver(store, aside=quarantine, hold_seconds=15.0) as one:
        waiting = [asyncio.create_task(one.take(body(float(value)))) for value in range(10, 17)]
        await until(lambda: one.pending_rows == 7)
        await one.finish()
        await asyncio.gather(*waiting)

        assert (None, 0) == (one.trouble, one.pending_rows)
    (folder,) = (tmp_path / "_quarantine").iterdir()
    kept = pickle.loads((folder / "as_it_came.pickle").read_bytes())

    assert ([10.0, 11.0, 12.0, 14.0, 15.0, 16.0], [1]) == (store.values, set_aside)
    assert [{"target": ["a"], "metric": ["m"], "labels": [None], "time_ms": [NOW], "value": [13.0]}] == kept
    assert "a fault of ours" in (folder / "why.json").read_text()


async def test_repeated_request_is_stored_once_even_after_a_restart():
    """Prometheus times out after 30 s, and sends the same bytes again."""
    store = Memory(fails=True)
    async with receiver(store, answer_seconds=0.05) as one:
        for _ in range(2):
            with pytest.raises(BusyError, match="accepted but not stored yet"):
                await one.take(body(1.0))
        store.fails = False
        await take_when_possible(one, body(1.0))
        await one.take(body(1.0))
        outcomes = one.counts.outcomes
    async with receiver(store) as one:
        await one.take(body(1.0))
        await one.take(body(2.0))

    assert [1.0, 2.0] == store.values
    assert {"repeated", "ok"} >= outcomes.keys()
    assert 2 == outcomes.total()
    assert {"repeated": 1, "ok": 1} == one.counts.outcomes


async def test_repeated_sample_in_another_request_waits_for_the_first_commit():
    store = Memory(fails=True)
    async with receiver(store, answer_seconds=0.05) as one:
        again = packed(write_request(({"instance": "a", "__name__": "m"}, [(NOW, 1.0)])))
        for request in (body(1.0), again):
            with pytest.raises(BusyError):
                await one.take(request)
        store.fails = False
        await take_when_possible(one, again)

    assert [1.0] == store.values
    assert 1 == one.counts.dropped["repeated"]


async def test_request_is_stored_if_its_sender_disconnects_during_decoding():
    """The reader detects decoded samples as repeated, so that a second request would not store them."""
    store, reader = Memory(), HeldReader()
    async with receiver(store, reader=reader, inline_bytes=0) as one:
        gone = asyncio.create_task(one.take(body(1.0)))
        await asyncio.to_thread(reader.has_decoded.wait, 10)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        reader.may_return.set()
        await one.take(body(1.0))

    assert [1.0] == store.values


async def test_requests_are_rejected_above_max_pending_samples():
    store = Memory(fails=True)
    async with receiver(store, answer_seconds=0.01, max_pending_samples=2, max_bytes=65_536) as one:
        for value in (1.0, 2.0, 3.0):
            with pytest.raises(BusyError):
                await one.take(body(value))
        with pytest.raises(BusyError, match="faster than they are stored"):
            one.reserve(100)

        assert 2 == one.pending_rows


async def test_waiting_request_is_rejected_when_the_receiver_closes():
    store = Memory(fails=True)
    async with receiver(store) as one:
        waiting = asyncio.create_task(one.take(body(1.0)))
        await until(lambda: one.pending_rows == 1)
        one.close()

        with pytest.raises(BusyError, match="was stopped before"):
            await waiting


async def test_bytes_of_incoming_bodies_are_bounded():
    async with receiver(Memory(), max_bytes=65_536) as one:
        reserved = [one.reserve(size) for size in (65_536, None, None, 60_000)]
        with pytest.raises(BusyError, match="being received at the same time"):
            one.reserve(10_000)
        one.release(reserved[0])

        assert 10_000 == one.reserve(10_000)


async def test_body_is_reserved_until_decoded_and_not_kept_while_store_is_slow():
    store, sent, reader = Memory(fails=True), body(1.0), HeldReader()
    references = sys.getrefcount(sent)
    async with receiver(store, reader=reader, inline_bytes=0, max_bytes=65_536) as one:
        others = [one.reserve(None) for _ in range(3)]
        waiting = asyncio.create_task(one.take(sent, one.reserve(65_535)))
        await asyncio.to_thread(reader.has_decoded.wait, 10)
        with pytest.raises(BusyError, match="being received at the same time"):
            one.reserve(2)
        reader.may_return.set()
        await until(lambda: one.pending_rows == 1)
        await asyncio.sleep(0)

        assert [65_536] * 3 == others
        assert 65_536 == one.reserve(None)
        await until(lambda: references == sys.getrefcount(sent))
        waiting.cancel()


async def test_malformed_request_leaves_no_samples_and_may_be_repeated():
    store = Memory()
    bad = packed(write_request(({"__name__": "m"}, [(NOW, 1.0)]), ({"job": "x"}, [(NOW, 1.0)])))
    async with receiver(store) as one:
        for _ in range(2):
            with pytest.raises(DecodeError, match="has no label __name__"):
                await one.take(bad)
        await one.take(body(1.0))

    assert [1.0] == store.values


async def test_service_stores_valid_requests_and_reports_why_others_are_rejected(start_service):
    """Same token and port as for all other requests; `/metrics` counts requests by outcome."""
    token = "for-ranks-and-readers"
    version_3 = "application/x-protobuf;proto=io.prometheus.write.v3.Request"
    cases = [
        (body(1.5, job="j"), {}, 204, ""),
        (body(1.5, job="j"), {}, 204, ""),
        (body(2.0), {"Authorization": "Bearer other"}, 401, "token"),
        (b"\xff", {}, 400, "truncated"),
        (packed(b"x" * 70_000), {}, 400, "limit is 65536"),
        (b"x" * 70_000, {}, 413, "max_bytes"),
        (body(2.0), {"Content-Type": version_3}, 415, "2.0"),
        (body(2.0), {"Content-Type": "text/plain"}, 415, "JSON"),
        (body(2.0), {"Content-Encoding": "lz4"}, 415, "snappy"),
        (packed(write_request(metadata=["up"])), {}, 204, ""),
    ]
    limits = {"remote_write.hold_seconds": 0.0, "remote_write.max_bytes": 65_536, "service.token": token}
    async with start_service(**limits) as service:
        for data, more, status, why in cases:
            found, _, text = await post(service, data, **{"Authorization": f"Bearer {token}", **more})
            assert (status, True) == (found, why in text)
        _, page = await service.get("/metrics", Authorization=f"Bearer {token}")
        rows = service.rows("SELECT run, target, metric, labels, value, ts_origin FROM samples")

    common = {"run": "", "ts_origin": "prometheus"}
    assert [{**common, "target": "a", "metric": "m", "labels": '{"job":"j"}', "value": 1.5}] == rows
    for outcome, count in {"ok": 2, "repeated": 1, "malformed": 2, "too_large": 1, "unsupported": 2}.items():
        assert f'remote_write_requests_total{{outcome="{outcome}"}} {count}.0' in page
    assert "rankscope_ingest_remote_write_samples_total 1.0" in page
    assert 'remote_write_dropped_total{reason="metadata"} 1.0' in page
