"""TLS between ranks and service in both directions, with real servers and certificates."""

import asyncio
import contextlib
import dataclasses
import json

import aiohttp
import pytest
from aiohttp import web

from rankscope_contract.wire.tls import TlsServer, client_context, server_context
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.publish.http_server import Answer, HttpServer
from rankscope_exporter.publish.registration import ServiceClient, UnreachableError
from rankscope_exporter.publish.serving_config import Address, server_tls
from rankscope_ingest.base import tls as service_tls
from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.base.errors import ConfigError


def served(certificates, cert, **changes):
    return server_context(TlsServer(cert_file=certificates.cert(cert), key_file=certificates.key(cert), **changes))


@contextlib.asynccontextmanager
async def relay(rank, context, host="127.0.0.1"):
    """Serve the pages of the fake rank at another address, and register this address."""
    runner = web.AppRunner(rank._runner.app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, 0, ssl_context=context).start()
    shown = f"[{host}]" if ":" in host else host
    url = f"http{'s' if context else ''}://{shown}:{runner.addresses[0][1]}"
    rank.registration = dataclasses.replace(rank.registration, url=url)
    try:
        yield rank
    finally:
        await runner.cleanup()


def demanding(certificates):
    return {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(certificates.ca)}


def client_of(certificates, name=None):
    """Return a context that trusts the CA and shows the certificate `name`."""
    pair = (certificates.cert(name), certificates.key(name)) if name else (None, None)
    return client_context(certificates.ca, *pair)


def trusting(certificates, **changes):
    return {"service.ca_file": str(certificates.ca), **changes}


def showing(certificates, name):
    return {"service.cert_file": str(certificates.cert(name)), "service.key_file": str(certificates.key(name))}


# The service dials ranks.


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
async def test_ranks_with_tls_are_polled(start_service, fake_rank, certificates, host):
    context = served(certificates, "server", **demanding(certificates) | {"client_ca_file": certificates.ca})
    settings = trusting(certificates, **showing(certificates, "client"))
    async with fake_rank() as rank, relay(rank, context, host), start_service(**settings) as service:
        await rank.deliver(service, 5)
        discovered = json.loads((await service.get("/sd"))[1])

    assert "https" == discovered[0]["labels"]["__scheme__"]
    assert [rank.registration.url.removeprefix("https://")] == discovered[0]["targets"]


@pytest.fixture
def exporter_server(certificates, tmp_path):
    """Return a function that starts the HTTP server of a real rank, with TLS if a certificate is given."""
    with contextlib.ExitStack() as stack:

        def make(name, **settings):
            shown = {}
            if name is not None:
                shown["tls"] = server_tls(certificates.web_config(tmp_path / "web.json", name, **settings))
            address = Address("127.0.0.1", 0)
            server = HttpServer(address, lambda _: Answer(204), on_fault=lambda *_: None, meter=CpuMeter(), **shown)
            server.start()
            stack.callback(server.stop)
            return server

        yield make


async def last_error(service, eventually):
    async def told():
        return (await service.targets())[0]["last_error"]

    return await eventually(told)


@pytest.mark.usual(3)
@pytest.mark.parametrize(
    ("shown", "client", "complaint"),
    [
        ("expired", None, "its certificate has expired: renew it"),
        ("stranger", None, "its certificate is not signed by a trusted CA"),
        ("elsewhere", None, "its certificate is for another name"),
        (None, None, "it does not use TLS: use an http:// address, or give the server a web_config"),
        ("demanding", None, "client certificate"),
        ("demanding", "stranger", "client certificate"),
    ],
)
async def test_tls_error_is_reported_in_the_state_of_the_target(
    start_service, fake_rank, eventually, certificates, exporter_server, caplog, shown, client, complaint
):
    guarded = demanding(certificates)
    server = exporter_server("server", **guarded) if shown == "demanding" else exporter_server(shown)
    changes = trusting(certificates, **(showing(certificates, client) if client else {}))
    async with fake_rank() as rank, start_service(**changes) as service:
        rank.registration = dataclasses.replace(rank.registration, url=f"https://127.0.0.1:{server.port}")
        await rank.register(service.url)
        error = await last_error(service, eventually)
        page = (await service.get("/metrics"))[1]

    assert complaint in error
    assert rank.registration.url in error
    assert 'rankscope_ingest_scrape_failures_total{reason="tls"} 0.0' not in page
    if shown is not None:
        assert "TLS handshake with 127.0.0.1 failed: " in caplog.text


async def test_plain_http_to_a_rank_with_tls_is_reported(start_service, eventually, exporter_server, fake_rank):
    url = f"http://127.0.0.1:{exporter_server('server').port}"
    async with fake_rank() as rank, start_service() as service:
        rank.registration = dataclasses.replace(rank.registration, url=url)
        await rank.register(service.url)

        assert "this port speaks TLS: write https://" in await last_error(service, eventually)


async def test_server_name_of_the_certificate_can_be_configured(start_service, fake_rank, certificates):
    changes = trusting(certificates, **{"service.server_name": "elsewhere.test"})
    async with fake_rank() as rank, relay(rank, served(certificates, "elsewhere")), start_service(**changes) as service:
        await rank.deliver(service, 1)


# Ranks and readers dial the service.


@pytest.fixture
def web_config(certificates, tmp_path):
    return certificates.web_config(tmp_path / "web.json")


