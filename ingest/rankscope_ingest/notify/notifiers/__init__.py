"""Notifiers deliver messages. Each module in this folder that defines `NOTIFIER` provides one kind of delivery.

`NOTIFIER` is a class that implements `Notifier`. For each URL, the service uses the first class that handles the URL,
in ascending order of `priority`.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, cast

from rankscope_contract.model.events import Severity
from rankscope_ingest.base.errors import ConfigError, IngestError
from rankscope_ingest.base.proxies import ENVIRONMENT, NO_PROXY

log = logging.getLogger(__name__)

_SEPARATOR: Final = re.compile(r"[,\s]+(?=[a-z0-9+.-]+://)", re.IGNORECASE)
"""Characters between two URLs. A comma within a URL, such as between two addresses of mail, is not followed by one."""


FORMS: Final = (
    "any apprise URL, http(s)://… for a webhook, slack+https://… for Slack, or smtp://host:port?to=ADDRESS for mail; "
    "the prefix critical= selects critical messages"
)
_OTHER_FORMS: Final = {
    "http": "json",
    "https": "jsons",
    "slack+http": "http",
    "slack+https": "https",
    "smtp": "mailtos",
}
"""Schemes of URLs of Alertmanager, as `rankscope up` accepts them, with the scheme of the same URL for apprise."""


class NotifyError(IngestError):
    """A notifier could not deliver a message, for the reason in the text. The sender of the message may try again.

    The text does not name the receiver and contains no secret of its URL.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One notification. All notifications about the same incident have the same `key`."""

    key: str
    title: str
    body: str
    severity: str


class Notifier(Protocol):
    """Delivers messages to one URL."""

    priority: ClassVar[int]
    """Priority of this notifier class.

    For each URL, the service tries the classes in ascending order of this number.
    """

    def __init__(self, url: str, *, timeout_seconds: float, proxy: str) -> None: ...

    @classmethod
    def handles(cls, url: str) -> bool:
        """Return whether this class can deliver messages to `url`."""

    @property
    def label(self) -> str:
        """Return the URL with secrets removed, for log messages."""

    @property
    def uses_proxy(self) -> bool:
        """Return whether messages are sent by HTTP, so that the setting `notify.proxy` applies to them."""

    async def send(self, message: Message) -> None:
        """Deliver `message`. Raises NotifyError if the delivery fails."""


def notifier_classes() -> list[type[Notifier]]:
    """Return the notifier class of each module in this folder, in ascending order of priority."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found: list[type[Notifier]] = [module.NOTIFIER for module in modules if hasattr(module, "NOTIFIER")]
    return sorted(found, key=lambda cls: cls.priority)


def make_notifiers(urls: Iterable[str], *, timeout_seconds: float, proxy: str = ENVIRONMENT) -> list[Notifier]:
    """Return one notifier per URL. `proxy` is the setting of that name in the section [notify].

    A text in `urls` may contain several URLs, separated by spaces or commas, as for apprise. See `FORMS` for a URL. A
    prefix such as `critical=` limits the messages to this severity.
    Raises ConfigError for an unsupported URL. The error text does not contain the secrets of the URL.
    """
    listed = list(urls)
    classes = notifier_classes() if listed else []  # loading apprise takes half a second
    notifiers: list[Notifier] = []
    for number, text in enumerate(listed):
        for part in _SEPARATOR.split(text.strip(", \n")):
            severity, url = split_severity(part)
            found = ((known, form) for form in (url, _for_apprise(url)) for known in classes if known.handles(form))
            notifier_class, form = next(found, (None, url))
            if notifier_class is None:
                scheme = url.partition("://")[0]
                raise ConfigError(
                    f"notify.urls[{number}] ({scheme}://…) is not a supported notification URL: use {FORMS}"
                )
            notifier = notifier_class(form, timeout_seconds=timeout_seconds, proxy=proxy)
            notifiers.append(notifier if severity is None else cast("Notifier", _Only(notifier, severity)))
    if proxy not in {ENVIRONMENT, NO_PROXY}:
        for notifier in notifiers:
            if not notifier.uses_proxy:
                log.warning("notify.proxy does not apply to %s, which is not reached by HTTP", notifier.label)
    return notifiers


def split_severity(address: str) -> tuple[Severity | None, str]:
    """Return the severity that the prefix of an address names, such as `critical=`, or None, and the URL."""
    word, equals, rest = address.partition("=")
    return (Severity(word), rest) if equals and word in tuple(Severity) else (None, address)


def _for_apprise(url: str) -> str:
    scheme, _, rest = url.partition("://")
    form = "mailto" if scheme == "smtp" and "tls=no" in rest else _OTHER_FORMS.get(scheme, scheme)
    return f"{form}://{rest}"


class _Only:
    """A notifier that delivers only messages of one severity; it is `notifier` in all other respects."""

    def __init__(self, notifier: Notifier, severity: Severity) -> None:
        self._notifier = notifier
        self._severity = severity

    def __getattr__(self, name: str) -> Any:
        return getattr(self._notifier, name)

    async def send(self, message: Message) -> None:
        if message.severity == self._severity:
            await self._notifier.send(message)


def receiver_names(notifiers: Sequence[Notifier]) -> list[str]:
    """Return the labels of `notifiers`, with a number after each label that occurs more than once.

    Examples are two addresses of one host, and two topics, which are secret.
    """
    labels = [notifier.label for notifier in notifiers]
    seen: Counter[str] = Counter()
    names = []
    for label in labels:
        seen[label] += 1
        names.append(label if labels.count(label) == 1 else f"{label}, address {seen[label]}")
    return names
