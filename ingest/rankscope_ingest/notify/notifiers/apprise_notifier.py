"""Deliver messages with the library apprise: mail, chat, webhooks and about a hundred services.

Examples of URLs are `json://…`, `mailto://…` and `slack://…`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import ClassVar, Final
from urllib.parse import urlsplit

import apprise

from rankscope_contract.model.events import Severity
from rankscope_contract.security.proxies import ENVIRONMENT, proxies_of
from rankscope_ingest.notify.notifiers import Message, NotifyError
from rankscope_ingest.notify.notifiers.http_session import exchange
from rankscope_ingest.notify.notifiers.secrets import MASK, Secrets

_TYPES: Final = {
    Severity.CRITICAL: apprise.NotifyType.FAILURE,
    Severity.WARNING: apprise.NotifyType.WARNING,
}
_EXCEPTION: Final = "Exception: "
"""End of the words before the text of an exception in the log records of apprise, such as `Socket Exception: `."""
_NUMBER: Final = re.compile(r"^\[Errno -?\d+\] ")
_SMTP_REPLY: Final = re.compile(r"\((\d{3}), b(['\"])(.*?)\2\)")
"""Status and text of a reply in the text of an exception of smtplib."""


class AppriseNotifier:
    """Delivers messages to one URL that apprise supports."""

    priority: ClassVar[int] = 100  # last, because it handles nearly all URLs

    def __init__(self, url: str, *, timeout_seconds: float, proxy: str = ENVIRONMENT) -> None:
        self._timeout_seconds = timeout_seconds
        self._proxy = proxy
        # Bodies contain names of tensors and runs, which must not be interpreted as escapes or emojis.
        asset = apprise.AppriseAsset(interpret_escapes=False, interpret_emojis=False)
        self._apprise = apprise.Apprise(asset=asset)
        self._apprise.add(url)
        plugins = list(self._apprise)
        self._uses_proxy = any(map(_uses_http, plugins))
        self._label, host = _label(url, self._apprise.urls(privacy=True), has_host=all(map(_has_host, plugins)))
        proxies = proxies_of(os.environ) if proxy == ENVIRONMENT else [proxy]
        self._secrets = Secrets([url, *proxies], public=[host, *map(_host, proxies)])

    @classmethod
    def handles(cls, url: str) -> bool:
        """Return whether apprise supports `url`."""
        with _records():
            return apprise.Apprise.instantiate(url, suppress_exceptions=True) is not None

    @property
    def label(self) -> str:
        """Return scheme, host and port of the URL, for log messages. The host is masked if it is a secret."""
        return self._label

    @property
    def uses_proxy(self) -> bool:
        """Return whether messages are sent by HTTP. Mail is not, for example."""
        return self._uses_proxy

    async def send(self, message: Message) -> None:
        """Deliver `message` in a thread, because apprise blocks during network I/O.

        Raises NotifyError with the reason if the delivery fails.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                failure = await asyncio.to_thread(self._send, message)
        except TimeoutError as error:
            raise NotifyError(f"timed out after {self._timeout_seconds:g} s") from error
        if failure is not None:
            raise NotifyError(failure)

    def _send(self, message: Message) -> str | None:
        """Deliver `message`; return the reason if it fails."""
        with exchange(self._proxy) as requests, _records() as records:
            is_delivered = self._apprise.notify(
                body=message.body,
                title=message.title,
                notify_type=_TYPES.get(Severity(message.severity), apprise.NotifyType.INFO),
                body_format=apprise.NotifyFormat.TEXT,
            )
        if is_delivered:
            return None
        text = requests.failure if requests.has_failed else _reason(records)
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


# Log records of apprise.

_captured: contextvars.ContextVar[list[logging.LogRecord] | None] = contextvars.ContextVar("captured", default=None)


class _Capture(logging.Handler):
    """Appends log records to the list of the delivery in which they are made, and discards all others."""

    def emit(self, record: logging.LogRecord) -> None:
        if (records := _captured.get()) is not None:
            records.append(record)


@contextlib.contextmanager
def _records() -> Iterator[list[logging.LogRecord]]:
    """Yield a list of the log records that apprise makes in the body of this context, in this thread.

    They are not logged: they contain secrets of addresses, and the reason of a failure is only in those of level DEBUG.
    """
    logger = logging.getLogger("apprise")
    if not any(isinstance(handler, _Capture) for handler in logger.handlers):
        logger.handlers = [_Capture()]
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    token = _captured.set([])
    try:
        records = _captured.get()
        assert records is not None
        yield records
    finally:
        _captured.reset(token)


NOTIFIER = AppriseNotifier
