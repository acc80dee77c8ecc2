"""Connections of the service: limits of slow and idle ones, addresses, and requests of foreign web pages."""

import asyncio
import contextlib
import dataclasses
import errno
import logging
import resource
import ssl

import aiohttp
import pytest
from aiohttp import web

from rankscope_contract.wire import channel
from rankscope_contract.wire.tls import TlsServer, server_context
from rankscope_ingest.base.addresses import address_of
from rankscope_ingest.base.config import ServiceSection, split_address
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.network import connections
from rankscope_ingest.network.auth import own_names
from rankscope_ingest.network.connections import Limits, accepting, advertised, open_socket
from rankscope_ingest.network.http_client import check_allowed, is_allowed

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HALF_OPEN = {
    "no byte": b"",
    "half a head": b"GET / HTTP/1.1\r\nX-A: ",
    "half a body": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc",
    "a GET without its body": b"GET /wait HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n",
    "half a chunk": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc",
}
READ_PATHS = (channel.HEALTH_PATH, channel.METRICS_PATH, channel.SERVICE_DISCOVERY_PATH)
FAST = Limits(head_seconds=0.1, body_seconds=0.1, sweep_seconds=0.02, most=8)


class Server:
    """An application with a plain answer, one that takes until `go_on` is set, and a stream without an end."""

    def __init__(self):
        self.go_on = asyncio.Event()
        self.clients = []  # asyncio closes a connection of which no writer exists
        self.application = web.Application()
        routes = [web.get("/stream", self.stream), web.post(channel.REGISTER_PATH, self.echo)]
        routes += [web.get(path, self.echo) for path in READ_PATHS]
        routes += [
            kind(path, do) for path, do in (("/", self.echo), ("/wait", self.wait)) for kind in (web.get, web.post)
        ]
        self.application.add_routes(routes)

    @contextlib.asynccontextmanager
    async def running(self, limits, tls=None):
        listening = open_socket("127.0.0.1:0")
        self.port = listening.getsockname()[1]
        async with (
            accepting(self.application, listening, tls, limits=limits, shutdown_seconds=0.1),
            asyncio.timeout(20),
        ):
            yield self

    async def echo(self, request):
        return web.Response(body=b"got " + await request.read())

    async def wait(self, request):
        await self.go_on.wait()
        return await self.echo(request)

    async def stream(self, request):
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await self.go_on.wait()
        await answer.write(b"data: 2\n\n")
        return answer

    async def begin(self, data=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(writer)
        writer.write(data)
        return reader, writer

    async def get(self, request=GET):
        reader, _ = await self.begin(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        return await reader.read()

    async def streams(self, number):
        """Return the readers of `number` new streams, and the head of each answer, one after the other."""
        readers, heads = [], []
        for _ in range(number):
            reader, _ = await self.begin(GET.replace(b"/ ", b"/stream "))
            readers.append(reader)
            heads.append(await reader.readuntil(b"\r\n\r\n"))
        return readers, heads


@pytest.mark.parametrize("part", [name for name in HALF_OPEN if name != "no byte"])
async def test_incomplete_request_is_closed_with_408(part, caplog):
    async with Server().running(FAST) as server:
        reader, _ = await server.begin(HALF_OPEN[part])
        answer = await reader.read()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert [] == [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_requests_that_are_not_http_are_one_line_of_the_log(caplog):
    head = b"GET / HTTP/1.1\r\nHost: a\r\n"
    requests = [
        *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"HELP\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
        *(b"GET / HTTP/9.9\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n"),
        *(head + b"A\x00: b\r\n\r\n", head + b"Content-Length: x\r\n\r\n", head + b"Content-Length: -1\r\n\r\n"),
        *(head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", head + b"X: " + b"a" * 20_000 + b"\r\n\r\n"),
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    ]
    async with Server().running(FAST) as server:
        answers = [await server.get(request) for request in requests * 3]
        assert b" 200 " in (await server.get())

    assert {b"4"} == {answer.split(b" ")[1][:1] for answer in answers if answer}
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "requests that are not valid HTTP are refused: " in record.getMessage()
    assert record.exc_info is None


async def test_head_that_arrives_in_single_bytes_is_closed():
    async with Server().running(FAST) as server:
        reader, writer = await server.begin(HALF_OPEN["half a head"])
        closed = asyncio.create_task(reader.readline())
        while not closed.done():
            writer.write(b"E")
            await asyncio.sleep(0.02)

    assert closed.result().startswith(b"HTTP/1.1 408 ")


async def test_body_that_arrives_in_parts_has_time():
    async with Server().running(Limits(head_seconds=0.05, body_seconds=30.0, sweep_seconds=0.01)) as server:
        reader, writer = await server.begin(HALF_OPEN["half a body"])
        await asyncio.sleep(0.2)
        writer.write(b"defghi")

        assert (await reader.readuntil(b"got abcdefghi")).startswith(b"HTTP/1.1 200 ")


async def test_idle_connection_and_answers_have_no_time_limit():
    async with Server().running(FAST) as server:
        idle, idle_writer = await server.begin(GET)
        await idle.readuntil(b"got ")
        slow, _ = await server.begin(GET.replace(b"/ ", b"/wait "))
        stream, _ = await server.begin(GET.replace(b"/ ", b"/stream "))
        await stream.readuntil(b"data: 1\n\n")
        await asyncio.sleep(0.3)
        idle_writer.write(GET)
        server.go_on.set()

        assert (await idle.readuntil(b"got ")).startswith(b"HTTP/1.1 200 ")
        assert (await slow.readuntil(b"got ")).startswith(b"HTTP/1.1 200 ")
        assert (await stream.readuntil(b"data: 2\n\n")).endswith(b"data: 2\n\n")


async def test_body_that_the_handler_does_not_read_has_no_time_limit():
    size = 16 << 20
    server = Server()
    server.application = web.Application(client_max_size=2 * size)
    server.application.add_routes([web.post("/wait", server.wait)])
    async with server.running(dataclasses.replace(FAST, body_seconds=0.5)):
        reader, writer = await server.begin(b"POST /wait HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        writer.write(bytes(size))
        await asyncio.sleep(0.8)
        server.go_on.set()
        head = await reader.readuntil(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("part", ["no byte", "half a head", "half a body", "half a chunk"])
async def test_others_are_answered_while_all_places_are_half_open(part, caplog):
    async with Server().running(Limits(most=8)) as server:
        held = [await server.begin(HALF_OPEN[part]) for _ in range(30)]
        answers = [await server.get() for _ in range(3)]
        closed = [reader for reader, _ in held if reader.at_eof()]

    assert [b"200"] * 3 == [answer.split()[1] for answer in answers]
    assert 22 <= len(closed)
    assert 1 == sum("connections are open" in record.message for record in caplog.records)


async def test_idle_connections_are_closed_first_and_oldest_first():
    async with Server().running(Limits(most=3)) as server:
        half_open, _ = await server.begin(HALF_OPEN["half a head"])
        await asyncio.sleep(0.01)
        old, _ = await server.begin(GET)
        await old.readuntil(b"got ")
        young, young_writer = await server.begin(GET)
        await young.readuntil(b"got ")
        await server.get()
        assert b"" == await old.read()
        young_writer.write(GET)

        assert (await young.readuntil(b"got ")).startswith(b"HTTP/1.1 200 ")
        assert not half_open.at_eof()


async def test_connection_is_refused_if_all_have_an_answer_under_way(caplog):
    async with Server().running(Limits(most=2)) as server:
        streams, _ = await server.streams(2)
        for stream in streams:
            await stream.readuntil(b"data: 1\n\n")
        refused, _ = await server.begin()
        answer = await refused.read()
        server.go_on.set()

        assert answer.startswith(b"HTTP/1.1 503 ")
        assert [b"data: 2\n\n"] * 2 == [(await stream.readuntil(b"data: 2\n\n"))[-9:] for stream in streams]
    assert "new connections are refused" in caplog.text


@pytest.mark.parametrize("part", ["no byte", "half a body"])
async def test_reserved_paths_are_answered_while_streams_use_all_other_places(part, caplog):
    register = HALF_OPEN["half a body"].replace(b"/ ", b"%s " % channel.REGISTER_PATH.encode()) + b"defghi"
    async with Server().running(Limits(most=8)) as server:
        streams, answers = await server.streams(20)
        for _ in range(10):
            await server.begin(HALF_OPEN[part])
        requests = [*(GET.replace(b"/ ", b"%s " % path.encode()) for path in READ_PATHS), register, GET]
        reserved = [await server.get(request) for request in requests]
        server.go_on.set()
        for stream in streams[:6]:
            await stream.readuntil(b"data: 2\n\n")
        await asyncio.sleep(0)

        assert [b"200"] * 6 + [b"503"] * 14 == [answer.split()[1] for answer in answers]
        assert all(b"\r\nRetry-After: " in answer for answer in answers[6:])
        assert [b"200"] * 4 + [b"503"] == [answer.split()[1] for answer in reserved]
        assert (await server.get()).startswith(b"HTTP/1.1 200 ")
    assert 1 == sum("requests are refused" in record.message for record in caplog.records)


@pytest.mark.parametrize("is_full", [False, True])
async def test_half_of_a_tls_handshake_is_closed(certificates, is_full):
    tls = server_context(TlsServer(cert_file=certificates.cert("server"), key_file=certificates.key("server")))
    limits = Limits(most=3) if is_full else dataclasses.replace(FAST, head_seconds=0.3)
    trusted = ssl.create_default_context(cafile=certificates.ca)
    async with Server().running(limits, tls) as server:
        held = [await server.begin(b"\x16\x03\x01") for _ in range(9)]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusted)
        writer.write(GET)
        answer = await reader.readuntil(b"got ")
        closed = [await reader.read() for reader, _ in held[: 7 if is_full else 9]]

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert {b""} == set(closed)


async def test_failed_accepts_are_logged_once_a_minute(monkeypatch, caplog):
    failures = iter(range(20))
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept

    async def failing(listening):
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", failing)
    monkeypatch.setattr(connections, "_RETRY_SECONDS", 0.001)
    async with Server().running(Limits()) as server:
        answer = await server.get()

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert 1 == sum("cannot be accepted" in record.message for record in caplog.records)


def test_connections_leave_half_of_the_files_to_the_store(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))

    assert 128 == Limits().most


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(((256, 4096), (4096, 4096)), ((1024, resource.RLIM_INFINITY), (65_536, resource.RLIM_INFINITY))),
        *(((256, 256), None), ((100_000, 1 << 20), None), ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None)),
    ],
)
def test_soft_limit_of_files_is_raised_to_the_hard_limit(monkeypatch, before, after):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    connections.raise_file_limit()

    assert ([] if after is None else [after]) == found


# Addresses: IPv4, IPv6 and both, and the advertised one.


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
        *(({"listen": "10.0.0.1:9470"}, "10.0.0.1:9999"), ({"listen": "[::1]:0"}, "[::1]:9999")),
        *(({"listen": "0.0.0.0:0"}, "node-1:9999"), ({"listen": "[::]:0"}, "node-1:9999")),
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


# Without a token, a foreign web page can neither register ranks nor read from the service.

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
