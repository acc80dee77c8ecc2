"""Alerts that notify about anomalies: one alert for each incident.

One bad step can make rules fire on hundreds of tensors and on all ranks. The service combines these firings into an
incident and finds the first one in causal order. If no service receives the records of a run, one alert for each run
and rule reports its firings.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.events import Severity
from rankscope_dashboards.alerts.alert import ANOMALIES, NOT_KNOWN, Alert, unless, with_all_labels
from rankscope_dashboards.alerts.counters import held, present_age
from rankscope_dashboards.deploy.alertmanager import NOT_APPLICABLE
from rankscope_dashboards.deploy.prometheus import seconds
from rankscope_storage.base import service_catalogue

UNREPORTED_FOR: Final = "1m"
"""Time that the service has to report an anomaly that Prometheus has found on the page of a rank."""

REPORTED_AFTER: Final = "10s"
"""Time after which the service has reported a firing: poll, incident, and scrape of the service."""


_TENSOR_TEXT: Final = "".join(
    (
        unless("kind", NOT_APPLICABLE, " in {{ $labels.kind }}"),
        unless("tensor", NOT_APPLICABLE, " of {{ $labels.tensor }}"),
        unless("op", NOT_APPLICABLE, " ({{ $labels.op }})"),
    )
)
_STEP_TEXT: Final = unless("step", NOT_KNOWN, ", step {{ $labels.step }}")


def incident_alerts(window: str) -> tuple[Alert, ...]:
    """Return the alert on incidents, and the alert on anomalies of runs from which no service receives records.

    Both alerts are active until `window` after the latest firing of a rule.
    """
    return _incident(window), _without_service(window)


def _incident(window: str) -> Alert:
    age = service_catalogue.INCIDENT_AGE
    recent = f"group by ({', '.join(age.labels)}) ({held(age, present=present_age(age))} < {seconds(window):g})"
    return Alert(
        name="AnomalyIncident",
        expression=with_all_labels(recent, ("rank", "kind", "tensor", "op", "step")),
        summary=f"{{{{ $labels.rule }}}}{_TENSOR_TEXT}, rank {{{{ $labels.rank }}}}{_STEP_TEXT}, "
        "run {{ $labels.run }}",
        description="This is the first firing of the incident, in causal order over all ranks. "
        "`rankscope anomalies RUN` lists the others.",
        severity=None,
        rule=None,
        panel=ANOMALIES,
    )


def _without_service(window: str) -> Alert:
    age, followed = present_age(catalogue.ANOMALY_AGE), service_catalogue.RUN_STATE.name
    # The service reported a firing that is older than its own outage. A second message must not repeat it.
    away = f"time() - max by (run) (max_over_time(timestamp({followed})[{window}:{REPORTED_AFTER}]))"
    reported = f"{age} - {seconds(REPORTED_AFTER):g} > on (run) group_left () ({away})"
    unreported = f"{age} < {seconds(window):g}\n  unless on (run, rank, rule, kind)\n{reported}"
    return Alert(
        name="AnomalyWithoutService",
        expression=f"group by (run, rule) (\n{unreported}\n)\n  unless on (run)\n{followed}",
        summary="{{ $labels.rule }} fired in run {{ $labels.run }}; no service receives its records",
        description="The pages of the ranks show the firing. No service has the records of this run, so that the first "
        "tensor and its rank are unknown.",
        severity=Severity.CRITICAL,
        rule=None,
        hold_for=UNREPORTED_FOR,
        panel=ANOMALIES,
    )
