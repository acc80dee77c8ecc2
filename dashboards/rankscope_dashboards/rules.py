"""The contract's rules as Prometheus alerts, and with them everything that a rule file holds.

A rank exports value, baseline and threshold of what it judged, so PromQL only repeats the comparison. Two alerts per
rule: the comparison on what a scrape happened to see, and the counter of firings, which misses no step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Final

from rankscope_contract import metrics
from rankscope_contract.escaping import label_value
from rankscope_contract.kinds import VALUE_OPS, Kind
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_dashboards.alerts import RUNBOOKS, Alert, AlertGroup
from rankscope_dashboards.hardware_alerts import hardware_alerts
from rankscope_dashboards.lifecycle_alerts import lifecycle_alerts
from rankscope_dashboards.look_ups import fired_tensors, latest_step
from rankscope_dashboards.replica_alerts import replica_alerts
from rankscope_dashboards.self_check import disagreement

DEFAULT_RULES: Final[tuple[AnomalyRule, ...]] = (
    AnomalyNan(),
    AnomalyTurbulence(threshold=10.0, kinds=(Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED), ops=("norm",)),
)
"""What a rank judges unless it is told otherwise; a test holds this equal to the exporter's own defaults."""

WINDOW: Final = "2m"
KEEP_FIRING_FOR: Final = "1m"

_SERIES: Final = "on (run, rank, kind, tensor, op)"
_SCALARS: Final = (metrics.LOSS, metrics.GRAD_NORM, metrics.LEARNING_RATE, metrics.SCALAR)


# Templates of Prometheus and Grafana alike. What is logged by name has neither kind nor tensor.
_RANK_NAMED: Final = "run {{ $labels.run }} rank {{ $labels.rank }}"
_KIND_NAMED: Final = "{{ if $labels.kind }}{{ $labels.kind }}{{ else }}logged numbers{{ end }}"
_SERIES_NAMED: Final = (
    "{{ if $labels.kind }}{{ $labels.kind }} of {{ $labels.tensor }} ({{ $labels.op }})"
    "{{ else }}a logged number{{ end }}"
)


@dataclass(frozen=True, slots=True)
class Terms:
    """The PromQL of a rule: alternatives over the statistics of tensors, and over logged scalars."""

    tensors: Sequence[str]
    scalars: Sequence[str] = ()


def rule_file(
    rules: Sequence[AnomalyRule] = DEFAULT_RULES,
    *,
    window: str = WINDOW,
    keep_firing_for: str = KEEP_FIRING_FOR,
    runbooks: str = RUNBOOKS,
) -> dict[str, Any]:
    """Return the document of a Prometheus rule file: the alerts of `rules`, of runs, and of the rules' self-check.

    `window` and `keep_firing_for` are those of `anomaly_alerts`; `runbooks` is the address of the page of runbooks.
    """
    groups = alert_groups(rules, window=window, keep_firing_for=keep_firing_for)
    return {"groups": [group.document(runbooks) for group in groups]}


def alert_groups(
    rules: Sequence[AnomalyRule] = DEFAULT_RULES, *, window: str = WINDOW, keep_firing_for: str = KEEP_FIRING_FOR
) -> tuple[AlertGroup, ...]:
    """Return every alert there is, in groups."""
    return (
        AlertGroup("rankscope-anomaly", anomaly_alerts(rules, window=window, keep_firing_for=keep_firing_for)),
        AlertGroup("rankscope-replicas", replica_alerts()),
        AlertGroup("rankscope-lifecycle", lifecycle_alerts()),
        AlertGroup("rankscope-hardware", hardware_alerts()),
        AlertGroup("rankscope-self-check", [disagreement(rule.name, tensor_expression(rule)) for rule in rules]),
    )


def anomaly_alerts(
    rules: Sequence[AnomalyRule], *, window: str = WINDOW, keep_firing_for: str = KEEP_FIRING_FOR
) -> tuple[Alert, ...]:
    """Return two alerts for each rule.

    An event stays an alert for `window`, which must hold at least two scrapes; a comparison that no longer holds stays
    one for `keep_firing_for`.
    """
    return tuple(alert for rule in rules for alert in (_comparison(rule, keep_firing_for), _counter(rule, window)))


def expression(rule: AnomalyRule) -> str:
    """Return the PromQL that is true for the series on which `rule` fires."""
    found = terms(rule)
    return _any((*found.tensors, *found.scalars))


