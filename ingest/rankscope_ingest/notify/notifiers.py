"""Addresses to which messages are sent, and the notifiers for these addresses."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Final

from rankscope_contract.model.events import Severity
from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.base.proxies import ENVIRONMENT, NO_PROXY
from rankscope_ingest.notify.announcer import Notifier

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


def make_notifiers(urls: Iterable[str], *, timeout_seconds: float, proxy: str = ENVIRONMENT) -> Sequence[Notifier]:
    """Return one notifier per URL. `proxy` is the setting of that name in the section [notify].

    A text in `urls` may contain several URLs, separated by spaces or commas, as for apprise. See `FORMS` for a URL. A
    prefix such as `critical=` limits the messages to this severity.
    Raises ConfigError for an unsupported URL. The error text does not contain the secrets of the URL.
    """
    listed = list(urls)
    if not listed:
        return []
    from rankscope_ingest.notify.apprise_notifier import (  # noqa: PLC0415 - loading apprise takes half a second
        AppriseNotifier,
        is_supported,
    )

    notifiers = []
    for number, address in enumerate(listed):
        for part in _SEPARATOR.split(address.strip(", \n")):
            severity, url = split_severity(part)
            form = next(filter(is_supported, (url, _for_apprise(url))), None)
            if form is None:
                scheme = url.partition("://")[0]
                raise ConfigError(
                    f"notify.urls[{number}] ({scheme}://…) is not a supported notification URL: use {FORMS}"
                )
            notifiers.append(AppriseNotifier(form, severity=severity, timeout_seconds=timeout_seconds, proxy=proxy))
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
