"""Remote write: the response follows the commit, a repeated request is stored once, back-pressure rejects requests."""

import asyncio
import contextlib
import json
import pickle
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.ingest.remote_write.messages import post, write_request, write_request_2

from rankscope_ingest.base.config import RemoteWriteSection
from rankscope_ingest.base.errors import BusyError, DecodeError
from rankscope_ingest.base.protobuf import packed
from rankscope_ingest.pipeline.flusher import Quarantine
from rankscope_ingest.remote_write import handler
from rankscope_ingest.remote_write.decoder import WriteReader
from rankscope_ingest.remote_write.handler import RemoteWrite, Version
from rankscope_storage.base.errors import BatchError, StoreError
from rankscope_storage.base.service_catalogue import REMOTE_WRITE_DROPPED, REMOTE_WRITE_REQUESTS
from rankscope_storage.writer.writer import Commit

NOW = 1_770_000_000_000


@pytest.fixture
def rejecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Quarantine]:
    """Return a function that returns a quarantine, and lets tables of samples fail of which the values are `is_bad`."""

    def reject(is_bad: Callable[[list[float]], bool], count: Callable[[int], None] = lambda _: None) -> Quarantine:
        genuine = handler.samples_table

        def table(requests):
            rows = genuine(requests)
            if is_bad(rows["value"].to_pylist()):
                raise BatchError("rows cannot be written as Parquet: a fault of ours")
            return rows

        monkeypatch.setattr(handler, "samples_table", table)
        return Quarantine(tmp_path, stamp=None, count=count)

    return reject


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
async def receiver(store, *, aside=None, reader=None, answer_seconds=30.0, **section):
    counts, clock = Counts(), asyncio.get_running_loop().time
    settings = RemoteWriteSection(**{"hold_seconds": 0.0, **section})
    changed = {"on_commit": lambda *_: None, "clock": clock, "aside": aside, "reader": reader}
    one = RemoteWrite(settings, store, counts, **changed, answer_seconds=answer_seconds)
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
    async with receiver(store, answer_seconds=0.2) as one:
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
    async with receiver(store, answer_seconds=0.2) as one:
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
    async with receiver(store, reader=reader) as one:
        gone = asyncio.create_task(one.take(body(1.0)))
        await asyncio.to_thread(reader.has_decoded.wait, 10)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        reader.may_return.set()
        await one.take(body(1.0))

    assert [1.0] == store.values


async def test_requests_are_rejected_above_max_pending_samples():
    store = Memory(fails=True)
    async with receiver(store, answer_seconds=0.2, max_pending_samples=2, max_bytes=65_536) as one:
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


async def test_body_is_reserved_until_decoded_and_not_kept_while_store_is_slow():
    store, sent, reader = Memory(fails=True), body(1.0), HeldReader()
    references = sys.getrefcount(sent)
    async with receiver(store, reader=reader, max_bytes=65_536) as one:
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


async def test_malformed_request_leaves_no_samples_and_no_trace(monkeypatch):
    """It may be repeated, and takes no place of the requests that wait for their commit."""
    monkeypatch.setattr(handler, "_MAX_WAITING_REQUESTS", 1)
    store = Memory()
    bad = packed(write_request(({"__name__": "m"}, [(NOW, 1.0)]), ({"job": "x"}, [(NOW, 1.0)])))
    async with receiver(store) as one:
        for _ in range(2):
            with pytest.raises(DecodeError, match="has no label __name__"):
                await one.take(bad)
        await one.take(body(1.0))

    assert [1.0] == store.values


async def in_parts(data):
    """Yield a body of a length that the service does not know in advance."""
    yield data


