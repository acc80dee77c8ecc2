"""Scraping in the running service: real HTTP servers and a real store."""

import contextlib
import gzip
import json

import aiohttp
from aiohttp import web
from tests.ingest.servers import FakeExporter

PAGE = b'# HELP power Power.\n# TYPE power gauge\npower{gpu="0",model="NVIDIA H100 80GB"} 120.5\n'
UP_OF_ALL = "SELECT target, value FROM samples WHERE metric = 'up'"
UP = "SELECT value FROM samples WHERE metric = 'up' ORDER BY ts"


def gzipped(_):
    return web.Response(body=gzip.compress(PAGE), headers={"Content-Encoding": "gzip", "Content-Type": "text/plain"})


def section(exporter, **more):
    return {"url": exporter.url, "every_seconds": 0.1, "timeout_seconds": 5} | more


async def test_page_is_stored_and_the_token_is_not_sent_to_exporters(start_service, eventually):
    """Rows contain target, labels and the samples about the scrape. The metrics of the service count them."""
    token = {"Authorization": "Bearer secret"}
    async with FakeExporter(PAGE) as exporter:
        exporter.answer = gzipped
        changes = {"exporters": [section(exporter, name="node-1", labels={"dc": "east"})], "service.token": "secret"}
        async with start_service(**changes) as service:

            async def is_shown():
                metrics = (await service.get("/metrics", **token))[1]
                return metrics if 'rankscope_ingest_exporter_samples_total{how="layout"} 0.0' not in metrics else None

            await eventually(lambda: service.rows("SELECT 1 FROM samples WHERE metric = 'power'"))
            metrics = await eventually(is_shown)

    row = service.rows("SELECT run, target, labels, value, ts_origin FROM samples WHERE metric = 'power'")[0]
    labels = '{"dc":"east","gpu":"0","model":"NVIDIA H100 80GB"}'
    assert {"run": "", "target": "node-1", "labels": labels, "value": 120.5, "ts_origin": "ingest"} == row
    assert {"value": 1.0} == service.rows(UP)[0]
    assert not any("Authorization" in request.headers for request in exporter.requests)
    assert {"identity"} == {request.headers["Accept-Encoding"] for request in exporter.requests}  # on this machine
    assert [] == service.rows("SELECT target, metric, labels, ts FROM samples GROUP BY ALL HAVING count(*) > 1")
    assert 'rankscope_ingest_exporters{health="up"} 1.0' in metrics
    assert 'rankscope_ingest_exporter_samples_total{how="exact"} 1.0' in metrics


def redirecting(_):
    raise web.HTTPFound("http://127.0.0.1:1/")


def packed(body):
    return lambda _: web.Response(body=body, headers={"Content-Encoding": "gzip"})


BAD = {
    "redirects are not followed": redirecting,
    "larger than 1000000 bytes: raise max_bytes": packed(gzip.compress(b"#" * 2_000_000)),
    "middle of its gzip": packed(b"\x1f\x8b\x08"),
    "the page is not a valid exposition": lambda _: web.Response(body=b"power\n"),
    "status 404": lambda _: web.Response(status=404),
}


async def test_bad_page_is_reported_and_stores_up_0(start_service, eventually):
    """The same applies to an address outside the allowed networks, which is not connected to."""
    async with contextlib.AsyncExitStack() as stack:
        exporters = [await stack.enter_async_context(FakeExporter(PAGE)) for _ in BAD]
        for exporter, answer in zip(exporters, BAD.values(), strict=True):
            exporter.answer = answer
        sections = [section(exporter, max_bytes=1_000_000) for exporter in exporters]
        sections.append({"url": "http://192.0.2.1/metrics", "every_seconds": 0.1})
        async with start_service(exporters=sections) as service:

            async def told():
                errors = [found["last_error"] for found in await described(service)]
                return all(errors) and errors

            errors = await eventually(told)
            await eventually(lambda: len(service.rows(f"SELECT DISTINCT target FROM ({UP_OF_ALL})")) > len(BAD))

    reasons = [*BAD, "outside [service] allowed_networks"]
    assert [] == [(reason, error) for reason, error in zip(reasons, errors, strict=True) if reason not in error]
    assert [{"value": 0.0}] == service.rows(f"SELECT DISTINCT value FROM ({UP_OF_ALL})")


async def test_lists_in_files_and_at_a_url_are_followed(start_service, eventually, tmp_path):
    """An invalid edit changes nothing. When a file is removed, its exporters are removed and their series end."""
    file = tmp_path / "targets.json"
    async with FakeExporter(PAGE) as one, FakeExporter(PAGE) as two, FakeExporter(PAGE) as directory:
        directory.page = json.dumps([{"targets": [two.address], "labels": {"dc": "west"}}]).encode()
        file.write_text(json.dumps([{"targets": [one.address]}]))
        quick = {"every_seconds": 0.1, "refresh_seconds": 0.05, "timeout_seconds": 5}
        lists = [{"file": str(tmp_path / "*.json")} | quick, {"url": directory.url} | quick]
        async with start_service(exporter_lists=lists) as service:
            await eventually(lambda: one.requests and two.requests)
            file.write_text("[{")
            looks = len(directory.requests)
            await eventually(lambda: len(directory.requests) > looks + 3)
            names = [found["name"] for found in await described(service)]
            file.unlink()

            async def one_left():
                return [found["name"] for found in await described(service)] == [two.address]

            await eventually(one_left)

    assert {one.address, two.address} == set(names)
    last = f"SELECT value FROM samples WHERE metric = 'up' AND target = '{one.address}' ORDER BY ts DESC LIMIT 1"
    assert [{"value": None}] == service.rows(last)
    assert 1 <= len(service.rows("SELECT 1 FROM samples WHERE labels LIKE '%west%' AND metric = 'power'"))


async def test_lag_of_an_exporter_is_the_age_of_its_last_successful_scrape(start_service, eventually):
    """The lag increases while scrapes fail."""
    async with FakeExporter(PAGE) as exporter, start_service(exporters=[section(exporter)]) as service:

        async def state(up):
            (found,) = await described(service)
            return found["up"] is up and found

        async def lag_has_grown():
            found = await state(up=False)
            return found and found["lag_seconds"] > failing["lag_seconds"] + 0.05

        healthy = await eventually(lambda: state(up=True))
        exporter.answer = lambda _: web.Response(status=404)
        failing = await eventually(lambda: state(up=False))
        await eventually(lag_has_grown)

    assert 0 <= healthy["lag_seconds"] < 10


async def described(service):
    async with aiohttp.ClientSession() as session, session.get(f"{service.url}/api/v1/exporters") as response:
        return await response.json()
