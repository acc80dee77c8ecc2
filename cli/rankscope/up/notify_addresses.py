"""Parse the addresses of `rankscope up --notify` into Alertmanager receivers: webhooks and mail.

This module does no I/O. Addresses for the service have another syntax, that of Apprise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from rankscope.base.errors import USAGE, CommandError
from rankscope_contract.model.events import Severity
from rankscope_dashboards.deploy.alertmanager import Mail, Receiver, Webhook

ADDRESS_FORMS: Final = (
    "https://host/path for a webhook, or smtp://[user:password@]host:port?to=ADDRESS[&from=ADDRESS][&tls=no] for mail; "
    "prefix critical= for critical alerts only"
)
DEFAULT_SENDER: Final = "rankscope@localhost"
_MAIL_KEYS: Final = {"to", "from", "tls"}


def receivers(addresses: Iterable[str]) -> list[Receiver]:
    """Return one Alertmanager receiver per address.

    Raises CommandError for an address in an unknown form. The message lists the valid forms and contains no secret.
    """
    return [_receiver(number, address) for number, address in enumerate(addresses, 1)]


def _receiver(number: int, address: str) -> Receiver:
    severity, url = _severity(address)
    scheme = url.partition("://")[0]
    try:
        parts = urlsplit(url)
        way = _webhook(url) if scheme in ("http", "https") else _mail(parts) if scheme == "smtp" else None
    except ValueError as error:
        raise CommandError(f"--notify address {number} ({scheme}://…): {error}", code=USAGE) from error
    if way is None:
        raise CommandError(
            f"--notify address {number} ({scheme}://…) is not supported by Alertmanager: write {ADDRESS_FORMS}. "
            'The service itself supports all Apprise addresses: [notify] mode = "embedded"',
            code=USAGE,
        )
    return Receiver(name=f"address-{number}", integrations=(way,), severities=(severity,) if severity else ())


def _severity(address: str) -> tuple[Severity | None, str]:
    word, equals, rest = address.partition("=")
    return (Severity(word), rest) if equals and word in tuple(Severity) else (None, address)


def _webhook(url: str) -> Webhook:
    return Webhook(url=url)


def _mail(parts: SplitResult) -> Mail:
    asked = parse_qs(parts.query)
    if unknown := asked.keys() - _MAIL_KEYS:
        raise ValueError(f"unknown key {', '.join(sorted(unknown))}: use to, from and tls")
    if not parts.hostname or "to" not in asked:
        raise ValueError("write smtp://host:port?to=ADDRESS")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Mail(
        to=", ".join(asked["to"]),
        sender=asked.get("from", [DEFAULT_SENDER])[0],
        smarthost=f"{host}:{parts.port or 25}",
        require_tls=asked.get("tls", ["yes"])[0] != "no",
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
    )
