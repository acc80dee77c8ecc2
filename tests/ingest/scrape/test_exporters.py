"""Scraping in the running service, with real HTTP servers and a real store, and its targets."""

from __future__ import annotations

import contextlib
import gzip
import json
import re

import aiohttp
import pytest
from aiohttp import web
from tests.ingest.servers import FakeExporter

from rankscope_ingest.base.config import ExporterListSection, ExporterSection
from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.scrape.discovery import configured, listed

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


# Scrape targets of the configuration file, and of lists in the formats of Prometheus.

LIST = ExporterListSection(file="x.json", labels={"dc": "east", "job": "none"}, every_seconds=5)


def test_target_of_a_configured_exporter_is_its_name_or_address():
    url = "http://10.0.0.1:9100/metrics"
    sections = [{}, {"name": "node-1"}, {"labels": {"instance": "node-2", "dc": "east", "empty": ""}}]
    found = list(configured([ExporterSection(url=url, **section) for section in sections]))

    assert ["10.0.0.1:9100", "node-1", "node-2"] == [exporter.name for exporter in found]
    assert (("dc", "east"),) == found[2].labels


def test_list_in_the_format_of_prometheus_is_parsed():
    """Labels of the list take precedence over those of the section; labels for relabelling are dropped."""
    labels = {"job": "dcgm", "__scheme__": "https", "__metrics_path__": "/gpu", "__param_all": "a b", "__meta_x": "y"}
    groups = [{"targets": ["a:9400", "[::1]:9400"], "labels": labels}, {"targets": ["b"]}]
    found = listed(json.dumps(groups), LIST)

    assert [
        ("a:9400", "https://a:9400/gpu?all=a+b", (("dc", "east"), ("job", "dcgm"))),
        ("[::1]:9400", "https://[::1]:9400/gpu?all=a+b", (("dc", "east"), ("job", "dcgm"))),
        ("b", "http://b/metrics", (("dc", "east"), ("job", "none"))),
    ] == [(exporter.name, exporter.url, exporter.labels) for exporter in found]
    assert {(5.0, 10.0)} == {(exporter.every_seconds, exporter.timeout_seconds) for exporter in found}


def test_yaml_list_keeps_label_values_as_text():
    """Label values that look like numbers or booleans remain text, as in Prometheus."""
    text = "- targets: ['a:9400', b]\n  labels:\n    rack: 07\n    on: yes\n"
    found = listed(text, LIST, is_yaml=True)

    labels = (("dc", "east"), ("job", "none"), ("on", "yes"), ("rack", "07"))
    assert [("a:9400", labels), ("b", labels)] == [(exporter.name, exporter.labels) for exporter in found]


@pytest.mark.parametrize("text", ["", "- [", "a: b", "- targets: x", "- !!python/object:os.system {}", "\t- a"])
def test_invalid_yaml_list_is_rejected_with_the_reason(text):
    with pytest.raises(ConfigError, match=r'not valid YAML|not a list|has no "targets"'):
        listed(text, LIST, is_yaml=True)


NO_LISTS = [
    *("", "{}", "[1]", '[{"targets": "a"}]', '[{"targets": [1]}]', '[{"targets": ["a/b"]}]', '[{"targets": ["u@h"]}]'),
    *('[{"targets": ["a:b"]}]', '[{"targets": [""]}]', '[{"targets": [], "labels": {"a b": "x"}}]'),
    *('[{"targets": [], "labels": {"a": 1}}]', '[{"targets": ["a"], "labels": {"__scheme__": "file"}}]', "[" * 100_000),
]


@pytest.mark.parametrize("text", NO_LISTS, ids=lambda text: text[:30])
def test_invalid_json_list_is_rejected_with_the_reason(text):
    with pytest.raises(ConfigError, match=r"not valid|not a list|an entry|invalid labels|not host:port"):
        listed(text, LIST)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exporters": [{"url": "localhost:9100"}]}, "such as http://127.0.0.1:9100/metrics"),
        ({"exporters": [{"url": "http://a:port/"}]}, "such as http://127.0.0.1:9100/metrics"),
        ({"exporters": [{"url": "http://a", "labels": {"a-b": "x"}}]}, "labels"),
        ({"exporter_lists": [{}]}, "set either file"),
        ({"exporter_lists": [{"file": "a", "url": "http://b"}]}, "set either file"),
        ({"exporter_lists": [{"fil": "a"}]}, "did you mean file"),
    ],
)
def test_error_names_the_wrong_setting(changes, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_config(None, {"store.path": "x"} | changes)


def test_paths_of_list_files_are_relative_to_the_configuration(tmp_path):
    (tmp_path / "service.toml").write_text('[store]\npath = "s"\n[[exporter_lists]]\nfile = "targets/*.json"\n')
    config = load_config(tmp_path / "service.toml")

    assert str(tmp_path / "targets/*.json") == config.exporter_lists[0].file
