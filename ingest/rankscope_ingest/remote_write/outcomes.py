"""Record the outcome of each remote write request with its sender, whichever part of the service refuses the request.

The middleware sees the final response. A request can be refused before its handler runs, for example without a valid
token, and a request to another path has no handler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from rankscope_contract.wire.channel import REMOTE_WRITE_PATH
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.remote_write.senders import Senders
from rankscope_storage.base.service_catalogue import REMOTE_WRITE_REQUESTS

OUTCOME: Final = "remote_write_outcome"
"""Key of a request: the outcome that its handler has counted."""

_VERSION: Final = "X-Prometheus-Remote-Write-Version"
"""Header of all requests of Prometheus and vmagent. It identifies remote write that is sent to a wrong path."""


def recording(senders: Senders, counts: ServiceMetrics) -> Any:
    """Return the outermost middleware of the service, which records accepted and refused remote write requests."""

    @web.middleware
    async def record(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        response = await handler(request)
        if not _is_write(request):
            return response
        sender = request.remote or "unknown address", request.headers.get("User-Agent", "")
        if response.status < 300:
            senders.accepted(*sender)
        elif response.status < 500 and request.transport is not None:  # None: the client has disconnected
            if OUTCOME not in request:
                counts.count(REMOTE_WRITE_REQUESTS, 1, "refused")
            senders.refused(*sender, _reason(request, response))
        return response

    return record


def _is_write(request: web.Request) -> bool:
    return (request.method == "POST" and request.path == REMOTE_WRITE_PATH) or _VERSION in request.headers


def _reason(request: web.Request, response: web.StreamResponse) -> str:
    if request.path != REMOTE_WRITE_PATH:
        return f"wrong path: send remote write to {REMOTE_WRITE_PATH}"  # the path of the request can contain a secret
    kind = str(request.get(OUTCOME, HTTPStatus(response.status).phrase.lower())).replace("_", " ")
    return f"{kind}: {response.text if isinstance(response, web.Response) else ''}"
