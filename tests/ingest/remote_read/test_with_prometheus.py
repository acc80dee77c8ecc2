"""A real Prometheus over a real store: months-old history in PromQL, one series with what is live."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import time
import urllib.parse

import aiohttp
import pyarrow as pa
import pytest
import yaml
from aiohttp import web

from rankscope_storage.schema import dataset_schema
from rankscope_storage.store import Batch, Store

DAY_MS = 86_400_000
OLD = (int(time.time()) // 60 * 60_000) - 60 * DAY_MS
TOKEN = "for-ranks-and-readers"
LIVE = (
    b'rankscope_loss{run="r",rank="0"} 0.25\nrankscope_tensor_value{run="r",rank="0",kind="k",tensor="w",op="norm"} 4\n'
)


def history():
    """Return a step a minute, two months ago; the last loss is NaN."""
    moments = [{"run": "r", "attempt": 0, "rank": 0, "step": n, "ts": (OLD + n * 60_000) * 1000} for n in range(10)]
    scalars = [{**one, "name": "loss", "value": 1.0 if one["step"] < 9 else math.nan} for one in moments]
    tensors = [{**one, "kind": "k", "tensor": "w", "norm": float(one["step"])} for one in moments]
    return {
        name: pa.Table.from_pylist(rows, schema=dataset_schema(name))
        for name, rows in (("scalars", scalars), ("tensor_stats", tensors))
    }


@contextlib.asynccontextmanager
async def live_page():
    async def page(_):
        return web.Response(body=LIVE, headers={"Content-Type": "text/plain; version=0.0.4"})

    application = web.Application()
    application.router.add_get("/metrics", page)
    runner = web.AppRunner(application, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def prometheus(program, folder, service, page, port):
    config = {
        "global": {"scrape_interval": "1s"},
        "remote_read": [{"url": f"{service.url}/api/v1/read", "authorization": {"credentials": TOKEN}}],
        "scrape_configs": [
            {"job_name": "rankscope", "static_configs": [{"targets": [page], "labels": {"instance": "r/0"}}]}
        ],
    }
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program, *arguments, f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log
        )
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
async def test_months_old_history_and_live_data_are_one_series(
    require_server, tmp_path, start_service, eventually, free_port
):
    """Under the token that all readers show; and what the service scraped of Prometheus itself comes back as well."""
    program = require_server("prometheus")
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=history(), watermarks={}))
    itself = {"url": f"http://127.0.0.1:{free_port}/metrics", "name": "prom", "every_seconds": 2.0}
    async with live_page() as page:
        limits = {"remote_read.max_samples": 25, "exporters": [itself]}
        async with (
            start_service(**{"service.token": TOKEN, **limits}) as service,
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
    assert ["prom"] == [found["metric"]["instance"] for found in itself_found]
    assert "more than 25 samples" in refused[0]
