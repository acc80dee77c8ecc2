"""`--notify ADDRESS`: people's addresses as one writes them on a command line, for Alertmanager. Pure.

Apprise's addresses are another family, read by the service itself; Alertmanager speaks webhooks and mail.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from rankscope.base.errors import USAGE, CommandError
from rankscope_contract.events import Severity
from rankscope_dashboards.alertmanager_config import Mail, Receiver, Webhook

FORMS: Final = (
    "https://host/path for a webhook, or smtp://[user:password@]host:port?to=ADDRESS[&from=ADDRESS][&tls=no] for mail; "
    "critical= in front of it for critical alerts alone"
)
DEFAULT_SENDER: Final = "rankscope@localhost"
_MAIL_KEYS: Final = {"to", "from", "tls"}


def receivers(addresses: Iterable[str]) -> list[Receiver]:
    """Return one receiver per address. Raises CommandError that says which forms there are, and repeats no secret."""
    return [_receiver(number, address) for number, address in enumerate(addresses, 1)]


def _receiver(number: int, address: str) -> Receiver:
    severity, url = _severity(address)
    scheme = url.partition("://")[0]
    try:
        parts = urlsplit(url)
        way = _webhook(url) if scheme in ("http", "https") else _mail(parts) if scheme == "smtp" else None
    except ValueError as error:
        raise CommandError(f"address {number} to notify ({scheme}://…): {error}", code=USAGE) from error
    if way is None:
        raise CommandError(
            f"address {number} to notify ({scheme}://…) is none that Alertmanager understands: write {FORMS}. "
            'The service itself understands all of Apprise: [notify] mode = "embedded"',
            code=USAGE,
        )
    return Receiver(name=f"address-{number}", ways=(way,), severities=(severity,) if severity else ())


def _severity(address: str) -> tuple[Severity | None, str]:
    word, equals, rest = address.partition("=")
    return (Severity(word), rest) if equals and word in tuple(Severity) else (None, address)


def _webhook(url: str) -> Webhook:
    return Webhook(url=url)


def _mail(parts: SplitResult) -> Mail:
    asked = parse_qs(parts.query)
    if unknown := asked.keys() - _MAIL_KEYS:
        raise ValueError(f"{', '.join(sorted(unknown))} is unknown: there are to, from and tls")
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
