"""GET of a page that is not ours: the same care as with ranks (allowed networks, no redirects, limits), no token.

Our token is for ranks: an exporter of somebody else never sees it.

Pages are megabytes, and each is waited for in a thread of its own: from the socket it goes into one piece of memory,
past the event loop and outside the GIL. A page of 1.8 MB costs 1.7 ms CPU so, and 2.4 with aiohttp, which has it in
pieces that are moved twice more; one of 20 kB costs 1.2, and 1.0 (`benchmarks/page_fetch.py`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import socket
import ssl
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

from yarl import URL

from rankscope_contract import __version__
from rankscope_contract.security.tls import MakeContext
from rankscope_ingest.base.config import Network
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.network.dialing import address_of, dial_allowed, fetch_error, is_allowed

T = TypeVar("T")

TEXT: Final = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
JSON: Final = "application/json"
AT_ONCE: Final = 64
"""Answers in memory at one time: together with their greatest size, the bound of it. Others wait for their turn."""
FAILING_AT_ONCE: Final = 32
"""Of those that failed the last time so many more: they may hang, and others need not wait for them."""
_THREADS: Final = 4 * (AT_ONCE + FAILING_AT_ONCE)
"""One that looks up a name or dials cannot be woken, and may outlive the time that its page had."""
KEPT_SECONDS: Final = 120.0
"""A connection that nobody used for so long is closed: most exporters are asked more often, and targets leave."""
_GZIP: Final = 31  # zlib's word for a gzip header
_AGENT: Final = f"Rankscope/{__version__}"


@dataclass(frozen=True, slots=True)
class Document:
    """A whole answer, inflated."""

    body: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a connection leads."""

    scheme: str
    host: str
    port: int


class PageFetcher:
    """Connections to exporters and to services that list them; those that stay open are used again."""

    def __init__(self, *, networks: Sequence[Network], tls: MakeContext | None = None) -> None:
        self._networks = networks
        self._tls = tls or ssl.create_default_context
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rankscope-page")
        self._idle: dict[_Origin, dict[_Connection, asyncio.TimerHandle]] = {}  # with what will close them

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection, closing in [one for idle in self._idle.values() for one in idle.items()]:
            closing.cancel()
            connection.close()
        self._idle.clear()
        # Not waited for: who still asks has been hung up on.
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def get(self, url: str, *, accept: str, timeout_seconds: float, max_bytes: int) -> Document:
        """Return the answer, of at most `max_bytes` also when inflated. Raises FetchError."""
        return await self.get_parsed(
            url, lambda document: document, accept=accept, timeout_seconds=timeout_seconds, max_bytes=max_bytes
        )

    async def get_parsed(
        self, url: str, then: Callable[[Document], T], *, accept: str, timeout_seconds: float, max_bytes: int
    ) -> T:
        """Return what `then`, which must not fail, makes of the answer in the thread that got it. Raises FetchError."""
        target = URL(url)
        origin = _Origin(target.scheme, target.raw_host or "", target.port or 0)
        address = address_of(origin.host)
        if address is not None and not is_allowed(address, self._networks):
            raise FetchError("forbidden", f"{target.host} is outside [service] allowed_networks")
        headers = {
            "Host": target.host_port_subcomponent or "",
            "User-Agent": _AGENT,
            "Accept": accept,
            # To ourselves there is no line to spare: packing and unpacking is all it would be.
            "Accept-Encoding": "identity" if address is not None and address.is_loopback else "gzip",
            "X-Prometheus-Scrape-Timeout-Seconds": f"{timeout_seconds:g}",
            **_credentials(target),
        }
        connection = self._taken(origin)
        connection.timeout = timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                made = await asyncio.get_running_loop().run_in_executor(
                    self._threads, lambda: then(connection.get(target.raw_path_qs, headers, max_bytes))
                )
        except BaseException as error:
            connection.hang_up()
            if (told := fetch_error(error, url)) is not None:
                raise told from error
            raise
        if connection.sock is not None:
            closing = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._close, origin, connection)
            self._idle.setdefault(origin, {})[connection] = closing
        return made

    def _taken(self, origin: _Origin) -> _Connection:
        """Return a connection that is open, or one that is not made yet."""
        idle = self._idle.get(origin)
        if idle is None:
            return _Connection(origin, self._networks, self._tls)
        connection, closing = idle.popitem()
        closing.cancel()
        if not idle:
            del self._idle[origin]
        return connection

    def _close(self, origin: _Origin, connection: _Connection) -> None:
        idle = self._idle[origin]
        del idle[connection]
        if not idle:
            del self._idle[origin]
        connection.close()


