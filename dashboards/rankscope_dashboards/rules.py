"""The contract's rules as Prometheus alerts.

A rank exports value, baseline and threshold of what it judged, so PromQL only repeats the comparison. Two alerts per
rule: the comparison on what a scrape happened to see, and the counter of firings, which misses no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, Final

from rankscope_contract import metrics
from rankscope_contract.escaping import label_value
from rankscope_contract.kinds import Kind
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence

DEFAULT_RULES: Final[tuple[AnomalyRule, ...]] = (
    AnomalyNan(),
    AnomalyTurbulence(threshold=10.0, kinds=(Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED), ops=("norm",)),
)
"""What a rank judges unless it is told otherwise; a test holds this equal to the exporter's own defaults."""

_SERIES: Final = "on (run, rank, kind, tensor, op)"
_SCALARS: Final = (metrics.LOSS, metrics.GRAD_NORM, metrics.LEARNING_RATE, metrics.SCALAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alerting rule of a Prometheus rule file."""

    name: str
    expression: str
    summary: str
    labels: dict[str, str] = field(default_factory=dict)
    keep_firing_for: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the rule as it stands in the file."""
        entry: dict[str, Any] = {"alert": self.name, "expr": self.expression}
        if self.keep_firing_for:
            entry["keep_firing_for"] = self.keep_firing_for
        return {**entry, "labels": self.labels, "annotations": {"summary": self.summary}}


def rule_file(
    rules: Sequence[AnomalyRule] = DEFAULT_RULES, *, window: str = "2m", keep_firing_for: str = "1m"
) -> dict[str, Any]:
    """Return the document of a Prometheus rule file with the alerts of `rules`.

    An event stays an alert for `window`, which must hold at least two scrapes; a comparison that no longer holds stays
    one for `keep_firing_for`.
    """
    alerts = [alert for rule in rules for alert in (_comparison(rule, keep_firing_for), _counter(rule, window))]
    return {"groups": [{"name": "rankscope-anomaly", "rules": [alert.document() for alert in alerts]}]}


@singledispatch
def expression(rule: AnomalyRule) -> str:
    """Return the PromQL that is true for the series on which `rule` fires."""
    raise NotImplementedError(f"{type(rule).__name__} has no PromQL form: register one with expression.register")


@expression.register
def _(rule: AnomalyTurbulence) -> str:
    series = _selector(rule, rule.ops)
    value, baseline = f"abs({metrics.TENSOR_VALUE.name}{series})", f"{metrics.TENSOR_BASELINE.name}{series}"
    factor = f"on (run, rank) group_left () (1 + {_threshold(rule)})"
    high = f"{value} > {_SERIES} ({baseline} * {factor})"
    if rule.direction == "up":
        return high
    return f"{high}\n  or\n{value} < {_SERIES} ({baseline} / {factor})"


@expression.register
def _(rule: AnomalyNan) -> str:
    parts = [f"{metrics.TENSOR_VALUE.name}{_selector(rule, ('nans', *(('infs',) if rule.infs else ())))} > 0"]
    if rule.kinds is None:
        for scalar in _SCALARS:
            # v != v keeps NaN alone, and its value is NaN: group() turns it into 1.
            parts.append(f"{scalar.name} != {scalar.name}")
            parts += [f"abs({scalar.name}) == Inf"] if rule.infs else []
    if rule.threshold is not None:
        judged = _selector(rule, ("norm", "min", "max", "mean"))
        parts.append(f"abs({metrics.TENSOR_VALUE.name}{judged}) > on (run, rank) group_left () {_threshold(rule)}")
    return "\n  or\n".join(parts)


def _comparison(rule: AnomalyRule, keep_firing_for: str) -> Alert:
    return Alert(
        name=rule.name,
        expression=f"group by (run, rank, kind, tensor, op) (\n{expression(rule)}\n)",
        summary=f"{rule.name} in {{{{ $labels.kind }}}} of {{{{ $labels.tensor }}}} ({{{{ $labels.op }}}}), "
        "run {{ $labels.run }} rank {{ $labels.rank }}",
        labels={"severity": str(rule.severity), "rule": rule.name},
        keep_firing_for=keep_firing_for,  # a spike lasts one scrape; do not flap
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
        expression="\n  or\n".join(counts),
        summary=f"{rule.name} fired in {{{{ $labels.kind }}}}, run {{{{ $labels.run }}}} rank {{{{ $labels.rank }}}}",
        labels={"severity": str(rule.severity), "rule": rule.name},
    )


def _selector(rule: AnomalyRule, ops: Sequence[str]) -> str:
    kinds = "" if rule.kinds is None else f'kind=~"{"|".join(rule.kinds)}", '
    return f'{{{kinds}op=~"{"|".join(ops)}"}}'


def _threshold(rule: AnomalyRule) -> str:
    return f'{metrics.RULE_THRESHOLD.name}{{rule="{label_value(rule.name)}"}}'
