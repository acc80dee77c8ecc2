"""Deliver messages with the library apprise: mail, chat, webhooks and about a hundred services.

Examples of URLs are `json://…`, `mailto://…` and `slack://…`.

The plugins of apprise call the functions of the library requests. These read the login of a host from ~/.netrc, send
requests to loopback addresses to the proxy of the environment, and apprise hides their failures. While a delivery runs,
its requests are therefore sent by a session of this module. All other users of requests are not affected.

The secrets of an address are removed from texts: user, password, parts of the path and values of the query. The texts
are reasons of failed deliveries, which are logged and shown. They can contain any text that a receiver sends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import errno
import http
import logging
import os
import re
import socket
import ssl
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, quote_plus, unquote, unquote_plus, urlsplit

import apprise
import requests
import requests.sessions

from rankscope_contract.model.events import Severity
from rankscope_contract.model.redaction import redacted_text
from rankscope_ingest.base.proxies import ENVIRONMENT, is_proxy, port_of, proxies_of_environment, proxy_of
from rankscope_ingest.notify.announcer import Message, NotifyError

MASK: Final = "…"
MAX_CHARACTERS: Final = 200

_SHORT: Final = 6
"""Secrets with fewer characters are masked only as whole words: `a` in other words is no secret."""
_PUBLIC: Final = frozenset(["yes", "no", "true", "false", "on", "off"])
_URL: Final = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)(?:[^\s\"'<>/?#]*@)?([^\s\"'<>/?#]*)[^\s\"'<>]*")
_DELIMITERS: Final = re.compile(r"[/&=#@:,;\s]+")


class Secrets:
    """The secrets of addresses, and the texts from which they are removed."""

    def __init__(self, urls: Iterable[str], *, public: Iterable[str] = ()) -> None:
        """Collect the secrets of `urls`. `public` are texts that may be shown, such as the host."""
        shown = _PUBLIC | {text.lower() for text in public}
        found = {form for url in urls for secret in _secrets(url) for form in _forms(secret)}
        listed = sorted((secret for secret in found if secret.lower() not in shown), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(_pattern, listed)), re.IGNORECASE) if listed else None

    def removed_from(self, text: str) -> str:
        """Return `text` as one line of at most MAX_CHARACTERS without secrets, paths of URLs and control characters."""
        text = redacted_text(_URL.sub(rf"\1\2/{MASK}", text))
        if self._pattern is not None:
            text = self._pattern.sub(MASK, text)
        line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
        return line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 1]}…"


def _secrets(url: str) -> Iterator[str]:
    """Yield all parts of an address but its scheme, its port and the names in its query."""
    address, _, query = url.partition("://")[2].partition("?")
    for _, value in parse_qsl(query):
        yield value
    user, _, rest = address.rpartition("@")
    yield user
    yield from user.split(":", 1)
    yield base64.b64encode(unquote(user).encode()).decode()  # of the header Authorization
    host, _, path = rest.partition("/")
    host = re.sub(r":\d{1,5}$", "", host)
    yield from [host.strip("[]")] if host.startswith("[") else _DELIMITERS.split(host)
    yield from _DELIMITERS.split(path)
    yield from _DELIMITERS.split(user)


def _forms(secret: str) -> set[str]:
    """Return the texts in which a URL, a header or a body contains a secret."""
    plain = unquote(secret)
    forms = {secret, plain, unquote_plus(secret), quote(plain), quote(plain, safe=""), quote_plus(plain)}
    return {form for form in forms if any(map(str.isalnum, form))}


def _pattern(secret: str) -> str:
    return re.escape(secret) if len(secret) >= _SHORT else rf"(?<!\w){re.escape(secret)}(?!\w)"


_MAX_BYTES: Final = 2000  # of the body of a response; the reason is shorter
_TAG: Final = re.compile(r"<[^>]*>")
_TRUST: Final = "REQUESTS_CA_BUNDLE names the file of further CAs"


@dataclass(slots=True)
class Exchange:
    """The HTTP requests of one delivery. `failure` is the reason why the latest request failed, with secrets."""

    proxy: str  # the setting `notify.proxy`
    status: str = ""  # status of the latest response, if it is an error
    failure: str = ""
    records: list[logging.LogRecord] = field(default_factory=list)  # of apprise

    @property
    def has_failed(self) -> bool:
        """Return whether the latest request failed."""
        return bool(self.status or self.failure)

    def proxies(self, url: str) -> dict[str, str]:
        """Return the proxy for a request to `url`, in the form of the library requests."""
        proxy = proxy_of(url, self.proxy)
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
        proxy = proxy_of(url, self.proxy)
        peer = urlsplit(proxy or url).hostname
        is_valid = proxy is None or is_proxy(proxy)
        self.status = ""
        self.failure = explain(error, peer or "the host") if is_valid else "the address of the proxy is not valid"
        self.failure += self._way(url)

    def _way(self, url: str) -> str:
        proxy = proxy_of(url, self.proxy)
        if proxy is None:
            return ""
        port = port_of(proxy)
        return f" (sent to the proxy {urlsplit(proxy).hostname}{f':{port}' if port else ''})"


_exchange: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("exchange", default=None)


class _Capture(logging.Handler):
    """Appends log records to those of the exchange in which they are made, and discards all others."""

    def emit(self, record: logging.LogRecord) -> None:
        if (known := _exchange.get()) is not None:
            known.records.append(record)


@contextlib.contextmanager
def exchange(proxy: str) -> Iterator[Exchange]:
    """Send the requests of the body of this context, in this thread, with the proxy of the setting `proxy`.

    The log records of apprise in this body are not logged: they contain secrets of addresses, and the reason of a
    failure is only in those of level DEBUG.
    """
    requests.sessions.Session = DeliverySession  # type: ignore[misc]  # functions of requests use it
    logger = logging.getLogger("apprise")
    if not any(isinstance(handler, _Capture) for handler in logger.handlers):
        logger.handlers, logger.propagate = [_Capture()], False
        logger.setLevel(logging.DEBUG)
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


_TYPES: Final = {
    Severity.CRITICAL: apprise.NotifyType.FAILURE,
    Severity.WARNING: apprise.NotifyType.WARNING,
}
_EXCEPTION: Final = "Exception: "
"""End of the words before the text of an exception in the log records of apprise, such as `Socket Exception: `."""
_NUMBER: Final = re.compile(r"^\[Errno -?\d+\] ")
_SMTP_REPLY: Final = re.compile(r"\((\d{3}), b(['\"])(.*?)\2\)")
"""Status and text of a reply in the text of an exception of smtplib."""


PLUGINS: Final = Path(__file__).with_name("plugins")
"""Folder of plugins of apprise. Each module in it adds the notification services that it defines."""


def is_supported(url: str) -> bool:
    """Return whether apprise supports `url`."""
    with exchange(ENVIRONMENT):
        return apprise.Apprise.instantiate(url, _asset(), suppress_exceptions=True) is not None


def _asset() -> apprise.AppriseAsset:
    # Bodies contain names of tensors and runs, which must not be interpreted as escapes or emojis.
    return apprise.AppriseAsset(interpret_escapes=False, interpret_emojis=False, plugin_paths=[str(PLUGINS)])


class AppriseNotifier:
    """Delivers messages to one URL that apprise supports; with `severity`, only messages of this severity.

    `label` has scheme, host and port of the URL, for log messages. The host is masked if it is a secret. `uses_proxy`
    is whether messages are sent by HTTP. Mail is not, for example.
    """

    def __init__(
        self, url: str, *, severity: Severity | None = None, timeout_seconds: float, proxy: str = ENVIRONMENT
    ) -> None:
        self._severity = severity
        self._timeout_seconds = timeout_seconds
        self._proxy = proxy
        self._apprise = apprise.Apprise(asset=_asset())
        self._apprise.add(url)
        plugins = list(self._apprise)
        self.uses_proxy = any(map(_uses_http, plugins))
        self.label, host = _label(url, self._apprise.urls(privacy=True), has_host=all(map(_has_host, plugins)))
        proxies = proxies_of_environment() if proxy == ENVIRONMENT else [proxy]
        self._secrets = Secrets([url, *proxies], public=[host, *map(_host, proxies)])

    async def send(self, message: Message) -> None:
        """Deliver `message` in a thread, because apprise blocks during network I/O.

        Raises NotifyError with the reason if the delivery fails.
        """
        if self._severity not in {None, message.severity}:
            return
        try:
            async with asyncio.timeout(self._timeout_seconds):
                failure = await asyncio.to_thread(self._send, message)
        except TimeoutError as error:
            raise NotifyError(f"timed out after {self._timeout_seconds:g} s") from error
        if failure is not None:
            raise NotifyError(failure)

    def _send(self, message: Message) -> str | None:
        """Deliver `message`; return the reason if it fails."""
        with exchange(self._proxy) as requests:
            is_delivered = self._apprise.notify(
                body=message.body,
                title=message.title,
                notify_type=_TYPES.get(Severity(message.severity), apprise.NotifyType.INFO),
                body_format=apprise.NotifyFormat.TEXT,
            )
        if is_delivered:
            return None
        text = requests.failure if requests.has_failed else _reason(requests.records)
        return ": ".join(self._secrets.removed_from(part) for part in (requests.status, text) if part)


def _reason(records: list[logging.LogRecord]) -> str:
    """Return the reason of a failed delivery according to the log records of apprise."""
    texts = [record.getMessage() for record in records]
    exceptions = [text.partition(_EXCEPTION)[2] for text in texts if _EXCEPTION in text]
    warnings = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    reason = "; ".join((exceptions or warnings)[-1:]) or "apprise gave no reason"
    return _SMTP_REPLY.sub(r"\1 \3", _NUMBER.sub("", reason)).strip("{}")


def _uses_http(plugin: apprise.NotifyBase) -> bool:
    """Return whether `plugin` sends messages with the library requests, which its module then imports."""
    modules = {base.__module__ for base in type(plugin).__mro__ if base.__module__.startswith("apprise.plugins.")}
    return any(hasattr(sys.modules[module], "requests") for module in modules)


def _has_host(plugin: apprise.NotifyBase) -> bool:
    """Return whether the address of `plugin` begins with a host, and not with a token or a topic."""
    is_cloud = getattr(plugin, "mode", None) == "cloud"  # of ntfy: `ntfy://topic`
    templates: Iterable[str] = plugin.templates
    return not is_cloud and any("{host}" in template for template in templates)


def _label(url: str, shown: list[str], *, has_host: bool) -> tuple[str, str]:
    """Return the label of `url`, and its host if the host is not a secret.

    `shown` are the addresses in which apprise has masked some secrets, but not all of them.
    """
    scheme, _, rest = url.partition("://")
    hosts = {_host(address) for address in shown}
    host = _host(url)
    if not has_host or not host or hosts != {host}:
        return f"{scheme}://{MASK}", ""
    netloc = rest.partition("/")[0].partition("?")[0].rpartition("@")[2]
    return f"{scheme}://{netloc}", host


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
