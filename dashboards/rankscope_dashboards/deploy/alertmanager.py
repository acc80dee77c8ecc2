"""Build the configuration of an Alertmanager: receivers, routes, and grouping and inhibition of alerts.

One bad step can make a rule fire for hundreds of tensors. Alertmanager sends one message about the incident, and none
about the alerts that are its details. Alerts are grouped by run, rule and step. While a tensor has NaN, the turbulence
alert of the same tensor is inhibited, because it is redundant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.model.events import Severity
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_contract.wire.escaping import label_value
from rankscope_dashboards.deploy.prometheus import duration

DETAIL: Final = ("notification", "none")
"""Label of an alert about one part of an incident. Alertmanager shows such an alert, but sends no message about it."""

NOT_APPLICABLE: Final = "n/a"
"""Value of the labels `kind`, `tensor` and `op` of an alert that is not about a tensor."""

GROUP_BY: Final = ("alertname", "run", "rule", "step")
"""Labels whose values are equal in all alerts of one message. Only the alert on incidents has a step.

Grafana makes the title of a message of these values. An alert that is not about a run has only a name."""

SAME_TENSOR: Final = ("run", "rank", "tensor")
MAX_ALERTS: Final = 2
"""Largest number of alerts in one message, so that the message has at most 4 kB.

Alertmanager adds the number of omitted alerts.
"""

SUBJECT: Final = (
    "[{{ .Status | toUpper }}] {{ or .GroupLabels.rule .CommonLabels.alertname }}"
    '{{ with .GroupLabels.run }} in run "{{ . }}"{{ end }}{{ with .CommonLabels.rank }}, rank {{ . }}{{ end }}'
)
"""Template of the subject of a mail. It omits run and rank if they are unknown.

Alerts on the service have no run and no rule, and a message may cover several ranks."""

FIRST_LINE: Final = (
    "[{{ .Status | toUpper }}] {{ with index .Alerts 0 }}{{ .Annotations.summary }}{{ end }}"
    "{{ if gt (len .Alerts) 1 }} and {{ len (slice .Alerts 1) }} more{{ end }}"
)
"""Template of the title of a chat message, and of the first line of a mail: the summary of the first alert."""

TEXT: Final = (
    f"{{{{ range $at, $alert := .Alerts }}}}{{{{ if lt $at {MAX_ALERTS} }}}}"
    "{{ if $at }}{{ .Annotations.summary }}\n{{ end }}{{ .Annotations.description }}\n"
    "{{ with .Annotations.runbook_url }}{{ . }}\n{{ end }}{{ end }}{{ end }}"
)
"""Template of the text of a mail or chat message below its first line."""

NO_RECEIVER: Final = "none"
"""Name of the default receiver of Alertmanager, which sends no notifications."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """Webhook: an HTTP address that accepts the JSON messages of Alertmanager, version 4."""

    url: str

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/\s]", self.url):
            raise ValueError("not a webhook address: write http(s)://host/path, such as https://alerts.example/hook")

    def document(self) -> dict[str, Any]:
        """Return this address as an entry of `webhook_configs` in the Alertmanager configuration."""
        return {"url": self.url, "send_resolved": True, "max_alerts": MAX_ALERTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """Incoming webhook of Slack, or of a chat that accepts the same JSON fields, such as Mattermost."""

    url: str

    def __post_init__(self) -> None:
        Webhook(url=self.url)  # checks the form of the address

    def document(self) -> dict[str, Any]:
        """Return this address as an entry of `slack_configs` in the Alertmanager configuration."""
        return {"api_url": self.url, "send_resolved": True, "title": FIRST_LINE, "fallback": FIRST_LINE, "text": TEXT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """A mail recipient, and the SMTP server that accepts mail for this recipient.

    `smarthost` has the form host:port.
    """

    to: str
    sender: str
    smarthost: str
    require_tls: bool = True
    username: str | None = None
    password: str | None = None
    password_file: str | None = None

    def __post_init__(self) -> None:
        for name in ("to", "sender"):
            if "@" not in getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}: write a mail address such as oncall@mail.example")
        if not re.fullmatch(r".+:\d{1,5}", self.smarthost):
            raise ValueError(f"smarthost is {self.smarthost!r}: write host:port, such as mail.example:587")
        if self.username is None and (self.password or self.password_file):
            raise ValueError("a password needs a username: set username too")

    def document(self) -> dict[str, Any]:
        """Return this recipient as an entry of `email_configs` in the Alertmanager configuration."""
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
            "html": "",
            "text": f"{FIRST_LINE}\n{TEXT}",
            "send_resolved": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """A recipient of notifications, with one or several integrations (webhook, Slack, mail).

    The recipient gets alerts of the given `severities`, or all alerts if `severities` is empty.
    """

    name: str
    integrations: tuple[Webhook | Slack | Mail, ...]
    severities: tuple[Severity, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return this recipient as an entry of `receivers` in the Alertmanager configuration."""
        keys = {"webhook_configs": Webhook, "slack_configs": Slack, "email_configs": Mail}
        made = {
            key: [one.document() for one in self.integrations if isinstance(one, kind)] for key, kind in keys.items()
        }
        document: dict[str, Any] = {"name": self.name}
        return document | _unless_empty(**made)

    def route(self) -> dict[str, Any]:
        """Return the route to this receiver.

        The route sets `continue`, so that other receivers get the same alert too. Incidents are sent without a group
        wait, because the service has waited for all their parts.
        """
        severities = "|".join(self.severities)
        limit = {"matchers": [f'severity=~"{severities}"']} if self.severities else {}
        incidents = {"matchers": ['step!=""'], "group_wait": "0s"}
        return {"receiver": self.name, **limit, "continue": True, "routes": [incidents]}


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertmanagerSettings:
    """Settings of the Alertmanager configuration.

    - `rules`: the anomaly rules of the rule file, for which inhibition rules are generated.
    - `group_wait_seconds`: the time for which the first notification of a group waits for more alerts.
    - `group_interval_seconds`: the minimum time until the next notification of the same group.
    - `repeat_seconds`: the time after which a notification about an active alert is sent again.
    """

    rules: Sequence[AnomalyRule]
    receivers: Sequence[Receiver] = ()
    group_wait_seconds: float = 2.0
    group_interval_seconds: float = 60.0
    repeat_seconds: float = 4 * 3600.0

    def __post_init__(self) -> None:
        names = [receiver.name for receiver in self.receivers]
        if len({NO_RECEIVER, *names}) != len(names) + 1:
            raise ValueError(f"receiver names must be unique and different from {NO_RECEIVER!r}: {', '.join(names)}")


