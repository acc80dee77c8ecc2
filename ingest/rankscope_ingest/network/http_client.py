"""HTTP clients with which the service sends requests to ranks and exporters.

The clients connect only to allowed networks and do not use redirects, proxies or cookies. Addresses are checked at
registration, and again whenever a name is resolved: otherwise, a name could resolve to a forbidden address after it was
accepted. `record_channel.client` sends the requests to ranks. The token of the service is never sent to exporters.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import socket
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from rankscope_contract import __version__
from rankscope_contract.wire.tls import HUNG_UP, MakeContext
from rankscope_ingest.base.addresses import Address, address_of
from rankscope_ingest.base.config import Network
from rankscope_ingest.base.errors import FetchError, RegistrationError
from rankscope_ingest.base.tls import tls_trouble

KEEPALIVE_SECONDS: Final = 120.0
"""Time in seconds after which an idle connection is closed.

Most targets are requested at shorter intervals, so that their connections remain open.
"""

_CONNECT_SECONDS: Final = 5.0

TEXT: Final = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
JSON: Final = "application/json"
_GZIP: Final = 31  # wbits of zlib for data with a gzip header


def parse_target_url(url: str) -> tuple[str, int]:
    """Return host and port of the URL that a rank advertises.

    Raises RegistrationError with status 400 unless the URL has the form http://host:port or https://host:port.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
    if parts.scheme not in {"http", "https"} or not host or not port or extra:
        raise RegistrationError(
            400, f"url {url!r} is not of the form http://host:port: advertise an address of this form"
        )
    return host, port


def check_allowed(url: str, addresses: Iterable[Address], networks: Sequence[Network]) -> None:
    """Raise RegistrationError with status 403 if any of `addresses` is outside `networks`.

    The message names the setting that allows further networks.
    """
    for address in addresses:
        if not is_allowed(address, networks):
            allowed = ", ".join(map(str, networks)) or "none"
            raise RegistrationError(
                403,
                f"{url} is at {address}, outside [service] allowed_networks ({allowed}): "
                "add its network to the service's configuration, or let the rank advertise another address",
            )


def is_allowed(address: Address, networks: Sequence[Network]) -> bool:
    """Return whether `address` is in one of the networks. An empty list of networks allows no address."""
    return any(address.version == network.version and address in network for network in networks)


class ForbiddenAddressError(OSError):
    """Raised when a host name resolves only to addresses outside the allowed networks."""


class AllowedResolver(AbstractResolver):
    """Resolves host names with the resolver of the system, and returns only addresses in the allowed networks."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks
        self._system = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the allowed addresses of `host`.

        Raises OSError if the name cannot be resolved, and ForbiddenAddressError if none of its addresses is allowed.
        """
        found = await self._system.resolve(host, port, family)
        allowed = [result for result in found if self._permits(result["host"])]
        if found and not allowed:
            raise ForbiddenAddressError(
                f"{host} resolves to an address outside [service] allowed_networks: add its network there"
            )
        return allowed

    async def addresses(self, host: str) -> list[Address]:
        """Return all addresses of `host`, which is a name or an address.

        Raises OSError if the name cannot be resolved.
        """
        if (address := address_of(host)) is not None:
            return [address]
        results = await self._system.resolve(host, 0, socket.AF_UNSPEC)
        return [address for result in results if (address := address_of(result["host"])) is not None]

    async def close(self) -> None:
        """Do nothing, because the resolver holds no resources."""

    def _permits(self, text: str) -> bool:
        address = address_of(text)
        return address is not None and is_allowed(address, self._networks)


