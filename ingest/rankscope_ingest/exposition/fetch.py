"""GET of a page that is not ours: the same care as with ranks (allowed networks, no redirects, limits), no token.

Our token is for ranks: an exporter of somebody else never sees it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import aiohttp
from yarl import URL

from rankscope_contract import __version__
from rankscope_contract.tls import MakeContext
from rankscope_ingest.channel.fetch import Reading
from rankscope_ingest.config import Network
from rankscope_ingest.errors import FetchError
from rankscope_ingest.web.networks import AllowedResolver, address_of, is_allowed

TEXT: Final = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
JSON: Final = "application/json"
_INLINE_BYTES: Final = 65_536  # less is inflated faster than a thread is woken
_READ_BYTES: Final = 1 << 22  # a page that waits to be read does not stop the reading of the rest
_GZIP: Final = 31  # zlib's word for a gzip header


@dataclass(frozen=True, slots=True)
class Document:
    """A whole answer, inflated."""

    body: bytes
    content_type: str


class PageFetcher:
    """A pool of connections to exporters and to services that list them."""

    def __init__(self, *, networks: Sequence[Network], tls: MakeContext | None = None) -> None:
        self._networks = networks
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        resolver = AllowedResolver(self._networks)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, resolver=resolver, use_dns_cache=False),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"User-Agent": f"Rankscope/{__version__}"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, url: str, *, accept: str, timeout_seconds: float, max_bytes: int) -> Document:
        """Return the answer, of at most `max_bytes` also when inflated. Raises FetchError."""
        assert self._session is not None, "use `async with`"
        target = URL(url)
        address = address_of(target.host or "")
        if address is not None and not is_allowed(address, self._networks):
            raise FetchError("forbidden", f"{target.host} is outside [service] allowed_networks")
        headers = {
            "Accept": accept,
            "Accept-Encoding": "gzip",
            "X-Prometheus-Scrape-Timeout-Seconds": f"{timeout_seconds:g}",
        }
        if address is not None and address.is_loopback:
            headers["Accept-Encoding"] = "identity"  # no line to spare: packing and unpacking is all it would be
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        secured = self._tls() if target.scheme == "https" and self._tls is not None else True
        async with Reading(None, url):
            response = await self._session.get(
                target,
                headers=headers,
                allow_redirects=False,
                timeout=timeout,
                ssl=secured,
                read_bufsize=min(max_bytes, _READ_BYTES),
            )
        async with Reading(response, url):
            return await _document(response, max_bytes)


async def _document(response: aiohttp.ClientResponse, max_bytes: int) -> Document:
    if 300 <= response.status < 400:
        raise FetchError("redirect", f"status {response.status}: redirects are not followed")
    if response.status != 200:
        raise FetchError("status", f"status {response.status}")
    chunks, length = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        length += len(chunk)
        if length > max_bytes:
            raise _too_large(max_bytes)
    body = await _inflated(b"".join(chunks), response.headers.get("Content-Encoding", "identity").lower(), max_bytes)
    return Document(body, response.content_type)


async def _inflated(data: bytes, encoding: str, max_bytes: int) -> bytes:
    if encoding == "identity":
        return data
    if encoding != "gzip":
        raise FetchError("garbage", f"the answer has Content-Encoding {encoding!r}, which was not asked for")
    if len(data) < _INLINE_BYTES:
        return _gunzipped(data, max_bytes)
    return await asyncio.to_thread(_gunzipped, data, max_bytes)


def _gunzipped(data: bytes, max_bytes: int) -> bytes:
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
