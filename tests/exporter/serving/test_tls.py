"""A rank with TLS: accepted clients, messages for refused clients, and handshakes that do not block others."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import shutil
import socket
import ssl

import pytest

from rankscope_contract.security.tls import client_context
from rankscope_exporter.base.errors import ServeError
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.serving.config import ServeConfig, client_tls, server_tls
from rankscope_exporter.serving.http_server import Answer, open_server
from rankscope_exporter.serving.registration import RefusedError, ServiceClient, UnreachableError


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


# Messages about TLS errors of the service.


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


# Settings.


def test_client_certificates_replace_the_token(certificates, mutual, tmp_path):
    web = certificates.web_config(tmp_path / "open.json")
    with pytest.raises(ServeError, match="RANKSCOPE_TOKEN"):
        ServeConfig(listen="0.0.0.0:0", web_config=str(web))
    guarded = certificates.web_config(tmp_path / "web.json", **mutual)

    assert "https" == ServeConfig(listen="0.0.0.0:0", web_config=str(guarded)).scheme


def test_unusable_web_configuration_is_refused_at_start(certificates, tmp_path):
    basic = tmp_path / "basic.json"
    basic.write_text('{"basic_auth_users": {"me": "$2y$10$abc"}}')
    with pytest.raises(ServeError, match=r"basic_auth_users is not supported on a rank.*RANKSCOPE_TOKEN"):
        ServeConfig(web_config=str(basic))
    web = certificates.web_config(tmp_path / "web.json", key_file=str(certificates.key("client")))
    with pytest.raises(ServeError, match="the key belongs to another certificate"):
        open_server(ServeConfig(web_config=str(web)), lambda _: Answer(204), on_fault=lambda *_: None, meter=CpuMeter())
