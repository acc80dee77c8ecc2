"""Addresses of ranks: shared port ranges, IPv6, and the advertised address."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.base.errors import ServeError
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.serving.config import Address, ServeConfig
from rankscope_exporter.serving.http_server import Answer, open_server

HOSTS = st.sampled_from(["127.0.0.1", "0.0.0.0", "::1", "::", "fd00::2", "node-7", "::ffff:10.0.0.1"])


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


@given(HOSTS, st.integers(1, 65535), st.none() | st.integers(1, 900))
def test_address_round_trips_through_its_text(host, port, more):
    last = None if more is None else min(65535, port + more)
    written = Address(host, port, None if last == port else last)

    assert written == Address.parse(str(written), what="listen")


@pytest.mark.parametrize(
    ("listen", "fix"),
    [
        ("127.0.0.1:9499-9400", "a port range must ascend"),
        ("127.0.0.1:0-10", "a port range must ascend"),
        ("127.0.0.1:1-60000", "at most 1000 ports"),
        ("::1:9400", "in brackets"),
        ("[::1", "listen"),
        ("[fe80::1%eth0]:9400", "zone"),
    ],
)
def test_invalid_address_is_refused_with_the_fix(listen, fix):
    with pytest.raises(ServeError, match=fix):
        ServeConfig(listen=listen, token="t")


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


@pytest.mark.parametrize(
    ("listen", "reached_at"),
    [
        ("[::1]:0", ["::1"]),
        ("0.0.0.0:0", ["127.0.0.1", "127.0.0.2"]),
        ("[::]:0", ["::1", "127.0.0.1"]),
        ("localhost:0", ["127.0.0.1"]),
        ("[::ffff:127.0.0.1]:0", ["127.0.0.1"]),
    ],
)
def test_wildcard_address_accepts_ipv4_and_ipv6(listening, listen, reached_at):
    server = listening(listen)
    server.start()
    for host in reached_at:
        with socket.create_connection((host, server.port), timeout=10) as client:
            client.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 204")


@pytest.mark.parametrize(
    ("settings", "advertised"),
    [
        ({"listen": "0.0.0.0:4700-4799"}, "node-1:4711"),
        ({"listen": "[::]:4700-4799"}, "node-1:4711"),
        ({"listen": "0.0.0.0:4700-4799", "advertise": "gateway"}, "gateway:4711"),
        ({"listen": "0.0.0.0:4700-4799", "advertise": "gateway:14700-14799"}, "gateway:14711"),
        ({"listen": "0.0.0.0:4711", "advertise": "gateway:80"}, "gateway:80"),
        ({"listen": "[::]:0", "advertise": "[fd00::2]"}, "[fd00::2]:4711"),
    ],
)
def test_advertised_port_is_paired_with_the_bound_port(settings, advertised):
    assert advertised == str(ServeConfig(token="t", **settings).advertised(4711, "node-1"))


@pytest.mark.parametrize("advertise", ["gateway:80", "gateway:14700-14710", "0.0.0.0", "[::]:9400"])
def test_advertise_with_another_number_of_ports_is_refused(advertise):
    with pytest.raises(ServeError, match=r"as many ports as listen has|is not a reachable address"):
        ServeConfig(listen="0.0.0.0:4700-4799", token="t", advertise=advertise)


@pytest.mark.parametrize("listen", ["[::ffff:127.0.0.1]:0", "[::1]:0"])
def test_loopback_is_detected_for_ipv4_and_ipv6(listen):
    assert ServeConfig(listen=listen).address.is_loopback


# The token.


def test_token_file_replaces_token(tmp_path):
    path = tmp_path / "token"
    path.write_text("open-sesame\n")

    assert "open-sesame" == ServeConfig(listen="0.0.0.0:0", token_file=str(path)).secret
    assert "open-sesame" == MonitorConfig().with_environment({"RANKSCOPE_TOKEN_FILE": str(path)}).serve.secret


def test_environment_replaces_token_and_token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("from-file")

    by_file = MonitorConfig(serve=ServeConfig(token_file=str(path)))
    given = by_file.with_environment({"RANKSCOPE_TOKEN": "set-directly"})
    direct = MonitorConfig(serve=ServeConfig(token="set-directly"))
    named = direct.with_environment({"RANKSCOPE_TOKEN_FILE": str(path)})

    assert ("set-directly", "from-file") == (given.serve.secret, named.serve.secret)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"token": "a", "token_file": "x"}, "both set"),
        ({"token_file": "nowhere"}, "token_file nowhere: No such file"),
        ({"cert_file": "nowhere"}, "cert_file nowhere: no such file"),
        ({"key_file": "nowhere"}, "key_file is set without cert_file"),
        ({"node_page": "yes"}, "node_page must be true or false"),
    ],
)
def test_missing_file_is_named(settings, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServeError, match=fix):
        ServeConfig(**settings)


@pytest.mark.parametrize(("text", "fix"), [("", "is empty"), ("\n", "is empty"), ("two words", "without spaces")])
def test_content_of_the_token_file_is_checked(tmp_path, text, fix):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ServeError, match=f"token_file .*{fix}"):
        ServeConfig(token_file=str(path))