class _Connection(http.client.HTTPConnection):
    """One connection, made when it is first needed, and again when the other side has closed it meanwhile.

    It belongs to one thread at a time; any other may hang up on it.
    """

    def __init__(self, origin: _Origin, networks: Sequence[Network], tls: MakeContext) -> None:
        super().__init__(origin.host, origin.port)
        self._origin = origin
        self._networks = networks
        self._tls = tls
        self._lock = threading.Lock()
        self._is_asking = False
        self._is_over = False

    def get(self, path: str, headers: Mapping[str, str], max_bytes: int) -> Document:
        """Ask, and return the whole answer. Raises FetchError, and whatever the system and http.client raise."""
        with self._lock:
            self._is_asking = True
        self._check_wanted()
        try:
            document = self._document(path, headers, max_bytes)
        except BaseException:
            self.close()
            raise
        with self._lock:
            self._is_asking = False
        return document

    def connect(self) -> None:
        """Dial one of the addresses that are allowed. Raises OSError, and FetchError when there are others only."""
        dialled = dial_allowed(self._origin.host, self._origin.port, self._networks, timeout_seconds=self.timeout)
        self._hold(dialled)
        if self._origin.scheme == "https":
            self._hold(self._tls().wrap_socket(dialled, server_hostname=self._origin.host))

    def hang_up(self) -> None:
        """End whatever goes on, from another thread: who waits for bytes there is woken by their end."""
        with self._lock:
            self._is_over = True
            if self.sock is not None:
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
            if not self._is_asking:  # else it is closed where it is used
                self.close()

    def _hold(self, connected: socket.socket) -> None:
        with self._lock:
            self.sock = connected
        self._check_wanted()

    def _document(self, path: str, headers: Mapping[str, str], max_bytes: int) -> Document:
        response = self._answer(path, headers)
        if 300 <= response.status < 400:
            raise FetchError("redirect", f"status {response.status}: redirects are not followed")
        if response.status != 200:
            raise FetchError("status", f"status {response.status}")
        if response.length is not None and response.length > max_bytes:
            raise _too_large(max_bytes)
        # With a length all of it must come; without one, or in chunks, what comes is the answer.
        data = response.read() if response.length is not None else response.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
        response.close()
        return Document(_inflated(data, response.headers, max_bytes), response.headers.get_content_type())

    def _answer(self, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        is_used = self.sock is not None
        try:
            return self._ask(path, headers)
        except (ConnectionError, ssl.SSLEOFError):
            if not is_used or self._is_over:
                raise
        # It had been open for long, and was closed as we asked.
        self.close()
        return self._ask(path, headers)

    def _ask(self, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        if self.sock is not None:
            self.sock.settimeout(self.timeout)
        self.request("GET", path, headers=headers)
        return self.getresponse()

    def _check_wanted(self) -> None:
        if self._is_over:
            raise ConnectionAbortedError("nobody waits for the answer any more")


def _credentials(target: URL) -> dict[str, str]:
    if target.user is None:
        return {}
    pair = f"{target.user}:{target.password or ''}".encode()
    return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}


def _inflated(data: bytes, headers: http.client.HTTPMessage, max_bytes: int) -> bytes:
    encoding = headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity":
        return data
    if encoding != "gzip":
        raise FetchError("garbage", f"the answer has Content-Encoding {encoding!r}, which was not asked for")
    inflate = zlib.decompressobj(_GZIP)
    try:
        body = inflate.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise FetchError("garbage", f"the answer says that it is gzip, and is not: {error}") from error
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    if not inflate.eof:
        raise FetchError("cut", "the answer ends in the middle of its gzip stream")
    return body


def _too_large(max_bytes: int) -> FetchError:
    return FetchError("garbage", f"the answer is larger than {max_bytes} bytes: raise max_bytes if that is right")
