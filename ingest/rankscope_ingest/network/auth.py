"""Authenticate requests, and protect a service without a token against requests of foreign web pages in a browser.

A web page in a browser on this machine can send requests to the service on loopback. Without permission of the server,
the page can send forms and plain text to any address, but neither JSON nor protobuf. Therefore, the service accepts a
POST only with the content type JSON or protobuf. With DNS rebinding, the host name of a page resolves to this machine,
and the browser sends that name in the Host header. Therefore, the service accepts a request only if the Host header
contains a name of the service.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from rankscope_contract.wire.channel import HEALTH_PATH
from rankscope_ingest.base.addresses import address_of
from rankscope_ingest.base.config import ServiceSection, split_address
from rankscope_ingest.base.errors import RegistrationError

BEARER: Final = "Bearer"
BROWSER: Final = 'Basic realm="Rankscope: any name, and the token as password", charset="UTF-8"'
_READS: Final = ("GET", "HEAD")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SAFE_TYPES: Final = frozenset({"application/json", "application/x-protobuf"})

OwnName = Callable[[str], bool]


def token_guard(token: str | None) -> Any:
    """Return the middleware that rejects requests without `token`. The health page needs no token.

    If `token` is None, no request is rejected.
    """

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if token is not None and request.path != HEALTH_PATH and not _has_token(request, token):
            raise RegistrationError(
                401, "no valid token: send the header Authorization: Bearer <token> with the [service] token"
            )
        answer = await handler(request)
        answer.headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
        answer.headers.setdefault("X-Content-Type-Options", "nosniff")
        return answer

    return guard


def challenge(request: web.Request) -> str:
    """Return the WWW-Authenticate header of a response with status 401.

    A browser that requests a page gets the Basic scheme and shows a login dialog. All other clients get the Bearer
    scheme.
    """
    is_browser = request.method in _READS and "text/html" in request.headers.get("Accept", "")
    return BROWSER if is_browser else BEARER


def _has_token(request: web.Request, token: str) -> bool:
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


def own_names(section: ServiceSection, host_name: Callable[[], str] = socket.gethostname) -> OwnName | None:
    """Return a function that checks whether a host name is a name of this service; None if no check is needed.

    The check protects against requests of foreign web pages. If the service has a token, no check is needed, because
    such a page does not have the token. With TLS, no check is needed either, because the certificate of the service is
    not valid for the host name of such a page.
    """
    if section.token is not None or section.web is not None:
        return None
    configured = [address for address in (section.listen, section.advertise) if address is not None]
    hosts = {split_address(address)[0] for address in configured} | set(section.allowed_hosts)
    own = host_name().lower()
    names = {"localhost", own, own.partition(".")[0]} | {_plain(name) for name in hosts}

    return lambda host: address_of(host) is not None or _plain(host) in names


def refuse_web_pages(is_own_name: OwnName | None) -> Any:
    """Return the middleware that rejects requests of foreign web pages.

    It checks the content type of each POST. If `is_own_name` is not None, it also checks the Host header.
    """

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if is_own_name is not None and request.path != HEALTH_PATH:
            _check_host(request.headers.get("Host", ""), is_own_name)
        if request.method == "POST" and request.content_type not in _SAFE_TYPES:
            raise RegistrationError(
                415, "this Content-Type is not accepted: send the body as JSON, with Content-Type: application/json"
            )
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
            f"{host[:200]!r} is not a known name of this service, which has no token: use its address, add the name to"
            " [service] allowed_hosts, or set the same token for the service and its clients",
        )


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")