class HttpClient:
    """A pool of HTTP connections to hosts in the allowed networks, for use with `async with`.

    `tls` returns the TLS context for HTTPS. `server_name`, if set, is the name for which certificates must be valid,
    instead of the host name in the URL.
    """

    def __init__(
        self,
        *,
        networks: Sequence[Network],
        tls: MakeContext | None = None,
        server_name: str | None = None,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
    ) -> None:
        self.resolver = AllowedResolver(networks)
        self._networks = networks
        self._tls = tls
        self._server_name = server_name
        self._keepalive_seconds = keepalive_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No limit of connections: a slow host must not keep requests to other hosts waiting.
        connector = aiohttp.TCPConnector(
            limit=0, resolver=self.resolver, use_dns_cache=False, keepalive_timeout=self._keepalive_seconds
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"User-Agent": f"Rankscope/{__version__}"},  # a rank reports which service reads it
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        timeout_seconds: float,
        query: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the response; the caller reads the body within the `async with` block.

        The time limit includes reading the body. User name and password in `url` are sent as basic authentication.
        Raises FetchError if the address is not allowed, the request fails, or the time limit is exceeded.
        """
        assert self._session is not None, "use `async with`"
        target, address = split_url(url)
        if address is not None and not is_allowed(address, self._networks):
            raise FetchError("forbidden", f"{target.host} is outside [service] allowed_networks")
        if target.user is not None:
            pair = f"{target.user}:{target.password or ''}".encode()
            headers = {**headers, "Authorization": f"Basic {base64.b64encode(pair).decode()}"}
            target = target.with_user(None)
        options: dict[str, Any] = {}
        if target.scheme == "https" and self._tls is not None:
            options |= {"ssl": self._tls(), "server_hostname": self._server_name}
        try:
            response = await self._session.request(
                method,
                target if query is None else target.with_query(query),
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_seconds, connect=min(_CONNECT_SECONDS, timeout_seconds)),
                **options,
            )
            try:
                yield response
            except BaseException:
                response.close()  # a connection with an unread rest must not be used again
                raise
            response.release()
        except Exception as error:
            if (failure := _fetch_error(error, url)) is not None:
                raise failure from error
            raise


@functools.lru_cache(maxsize=4096)
def split_url(url: str) -> tuple[URL, Address | None]:
    """Return the parsed URL and the IP address in it; None instead of the address if the host is a name.

    The result is cached, because the same URLs are polled repeatedly.
    """
    target = URL(url)
    return target, address_of(target.host or "")


def _fetch_error(error: Exception, url: str) -> FetchError | None:
    """Return an exception of aiohttp or of the system as a FetchError; None for any other exception."""
    if (trouble := tls_trouble(error)) is not None:
        return FetchError("tls", f"{url}: {trouble}")
    match error:
        case FetchError():
            return None
        case TimeoutError():
            return FetchError("timeout", f"{url}: timed out")
        case aiohttp.ClientConnectorError(os_error=ForbiddenAddressError() as forbidden):
            return FetchError("forbidden", str(forbidden))
        case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            return FetchError("refused", f"connection refused: {url}")
        case aiohttp.ClientPayloadError():
            return FetchError("cut", f"{url}: the connection was closed in the middle of the response body")
        case aiohttp.ServerDisconnectedError() if url.startswith("https:"):
            return FetchError("tls", f"{url}: {HUNG_UP}")
        case aiohttp.ClientError() | OSError() | ValueError():
            return FetchError("connection", f"{url}: {error or type(error).__name__}")
    return None


class PageFetcher(HttpClient):
    """HTTP client for exporters and for services that list exporters."""

    async def get(self, url: str, *, accept: str, timeout_seconds: float, max_bytes: int) -> tuple[bytes, str]:
        """Return the decompressed document at `url`, and its content type.

        Raises FetchError if the request fails, or if the document has more than `max_bytes` bytes after decompression.
        """
        address = split_url(url)[1]
        headers = {
            "Accept": accept,
            # On loopback, compression costs CPU time and saves nothing.
            "Accept-Encoding": "identity" if address is not None and address.is_loopback else "gzip",
            "X-Prometheus-Scrape-Timeout-Seconds": f"{timeout_seconds:g}",
        }
        async with self.request("GET", url, headers=headers, timeout_seconds=timeout_seconds) as response:
            if 300 <= response.status < 400:
                raise FetchError("redirect", f"status {response.status}: redirects are not followed")
            if response.status != 200:
                raise FetchError("status", f"status {response.status}")
            data = await _body(response, max_bytes)
            return _decompressed(data, response, max_bytes), response.content_type


async def _body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of `response` without decompressing it.

    A body without Content-Length ends with its last chunk, or when the connection is closed. Raises FetchError if the
    body has more than `max_bytes` bytes.
    """
    if (response.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    if response.content_length is not None:
        return await response.read()
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(data)


def _decompressed(data: bytes, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity":
        return data
    if encoding != "gzip":
        raise FetchError("garbage", f"the response has Content-Encoding {encoding!r}, which was not requested")
    stream = zlib.decompressobj(_GZIP)
    try:
        body = stream.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise FetchError("garbage", f"the response is not valid gzip: {error}") from error
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    if not stream.eof:
        raise FetchError("cut", "the response ends in the middle of its gzip stream")
    return body


def _too_large(max_bytes: int) -> FetchError:
    return FetchError(
        "garbage", f"the response is larger than {max_bytes} bytes: raise max_bytes of the exporter if this is expected"
    )
