"""The HTTP server, plain and with TLS: wrong requests, slow clients, tokens, certificates, and its list of clients."""

import contextlib
import http.client
import json
import logging
import os
import shutil
import socket
import ssl
import threading
import time
import urllib.request
from typing import Any

import pytest

from rankscope_contract.wire.tls import TlsServer, client_context, server_context
from rankscope_exporter.process.errors import ConfigError
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.publish import http_server
from rankscope_exporter.publish.http_server import Answer, HttpServer, open_server
from rankscope_exporter.publish.registration import RefusedError, ServiceClient, UnreachableError
from rankscope_exporter.publish.routes import MOST_CLIENTS, RankServerSources, RecentClients
from rankscope_exporter.publish.serving_config import Address, ServeConfig, ServeError, client_tls, server_tls


def listening(host, port):
    return HttpServer(Address(host, port), lambda _: Answer(204), on_fault=print, meter=CpuMeter())


def _connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def _say(server, raw):
    with _connect(server) as client:
        client.sendall(raw)
        return _read_all(client)


def _read_all(client):
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := client.recv(65536):
            received += chunk
    return received


INVALID = [
    *((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"), (b"\x00" * 200 + b"\r\n", b"400")),
    *((b"\xff\xfe\r\n\r\n", b"400"), (b"GARBAGE\r\n\r\n", b"400"), (b"GET /metrics\r\n\r\n", b"400")),
    *((b"GET /metrics HTTP/x.y\r\n\r\n", b"400"), (b"GET / HTTP/3.0\r\n\r\n", b"505")),
    *((b"BREW /pot HTTP/1.1\r\n\r\n", b"501"), (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414")),
    (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 200 + b"\r\n", b"431"),
    (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
    (b"GET http://[ HTTP/1.1\r\nConnection: close\r\n\r\n", b"400"),
    (b"GET /?" + b"a=1&" * 100 + b" HTTP/1.1\r\nConnection: close\r\n\r\n", b"400"),
]


def test_invalid_request_is_refused_without_traceback(new_server, capfd):
    server = new_server()
    for raw, status in INVALID:
        answer = _say(server, raw)
        assert answer.startswith(b"HTTP/1.1 " + status), raw[:50]
        assert b"\r\nContent-Length: " in answer

    assert b"/ok {}" in _say(server, b"GET /ok HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert ("", "") == capfd.readouterr()
    assert [] == server.faults


def test_path_and_query_are_decoded_and_the_connection_is_kept_alive(new_server):
    connection = http.client.HTTPConnection("127.0.0.1", new_server().port, timeout=10)
    ports = set()
    for _ in range(3):
        connection.request("GET", "/a%20b?x=%C3%BC&x=2&y=")
        assert b"/a b {'x': '2', 'y': ''}\n" == connection.getresponse().read()
        ports.add(connection.sock.getsockname()[1])
    connection.close()

    assert 1 == len(ports)


def test_body_of_a_get_is_not_read_as_a_request(new_server):
    smuggled = b"GET /inner HTTP/1.1\r\n\r\n"
    answer = _say(new_server(), b"GET /outer HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(smuggled) + smuggled)

    assert 1 == answer.count(b"HTTP/1.1")
    assert b"/inner" not in answer


def test_application_error_is_reported_and_answered_with_500(new_server, capfd):
    server = new_server(lambda _: 1 / 0)

    assert _say(server, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 500")
    assert [ZeroDivisionError] == [type(error) for error in server.faults]
    assert ("", "") == capfd.readouterr()


def test_disconnected_client_is_not_a_fault(new_server, until, capfd):
    begun, go_on = threading.Event(), threading.Event()

    def slow(_):
        begun.set()
        go_on.wait(10)
        return Answer(200, (b"x" * 10_000_000,))

    server = new_server(slow)
    client = _connect(server)
    client.sendall(b"GET / HTTP/1.1\r\n\r\n")
    begun.wait(10)
    client.close()
    go_on.set()
    until(lambda: not server._deadlines)

    assert [] == server.faults
    assert ("", "") == capfd.readouterr()


def test_silent_client_and_half_a_body_are_disconnected(new_server):
    server = new_server(client_seconds=0.2)

    assert b"" == _say(server, b"")
    assert b"" == _say(server, b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc")


def test_slow_client_is_disconnected(new_server, until):
    """Each byte would restart a socket timeout; the limit applies to the whole head."""
    server = new_server(head_seconds=0.3)
    with _connect(server) as client:
        until(lambda: server._deadlines)

        def drip():
            with contextlib.suppress(OSError):
                client.sendall(b"G")
            return not server._deadlines

        until(drip)


def test_slow_body_and_slow_answer_have_no_limit_in_total(new_server, monkeypatch):
    monkeypatch.setattr(http_server, "_SWEEP_SECONDS", 0.05)
    server = new_server(lambda request: time.sleep(0.6) or Answer(200, (request.body,)), client_seconds=0.4)
    with _connect(server) as client:
        client.sendall(b"POST / HTTP/1.1\r\nContent-Length: 4\r\nConnection: close\r\n\r\n")
        for byte in (b"a", b"b", b"c", b"d"):
            time.sleep(0.15)
            client.sendall(byte)
        answer = _read_all(client)

    assert answer.endswith(b"\r\n\r\nabcd")


def test_client_that_does_not_read_is_disconnected(new_server, until):
    server = new_server(lambda _: Answer(200, (b"x" * 50_000_000,)), client_seconds=0.3)
    with _connect(server) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: server._deadlines)
        until(lambda: not server._deadlines)

    assert [] == server.faults


def test_connection_above_the_limit_gets_429(new_server, until):
    server = new_server(max_connections=2)
    with _connect(server), _connect(server):
        until(lambda: len(server._deadlines) == 2)
        refused = _say(server, b"GET / HTTP/1.1\r\n\r\n")

    assert refused.startswith(b"HTTP/1.1 429")
    assert b"\r\nRetry-After: 1\r\n" in refused

    until(lambda: not server._deadlines)

    assert b"200" in _say(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")


def test_cpu_time_of_handlers_is_counted(new_server, until):
    server = new_server(lambda _: Answer.text(200, str(sum(range(2_000_000)))))
    _say(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")

    assert until(lambda: server.meter.totals().get("http", 0.0) > 0.005)


def test_address_that_cannot_be_used_is_refused_with_the_fix(new_server):
    port = new_server().port
    with pytest.raises(ServeError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use; use port 0"):
        listening("127.0.0.1", port)
    with pytest.raises(ServeError, match=r"cannot listen on 192.0.2.1:0: .*assign"):
        listening("192.0.2.1", 0)


@pytest.mark.thorough
@pytest.mark.parametrize("is_tls", [False, True])
def test_client_that_reads_slowly_gets_the_whole_answer(new_server, certificates, is_tls, monkeypatch):
    """A megabyte of the answer takes twice the time limit, which counts from the last accepted bytes."""
    monkeypatch.setattr(http_server, "_SWEEP_SECONDS", 0.05)
    body = os.urandom(6_000_000)  # more than the buffers of the sockets
    tls = TlsServer(cert_file=certificates.cert("server"), key_file=certificates.key("server")) if is_tls else None
    settings = {} if tls is None else {"tls": lambda: server_context(tls)}
    server = new_server(lambda _: Answer(200, (body,)), client_seconds=0.5, **settings)
    size = 0
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        plain.settimeout(10)
        plain.connect(("127.0.0.1", server.port))
        trusted = ssl.create_default_context(cafile=certificates.ca)
        with trusted.wrap_socket(plain, server_hostname="localhost") if is_tls else plain as client:
            client.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            begun_at = time.monotonic()
            with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
                while chunk := client.recv(8192):
                    size += len(chunk)
                    time.sleep(max(0.0, begun_at + size / 1_000_000 - time.monotonic()))

    assert size > len(body)


RIGHT = {"Authorization": "Bearer secret"}


@pytest.fixture
def guarded(new_rank):
    """Return a rank with a token and with sampling that can be changed."""
    changes: list[Any] = []

    def change(document: Any) -> None:
        if "quantities" not in document:
            raise ConfigError("unknown setting. Did you mean quantities?")
        changes.append(document)

    sources = RankServerSources(change_sampling=change, sampling_state=lambda: {"since_step": 7, "to_come": changes})
    return new_rank(token="secret", sources=sources)


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_valid_document_changes_the_sampling(guarded, method):
    got = guarded.get("/config", method, b'{"quantities": ["gradients"]}', **RIGHT)
    state = {"since_step": 7, "to_come": [{"quantities": ["gradients"]}]}

    assert (202, state) == (got.status, json.loads(got.body))
    assert state == json.loads(guarded.get("/config", **RIGHT).body)["measuring"]


INVALID_CHANGES = {
    b"{": "not a JSON document",
    b"[" * 5000: "not a JSON document",
    b"\xff": "not a JSON document",
    b"[]": "a JSON object of settings",
    b'{"quantitis": []}': "Did you mean quantities",
    b" " * 70_000: "longer than 64 KiB",
}


def test_invalid_document_is_refused_with_the_reason(guarded):
    for body, reason in INVALID_CHANGES.items():
        got = guarded.get("/config", "PUT", body, **RIGHT)
        assert (400, True) == (got.status, reason in got.text), reason


def test_length_of_5000_digits_is_too_long_and_no_fault(guarded):
    got = guarded.get("/config", "PUT", b"x" * 70_000, Content_Length="9" * 5000, **RIGHT)

    assert (400, True) == (got.status, "longer than 64 KiB" in got.text)
    assert [] == guarded.faults


def test_rank_without_a_session_answers_503(new_rank):
    rank = new_rank(token="secret")

    assert 503 == rank.get("/config", "PUT", b'{"quantities": []}', **RIGHT).status
    assert 503 == rank.get("/stacks", "POST", **RIGHT).status


def must_not_be_called(*_: object) -> dict[str, object]:
    pytest.fail("stacks were taken, or the sampling was changed")


def test_stacks_are_sent_for_the_right_token(new_rank):
    stacks = {"rank": 0, "stacks": {"threads": []}, "loss": "ünïcode"}
    rank = new_rank(token="secret", sources=RankServerSources(take_stacks=lambda: stacks))
    got = rank.get("/stacks", "POST", b"{}", Authorization="Bearer secret")

    shown = (got.status, got.headers["Content-Type"], got.headers["Cache-Control"])
    assert (200, "application/json", "no-store") == shown
    assert "ünïcode" == json.loads(got.body)["loss"]


def test_request_without_the_right_token_takes_no_stacks_and_changes_nothing(new_rank):
    """Without a token, a rank sends stacks on loopback only."""
    never = RankServerSources(take_stacks=must_not_be_called, change_sampling=must_not_be_called)
    guarded, other = new_rank(token="secret", sources=never), new_rank(sources=never, listen="0.0.0.0:0", insecure=True)
    rank = new_rank(sources=RankServerSources(take_stacks=lambda: {"rank": 0}, change_sampling=must_not_be_called))

    for method, path in (("POST", "/stacks"), ("PUT", "/config")):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            got = guarded.get(path, method, b"{}", **headers)
            assert (401, True) == (got.status, "RANKSCOPE_TOKEN" in got.text)
    for refused in (other.get("/stacks", "POST", b"{}"), rank.get("/config", "PUT", b"{}")):
        assert (403, True) == (refused.status, "set RANKSCOPE_TOKEN" in refused.text)
    assert {"rank": 0} == json.loads(rank.get("/stacks", "POST", b"{}").body)


def test_most_recent_client_is_first_and_names_are_limited():
    now = 100.0
    readers = RecentClients(lambda: now)
    readers.note("/metrics", "Prometheus/2.42.0")
    readers.note("/config", "curl")  # only the pages with records are listed
    now = 101.0
    readers.note("/records", "Rankscope/1")
    readers.note("/plan/1", "curl")
    now = 102.5
    readers.note("/metrics", "Prometheus/2.42.0")
    now = 103.0

    assert [
        {"page": "/metrics", "by": "Prometheus/2.42.0", "seconds_ago": 0.5},
        {"page": "/records", "by": "Rankscope/1", "seconds_ago": 2.0},
    ] == readers.latest()

    for number in range(1000):
        readers.note("/metrics", f"{number}\x1b[2J{'x' * 1000}")
    assert MOST_CLIENTS == len(readers.latest())
    assert all(reader["by"].isprintable() and len(reader["by"]) <= 80 for reader in readers.latest())
    assert readers.latest()[0]["by"].startswith("999?[2J")


def test_healthz_lists_the_recent_clients(rank):
    request = urllib.request.Request(rank.channel.url + "/metrics", headers={"User-Agent": "Prometheus/2.42.0"})
    urllib.request.urlopen(request, timeout=5).close()
    (reader,) = json.loads(rank.get("/healthz").body)["readers"]

    assert ("/metrics", "Prometheus/2.42.0") == (reader["page"], reader["by"])
    assert reader["seconds_ago"] < 10


@pytest.fixture
def new_tls_server(new_server, certificates, tmp_path):
    """Return a function that starts a server with a certificate and further settings of its web configuration."""
    servers = []

    def make(name="server", *, web=None, **options):
        tls = server_tls(certificates.web_config(tmp_path / "web.json", name, **(web or {})))
        servers.append(new_server(tls=tls, **options))
        return servers[-1]

    yield make
    assert {ZeroDivisionError} >= {type(fault) for server in servers for fault in server.faults}


def asked(server, context):
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=context)
    try:
        connection.request("GET", "/hello")
        return connection.getresponse().read()
    finally:
        connection.close()


@pytest.fixture
def trusting(certificates):
    """Return the TLS context of a client that trusts the CA and has no certificate."""
    return client_context(certificates.ca, None, None)


@pytest.fixture
def mutual(certificates):
    """Return the settings of a server that requires client certificates."""
    return {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(certificates.ca)}


def test_page_and_error_are_served_over_tls(new_tls_server, trusting):
    body = bytes(range(256)) * 20_000
    server = new_tls_server(application=lambda _: 1 / 0)

    assert body == asked(new_tls_server(application=lambda _: Answer(200, (body[:7], body[7:]))), trusting)
    assert b"internal error" in asked(server, trusting)
    assert [ZeroDivisionError] == [type(fault) for fault in server.faults]


def test_only_a_client_certificate_of_the_ca_is_accepted(new_tls_server, mutual, certificates, trusting, caplog, until):
    server = new_tls_server(web=mutual)
    known, stranger = (
        client_context(certificates.ca, certificates.cert(name), certificates.key(name))
        for name in ("client", "stranger")
    )

    assert b"/hello {}\n" == asked(server, known)
    for refused in (trusting, stranger):
        with pytest.raises(OSError):
            asked(server, refused)
    until(lambda: len(caplog.records) >= 2)
    assert "TLS handshake with 127.0.0.1 failed: it sent no client certificate" in caplog.text
    assert "its client certificate is not signed by a trusted CA" in caplog.text


def test_plain_http_to_a_tls_port_is_reported_on_both_sides(new_tls_server, caplog, until):
    with socket.create_connection(("127.0.0.1", new_tls_server().port), timeout=10) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: rank\r\n\r\n")
        answer = client.recv(65536)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"this port speaks TLS: write https://" in answer
    assert until(lambda: "it sent plain HTTP to a TLS port: use https:// in its configuration" in caplog.text)


def test_client_that_does_not_trust_the_rank_is_logged_once(new_tls_server, certificates, caplog, until):
    server = new_tls_server()
    for _ in range(3):
        with pytest.raises(ssl.SSLCertVerificationError):
            asked(server, client_context(certificates.other_ca, None, None))
    until(lambda: not server._deadlines)

    text = "TLS handshake with 127.0.0.1 failed: it does not trust our certificate: set its ca_file to our CA"
    assert [text] == [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_old_tls_version_is_refused(new_tls_server, trusting):
    trusting.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        asked(new_tls_server(web={"min_version": "TLS13"}), trusting)


def test_clients_that_stall_in_the_handshake_block_no_other(new_tls_server, trusting, until):
    """Each sends nothing, or half of a client hello, as a port scanner does."""
    server = new_tls_server(client_seconds=1.0)
    with contextlib.ExitStack() as stalled:
        clients = [stalled.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(5)]
        for client in clients[2:]:
            client.sendall(b"\x16\x03\x01\x02\x00\x01")
        until(lambda: len(server._deadlines) == 5)
        assert b"/hello {}\n" == asked(server, trusting)
        still_there = len(server._deadlines)
        until(lambda: not server._deadlines)

    assert still_there >= len(clients)  # the answer did not wait for their timeouts


def test_connections_above_the_limit_close_without_handshake(new_tls_server, trusting, until):
    server = new_tls_server(max_connections=1)
    with socket.create_connection(("127.0.0.1", server.port)):
        until(lambda: len(server._deadlines) == 1)
        with pytest.raises(OSError):
            asked(server, trusting)
    until(lambda: not server._deadlines)

    assert b"/hello {}\n" == asked(server, trusting)


def test_new_certificate_is_used_for_the_next_connection(new_tls_server, certificates, tmp_path, trusting):
    server = new_tls_server("expired")
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        asked(server, trusting)
    certificates.web_config(tmp_path / "fresh.json").replace(tmp_path / "web.json")

    assert b"/hello {}\n" == asked(server, trusting)


def test_files_named_by_a_changed_configuration_are_reloaded(new_tls_server, certificates, tmp_path, trusting):
    server = new_tls_server()
    cert, key = tmp_path / "copy.cert", tmp_path / "copy.key"
    shutil.copy(certificates.cert("server"), cert)
    shutil.copy(certificates.key("server"), key)
    certificates.web_config(tmp_path / "web.json", cert_file=str(cert), key_file=str(key))

    assert b"/hello {}\n" == asked(server, trusting)
    shutil.copy(certificates.cert("expired"), cert)
    shutil.copy(certificates.key("expired"), key)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        asked(server, trusting)


def test_url_and_discovery_file_of_a_rank_with_tls_have_the_scheme(new_rank, certificates, tmp_path, service, until):
    web = str(certificates.web_config(tmp_path / "web.json"))
    rank = new_rank(web_config=web, token="t", ingest_url=service.url)
    until(lambda: service.registrations)
    new_rank(web_config=web, discovery_dir=str(tmp_path / "sd"))
    (entry,) = json.loads(next((tmp_path / "sd").glob("*.json")).read_text())

    assert rank.channel.url == service.registrations[0]["url"]
    assert rank.channel.url.startswith("https://127.0.0.1:")
    assert "https" == entry["labels"]["__scheme__"]


def registering(url, certificates, ca=None, client=None):
    pair = (certificates.cert(client), certificates.key(client)) if client else (None, None)
    context = client_context(ca or certificates.ca, *pair)
    with pytest.raises(UnreachableError) as error:
        ServiceClient(url, None, lambda: context).poke("feedc0de")
    return str(error.value)


WRONG = [
    ("expired", "ca", "its certificate has expired: renew it"),
    ("server", "other_ca", "not signed by a trusted CA"),
    ("elsewhere", "ca", "its certificate is for another name"),
]


@pytest.mark.parametrize(("shown", "ca", "complaint"), WRONG)
def test_wrong_certificate_of_the_service_is_reported(new_tls_server, certificates, shown, ca, complaint):
    text = registering(f"https://127.0.0.1:{new_tls_server(shown).port}", certificates, certificates.cert(ca))

    assert complaint in text
    assert "https://127.0.0.1" in text


def test_missing_client_certificate_or_tls_is_reported(new_tls_server, mutual, certificates, service):
    url = f"https://127.0.0.1:{new_tls_server(web=mutual).port}"

    assert "it requires a client certificate" in registering(url, certificates)
    assert "client cert" in registering(url, certificates, client="stranger")
    text = registering(service.url.replace("http:", "https:"), certificates)
    assert "it does not use TLS: use an http:// address" in text


def test_rank_with_a_client_certificate_registers(new_tls_server, mutual, certificates):
    server = new_tls_server(application=lambda request: Answer.text(403, "received, and refused"), web=mutual)
    files = (certificates.ca, certificates.cert("client"), certificates.key("client"))
    with pytest.raises(RefusedError, match="403: received, and refused"):
        ServiceClient(f"https://localhost:{server.port}", None, client_tls(*map(str, files))).poke("feedc0de")


def test_client_certificates_replace_the_token(certificates, mutual, tmp_path):
    web = certificates.web_config(tmp_path / "open.json")
    with pytest.raises(ServeError, match="RANKSCOPE_TOKEN"):
        ServeConfig(listen="0.0.0.0:0", web_config=str(web))
    guarded = certificates.web_config(tmp_path / "web.json", **mutual)

    assert "https" == ServeConfig(listen="0.0.0.0:0", web_config=str(guarded)).scheme


def test_unusable_web_configuration_is_refused_at_start(certificates, tmp_path):
    basic = tmp_path / "basic.json"
    basic.write_text('{"basic_auth_users": {"me": "$2y$10$abc"}}')
    with pytest.raises(ServeError, match=r"basic_auth_users is not supported.*RANKSCOPE_TOKEN"):
        ServeConfig(web_config=str(basic))
    web = certificates.web_config(tmp_path / "web.json", key_file=str(certificates.key("client")))
    with pytest.raises(ServeError, match="the key belongs to another certificate"):
        open_server(ServeConfig(web_config=str(web)), lambda _: Answer(204), on_fault=lambda *_: None, meter=CpuMeter())
