"""Listening and connecting over IPv4, IPv6 and both, and the advertised address."""

from __future__ import annotations

import contextlib

import pytest

from rankscope_ingest.base.config import ServiceSection, split_address
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.network.connections import advertised, open_socket
from rankscope_ingest.network.dialing import address_of, check_allowed, is_allowed


@pytest.mark.parametrize(
    ("listen", "reached_at"),
    [("[::]:0", ("127.0.0.1", "[::1]")), ("0.0.0.0:0", ("127.0.0.1", "127.0.0.2")), ("[::1]:0", ("[::1]",))],
)
async def test_service_is_reached_over_ipv4_and_ipv6(start_service, listen, reached_at):
    async with start_service(**{"service.listen": listen, "service.token": "t"}) as service:
        port = service.url.rpartition(":")[2]
        for host in reached_at:
            service.url = f"http://{host}:{port}"
            assert 200 == (await service.get("/healthz"))[0]


LOOPBACK = ["127.0.0.0/8", "::1/128"]


@pytest.mark.parametrize(
    ("networks", "host", "is_permitted"),
    [
        *((LOOPBACK, host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")),
        *((LOOPBACK, host, False) for host in ("::ffff:8.8.8.8", "169.254.169.254", "0.0.0.0", "fe80::1%eth0")),
        *((["fd00::/8"], "fd00::7", True), (["fd00::/8"], "fe80::7", False), (["fd00::/8"], "::1", False)),
        *((["10.0.0.0/8"], "::ffff:10.1.2.3", True), (["::ffff:10.0.0.0/104"], "10.1.2.3", True)),
        (["::/0"], "10.1.2.3", False),
    ],
)
def test_allowed_networks_apply_to_both_address_families(networks, host, is_permitted):
    allowed = ServiceSection(allowed_networks=networks).allowed_networks

    assert is_permitted == is_allowed(address_of(host), allowed)
    with contextlib.nullcontext() if is_permitted else pytest.raises(RegistrationError, match="allowed_networks"):
        check_allowed("http://h:9400", [address_of(host)], allowed)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"listen": "10.0.0.1:9470"}, "10.0.0.1:9999"),
        ({"listen": "[::1]:0"}, "[::1]:9999"),
        ({"listen": "0.0.0.0:0"}, "node-1:9999"),
        ({"listen": "[::]:0"}, "node-1:9999"),
        ({"listen": "[::]:0", "advertise": "ingest.cluster:443"}, "ingest.cluster:443"),
        ({"listen": "[::]:0", "advertise": "[fd00::1]:0"}, "[fd00::1]:9999"),
    ],
)
def test_advertised_address_is_reachable_for_ranks(section, expected):
    assert expected == advertised(ServiceSection(token="t", **section), 9999, lambda: "node-1")


@pytest.mark.parametrize(
    "text", ["::1:9470", "[127.0.0.1]x:1", "[::1]", "host", "host:", ":9470", "[]:1", "host:99999"]
)
def test_listen_address_needs_a_port_and_brackets_for_ipv6(text):
    with pytest.raises(ValueError, match=r"\[::1\]:9470"):
        split_address(text)


def test_localhost_listens_on_one_socket(free_port):
    with open_socket(f"localhost:{free_port}") as listening:
        assert ("127.0.0.1", free_port) == listening.getsockname()
