"""The configuration of an Alertmanager for the contract's rules, from values: who is told of what, and how often.

One message per run and rule, however many tensors fire: a bad step can fire hundreds. Where a tensor has NaN, that its
norm also left its average is no news.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.escaping import label_value
from rankscope_contract.events import Severity
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_dashboards.prometheus_config import duration
from rankscope_dashboards.rules import DEFAULT_RULES

GROUP_BY: Final = ("run", "rule")
SAME_TENSOR: Final = ("run", "rank", "tensor")
MOST_ALERTS: Final = 20
"""Alerts in one webhook message; Alertmanager counts the rest."""

SUBJECT: Final = (
    "[{{ .Status | toUpper }}] {{ .GroupLabels.rule }}"
    '{{ with .GroupLabels.run }} in run "{{ . }}"{{ end }}{{ with .CommonLabels.rank }}, rank {{ . }}{{ end }}'
)
"""Of a mail. An alert on the service has no run, and one message may be about several ranks."""

NOBODY: Final = "nobody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """An address that takes Alertmanager's JSON, version 4."""

    url: str

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/\s]", self.url):
            raise ValueError("a webhook is an address such as https://alerts.example/hook")

    def document(self) -> dict[str, Any]:
        """Return one entry of `webhook_configs`."""
        return {"url": self.url, "send_resolved": True, "max_alerts": MOST_ALERTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """A mailbox, and the server that takes mail for it."""

    to: str
    sender: str
    smarthost: str  # host:port
    require_tls: bool = True
    username: str | None = None
    password: str | None = None
    password_file: str | None = None

    def __post_init__(self) -> None:
        for name in ("to", "sender"):
            if "@" not in getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}: write a mail address")
        if not re.fullmatch(r".+:\d{1,5}", self.smarthost):
            raise ValueError(f"smarthost is {self.smarthost!r}: write host:port, such as mail.example:587")
        if self.username is None and (self.password or self.password_file):
            raise ValueError("a password needs a username")

    def document(self) -> dict[str, Any]:
        """Return one entry of `email_configs`."""
        secrets = {
            "auth_username": self.username,
            "auth_password": self.password,
            "auth_password_file": self.password_file,
        }
        return {
            "to": self.to,
            "from": self.sender,
            "smarthost": self.smarthost,
            "require_tls": self.require_tls,
            **{name: value for name, value in secrets.items() if value is not None},
            "headers": {"Subject": SUBJECT},
            "send_resolved": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """Somebody who is told, by one or several ways; `severities` limits of what, empty means of everything."""

    name: str
    ways: tuple[Webhook | Mail, ...]
    severities: tuple[Severity, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return one entry of `receivers`."""
        webhooks = [way.document() for way in self.ways if isinstance(way, Webhook)]
        mails = [way.document() for way in self.ways if isinstance(way, Mail)]
        document: dict[str, Any] = {"name": self.name}
        return document | _unless_empty(webhook_configs=webhooks, email_configs=mails)

    def route(self) -> dict[str, Any]:
        """Return the route to this receiver; the next one is asked too, since each tells somebody else."""
        words = "|".join(self.severities)
        limit = {"matchers": [f'severity=~"{words}"']} if self.severities else {}
        return {"receiver": self.name, **limit, "continue": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertmanagerSettings:
    """Who is told, and the pace: the first message of a group waits `group_wait_seconds` for others to join it."""

    receivers: Sequence[Receiver] = ()
    rules: Sequence[AnomalyRule] = DEFAULT_RULES
    group_wait_seconds: float = 2.0
    group_interval_seconds: float = 60.0
    repeat_seconds: float = 4 * 3600.0

    def __post_init__(self) -> None:
        names = [receiver.name for receiver in self.receivers]
        if len({NOBODY, *names}) != len(names) + 1:
            raise ValueError(f"receivers need names of their own, none of them {NOBODY!r}: {', '.join(names)}")


def alertmanager_config(settings: AlertmanagerSettings) -> dict[str, Any]:
    """Return the document. Without receivers alerts are taken and shown, and nobody is told."""
    route: dict[str, Any] = {
        "receiver": NOBODY,
        "group_by": list(GROUP_BY),
        "group_wait": duration(settings.group_wait_seconds),
        "group_interval": duration(settings.group_interval_seconds),
        "repeat_interval": duration(settings.repeat_seconds),
    }
    return {
        "route": route | _unless_empty(routes=[receiver.route() for receiver in settings.receivers]),
        "receivers": [{"name": NOBODY}, *(receiver.document() for receiver in settings.receivers)],
        **_unless_empty(inhibit_rules=list(_inhibitions(settings.rules))),
    }


def _inhibitions(rules: Sequence[AnomalyRule]) -> Iterable[dict[str, Any]]:
    """Yield which alert hides which: of one tensor, NaN hides turbulence, as the first rule that fires names the alert.

    Two alerts that both lack a label count as equal in it, so what names no tensor must be kept out by a matcher.
    """
    for first in rules:
        for second in rules:
            if isinstance(first, AnomalyNan) and isinstance(second, AnomalyTurbulence):
                yield {
                    "source_matchers": [f'rule="{label_value(first.name)}"', 'tensor!=""'],
                    "target_matchers": [f'rule="{label_value(second.name)}"', 'tensor!=""'],
                    "equal": list(SAME_TENSOR),
                }


def _unless_empty(**parts: list[Any]) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if part}
