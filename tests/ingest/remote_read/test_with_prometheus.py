"""Remote read of a real Prometheus: history and live data are one series, also with hints."""

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import struct
import time
import urllib.parse
from collections import Counter, defaultdict

import aiohttp
import numpy as np
import pyarrow as pa
import pytest
import yaml
from aiohttp import web
from tests.ingest.remote_read.streams import MESSAGES, decoded, frames_of
from tests.ingest.servers import FakeExporter, serving

from rankscope_ingest.base.config import RemoteReadSection
from rankscope_ingest.base.protobuf import packed, unpacked
from rankscope_ingest.remote_read import handler
from rankscope_ingest.remote_read.handler import RemoteRead
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.prometheus.read import read

DAY_MS = 86_400_000
OLD = (int(time.time()) // 60 * 60_000) - 60 * DAY_MS
TOKEN = "for-ranks-and-readers"
OUTSIDE = {"cluster": "a"}
STALE = bytes.fromhex("7ff0000000000002")
LIVE = (
    b'rankscope_loss{run="r",rank="0"} 0.25\nrankscope_tensor_value{run="r",rank="0",kind="k",tensor="w",op="norm"} 4\n'
)


def history():
    """Return tables with one step per minute, two months ago; the last loss is NaN, and the run ends 1 s later."""
    moments = [{"run": "r", "attempt": 0, "rank": 0, "step": n, "ts": (OLD + n * 60_000) * 1000} for n in range(10)]
    scalars = [{**one, "name": "loss", "value": 1.0 if one["step"] < 9 else math.nan} for one in moments]
    tensors = [{**one, "kind": "k", "tensor": "w", "norm": float(one["step"])} for one in moments]
    times = {"started_at": OLD * 1000, "ended_at": (OLD + 9 * 60_000 + 1_000) * 1000}
    attempt = {**moments[-1], "state": "completed", "source_kind": "live", **times}
    return {
        name: pa.Table.from_pylist(rows, schema=dataset_schema(name))
        for name, rows in (("scalars", scalars), ("tensor_stats", tensors), ("attempts", [attempt]))
    }


@contextlib.asynccontextmanager
async def live_page(text=lambda: LIVE):
    async with FakeExporter() as page:
        page.answer = lambda _: web.Response(body=text(), headers={"Content-Type": "text/plain; version=0.0.4"})
        yield page.address


def remote(service, what, **more):
    return {"url": f"{service.url}/api/v1/{what}", "authorization": {"credentials": TOKEN}, **more}


READER = {"service.token": TOKEN, "remote_read.external_labels": OUTSIDE}


@contextlib.asynccontextmanager
async def prometheus(program, folder, service, page, port, **more):
    targets = [{"targets": [page], "labels": {"instance": "r/0"}}]
    config = {
        "global": {"scrape_interval": "1s", "external_labels": OUTSIDE if "remote_write" not in more else {}},
        **(more or {"remote_read": [remote(service, "read")]}),
        "scrape_configs": [{"job_name": "rankscope", "static_configs": targets}],
    }
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    arguments.append(f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(program, *arguments, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 30)


async def asked(url, expression, **when):
    query = urllib.parse.urlencode({"query": expression, **when})
    path = "query_range" if "start" in when else "query"
    with contextlib.suppress(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as session, session.get(f"{url}/api/v1/{path}?{query}") as response:
            if response.status == 503:  # it is starting
                return [], []
            document = json.loads(await response.text())
            return document.get("data", {}).get("result", []), document.get("warnings", [])
    return [], []


@pytest.mark.timeout(180)
@pytest.mark.thorough
async def test_months_old_history_and_live_data_are_one_series(
    require_server, tmp_path, start_service, eventually, free_port
):
    """With a token and external labels. Series that the service scraped from Prometheus itself are returned as well."""
    program = require_server("prometheus")
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=history(), watermarks={}))
    itself = {"url": f"http://127.0.0.1:{free_port}/metrics", "name": "prom", "every_seconds": 2.0}
    async with (
        live_page() as page,
        start_service(**READER, **{"remote_read.max_samples": 25, "exporters": [itself]}) as service,
        prometheus(program, tmp_path / "p", service, page, free_port) as url,
    ):

        async def is_live():
            return (await asked(url, 'rankscope_loss{instance="r/0"}'))[0]

        await eventually(is_live)
        merged, warnings = await asked(url, 'rankscope_loss{run=~"r|none"}[90d]')
        range_, _ = await asked(
            url,
            'increase(rankscope_tensor_value{op="norm",tensor=~"w.*"}[5m])',
            start=OLD // 1000 + 300,
            end=OLD // 1000 + 540,
            step=60,
        )
        end, curve = OLD // 1000 + 540, 'rankscope_tensor_value{op="norm",run="r"}'
        ended, _ = await asked(url, curve, start=end - 60, end=end + 240, step=20)
        at_end, _ = await asked(url, curve, time=end + 30)
        await eventually(lambda: service.rows("SELECT 1 FROM samples WHERE metric = 'prometheus_build_info'"))
        stored = 'last_over_time(prometheus_build_info{instance="prom"}[1h] offset 1s)'
        itself_found, _ = await asked(url, stored)
        _, refused = await asked(url, '{__name__=~"rankscope_.*",job="rankscope"}[90d]')

    samples = merged[0]["values"]
    old = [(ts, value) for ts, value in samples if ts * 1000 < OLD + DAY_MS]
    assert [] == warnings
    assert 1 == len(merged)
    assert {"__name__": "rankscope_loss", "job": "rankscope", "instance": "r/0", "run": "r", "rank": "0"} == (
        merged[0]["metric"]
    )
    assert [(OLD // 1000 + 60 * n, "1" if n < 9 else "NaN") for n in range(10)] == old
    assert {"0.25"} == {value for _, value in samples[len(old) :]}
    assert [float(value) for _, value in range_[0]["values"]] == pytest.approx([5.0] * 5)
    assert ["8", "8", "8", "9"] == [value for _, value in ended[0]["values"]]
    assert [] == at_end
    assert ["prom"] == [found["metric"]["instance"] for found in itself_found]
    assert "more than 25 samples" in refused[0]


@pytest.mark.timeout(180)
async def test_series_ends_in_prometheus_when_its_exporter_stops_exposing_it(
    require_server, tmp_path, start_service, eventually, free_port
):
    """Without a staleness marker, Prometheus would repeat the last value for five minutes."""
    program, shown = require_server("prometheus"), [b"ends 1\nstays 1\n"]
    async with live_page(lambda: shown[-1]) as exporter, live_page() as page:
        sections = [{"url": f"http://{exporter}/metrics", "name": "e", "every_seconds": 0.5, "timeout_seconds": 0.5}]
        async with (
            start_service(exporters=sections, **READER) as service,
            prometheus(program, tmp_path / "p", service, page, free_port) as url,
        ):

            async def are(*expected):
                found = (await asked(url, '{__name__=~"ends|stays"}'))[0]
                return sorted(one["metric"]["__name__"] for one in found) == list(expected)

            await eventually(lambda: are("ends", "stays"))
            shown.append(b"stays 2\n")
            await eventually(lambda: are("stays"))


def read_request(metric, start, end, accepted):
    request = MESSAGES["ReadRequest"](accepted_response_types=accepted)
    query = request.queries.add(start_timestamp_ms=start, end_timestamp_ms=end)
    query.matchers.add(type=2, name="__name__", value=metric)
    return packed(request.SerializeToString())


async def series_of(url, metric, start, end):
    """Return {labels: [(ms, bits)]} of the plain response, and {labels: [chunk]} of the streamed one."""
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
    headers["Authorization"] = f"Bearer {TOKEN}"
    plain, streamed = {}, defaultdict(list)
    async with aiohttp.ClientSession() as session:
        for accepted in ([0], [1, 0]):
            body = read_request(metric, start, end, accepted)
            async with session.post(f"{url}/api/v1/read", data=body, headers=headers) as response:
                assert 200 == response.status, await response.text()
                answer = await response.read()
            if accepted == [0]:
                for one in MESSAGES["ReadResponse"].FromString(unpacked(answer, 1 << 24)).results[0].timeseries:
                    samples = [(sample.timestamp, struct.pack(">d", sample.value)) for sample in one.samples]
                    plain[tuple((label.name, label.value) for label in one.labels)] = samples
                continue
            for frame in frames_of(answer):
                (one,) = MESSAGES["ChunkedReadResponse"].FromString(frame).chunked_series
                streamed[tuple((label.name, label.value) for label in one.labels)] += one.chunks
    return plain, dict(streamed)


def prometheus_3():
    program = os.environ.get("RANKSCOPE_PROMETHEUS_3")
    return program or pytest.skip("make test-prometheus-3 runs this test with the program RANKSCOPE_PROMETHEUS_3")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("version", [1, 2])
async def test_pushed_samples_are_read_back_bit_identical(
    version, require_server, tmp_path, start_service, eventually, free_port
):
    """The service and Prometheus return the same values, NaN, times and staleness markers, plain and streamed."""
    program = require_server("prometheus") if version == 1 else prometheus_3()
    push = {} if version == 1 else {"protobuf_message": "io.prometheus.write.v2.Request"}
    scrapes = itertools.count(1)

    def text():
        count = next(scrapes)
        lines = [f'm_total{{cpu="{cpu}",mode="a b\\"c"}} {count * cpu / 3}\n' for cpu in range(3)]
        lines += [f"m_nan {[math.nan, 0.0, 1e300, math.inf][count % 4]}\n"]
        lines += ["m_goes 1\n"] if count < 4 else []
        return "".join(lines).encode()

    async with live_page(text) as page:
        limits = {"remote_write.hold_seconds": 0.2, "service.token": TOKEN}
        async with (
            start_service(**limits) as service,
            prometheus(
                program, tmp_path / "p", service, page, free_port, remote_write=[remote(service, "write", **push)]
            ) as url,
        ):
            found = "SELECT epoch_ms(ts) AS at FROM samples WHERE metric = 'm_goes' AND value IS NULL"
            marks = await eventually(lambda: service.rows(found))
            end = max(int(time.time() * 1000) - 1_500, marks[0]["at"])
            last = f"SELECT 1 FROM samples WHERE metric = 'm_nan' AND epoch_ms(ts) > {end}"
            await eventually(lambda: service.rows(last))
            query = ["m_.*|up", end - 3_600_000, end]
            theirs, their_chunks = await series_of(url, *query)
            ours, our_chunks = await series_of(service.url, *query)
            _, metrics = await service.get("/metrics", Authorization=f"Bearer {TOKEN}")

    assert 6 == len(ours)
    assert theirs == ours
    assert 'requests_total{outcome="unsupported"} 0.0' in metrics
    assert 'requests_total{outcome="malformed"} 0.0' in metrics
    assert "statistics indicate" not in (tmp_path / "p" / "log").read_text()  # the number of stored samples is wrong
    by_name = {dict(labels)["__name__"]: samples for labels, samples in ours.items()}
    assert STALE in [bits for _, bits in by_name["m_goes"]]
    for labels, chunks in their_chunks.items():
        for chunk in chunks:
            times, bits = zip(*decoded(chunk.data), strict=True)
            assert [chunk.data] == again(times, bits)
        assert samples_in(chunks, end) == samples_in(our_chunks[labels], end)


def again(times, bits):
    return handler.chunks(np.array(times), np.array(bits, np.uint64).view(np.float64), np.array([0]))


def samples_in(chunks, end):
    return [(ts, struct.pack(">Q", bits)) for chunk in chunks for ts, bits in decoded(chunk.data) if ts <= end]


# Hints: the service sends fewer samples, and every query has the same result as without hints.

STEPS, STEP_MS = 400, 4_000
START, END = OLD // 1000, (OLD + STEPS * STEP_MS) // 1000
LOSS, NORM = "rankscope_loss{%s}", 'rankscope_tensor_value{op="norm",%s}'
INSTANT = [
    *(LOSS, f"{NORM} offset 10m", f"{LOSS} - {LOSS} offset 20m", f"{LOSS} @ {START + 301}", f"topk(1, {NORM})"),
    *(f"abs({NORM})", f"clamp_min({LOSS}, 2)", f"label_replace({LOSS}, 'other', '$1', 'rank', '(.*)')"),
    *(f"sum by (tensor) ({NORM})", f"count_values('v', {LOSS})", f"timestamp({LOSS})", f"absent({LOSS})"),
    *(f"{LOSS}[3m]", f"rate({NORM}[5m])", f"last_over_time({LOSS}[20m])", f"max_over_time({LOSS}[20m])"),
    *(f"max_over_time({NORM}[10m] offset 5m)", f"max_over_time({LOSS}[10m:30s])"),
    *(f"max_over_time(({LOSS} + {LOSS})[5m:])", f"avg_over_time(sum({NORM})[10m:7s])", "gone_temperature{%s}"),
    "temperature{%s}",
]
RANGES = [LOSS, NORM, f"sum({NORM})", f"increase({NORM}[2m])", f"{LOSS} - {LOSS} offset 3m", "temperature{%s}"]
COARSE = [
    *RANGES,
    f"timestamp({LOSS})",
    f"max_over_time(sum({NORM})[10m:1m])",
    f"topk(1, {LOSS}) and {LOSS} offset 2m",
    f"{NORM} and topk(2, max_over_time({NORM}[15m] @ end()))",
]
SERIES = [NORM, '{__name__=~".+",%s}']


def hinted_history():
    """Return tables with a step every 4 s; some steps share a millisecond, a rank stops early, and values are NaN."""
    moments = [
        {"run": "r", "attempt": 0, "rank": rank, "step": n, "ts": (OLD + (n // 3 * 3) * STEP_MS) * 1000 + rank}
        for rank, stop in ((0, STEPS), (1, 250), (2, STEPS - 40))
        for n in range(stop)
    ]
    scalars = [
        {**one, "name": "loss", "value": math.nan if one["step"] % 90 == 7 else one["step"] / 7} for one in moments
    ]
    tensors = [
        {**one, "kind": "k", "tensor": tensor, "norm": float(one["step"] * factor), "min": None if factor > 1 else 1.0}
        for one in moments
        for tensor, factor in (("w", 1), ("b", 3))
    ]
    samples = [
        {"run": "", "target": "t", "metric": metric, "ts": one["ts"] + 500, "value": one["step"] or None}
        for one in moments[:STEPS:5]
        for metric in ("temperature", "gone_temperature")
    ]
    samples.append({"run": "", "target": "t", "metric": "gone_temperature", "ts": END * 1_000_000 - 500, "value": None})
    times = {"started_at": OLD * 1000, "ended_at": (OLD + 240 * STEP_MS) * 1000}
    attempt = {**moments[0], "state": "failed", "source_kind": "live", **times}
    tables = {"scalars": scalars, "tensor_stats": tensors, "samples": samples, "attempts": [attempt]}
    return {name: pa.Table.from_pylist(rows, schema=dataset_schema(name)) for name, rows in tables.items()}


class WithoutHints(RemoteRead):
    """Removes the hints of each request before it is answered."""

    def _answer(self, body, cancel):
        request = MESSAGES["ReadRequest"].FromString(unpacked(body, handler.MAX_REQUEST_BYTES))
        for query in request.queries:
            query.ClearField("hints")
        return super()._answer(packed(request.SerializeToString()), cancel)


READERS = {"hints": RemoteRead, "all": WithoutHints}


@contextlib.asynccontextmanager
async def two_readers(store, monkeypatch, sent):
    """Yield settings of remote read for two values of the label `via`, with the hints of a request and without them."""
    # `sent` has the number of samples that were sent for each value of `via`.

    def counted(*args, **more):
        answers = read(*args, **more)
        sent[more["external_labels"]["via"]] += sum(len(series.values) for series in itertools.chain(*answers))
        return answers

    monkeypatch.setattr(handler, "read", counted)
    monkeypatch.setattr(handler, "_KEPT_SAMPLES", -1)  # each case reads the store
    routes = []
    for via, kind in READERS.items():
        section = RemoteReadSection(external_labels={**OUTSIDE, "via": via}, max_samples=100_000)
        routes.append(web.post(f"/{via}", kind(str(store), section).answer))
    async with serving(*routes) as address:
        yield [{"url": f"http://{address}/{via}", "name": via, "required_matchers": {"via": via}} for via in READERS]


async def result_of(url, path, text, via, **when):
    """Return the result of a query as a sorted list of texts, without the label `via`."""
    key = "match[]" if path == "series" else "query"
    query = urllib.parse.urlencode({key: text.replace("%s", f'via="{via}"'), **when})
    async with aiohttp.ClientSession() as session, session.get(f"{url}/api/v1/{path}?{query}") as response:
        document = json.loads(await response.text())
    assert ("success", None) == (document["status"], document.get("warnings")), document
    found = document["data"] if path == "series" else document["data"]["result"]
    for one in found:
        one.get("metric", one).pop("via", None)
    return sorted(map(json.dumps, found))


CASES = [
    *(("query", text, {"time": END - 1}) for text in INSTANT),
    *(("query_range", text, {"start": START + 90, "end": END, "step": 17}) for text in RANGES),
    *(("query_range", text, {"start": START + 120, "end": END // 60 * 60, "step": 60}) for text in COARSE),
    *(("series", text, {"start": START, "end": END}) for text in SERIES),
    ("series", NORM, {"start": START + 600, "end": START + 605}),
]


@pytest.mark.timeout(180)
async def test_results_with_hints_equal_results_without(require_server, tmp_path, monkeypatch, eventually, free_port):
    program, sent, saved = require_server("prometheus"), Counter(), set()
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=hinted_history(), watermarks={}))
    async with (
        two_readers(tmp_path / "store", monkeypatch, sent) as entries,
        prometheus(program, tmp_path / "p", None, "127.0.0.1:1", free_port, remote_read=entries) as url,
    ):
        await eventually(lambda: is_ready(url))
        for path, text, when in CASES:
            sent.clear()
            results = [await result_of(url, path, text, via, **when) for via in READERS]
            assert results[0] == results[1], (path, text)
            assert results[0] or "gone" in text or "absent" in text, (path, text)
            saved |= {text} if sent["hints"] < sent["all"] else set()

    thinned = {LOSS, NORM, *COARSE[6:], *INSTANT[14:17]}
    assert {*INSTANT[:10], *SERIES, "gone_temperature{%s}", *thinned} <= saved


async def is_ready(url):
    with contextlib.suppress(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as session, session.get(f"{url}/-/ready") as response:
            return response.status == 200
    return False
