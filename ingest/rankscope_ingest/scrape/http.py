"""Fetch exporter pages and lists of exporters over HTTP. The token of the service is never sent to other programs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

import aiohttp

from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.network.http_client import HttpClient, split_url

TEXT: Final = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
JSON: Final = "application/json"
_GZIP: Final = 31  # wbits of zlib for data with a gzip header


@dataclass(frozen=True, slots=True)
class Document:
    """A complete and decompressed response body."""

    body: bytes
    content_type: str


class PageFetcher(HttpClient):
    """HTTP client for exporters and for services that list exporters."""

    async def get(self, url: str, *, accept: str, timeout_seconds: float, max_bytes: int) -> Document:
        """Return the document at `url`.

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
            return Document(_decompressed(data, response, max_bytes), response.content_type)


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
