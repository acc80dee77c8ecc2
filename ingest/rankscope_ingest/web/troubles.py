"""What went wrong with an answer, in our words, whichever library was asked for it."""

from __future__ import annotations

import http.client

import aiohttp

from rankscope_contract.tls import HUNG_UP
from rankscope_ingest.errors import FetchError
from rankscope_ingest.web.tls import tls_trouble


def fetch_error(error: BaseException | None, url: str) -> FetchError | None:
    """Return what aiohttp, http.client or the system raised as the failure of `url`; None when it is none of theirs."""
    if (trouble := tls_trouble(error)) is not None:
        return FetchError("tls", f"{url}: {trouble}")
    match error:
        case TimeoutError():
            return FetchError("timeout", f"{url} did not answer in time")
        case ConnectionRefusedError() | aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            return FetchError("refused", f"nobody listens at {url}")
        case http.client.IncompleteRead() | aiohttp.ClientPayloadError():
            return FetchError("cut", f"{url} broke off in the middle of a body")
        case http.client.RemoteDisconnected() | aiohttp.ServerDisconnectedError() if url.startswith("https:"):
            return FetchError("tls", f"{url}: {HUNG_UP}")
        case http.client.HTTPException() | aiohttp.ClientError() | OSError() | ValueError():
            return FetchError("connection", f"{url}: {error or type(error).__name__}")
    return None
