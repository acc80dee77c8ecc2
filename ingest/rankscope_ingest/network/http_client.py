"""HTTP client with which the service sends requests to ranks and exporters.

The client connects only to allowed networks and does not use redirects, proxies or cookies. `record_channel.client` and
`scrape.http` send the requests and check the responses.
"""

from __future__ import annotations

import base64
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
from yarl import URL

from rankscope_contract import __version__
from rankscope_contract.wire.tls import HUNG_UP, MakeContext
from rankscope_ingest.base.addresses import Address, address_of
from rankscope_ingest.base.config import Network
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.base.tls import tls_trouble
from rankscope_ingest.network.dialing import AllowedResolver, ForbiddenAddressError, is_allowed

KEEPALIVE_SECONDS: Final = 120.0
"""Time in seconds after which an idle connection is closed.

Most targets are requested at shorter intervals, so that their connections remain open.
"""

_CONNECT_SECONDS: Final = 5.0


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
                timeout=_timeout(timeout_seconds),
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


@functools.lru_cache(maxsize=256)
def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, connect=min(_CONNECT_SECONDS, seconds))


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
