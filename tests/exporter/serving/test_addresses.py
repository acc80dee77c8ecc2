"""Addresses on which ranks listen: shared port ranges and IPv6."""

from __future__ import annotations

import socket

import pytest

from rankscope_exporter.base.errors import ServeError
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.serving.http_server import Answer, open_server


@pytest.fixture
def listening():
    """Return a function that opens a server with the given settings."""
    servers = []

    def make(listen, **settings):
        config = ServeConfig(listen=listen, token="t", **settings)
        servers.append(open_server(config, lambda _: Answer(204), on_fault=lambda *_: None, meter=CpuMeter()))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


def test_servers_share_a_port_range(listening, free_port):
    """Each server takes the first free port, and a released port is used again."""
    listen = f"127.0.0.1:{free_port}-{free_port + 30}"
    first, second, third = (listening(listen) for _ in range(3))
    second.stop()

    assert free_port <= first.port < second.port < third.port <= free_port + 30
    assert second.port == listening(listen).port


def test_full_port_range_is_reported(listening):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        with socket.socket() as two:
            try:
                two.bind(("127.0.0.1", port + 1))
                two.listen()
            except OSError:
                pytest.skip("another process uses the next port")
            one.listen()
            with pytest.raises(ServeError, match=f"127.0.0.1:{port}-{port + 1}: all 2 ports are in use; set a longer"):
                listening(f"127.0.0.1:{port}-{port + 1}")


REACHED_AT = {"[::1]": ["::1"], "0.0.0.0": ["127.0.0.1", "127.0.0.2"], "[::]": ["::1", "127.0.0.1"]}
REACHED_AT |= {"localhost": ["127.0.0.1"], "[::ffff:127.0.0.1]": ["127.0.0.1"]}


@pytest.mark.parametrize("listen", REACHED_AT)
def test_wildcard_address_accepts_ipv4_and_ipv6(listening, listen):
    server = listening(f"{listen}:0")
    server.start()
    for host in REACHED_AT[listen]:
        with socket.create_connection((host, server.port), timeout=10) as client:
            client.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 204")
