"""The HTTP requests of one delivery by apprise: their proxy, and the reason why they failed.

The plugins of apprise call the functions of the library requests. These read the login of a host from ~/.netrc, send
requests to loopback addresses to the proxy of the environment, and apprise hides their failures. While a delivery runs,
its requests are therefore sent by a session of this module. All other users of requests are not affected.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import http
import os
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import requests
import requests.sessions

from rankscope_contract.security.proxies import is_proxy, port_of, proxy_of

_MAX_BYTES: Final = 2000  # of the body of a response; the reason is shorter
_TAG: Final = re.compile(r"<[^>]*>")
_TRUST: Final = "REQUESTS_CA_BUNDLE names the file of further CAs"


@dataclass(slots=True)
class Exchange:
    """The HTTP requests of one delivery. `failure` is the reason why the latest request failed, with secrets."""

    proxy: str  # the setting `notify.proxy`
    status: str = ""  # status of the latest response, if it is an error
    failure: str = ""

    @property
    def has_failed(self) -> bool:
        """Return whether the latest request failed."""
        return bool(self.status or self.failure)

    def proxies(self, url: str) -> dict[str, str]:
        """Return the proxy for a request to `url`, in the form of the library requests."""
        proxy = proxy_of(url, self.proxy, os.environ)
        return {} if proxy is None else {urlsplit(url).scheme: proxy}

    def answered(self, response: requests.Response) -> None:
        """Note the status and the text of `response` if it is an error."""
        self.status = self.failure = ""
        if not response.ok:
            self.status = f"{response.status_code} {_phrase(response)}".strip()
            body = response.content[:_MAX_BYTES].decode("utf-8", "replace")
            self.failure = _TAG.sub(" ", body).strip() + self._way(response.url)

    def failed(self, error: requests.RequestException, url: str) -> None:
        """Note that a request to `url` got no response."""
        proxy = proxy_of(url, self.proxy, os.environ)
        peer = urlsplit(proxy or url).hostname
        is_valid = proxy is None or is_proxy(proxy)
        self.status = ""
        self.failure = explain(error, peer or "the host") if is_valid else "the address of the proxy is not valid"
        self.failure += self._way(url)

    def _way(self, url: str) -> str:
        proxy = proxy_of(url, self.proxy, os.environ)
        if proxy is None:
            return ""
        port = port_of(proxy)
        return f" (sent to the proxy {urlsplit(proxy).hostname}{f':{port}' if port else ''})"


_exchange: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("exchange", default=None)


@contextlib.contextmanager
def exchange(proxy: str) -> Iterator[Exchange]:
    """Send the requests of the body of this context, in this thread, with the proxy of the setting `proxy`."""
    requests.sessions.Session = DeliverySession  # type: ignore[misc]  # functions of requests use it
    known = Exchange(proxy)
    token = _exchange.set(known)
    try:
        yield known
    finally:
        _exchange.reset(token)


class DeliverySession(requests.Session):
    """A session of requests. Within `exchange`, it reads no netrc and uses the proxy of the exchange."""

    def __init__(self) -> None:
        super().__init__()
        self._exchange = _exchange.get()
        self.trust_env = self._exchange is None

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> dict[str, Any]:
        """Return the options of a request to `url`. The CA file of the environment is used, netrc and proxies not."""
        if self._exchange is not None:
            proxies = self._exchange.proxies(url)
            if verify in {True, None}:
                verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or verify
        return super().merge_environment_settings(url, proxies, stream, verify, cert)

    def rebuild_proxies(self, prepared_request: Any, proxies: Any) -> dict[str, str]:
        """Return the proxies of the request that follows a redirect."""
        if self._exchange is not None:
            proxies = self._exchange.proxies(prepared_request.url)
        return super().rebuild_proxies(prepared_request, proxies)

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send `request`, and note its failure in the exchange."""
        try:
            response = super().send(request, **options)
        except requests.RequestException as error:
            if self._exchange is not None:
                self._exchange.failed(error, request.url or "")
            raise
        if self._exchange is not None:
            self._exchange.answered(response)
        return response


def explain(error: BaseException, host: str) -> str:
    """Return why a request that was sent to `host` got no response.

    The messages of requests are not used, because they contain the address of the request.
    """
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, socket.gaierror):
            return f"the name {host} cannot be resolved: {cause.strerror or cause}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"TLS: the certificate of {host} is not valid: {cause.verify_message}; {_TRUST}"
        if isinstance(cause, ssl.SSLError):
            return f"TLS with {host} failed: {cause.reason or cause}"
        if isinstance(cause, ConnectionRefusedError):
            return f"connection refused by {host}"
        if isinstance(cause, OSError) and cause.errno in errno.errorcode:
            return f"{os.strerror(cause.errno or 0)}: {host}"
    if any(isinstance(cause, requests.Timeout | TimeoutError) for cause in causes):
        return f"{host} timed out"
    return str(causes[-1]) or type(causes[-1]).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and the exceptions that caused it, which urllib3 keeps in `reason`."""
    seen: list[BaseException] = []
    found: object = error
    while isinstance(found, BaseException) and found not in seen:
        seen.append(found)
        yield found
        inner = (getattr(found, "reason", None), *found.args, found.__cause__, found.__context__)
        found = next((part for part in inner if isinstance(part, BaseException)), None)


def _phrase(response: requests.Response) -> str:
    with contextlib.suppress(ValueError):
        return response.reason or http.HTTPStatus(response.status_code).phrase
    return ""