def alertmanager_config(settings: AlertmanagerSettings) -> dict[str, Any]:
    """Return the content of `alertmanager.yml`.

    Without receivers, Alertmanager shows alerts but sends no notifications.
    """
    route: dict[str, Any] = {
        "receiver": NO_RECEIVER,
        "group_by": list(GROUP_BY),
        "group_wait": duration(settings.group_wait_seconds),
        "group_interval": duration(settings.group_interval_seconds),
        "repeat_interval": duration(settings.repeat_seconds),
    }
    details = {"receiver": NO_RECEIVER, "matchers": ['{}="{}"'.format(*DETAIL)]}
    routes = [details, *(receiver.route() for receiver in settings.receivers)] if settings.receivers else []
    return {
        "route": route | _unless_empty(routes=routes),
        "receivers": [{"name": NO_RECEIVER}, *(receiver.document() for receiver in settings.receivers)],
        **_unless_empty(inhibit_rules=list(_inhibitions(settings.rules))),
    }


def _inhibitions(rules: Sequence[AnomalyRule]) -> Iterable[dict[str, Any]]:
    """Yield the inhibition rules: a NaN alert mutes the turbulence alert of the same tensor.

    The matcher excludes alerts without a tensor: two alerts on logged scalars are not about the same value.
    """
    of_tensors = f'tensor!~"|{NOT_APPLICABLE}"'
    for first in rules:
        for second in rules:
            if isinstance(first, AnomalyNan) and isinstance(second, AnomalyTurbulence):
                yield {
                    "source_matchers": [f'rule="{label_value(first.name)}"', of_tensors],
                    "target_matchers": [f'rule="{label_value(second.name)}"', of_tensors],
                    "equal": list(SAME_TENSOR),
                }


def _unless_empty(**parts: list[Any]) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if part}
