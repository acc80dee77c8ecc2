"""The HTTP client for pages, with real sockets: connections, limits, bad responses, TLS."""

import asyncio
import gzip
import ipaddress

import pytest

from rankscope_contract.wire.tls import TlsServer, client_context, server_context
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.network.http_client import TEXT, PageFetcher

LOOPBACK = [ipaddress.ip_network("127.0.0.0/8")]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"


class Answering:
    """A server of raw bytes. `answer(writer, number)` is called for each request; the first number is 0."""

    def __init__(self, answer, tls=None):
        self._answer, self._tls = answer, tls
        self.connections, self.requests, self._closed = 0, [], asyncio.Semaphore(0)

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def closed(self, times):
        """Return after clients have closed `times` connections."""
        async with asyncio.timeout(5):
            for _ in range(times):
                await self._closed.acquire()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
                if await self._answer(writer, len(self.requests) - 1):
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self._closed.release()
        finally:
            writer.close()


def complete(body, head=b""):
    async def answer(writer, _):
        writer.write(OK + head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    return answer


def raw(data, *, ends=True):
    async def answer(writer, _):
        writer.write(data)
        return ends

    return answer


async def get(url, *, seconds=5.0, most=1000, networks=LOOPBACK, **more):
    async with PageFetcher(networks=networks, **more) as fetcher:
        return await fetcher.get(url, accept=TEXT, timeout_seconds=seconds, max_bytes=most)


async def failure(answer, **more):
    async with Answering(answer) as server:
        with pytest.raises(FetchError) as caught:
            await get(f"http://127.0.0.1:{server.port}/metrics", **more)
    return caught.value.reason


async def test_connection_is_reused_and_replaced_after_the_server_closed_it():
    async def answer(writer, number):
        writer.write(OK + b"Content-Length: 1\r\n\r\n%d" % number)
        return number == 1  # without a Connection: close header

    async with Answering(answer) as server, PageFetcher(networks=LOOPBACK) as fetcher:
        url = f"http://127.0.0.1:{server.port}/metrics?a=b%20c"
        pages = [await fetcher.get(url, accept=TEXT, timeout_seconds=5, max_bytes=10) for _ in range(4)]

    assert ([b"0", b"1", b"2", b"3"], 2) == ([body for body, _ in pages], server.connections)
    lines = server.requests[0].split("\r\n")
    assert ["GET /metrics?a=b%20c HTTP/1.1", f"Host: 127.0.0.1:{server.port}"] == lines[:2]
    assert {f"Accept: {TEXT}", "Accept-Encoding: identity", "X-Prometheus-Scrape-Timeout-Seconds: 5"} < set(lines)


async def test_idle_connection_is_closed():
    """Targets change over months; connections to removed targets must not accumulate."""
    fetcher = PageFetcher(networks=LOOPBACK, keepalive_seconds=0.1)
    async with Answering(complete(b"a 1\n")) as server, fetcher:
        url = f"http://127.0.0.1:{server.port}/metrics"
        await asyncio.gather(*(fetcher.get(url, accept=TEXT, timeout_seconds=5, max_bytes=10) for _ in range(2)))
        await server.closed(2)
        assert b"a 1\n" == (await fetcher.get(url, accept=TEXT, timeout_seconds=5, max_bytes=10))[0]

    assert 3 == server.connections


PACKED = gzip.compress(b"a 1\n")
GOOD = {
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\na 1\r\n1\r\n\n\r\n0\r\n\r\n", False),
    "end of the connection": (OK + b"Connection: close\r\n\r\na 1\n", True),
    "gzip": (OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(PACKED), PACKED), False),
}


@pytest.mark.parametrize("name", GOOD)
async def test_page_may_have_any_encoding_and_the_url_has_the_login(name):
    data, ends = GOOD[name]
    async with Answering(raw(data, ends=ends)) as server:
        page = await get(f"http://me:se%20cret@127.0.0.1:{server.port}/metrics")

    assert (b"a 1\n", "text/plain") == page
    assert "Authorization: Basic bWU6c2UgY3JldA==" in server.requests[0].split("\r\n")


CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n"
BAD = {
    "an error": (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "status"),
    "a redirect": (b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n", "redirect"),
    "too long by its length": (OK + b"Content-Length: 1001\r\n\r\n", "garbage"),
    "too long in chunks": (OK + CHUNKS + b"200\r\n" + b"x" * 512 + b"\r\n200\r\n" + b"x" * 512 + b"\r\n", "garbage"),
    "too long without a length": (OK + b"Connection: close\r\n\r\n" + b"x" * 1001, "garbage"),
    "shorter than its length": (OK + b"Content-Length: 9\r\n\r\na 1\n", "cut"),
    "chunks without an end": (OK + CHUNKS + b"4\r\na 1\n\r\n", "cut"),
    "a chunk that is shorter than it says": (OK + CHUNKS + b"9\r\na 1\n", "cut"),
    "no HTTP": (b"\x00\x01\x02\r\n\r\n", "connection"),
    "nothing": (b"", "connection"),
    "a header without end": (OK + b"X: " + b"x" * 70_000, "connection"),
    "packed as never asked for": (OK + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\nx", "garbage"),
    "not packed as it says": (OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nxyz", "garbage"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_response_raises_fetch_error_with_its_reason(name):
    data, reason = BAD[name]

    assert reason == await failure(raw(data))


async def test_decompression_bomb_is_rejected():
    packed = gzip.compress(bytes(10_000_000))

    assert "garbage" == await failure(complete(packed, b"Content-Encoding: gzip\r\n"), most=100_000)
    assert "cut" == await failure(complete(packed[:100], b"Content-Encoding: gzip\r\n"), most=100_000_000)


@pytest.mark.parametrize("head", [b"", OK, OK + b"Content-Length: 500\r\n\r\nX"], ids=["nothing", "headers", "a body"])
async def test_incomplete_response_times_out_and_closes_the_connection(head):
    async with Answering(raw(head, ends=False)) as server:
        with pytest.raises(FetchError, match="timed out") as caught:
            await get(f"http://127.0.0.1:{server.port}/metrics", seconds=0.2)
        await server.closed(1)

    assert "timeout" == caught.value.reason


async def test_cancelled_request_closes_its_connection():
    """A target that is removed from its list during a scrape keeps no connection."""
    asked = asyncio.Event()

    async def answer(*_):
        asked.set()

    async with Answering(answer) as server, PageFetcher(networks=LOOPBACK) as fetcher:
        url = f"http://127.0.0.1:{server.port}/metrics"
        waiting = asyncio.create_task(fetcher.get(url, accept=TEXT, timeout_seconds=60, max_bytes=10))
        await asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await server.closed(1)


async def test_forbidden_address_is_not_connected_to(monkeypatch):
    async with Answering(complete(b"a 1\n")) as server:
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(FetchError, match=r"outside .service. allowed_networks") as caught:
                await get(f"http://{host}:{server.port}/", networks=[ipaddress.ip_network("10.0.0.0/8")])
            assert "forbidden" == caught.value.reason
        assert b"a 1\n" == (await get(f"http://localhost:{server.port}/", networks=LOOPBACK))[0]

    assert 1 == server.connections


@pytest.mark.parametrize(
    ("cert", "why"),
    [
        *(("server", None), ("stranger", "its certificate is not signed by a trusted CA")),
        *(("elsewhere", "its certificate is for another name"), ("expired", "its certificate has expired")),
    ],
)
async def test_tls_certificate_is_verified_against_the_ca(certificates, cert, why):
    shown = server_context(TlsServer(cert_file=certificates.cert(cert), key_file=certificates.key(cert)))
    trusted = client_context(certificates.ca, None, None)
    async with (
        Answering(complete(b"a 1\n"), shown) as server,
        PageFetcher(networks=LOOPBACK, tls=lambda: trusted) as fetcher,
    ):
        for _ in range(2):
            asked = fetcher.get(f"https://127.0.0.1:{server.port}/", accept=TEXT, timeout_seconds=5, max_bytes=99)
            if why is None:
                assert b"a 1\n" == (await asked)[0]
                continue
            with pytest.raises(FetchError, match=why) as caught:
                await asked
            assert "tls" == caught.value.reason

    assert why is not None or server.connections == 1


async def test_closed_port_and_plain_text_in_response_to_tls_are_reported(free_port):
    async def plain(_, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        with pytest.raises(FetchError, match="it does not use TLS") as caught:
            await get(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    with pytest.raises(FetchError) as refused:
        await get(f"http://127.0.0.1:{free_port}/metrics")

    assert ("tls", "refused") == (caught.value.reason, refused.value.reason)
