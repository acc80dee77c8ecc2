"""Ranks, service and commands reach each other without a proxy, and without the login of ~/.netrc."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest
from tests.ingest.notify.web_server import PROXIES

from rankscope.base.http_client import get
from rankscope_dashboards.grafana.server import GrafanaError, Server
from rankscope_exporter.serving.registration import ServiceClient
from rankscope_ingest.network.http_client import HttpClient


def by_service(url: str) -> None:
    async def request() -> None:
        networks = [ipaddress.ip_network("127.0.0.0/8")]
        async with HttpClient(networks=networks) as client, client.request("GET", url, headers={}, timeout_seconds=5.0):
            pass

    asyncio.run(request())


def by_deployment(url: str) -> None:
    with pytest.raises(GrafanaError, match="it is not Grafana"):
        Server(url, "glsa_token").check()


@pytest.mark.parametrize(
    "send",
    [by_service, by_deployment, get, lambda url: ServiceClient(url, None).poke("incarnation")],
    ids=["service", "deployment to Grafana", "command", "rank"],
)
def test_request_to_loopback_uses_neither_proxy_nor_netrc(serve, monkeypatch, send):
    receiver, proxy = serve(text=b"{}"), serve(status=502)
    for name in PROXIES[:3]:
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    send(f"http://127.0.0.1:{receiver.port}")
    ((_, headers),) = receiver.requests

    assert [] == proxy.requests
    assert "Authorization" not in headers


def test_deployment_reaches_another_machine_through_the_proxy(serve, monkeypatch):
    proxy = serve(text=b"{}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    by_deployment("http://grafana.invalid:3000")
    ((path, headers),) = proxy.requests

    assert "http://grafana.invalid:3000/api/health" == path
    assert "Authorization" not in headers
