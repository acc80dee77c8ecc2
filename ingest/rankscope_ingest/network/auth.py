"""What keeps web pages out of a service without a token: a browser on this machine reaches loopback for any page.

A page may send a form or plain text anywhere, but JSON or protobuf only where it is let, so a POST must be one of them.
A page whose name was made to resolve to this machine (DNS rebinding) comes with that name in its Host header, so names
must be ours.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from rankscope_contract.protocol.channel import HEALTH_PATH
from rankscope_ingest.base.config import ServiceSection, split_address
from rankscope_ingest.base.errors import RegistrationError

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


_NOT_SENT_BY_PAGES: Final = frozenset({"application/json", "application/x-protobuf"})

OwnName = Callable[[str], bool]


def own_names(section: ServiceSection, host_name: Callable[[], str] = socket.gethostname) -> OwnName | None:
    """Return what tells whether the host of a request is this service, for one without a token.

    None where no name need be looked at: a page has no token, and no certificate for the name it lies about.
    """
    if section.token is not None or section.web is not None:
        return None
    written = [address for address in (section.listen, section.advertise) if address is not None]
    configured = {split_address(address)[0] for address in written} | set(section.allowed_hosts)
    own = host_name().lower()
    names = {"localhost", own, own.partition(".")[0]} | {_plain(name) for name in configured}

    return lambda host: _is_address(host) or _plain(host) in names


def refuse_web_pages(is_own_name: OwnName | None) -> Any:
    """Return the middleware that demands of a POST what no page sends and, with `is_own_name`, a Host of ours."""

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if is_own_name is not None and request.path != HEALTH_PATH:
            _check_host(request.headers.get("Host", ""), is_own_name)
        if request.method == "POST" and request.content_type not in _NOT_SENT_BY_PAGES:
            raise RegistrationError(415, "send the body as JSON, with Content-Type: application/json")
        return await handler(request)

    return guard


def _check_host(header: str, is_own_name: OwnName) -> None:
    try:
        host = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        host = ""
    if not is_own_name(host):
        raise RegistrationError(
            421,
            f"{host[:200]!r} is no known name of this service, which has no token: dial its address, name it in"
            " [service] allowed_hosts, or set a token on both sides",
        )


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
