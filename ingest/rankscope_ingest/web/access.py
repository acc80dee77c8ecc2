"""Who may ask: whoever shows the token, as programs do in a header of their own, and browsers by asking a person.

A browser shows what it was once given with every request to this address, also with one that another page has it make.
So a password opens what only reads, and a request that changes something needs the header that no page can add. What is
read so is kept from other pages by `Cross-Origin-Resource-Policy`, and by the lack of any leave for other origins.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from rankscope_contract.channel import HEALTH_PATH
from rankscope_ingest.errors import RegistrationError

BEARER: Final = "Bearer"
BROWSER: Final = 'Basic realm="Rankscope: any name, and the token as password", charset="UTF-8"'

_READS: Final = ("GET", "HEAD")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def token_guard(token: str | None) -> Any:
    """Return the middleware that lets through who shows `token`; the health page is for everybody."""

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if token is not None and request.path != HEALTH_PATH and not _shows(request, token):
            raise RegistrationError(401, "send Authorization: Bearer <token> with the [service] token")
        answer = await handler(request)
        answer.headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
        answer.headers.setdefault("X-Content-Type-Options", "nosniff")
        return answer

    return guard


def challenge(request: web.Request) -> str:
    """Return how to say who one is: a browser that shows a page is to ask the person before it."""
    is_browser = request.method in _READS and "text/html" in request.headers.get("Accept", "")
    return BROWSER if is_browser else BEARER


def _shows(request: web.Request, token: str) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "basic" and request.method in _READS:
        given = _password(given)
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(errors="surrogateescape"), token.encode())


def _password(given: str) -> str:
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""