def tensor_expression(rule: AnomalyRule) -> str:
    """Return the same over the statistics of tensors alone."""
    return _any(terms(rule).tensors)


@singledispatch
def terms(rule: AnomalyRule) -> Terms:
    """Return the PromQL form of `rule`; a rule gets one with `terms.register`."""
    raise NotImplementedError(f"{type(rule).__name__} has no PromQL form: register one with terms.register")


@terms.register
def _(rule: AnomalyTurbulence) -> Terms:
    series = _selector(rule, rule.ops)
    value, baseline = f"abs({metrics.TENSOR_VALUE.name}{series})", f"{metrics.TENSOR_BASELINE.name}{series}"
    factor = f"on (run, rank) group_left () (1 + {_threshold(rule)})"
    high = f"{value} > {_SERIES} ({baseline} * {factor})"
    low = f"{value} < {_SERIES} ({baseline} / {factor})"
    return Terms([high] if rule.direction == "up" else [high, low])


@terms.register
def _(rule: AnomalyNan) -> Terms:
    tensors = [f"{metrics.TENSOR_VALUE.name}{_selector(rule, ('nans', *(('infs',) if rule.infs else ())))} > 0"]
    if rule.threshold is not None:
        judged = _selector(rule, VALUE_OPS)
        tensors.append(f"abs({metrics.TENSOR_VALUE.name}{judged}) > on (run, rank) group_left () {_threshold(rule)}")
    return Terms(tensors, [part for scalar in _SCALARS for part in _nonfinite(rule, scalar.name)])


def _nonfinite(rule: AnomalyNan, scalar: str) -> Iterable[str]:
    if rule.kinds is not None:
        return
    # v != v keeps NaN alone, and its value is NaN: group() turns it into 1.
    yield f"{scalar} != {scalar}"
    if rule.infs:
        yield f"abs({scalar}) == Inf"
    if rule.threshold is not None:
        yield f"abs({scalar}) > on (run, rank) group_left () {_threshold(rule)}"


def _any(parts: Iterable[str]) -> str:
    return "\n  or\n".join(parts)


def _comparison(rule: AnomalyRule, keep_firing_for: str) -> Alert:
    return Alert(
        name=rule.name,
        expression=f"group by (run, rank, kind, tensor, op) (\n{expression(rule)}\n)",
        summary=f"{rule.name} in {_SERIES_NAMED}, {_RANK_NAMED}",
        description=_described(rule, "At the step that Prometheus saw last, the rule holds for this series."),
        severity=str(rule.severity),
        runbook=rule.runbook or type(rule).__name__,
        rule=rule.name,
        keep_firing_for=keep_firing_for,  # a spike lasts one scrape; do not flap
        panel="Anomalies",
    )


def _counter(rule: AnomalyRule, window: str) -> Alert:
    """Return the alert on firings that no scrape saw; `increase` alone would miss a counter born above zero.

    The rank's own counter, and the service's count of what arrived: a rank that dies by what it did last has no page.
    """
    by, counts = "sum by (run, rank, kind)", []
    for metric in (metrics.ANOMALY_EVENTS, metrics.ANOMALIES_INGESTED):
        counter = f'{metric.name}{{rule="{label_value(rule.name)}"}}'
        counts.append(f"{by} (increase({counter}[{window}])) > 0")
        counts.append(f"{by} ({counter} unless {counter} offset {window}) > 0")
    return Alert(
        name=f"{rule.name}Events",
        expression=_any(counts),
        summary=f"{rule.name} fired in {_KIND_NAMED}, {_RANK_NAMED}",
        description=_described(rule, f"Counted on the rank at every step; within {window} it fired at least once."),
        severity=str(rule.severity),
        runbook=rule.runbook or type(rule).__name__,
        rule=rule.name,
        panel="Anomalies",
        looked_up=fired_tensors(rule.name, window) + latest_step(),
    )


def _described(rule: AnomalyRule, what: str) -> str:
    return (
        f"{rule.summary} {what}".strip() + " `rankscope anomalies {{ $labels.run }}` puts the tensors in causal order."
    )


def _selector(rule: AnomalyRule, ops: Sequence[str]) -> str:
    kinds = "" if rule.kinds is None else f'kind=~"{"|".join(rule.kinds)}", '
    return f'{{{kinds}op=~"{"|".join(ops)}"}}'


def _threshold(rule: AnomalyRule) -> str:
    return f'{metrics.RULE_THRESHOLD.name}{{rule="{label_value(rule.name)}"}}'
