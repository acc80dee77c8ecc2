"""The HTTP side of remote write: which requests are of a form that is understood, and how each is answered."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from rankscope_ingest.errors import BusyError, DecodeError, RegistrationError
from rankscope_ingest.remote_write.receiving import Counts, RemoteWrite

RETRY_AFTER_SECONDS: Final = 5
_MESSAGE: Final = "prometheus.WriteRequest"
_TAKEN: Final = (
    f"send remote write 1.0 ({_MESSAGE}): Content-Type: application/x-protobuf, Content-Encoding: snappy;"
    " 2.0 is not taken"
)


async def answer(receiver: RemoteWrite, counts: Counts, request: web.Request) -> web.Response:
    """Return 204 when what came is stored, 503 when it may come again. Raises RegistrationError for what may not."""
    try:
        _check_form(request)
        await receiver.take(*await _body(receiver, request))
    except BusyError as error:
        # 503 and not 429: unless it is configured, Prometheus throws away what is answered with 429.
        counts.write_answered("busy")
        return web.Response(status=503, text=str(error), headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
    except DecodeError as error:
        counts.write_answered("malformed")
        raise RegistrationError(400, str(error)) from error
    except RegistrationError as error:
        counts.write_answered("too_large" if error.status == 413 else "unsupported")
        raise
    return web.Response(status=204)


def _check_form(request: web.Request) -> None:
    message = _parameter(request.headers.get("Content-Type", ""), "proto")
    if request.content_type != "application/x-protobuf" or message not in {None, _MESSAGE}:
        raise RegistrationError(415, f"{message or request.content_type} is not understood: {_TAKEN}")
    encoding = request.headers.get("Content-Encoding", "snappy").lower()
    if encoding != "snappy":
        raise RegistrationError(415, f"Content-Encoding {encoding} is not understood: {_TAKEN}")


def _parameter(content_type: str, name: str) -> str | None:
    for part in content_type.split(";")[1:]:
        key, _, value = part.partition("=")
        if key.strip().lower() == name:
            return value.strip().strip('"')
    return None


async def _body(receiver: RemoteWrite, request: web.Request) -> tuple[bytes, int]:
    """Return what was sent, and the room that is reserved for it."""
    reserved = receiver.reserve(request.content_length)
    try:
        body = await _read(request, receiver.max_bytes)
    except BaseException:
        receiver.release(reserved)
        raise
    receiver.release(reserved - len(body))
    return body, len(body)


async def _read(request: web.Request, limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise RegistrationError(413, f"a request may have [remote_write] max_bytes, {limit}")
    return bytes(body)