async def test_service_stores_valid_requests_and_reports_why_others_are_rejected(start_service):
    """Same token and port as for all other requests; `/metrics` counts requests by outcome."""
    token = "for-ranks-and-readers"
    version_3 = "application/x-protobuf;proto=io.prometheus.write.v3.Request"
    cases = [
        *((body(1.5, job="j"), {}, 204, ""), (body(1.5, job="j"), {}, 204, "")),
        *((body(2.0), {"Authorization": "Bearer other"}, 401, "token"), (b"\xff", {}, 400, "truncated")),
        *((packed(b"x" * 70_000), {}, 400, "limit is 65536"), (b"x" * 70_000, {}, 413, "max_bytes")),
        *((in_parts(b"x" * 70_000), {}, 413, "max_bytes") for _ in range(5)),  # as many as would fill the memory
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
    for outcome, count in {"ok": 2, "repeated": 1, "malformed": 2, "too_large": 6, "unsupported": 2}.items():
        assert f'remote_write_requests_total{{outcome="{outcome}"}} {count}.0' in page
    assert "rankscope_ingest_remote_write_samples_total 1.0" in page
    assert 'remote_write_dropped_total{reason="metadata"} 1.0' in page


async def test_request_repeated_at_another_service_is_stored_once(start_service):
    """Both services have some requests at the same time, in batches with other ones."""
    requests = [body(float(value)) for value in range(6)]
    changes = {"remote_write.hold_seconds": 0.5}
    async with (
        start_service(**changes, **{"store.shard": "0/2"}) as first,
        start_service(**changes, **{"store.shard": "1/2"}) as second,
    ):
        sent = [(first, one) for one in requests[:4]] + [(second, one) for one in requests[2:]]
        together = await asyncio.gather(*(post(service, one) for service, one in sent))
        later = [await post(second, one) for one in requests]
        rows = first.rows("SELECT value FROM samples ORDER BY value")

    assert {204} == {status for status, *_ in [*together, *later]}
    assert [float(value) for value in range(6)] == [row["value"] for row in rows]


# Version 2.0: the version, the headers of responses, and senders that get only refusals.

V1 = "application/x-protobuf"
V2 = "application/x-protobuf;proto=io.prometheus.write.v2.Request"
SERIES = {"__name__": "m", "instance": "a", "job": "j"}
WRITTEN = [f"X-Prometheus-Remote-Write-{kind}-Written" for kind in ("Samples", "Histograms", "Exemplars")]
RECORDED = Path(__file__).parents[2] / "data" / "remote_write_2" / "prometheus_3.16.snappy"
"""A request of Prometheus 3.16, which scraped `m_total` and, in its first two scrapes, `goes`; with one exemplar."""


def body_2(*values, items=(0, 0)):
    samples = [(NOW + at, value) for at, value in enumerate(values)]
    return packed(write_request_2((SERIES, samples, *items)))


async def test_responses_to_version_2_have_the_numbers_of_stored_items(start_service):
    """In all responses 2xx and 4xx; a repeated request has the same numbers. Version 1.0 has no such headers."""
    token = "for-ranks-and-readers"
    many = {"__name__": "m", **{f"l{number}": "x" for number in range(200)}}
    strange = {"Content-Type": V2.replace("v2", "v\u202e2"), "User-Agent": "p\u202e"}
    version_1 = {"Content-Type": V1 + '; proto="prometheus.WriteRequest"'}
    cases = [
        (body_2(1.0, 2.0, items=(3, 1)), {}, 204, "2"),
        (body_2(1.0, 2.0, items=(3, 1)), {}, 204, "2"),
        (packed(write_request_2((SERIES, [(NOW + 1, 2.0)]))), {}, 204, "1"),  # it is stored already
        (packed(write_request_2((SERIES, [(NOW + 2, 3.0)]), (many, [(NOW, 1.0)]))), {}, 204, "1"),
        (body_2(9.0)[:-1], {}, 400, "0"),
        (b"x" * 70_000, {}, 413, "0"),
        (body_2(9.0), {"Content-Type": V2.replace("v2", "v3")}, 415, "0"),
        *((body_2(9.0), {"Content-Encoding": name}, 415, "0") for name in ("lz4", "gzip", "zstd", "br")),
        (body_2(9.0), strange, 415, "0"),
        (body_2(9.0), {"Authorization": "Bearer other"}, 401, "0"),
        (body_2(9.0), {"Content-Type": V1}, 400, None),
        (packed(write_request((SERIES, [(NOW + 3, 4.0)]))), version_1, 204, None),
    ]
    limits = {"remote_write.hold_seconds": 0.0, "remote_write.max_bytes": 65_536, "service.token": token}
    async with start_service(**limits) as service:
        for data, more, status, samples in cases:
            common = {"Content-Type": V2, "Authorization": f"Bearer {token}"}
            found, headers, _ = await post(service, data, **common | more)

            assert (status, [samples, *([samples and "0"] * 2)]) == (found, [headers.get(name) for name in WRITTEN])
        _, page = await service.get("/metrics", Authorization=f"Bearer {token}")
        _, document = await service.get("/api/v1/status", Authorization=f"Bearer {token}")
        rows = service.rows("SELECT target, metric, labels, value, ts_origin FROM samples ORDER BY value")

    _, unusual = [one["name"] for one in json.loads(document)["refused_senders"]]
    assert r"127.0.0.1 (p\u202e)" == unusual
    common = {"target": "a", "metric": "m", "labels": '{"job":"j"}', "ts_origin": "prometheus"}
    assert [{**common, "value": value} for value in (1.0, 2.0, 3.0, 4.0)] == rows
    for reason, count in {"exemplar": 3, "histogram": 1, "metadata": 4, "oversized": 1, "repeated": 1}.items():
        assert f'remote_write_dropped_total{{reason="{reason}"}} {count}.0' in page


def request_of_literals(name, value, moment):
    """Return a request that is encoded without protobuf and without a compressor, as a snappy block of literals."""

    def varint(number):
        out = bytearray()
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        return bytes([*out, number])

    def field(number, wire, value):
        return varint(number << 3 | wire) + (varint(len(value)) + value if wire == 2 else value)

    symbols = ["", "__name__", name, "instance", "node-1", "job", "field"]
    sample = field(1, 1, struct.pack("<d", value)) + field(2, 0, varint(moment))
    series = field(1, 2, b"".join(varint(place) for place in range(1, 7))) + field(2, 2, sample)
    data = b"".join(field(4, 2, symbol.encode()) for symbol in symbols) + field(5, 2, series)
    pieces = [data[start : start + 60] for start in range(0, len(data), 60)]
    return varint(len(data)) + b"".join(bytes([(len(piece) - 1) << 2]) + piece for piece in pieces)


async def test_requests_of_prometheus_3_and_of_other_code_are_stored(start_service):
    version = {"Content-Type": V2, "X-Prometheus-Remote-Write-Version": "2.0.0"}
    async with start_service(**{"remote_write.hold_seconds": 0.0}) as service:
        status, headers, _ = await post(service, RECORDED.read_bytes(), **version)
        _, page = await service.get("/metrics")
        total = service.rows("SELECT count(*) AS samples, count(DISTINCT metric) AS metrics FROM samples")
        for at in range(5):
            assert 204 == (await post(service, request_of_literals("x", 1.0, NOW + at), **version))[0]
        found = "SELECT target, metric, labels, value FROM samples WHERE metric IN ('m_total', 'goes', 'x')"
        rows = service.rows(f"{found} ORDER BY metric, ts")

    goes = {"target": "a:9100", "metric": "goes", "labels": '{"job":"node"}'}
    counter = {"target": "a:9100", "metric": "m_total", "labels": r'{"cpu":"0","job":"node","mode":"a b\"c"}'}
    assert (204, "36", "0", "0") == (status, *(headers[name] for name in WRITTEN))
    assert [{**goes, "value": value} for value in (1.0, 1.0, None)] == rows[:3]
    assert [{**counter, "value": value} for value in (5.0, 10.0, 15.0)] == rows[3:6]
    assert [{"target": "node-1", "metric": "x", "labels": '{"job":"field"}', "value": 1.0}] * 5 == rows[-5:]
    assert [{"samples": 36, "metrics": 7}] == total
    assert 'remote_write_dropped_total{reason="exemplar"} 1.0' in page


async def test_repeated_samples_are_reported_as_stored_only_if_they_are(rejecting):
    """Samples that occur twice in one request, and samples of an earlier request that is moved to quarantine."""
    store, quarantine = Memory(), rejecting(lambda values: 13.0 in values)
    bodies = [
        packed(write_request_2((SERIES, [(NOW, 12.0), (NOW, 12.0)]))),
        packed(write_request_2((SERIES, [(NOW + 1, 13.0), (NOW + 1, 13.0)]))),
        packed(write_request_2((SERIES, [(NOW + 1, 13.0), (NOW + 2, 14.0)]))),  # the first sample is in quarantine
        packed(write_request_2((SERIES, [(NOW + 2, 14.0)]), (SERIES | {"job": "k"}, [(NOW, 15.0)]))),
    ]
    async with receiver(store, aside=quarantine, hold_seconds=15.0) as one:
        waiting = [asyncio.create_task(one.take(body, 0, Version.V2)) for body in bodies]
        await until(lambda: one.pending_rows == 4)
        await one.finish()

        assert [2, 0, 1, 2] == await asyncio.gather(*waiting)
        assert 0 == await one.take(bodies[1], 0, Version.V2)
    assert [12.0, 14.0, 15.0] == store.values


async def test_sender_that_gets_only_refusals_is_logged_once_and_listed(start_service, caplog):
    """Another sender at the same address is not listed; the sender is removed after an accepted request."""
    good = packed(write_request_2((SERIES, [(NOW, 1.0)])))
    async with start_service(**{"remote_write.hold_seconds": 0.0}) as service:

        async def send(data, agent, **more):
            return (await post(service, data, **{"Content-Type": V2, "User-Agent": agent, **more}))[0]

        statuses = [await send(good, "<vm>/1", **{"Content-Encoding": "zstd"}) for _ in range(3)]
        statuses += [await send(good, "Prometheus/3"), await send(b"\xff", "Prometheus/3")]
        _, document = await service.get("/api/v1/status")
        _, page = await service.get("/service")
        statuses.append(await send(good, "<vm>/1"))
        _, after = await service.get("/api/v1/status")

    (said,) = [one.getMessage() for one in caplog.records if "remote write: all requests" in one.getMessage()]
    (listed,) = json.loads(document)["refused_senders"]
    assert [415, 415, 415, 204, 400, 204] == statuses
    assert ("127.0.0.1 (<vm>/1)", 3) == (listed["name"], listed["requests"])
    assert listed["reason"].startswith("unsupported: Content-Encoding zstd is not supported: send remote write")
    assert [] == json.loads(after)["refused_senders"]
    assert "127.0.0.1 (<vm>/1) are refused, its samples are lost: unsupported: Content-Encoding zstd" in said
    assert "Samples are lost." in page
    assert "127.0.0.1 (&lt;vm&gt;/1) are refused: unsupported: Content-Encoding zstd" in page


async def test_senders_that_are_refused_for_any_reason_are_listed(start_service, caplog):
    """The reasons contain neither a token nor the path of a request. Another status than 4xx is no refusal."""
    token, good, path = "for-ranks-and-readers", packed(write_request_2((SERIES, [(NOW, 1.0)]))), "/api/v1/write"
    version = {"X-Prometheus-Remote-Write-Version": "2.0.0"}
    cases = {
        "no token": (good, path, {"Authorization": ""}, 401, "unauthorized: no valid token"),
        "token": (good, path, {"Authorization": "Bearer s3cret"}, 401, "unauthorized: no valid token"),
        "path": (good, "/push/s3cret", version, 400, "wrong path: send remote write to /api/v1/write"),
        "text": (good, path, {"Content-Type": "text/plain"}, 415, "unsupported media type: this Content"),
        "snappy": (b"\xff" * 9, path, {}, 400, "malformed: "),
        "inflated": (packed(b"x" * 70_000), path, {}, 400, "malformed: "),
        "size": (b"x" * 70_000, path, {}, 413, "too large: "),
        "gzip": (good, path, {"Content-Encoding": "gzip"}, 415, "unsupported: Content-Encoding gzip"),
    }
    limits = {"remote_write.hold_seconds": 0.0, "remote_write.max_bytes": 65_536, "service.token": token}
    common = {"Content-Type": V2, "Authorization": f"Bearer {token}"}
    async with start_service(**limits) as service:
        for agent, (data, place, more, status, _) in cases.items():
            found, _, _ = await post(service, data, place, **common | {"User-Agent": agent} | more)
            assert (agent, status) == (agent, found)
        assert 400 == (await post(service, "{}", "/api/v1/register", **common))[0]  # not of a sender
        pages = [await service.get(one, **common) for one in ("/api/v1/status", "/service", "/metrics")]

    document, page, metrics = (text for _, text in pages)
    reasons = {one["name"]: one["reason"] for one in json.loads(document)["refused_senders"]}
    assert {f"127.0.0.1 ({agent})" for agent in cases} == set(reasons)
    for agent, (*_, reason) in cases.items():
        assert reasons[f"127.0.0.1 ({agent})"].startswith(reason)
        assert f"127.0.0.1 ({agent}) are refused: {reason}" in page
    assert "s3cret" not in document + page + caplog.text
    assert 'remote_write_requests_total{outcome="refused"} 4.0' in metrics
