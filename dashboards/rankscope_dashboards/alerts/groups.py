"""All alerts of Rankscope in groups, and the Prometheus rule file that contains these groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rankscope_contract.model.kinds import Kind
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_dashboards.alerts.alert import RUNBOOKS, AlertGroup
from rankscope_dashboards.alerts.anomaly import KEEP_FIRING_FOR, WINDOW, anomaly_alerts, rule_disagreement
from rankscope_dashboards.alerts.hardware import hardware_alerts
from rankscope_dashboards.alerts.lifecycle import lifecycle_alerts
from rankscope_dashboards.alerts.replicas import replica_alerts

DEFAULT_RULES: Final[tuple[AnomalyRule, ...]] = (
    AnomalyNan(),
    AnomalyTurbulence(threshold=10.0, kinds=(Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED), ops=("norm",)),
)
"""The anomaly rules that a rank evaluates by default. A test compares them with the defaults of the exporter."""


def rule_file(
    rules: Sequence[AnomalyRule] = DEFAULT_RULES,
    *,
    window: str = WINDOW,
    keep_firing_for: str = KEEP_FIRING_FOR,
    runbooks: str = RUNBOOKS,
) -> dict[str, Any]:
    """Return a Prometheus rule file with all alerts; `rules` are the anomaly rules for which it has alerts.

    `window` and `keep_firing_for` are passed to `anomaly_alerts`. `runbooks` is the address of the runbooks page.
    """
    groups = alert_groups(rules, window=window, keep_firing_for=keep_firing_for)
    return {"groups": [group.document(runbooks) for group in groups]}


def alert_groups(
    rules: Sequence[AnomalyRule] = DEFAULT_RULES, *, window: str = WINDOW, keep_firing_for: str = KEEP_FIRING_FOR
) -> tuple[AlertGroup, ...]:
    """Return all alerts in groups; `rules` are the anomaly rules for which there are alerts."""
    return (
        AlertGroup("rankscope-anomaly", anomaly_alerts(rules, window=window, keep_firing_for=keep_firing_for)),
        AlertGroup("rankscope-replicas", replica_alerts()),
        AlertGroup("rankscope-lifecycle", lifecycle_alerts()),
        AlertGroup("rankscope-hardware", hardware_alerts()),
        AlertGroup("rankscope-self-check", [rule_disagreement(rule) for rule in rules]),
    )
