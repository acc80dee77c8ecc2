"""The shared parts of the HTTP routes: errors as responses, JSON, and service discovery for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from aiohttp import web

from rankscope_contract.wire import channel
from rankscope_ingest.base.errors import OtherServiceError, RegistrationError
from rankscope_ingest.network.auth import challenge
from rankscope_ingest.remote_write.handler import written_headers
from rankscope_ingest.runs.models import Health, Target

_JOB: Final = "rankscope"


def per_rank(targets: Iterable[Target], others: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the http_sd entry of the metrics page of each live rank.

    `others` has the run, rank and URL of ranks of other services.
    """
    # Another process may serve the records of a dead process, but not the metrics page of the dead process.
    live = (one for one in targets if one.health is not Health.GONE and one.registration.served_by is None)
    urls = {target.name: target.registration.url for target in live}
    urls |= {f"{other['run']}/{other['rank']}": other["url"] for other in others}
    return [_entry(name, urlsplit(url)) for name, url in urls.items()]


def _entry(name: str, address: SplitResult) -> dict[str, Any]:
    scheme = {"__scheme__": "https"} if address.scheme == "https" else {}
    return {"targets": [address.netloc], "labels": {"job": _JOB, "instance": name, **scheme}}


MAX_REQUEST_BYTES: Final = 1 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(document: Any, *, status: int = 200) -> web.Response:
    """Return a response with `document` as JSON."""
    return web.json_response(document, status=status, dumps=_dumps)


def _dumps(document: Any) -> str:
    """Return `document` as JSON with NaN and infinite numbers as text, such as "NaN".

    JSON has no such numbers, and null means an absent value.
    """
    return json.dumps(_without_nonfinite(document), ensure_ascii=False, allow_nan=False)


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):  # noqa: PLR0124 - NaN
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    return [_without_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


@web.middleware
async def errors_as_text(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors of request handlers to responses that state the reason and how the sender can correct it.

    The response to a POST is text, because ranks print it. Other responses are JSON.
    """
    try:
        return await handler(request)
    except RegistrationError as error:
        refusal = _refusal(request, error.status, str(error))
        if isinstance(error, OtherServiceError):
            refusal.headers.update({"Location": error.location, channel.SHARD_HEADER: error.shard})
        return refusal
    except web.HTTPNotFound:
        paths = sorted({resource.canonical for resource in request.app.router.resources()})
        return _refusal(request, 404, f"{request.path} does not exist; the paths are {', '.join(paths)}")
    except web.HTTPMethodNotAllowed as error:
        return _refusal(request, 405, f"use {' or '.join(sorted(error.allowed_methods))} for {request.path}")
    except web.RequestPayloadError:
        return _refusal(request, 400, "the body is truncated, or its chunks are malformed")
    except web.HTTPRequestEntityTooLarge:
        return _refusal(
            request,
            413,
            f"the request exceeds {MAX_REQUEST_BYTES} bytes; send a smaller body, for example less run configuration",
        )


@web.middleware
async def refuse_compressed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject a request with a compressed body. Remote read and remote write check the compression themselves."""
    encoding = request.headers.get("Content-Encoding", "identity")
    is_remote = request.path in {channel.REMOTE_READ_PATH, channel.REMOTE_WRITE_PATH}
    if request.method == "POST" and encoding.lower() != "identity" and not is_remote:
        raise RegistrationError(400, f"the Content-Encoding {encoding!r} is not supported: do not compress the body")
    return await handler(request)


def _refusal(request: web.Request, status: int, text: str) -> web.Response:
    headers = {"WWW-Authenticate": challenge(request)} if status == 401 else {}
    if request.path == channel.REMOTE_WRITE_PATH:
        headers |= written_headers(request)
    if request.method == "POST":
        return web.Response(status=status, text=text, headers=headers)
    return web.json_response({"error": text}, status=status, headers=headers)
