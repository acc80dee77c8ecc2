"""Without a token, a foreign web page can neither register ranks nor read from the service."""

from __future__ import annotations

import aiohttp
import pytest

from rankscope_ingest.base.config import ServiceSection
from rankscope_ingest.network.auth import own_names

shared = pytest.mark.asyncio(loop_scope="module")
JSON = {"Content-Type": "application/json"}


async def answer(service, method, path, data=b"{}", **headers):
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, service.url + path, data=data if method == "POST" else None, headers=headers) as got,
    ):
        return got.status, await got.text()


@shared
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/api/v1/register", "text/plain"),
        ("/api/v1/poke", "application/x-www-form-urlencoded"),
        ("/api/v1/stacks", "multipart/form-data"),
    ],
)
async def test_post_that_a_foreign_web_page_can_send_is_rejected(shared_service, path, kind):
    status, text = await answer(shared_service, "POST", path, **{"Content-Type": kind})

    assert 415 == status
    assert "Content-Type: application/json" in text


@shared
async def test_json_with_a_charset_is_accepted(shared_service):
    """The process is unknown."""
    charset = {"Content-Type": "application/json; charset=utf-8"}

    assert 404 == (await answer(shared_service, "POST", "/api/v1/poke", data=b'{"incarnation": "x"}', **charset))[0]


@shared
@pytest.mark.parametrize(("method", "path"), [("GET", "/api/v1/runs"), ("GET", "/metrics"), ("POST", "/api/v1/poke")])
async def test_foreign_host_header_is_rejected_with_the_setting(shared_service, method, path):
    """DNS rebinding: the name of the page resolves to this machine, so that its requests have the same origin."""
    status, text = await answer(shared_service, method, path, Host="page.example:9470", **JSON)

    assert 421 == status
    assert all(words in text for words in ("'page.example'", "allowed_hosts", "set the same token"))


async def test_addresses_and_names_of_the_service_are_accepted(start_service):
    hosts = ("127.0.0.1", "10.1.2.3:9470", "[::1]:9470", "localhost:9470", "LocalHost", "sd.cluster")
    async with start_service(**{"service.allowed_hosts": ["sd.cluster"]}) as service:
        assert [200] * 6 == [(await answer(service, "GET", "/sd", Host=host))[0] for host in hosts]
        assert 200 == (await answer(service, "GET", "/healthz", Host="probe.example"))[0]


async def test_any_host_header_is_accepted_with_a_token(start_service):
    async with start_service(**{"service.token": "secret"}) as service:
        headers = {"Host": "telemetry.example", "Authorization": "Bearer secret"}
        assert 200 == (await answer(service, "GET", "/sd", **headers))[0]


def test_host_name_and_configured_names_are_accepted():
    section = ServiceSection(listen="localhost:0", advertise="Telemetry.Cluster:9470", allowed_hosts=("other.",))
    is_own = own_names(section, lambda: "node7.cluster")

    assert is_own is not None
    assert all(map(is_own, ["node7.cluster", "NODE7", "node7.cluster.", "telemetry.cluster", "other", "::1"]))
    assert not any(map(is_own, ["", "node7.example", "cluster", "localhost.example", "127.0.0.1.example"]))


def test_host_header_is_not_checked_with_tls(certificates, tmp_path):
    written = certificates.web_config(tmp_path / "web.json", "server")

    assert own_names(ServiceSection(web_config=str(written))) is None