def secured(service, context):
    """Return the status of a request to the service over TLS with `context`."""

    async def get(path="/healthz", **headers):
        async with (
            aiohttp.ClientSession() as session,
            session.get(service.url + path, headers=headers, ssl=context) as response,
        ):
            return response.status, await response.text()

    return get


@pytest.mark.parametrize("listen", ["[::1]:0", "localhost:0"])
async def test_service_listens_with_tls(start_service, certificates, web_config, listen):
    changes = {"service.listen": listen, "service.web_config": str(web_config), "service.token": "t"}
    async with start_service(**changes) as service:
        get = secured(service, client_of(certificates))

        assert service.url.startswith(f"https://{listen.removesuffix('0')}")
        assert (200, '{"status": "ok"}') == await get()
        assert [401, 200] == [(await get("/sd"))[0], (await get("/sd", Authorization="Bearer t"))[0]]


REFUSED = [  # Scheme, certificate of the client, and the texts of the service and of the client
    (
        "http",
        None,
        "it sent plain HTTP to a TLS port: use https:// in its configuration",
        "write https:// in ingest_url",
    ),
    ("https", None, "it sent no client certificate", "client certificate"),
    ("https", "stranger", "its client certificate is not signed by a trusted CA", "client certificate"),
    ("https", "expired", "its client certificate has expired: renew it", "client certificate"),
]


async def test_only_client_certificates_of_the_ca_are_accepted(
    start_service, certificates, tmp_path, caplog, monkeypatch
):
    """Rank and service report each refusal."""
    monkeypatch.setattr(service_tls._Handshake, "_logged", set())
    web_config = certificates.web_config(tmp_path / "web.json", **demanding(certificates))
    async with start_service(**{"service.web_config": str(web_config)}) as service:
        assert 200 == (await secured(service, client_of(certificates, "client"))())[0]
        for scheme, name, told_here, told_there in REFUSED:
            context = client_of(certificates, name)
            client = ServiceClient(service.url.replace("https", scheme), None, lambda context=context: context)
            with pytest.raises(UnreachableError, match=told_there):
                await asyncio.to_thread(client.poke, "nobody")
            assert f"TLS handshake with a client failed: {told_here}" in caplog.text


async def test_new_certificate_is_used_without_a_restart(
    start_service, certificates, tmp_path, eventually, monkeypatch
):
    monkeypatch.setattr(service_tls, "RELOAD_SECONDS", 0.05)
    shown = tmp_path / "web.json"
    certificates.web_config(shown, "expired")
    context = client_of(certificates)
    async with start_service(**{"service.web_config": str(shown)}) as service:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await secured(service, context)()
        certificates.web_config(tmp_path / "broken.json", "server", key_file=str(certificates.ca)).replace(shown)
        await asyncio.sleep(0.2)  # long enough to be looked at: a file that cannot be used changes nothing
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await secured(service, context)()
        certificates.web_config(tmp_path / "fresh.json").replace(shown)

        async def renewed():
            with contextlib.suppress(aiohttp.ClientConnectorCertificateError):
                return (await secured(service, context)())[0]

        assert 200 == await eventually(renewed)


# Settings.


def configured(tmp_path, text):
    path = tmp_path / "service.toml"
    path.write_text(f"[store]\npath='x'\n[service]\n{text}")
    return load_config(path)


def test_path_of_a_token_file_is_relative_to_the_configuration(tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    config = configured(tmp_path, "listen='0.0.0.0:0'\ntoken_file='token'")

    assert "s3cret" == config.token
    assert "s3cret" not in repr(config)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("token='a'\ntoken_file='b'", "token and token_file are both set"),
        ("token_file='nowhere'", "nowhere: No such file"),
        ("token='two words'", "printable ASCII without spaces"),
        ("advertise='0.0.0.0:1'", "is not an address that clients can connect to"),
        ("web_config='nowhere.yml'", "nowhere.yml: No such file"),
        ("web_config='users.yml'", "basic_auth_users is not supported"),
        ("listen='0.0.0.0:0'\nweb_config='open.json'", "can be reached from other machines"),
    ],
)
def test_configuration_error_names_the_fix(tmp_path, certificates, text, complaint):
    (tmp_path / "users.yml").write_text("basic_auth_users: {me: $2y$10$abc}")
    certificates.web_config(tmp_path / "open.json")
    with pytest.raises(ConfigError) as error:
        configured(tmp_path, text)

    assert complaint in str(error.value)


def test_client_certificates_can_replace_a_token(tmp_path, certificates):
    certificates.web_config(tmp_path / "web.json", **demanding(certificates))

    assert "0.0.0.0:0" == configured(tmp_path, "listen='0.0.0.0:0'\nweb_config='web.json'").service.listen


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("ca_file", "no PEM certificate"),
        ("cert_file", "no PEM certificate"),
        ("web_config", "the key belongs to another certificate"),
    ],
)
async def test_unusable_certificate_stops_the_start_before_the_store_exists(
    start_service, certificates, tmp_path, setting, complaint
):
    mismatched = certificates.web_config(tmp_path / "web.json", key_file=str(certificates.key("client")))
    file = mismatched if setting == "web_config" else certificates.key("ca")
    with pytest.raises(ConfigError, match=complaint):
        async with start_service(**{f"service.{setting}": str(file)}):
            pass

    assert not (tmp_path / "store").exists()
