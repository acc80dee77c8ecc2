"""Build examples of Grafana's contact points, notification policies, mute timings and message templates.

The files are in a folder of their own, which Grafana does not read. A server has only one tree of policies, so that a
provisioned tree replaces the one of the user. Addresses in the examples must be replaced.
"""

from __future__ import annotations

from typing import Any, Final

from rankscope_dashboards.deploy.alertmanager import DETAIL, GROUP_BY, SUBJECT
from rankscope_dashboards.provisioning.alert_rules import FOLDER
from rankscope_dashboards.provisioning.datasources import ORGANISATION

CHAT: Final = "rankscope-chat"
ON_CALL: Final = "rankscope-on-call"
ALWAYS: Final = "rankscope-always"
MAINTENANCE: Final = "rankscope-maintenance"
DEFAULT_RECEIVER: Final = "grafana-default-email"
"""The contact point that every new Grafana server has."""

GROUP_WAIT: Final = "5s"
"""Time for which the first message of a group waits for more alerts. The default of Grafana is 30 s."""

MESSAGE: Final = (
    "{{ range .Alerts }}{{ .Annotations.summary }}\n{{ .Annotations.description }}\n"
    "{{ with .Annotations.board }}{{ . }}\n{{ end }}{{ end }}"
)


def notification_examples() -> dict[str, dict[str, Any]]:
    """Return the content of each example, by the name of its file."""
    return {
        "contact-points.yaml": {"apiVersion": 1, "contactPoints": [_chat(), _on_call()]},
        "policies.yaml": {"apiVersion": 1, "policies": [_policy()]},
        "mute-timings.yaml": {"apiVersion": 1, "muteTimes": [_always(), _maintenance()]},
        "templates.yaml": {"apiVersion": 1, "templates": [_template()]},
    }


def _chat() -> dict[str, Any]:
    settings = {"url": "https://chat.example.invalid/hook", "httpMethod": "POST", "maxAlerts": "20"}
    return _contact_point(CHAT, "webhook", settings)


def _on_call() -> dict[str, Any]:
    settings = {
        "addresses": "oncall@example.invalid",
        "singleEmail": True,
        "subject": '{{ template "rankscope.title" . }}',
        "message": '{{ template "rankscope.message" . }}',
    }
    return _contact_point(ON_CALL, "email", settings)


def _contact_point(name: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    receiver = {"uid": name, "type": kind, "disableResolveMessage": False, "settings": settings}
    return {"orgId": ORGANISATION, "name": name, "receivers": [receiver]}


def _policy() -> dict[str, Any]:
    """Return a tree with one route for the alerts of Rankscope. All other alerts go to the default contact point."""
    label, value = DETAIL
    details = {
        "receiver": CHAT,
        "object_matchers": [[label, "=", value]],
        "mute_time_intervals": [ALWAYS],  # details of an incident, about which one message is sent
    }
    critical = {"receiver": ON_CALL, "object_matchers": [["severity", "=", "critical"]], "continue": True}
    route = {
        "receiver": CHAT,
        "object_matchers": [["grafana_folder", "=", FOLDER]],
        "group_by": list(GROUP_BY),
        "group_wait": GROUP_WAIT,
        "group_interval": "1m",
        "repeat_interval": "4h",
        "routes": [details, {**critical, "mute_time_intervals": [MAINTENANCE]}, {"receiver": CHAT}],
    }
    return {
        "orgId": ORGANISATION,
        "receiver": DEFAULT_RECEIVER,
        "group_by": ["grafana_folder", "alertname"],
        "routes": [route],
    }


def _always() -> dict[str, Any]:
    whole_day = {"start_time": "00:00", "end_time": "24:00"}
    return {"orgId": ORGANISATION, "name": ALWAYS, "time_intervals": [{"times": [whole_day]}]}


def _maintenance() -> dict[str, Any]:
    hours = {"start_time": "02:00", "end_time": "04:00"}
    interval = {"weekdays": ["sunday"], "times": [hours]}
    return {"orgId": ORGANISATION, "name": MAINTENANCE, "time_intervals": [interval]}


def _template() -> dict[str, Any]:
    definitions = {"rankscope.title": SUBJECT, "rankscope.message": MESSAGE}
    text = "".join(f'{{{{ define "{name}" }}}}{body}{{{{ end }}}}\n' for name, body in definitions.items())
    return {"orgId": ORGANISATION, "name": "rankscope", "template": text}
