"""Hints of a real Prometheus: the service sends fewer samples, and every query has the same result as without hints."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import urllib.parse
from collections import Counter

import aiohttp
import pyarrow as pa
import pytest
from aiohttp import web
from tests.ingest.remote_read.streams import MESSAGES
from tests.ingest.remote_read.test_with_prometheus import OLD, OUTSIDE, prometheus
from tests.ingest.servers import serving

from rankscope_ingest.base.config import RemoteReadSection
from rankscope_ingest.base.protobuf import packed, unpacked
from rankscope_ingest.remote_read import handler
from rankscope_ingest.remote_read.handler import RemoteRead
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.prometheus.read import read

STEPS, STEP_MS = 400, 4_000
START, END = OLD // 1000, (OLD + STEPS * STEP_MS) // 1000
LOSS, NORM = "rankscope_loss{%s}", 'rankscope_tensor_value{op="norm",%s}'
INSTANT = [
    LOSS,
    f"{NORM} offset 10m",
    f"{LOSS} - {LOSS} offset 20m",
    f"{LOSS} @ {START + 301}",
    f"topk(1, {NORM})",
    f"abs({NORM})",
    f"clamp_min({LOSS}, 2)",
    f"label_replace({LOSS}, 'other', '$1', 'rank', '(.*)')",
    f"sum by (tensor) ({NORM})",
    f"count_values('v', {LOSS})",
    f"timestamp({LOSS})",
    f"absent({LOSS})",
    f"{LOSS}[3m]",
    f"rate({NORM}[5m])",
    f"last_over_time({LOSS}[20m])",
    f"max_over_time({LOSS}[20m])",
    f"max_over_time({NORM}[10m] offset 5m)",
    f"max_over_time({LOSS}[10m:30s])",
    f"max_over_time(({LOSS} + {LOSS})[5m:])",
    f"avg_over_time(sum({NORM})[10m:7s])",
    "gone_temperature{%s}",
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


def history():
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
    """Yield settings of remote read for two values of the label `via`, with the hints of a request and without them.

    `sent` has the number of samples that were sent for each value of `via`.
    """

    def counted(*args, **more):
        answers = read(*args, **more)
        sent[more["external_labels"]["via"]] += sum(len(series.values) for series in itertools.chain(*answers))
        return answers

    monkeypatch.setattr(handler, "read", counted)
    monkeypatch.setattr(handler, "_KEPT_SAMPLES", -1)  # each case reads the store
    readers, routes = [], []
    for via, kind in READERS.items():
        section = RemoteReadSection(external_labels={**OUTSIDE, "via": via}, max_samples=100_000)
        readers.append(kind(str(store), section))
        routes.append(web.post(f"/{via}", readers[-1].answer))
    async with serving(*routes) as address:
        yield [{"url": f"http://{address}/{via}", "name": via, "required_matchers": {"via": via}} for via in READERS]
    for reader in readers:
        reader.close()


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
        writer.append(Batch(tables=history(), watermarks={}))
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
