"""Alerts on the anomaly rules of the contract, with each rule as PromQL.

A rank exports the value, the baseline and the threshold of each series that it evaluates. PromQL only repeats the
comparison. There are three alerts for each rule:

- The comparison alert evaluates the latest scrape, which contains only one step of many, and the firings that the rank
  has counted for each series. It names the affected series.
- The counting alert uses the counter of firings, which the rank increments at every step. It misses no step.
- The self-check compares the result of PromQL with the rank's own result, which must be equal.

Score rules have one alert for all of them, which knows no rule: it compares exported scores with exported limits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Final

from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.spec import MetricSpec
from rankscope_contract.model.events import Severity
from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.anomaly import LIMITED, NOT_LIMITED, AnomalyNan, AnomalyTurbulence
from rankscope_contract.wire.escaping import label_value
from rankscope_dashboards.alerts.alert import ANOMALIES, SCORES, Alert, with_all_labels
from rankscope_dashboards.alerts.counters import increased
from rankscope_dashboards.deploy.alertmanager import NOT_APPLICABLE
from rankscope_storage.base import service_catalogue

WINDOW: Final = "2m"
"""Time for which the alerts on a rule are active after a firing."""

KEEP_FIRING_FOR: Final = "1m"
"""Time for which a comparison alert remains active after the scraped value fell below the threshold."""

MAX_TENSORS: Final = 5
"""Largest number of tensors that the text of an alert names."""

_SCALARS: Final = (catalogue.LOSS, catalogue.GRAD_NORM, catalogue.LEARNING_RATE, catalogue.SCALAR)

# Templates that Prometheus and Grafana both expand. Logged scalars have no kind and no tensor.
_RANK_TEXT: Final = "run {{ $labels.run }} rank {{ $labels.rank }}"
_KIND_TEXT: Final = (
    f'{{{{ if eq $labels.kind "{NOT_APPLICABLE}" }}}}logged scalars{{{{ else }}}}{{{{ $labels.kind }}}}{{{{ end }}}}'
)
_SERIES_TEXT: Final = (
    f'{{{{ if eq $labels.kind "{NOT_APPLICABLE}" }}}}a logged scalar{{{{ else }}}}'
    "{{ $labels.kind }} of {{ $labels.tensor }} ({{ $labels.op }}){{ end }}"
)

_RANK_LABELS: Final = ("run", "rank")
_KIND_LABELS: Final = (*_RANK_LABELS, "kind")
_SERIES_LABELS: Final = (*_KIND_LABELS, "tensor", "op")
_OR: Final = "\n  or\n"
_BY_KIND: Final = "(run, rank, kind)"


@dataclass(frozen=True, slots=True)
class RulePromql:
    """A rule as PromQL expressions over tensor statistics and over logged scalars.

    The rule fires if any expression holds.
    """

    tensors: Sequence[str]
    scalars: Sequence[str] = ()


def anomaly_alerts(
    rules: Sequence[AnomalyRule], *, window: str = WINDOW, keep_firing_for: str = KEEP_FIRING_FOR
) -> tuple[Alert, ...]:
    """Return two alerts for each rule on tensors: one compares values, the other one counts the firings of the rank.

    The first one is the comparison alert. It remains active for `keep_firing_for` after the comparison became false,
    and for `window` after a firing that the rank counted. The second one is the counting alert, which is active for
    `window` after a firing. `window` must be long enough for at least two scrapes.
    """
    return tuple(
        alert
        for rule in of_tensors(rules)
        for alert in (_comparison_alert(rule, window, keep_firing_for), _counting_alert(rule, window))
    )


def score_alert() -> Alert:
    """Return the alert on all rules with a score. It fires while the largest recent score is above the limit.

    Both metrics have the same labels, so that the comparison needs no matching clause, also for a rank that is scraped
    twice.
    """
    return Alert(
        name="ScoreAboveLimit",
        expression=f"group by (run, rank, rule) ({catalogue.RULE_SCORE.name} > {catalogue.RULE_THRESHOLD.name})",
        summary=f"score of {{{{ $labels.rule }}}} above its limit, {_RANK_TEXT}",
        description="The largest score of the last minute or two is above the limit. "
        "`rankscope anomalies {{ $labels.run }}` names tensor and step.",
        severity=Severity.WARNING,
        rule=None,
        panel=SCORES,
        is_detail=True,
    )


def rule_disagreement(rule: AnomalyRule) -> Alert:
    """Return the alert that fires when PromQL and the rank evaluate `rule` differently for the same scrape.

    `/metrics` has value, baseline and threshold together with the rank's own result, all of one step, and one scrape
    reads all of them. The two results must therefore always be equal. Logged scalars are not compared. `/metrics` has
    the last value of each scalar, but the rank's own result refers to the scalars of the latest record.
    """
    name, tensors = label_value(rule.name), tensor_expression(rule)
    firing = f'{catalogue.RULE_FIRING.name}{{rule="{name}", kind!=""}} == 1'
    # If `/metrics` omits tensors because of the series limit, PromQL cannot see everything that the rank evaluated.
    omitted = f'{catalogue.DROPPED.name}{{reason=~"series_.+"}} > 0'
    only_promql = f"group by {_BY_KIND} (\n{tensors}\n)\n  unless on {_BY_KIND}\n{firing}"
    only_rank = (
        f"group by {_BY_KIND} ({firing})\n  unless on {_BY_KIND}\n(\n{tensors}\n)\n  unless on (run, rank)\n{omitted}"
    )
    return Alert(
        name="RuleDisagreement",
        expression=f"(\n{only_promql}\n)\n  or\n(\n{only_rank}\n)",
        summary="rank {{ $labels.rank }} of run {{ $labels.run }} and Prometheus disagree on "
        f"{rule.name} in {{{{ $labels.kind }}}}",
        description="The rank and Prometheus evaluated the rule on the same scrape, with different results. Usual "
        "cause: the rank is configured with other rules than the rule file was generated for.",
        severity=Severity.WARNING,
        labels={"judged_by": rule.name},
        keep_firing_for="5m",
        panel=ANOMALIES,
    )


def of_tensors(rules: Iterable[AnomalyRule]) -> list[AnomalyRule]:
    """Return the rules that PromQL judges for each statistic of a tensor. Only these have alerts of their own."""
    return [rule for rule in rules if rule_promql(rule).tensors]


def rule_expression(rule: AnomalyRule) -> str:
    """Return PromQL that selects the series of tensor statistics and logged scalars on which `rule` fires."""
    promql = rule_promql(rule)
    return _OR.join((*promql.tensors, *promql.scalars))


def tensor_expression(rule: AnomalyRule) -> str:
    """Return PromQL that selects the tensor statistics on which `rule` fires, without logged scalars."""
    return _OR.join(rule_promql(rule).tensors)


@singledispatch
def rule_promql(rule: AnomalyRule) -> RulePromql:
    """Return the PromQL expressions of `rule`. Use `rule_promql.register` to add a new class of rules.

    A rule of another class needs the history of a series, which PromQL does not see: the rank exports its result.
    """
    return RulePromql([], [f'{catalogue.RULE_FIRING.name}{{rule="{label_value(rule.name)}"}} == 1'])


@rule_promql.register
def _(rule: AnomalyTurbulence) -> RulePromql:
    series = _selector(rule, rule.ops)
    value, baseline = f"abs({catalogue.TENSOR_VALUE.name}{series})", f"{catalogue.TENSOR_BASELINE.name}{series}"
    factor = f"{_beside(catalogue.TENSOR_BASELINE, catalogue.RULE_THRESHOLD)} (1 + {_threshold(rule)})"
    floor = f" > {rule.floor!r}" if rule.floor else ""
    high = f"{value} > ({baseline} * {factor}){floor}"
    low = f"{value} < ({baseline} / {factor})"
    return RulePromql([high] if rule.direction == "up" else [high, low])


@rule_promql.register
def _(rule: AnomalyNan) -> RulePromql:
    tensors = [f"{catalogue.TENSOR_VALUE.name}{_selector(rule, ('nans', *(('infs',) if rule.infs else ())))} > 0"]
    if rule.infs:  # only the rank knows which infinities a tensor has had from its first value on
        quiet = f'{catalogue.RULE_FIRING.name}{{rule="{label_value(rule.name)}"}} == 0'
        tensors[0] += f' unless ({catalogue.TENSOR_VALUE.name}{{op="infs"}} and on {_BY_KIND} {quiet})'
    if rule.threshold is not None:
        values = _selector(rule, VALUE_OPS)
        above = f"> {_beside(catalogue.TENSOR_VALUE, catalogue.RULE_THRESHOLD)} {_threshold(rule)}"
        tensors.append(f"abs({catalogue.TENSOR_VALUE.name}{values}) {above}")
    return RulePromql(tensors, [part for scalar in _SCALARS for part in _nonfinite(rule, scalar)])


def _nonfinite(rule: AnomalyNan, spec: MetricSpec) -> Iterable[str]:
    scalar = spec.name
    if rule.kinds is not None:
        return
    # `v != v` selects NaN samples, and their value is NaN. The alert's group() replaces it by 1.
    yield f"{scalar} != {scalar}"
    if rule.infs:
        yield f"abs({scalar}) == Inf"
    if rule.threshold is not None and scalar != catalogue.LEARNING_RATE.name:
        limited = f'{{name=~"{LIMITED}", name!~"{NOT_LIMITED}"}}' if scalar == catalogue.SCALAR.name else ""
        above = f"> {_beside(spec, catalogue.RULE_THRESHOLD)} {_threshold(rule)}"
        yield f"abs({scalar}{limited}) {above}"


def _beside(many: MetricSpec, one: MetricSpec) -> str:
    """Return the matching clause that compares each series of `many` with the series of `one` of the same scrape.

    If Prometheus scrapes a rank twice, each series exists twice, with other labels of the target: `job`, `instance`,
    `replica` of a federation. Both series of a pair have the same of these labels, so that only the labels of the two
    metrics are ignored.
    """
    ignored = [name for name in (*many.labels, *one.labels) if name not in many.labels or name not in one.labels]
    return f"ignoring ({', '.join(ignored)}) group_left ()"


def _comparison_alert(rule: AnomalyRule, window: str, keep_firing_for: str) -> Alert:
    series = f"group by ({', '.join(_SERIES_LABELS)}) (\n{rule_expression(rule)}\n)"
    return Alert(
        name=rule.name,
        expression=with_all_labels(_OR.join((series, _fired(rule, window))), ("kind", "tensor", "op")),
        summary=f"{rule.name} in {_SERIES_TEXT}, {_RANK_TEXT}",
        description=_description(
            rule, f"The rule holds for this series at the step of the last scrape, or fired on it within {window}."
        ),
        severity=str(rule.severity),
        runbook=rule.runbook or type(rule).__name__,
        rule=rule.name,
        keep_firing_for=keep_firing_for,  # a spike is visible in one scrape only; without this the alert would flap
        panel=ANOMALIES,
        is_detail=True,
    )


def _fired(rule: AnomalyRule, window: str) -> str:
    """Return PromQL that selects the series on which the rank found a firing within `window`, at any step.

    A firing between two scrapes is therefore not missed.
    """
    matcher = f'{{rule="{label_value(rule.name)}"}}'
    return increased(
        catalogue.TENSOR_ANOMALY_EVENTS,
        catalogue.ANOMALY_AGE,
        _SERIES_LABELS,
        window,
        matcher=matcher,
        age_by=_KIND_LABELS,
    )


def _counting_alert(rule: AnomalyRule, window: str) -> Alert:
    """Return the alert on firings of `rule`, including firings between two scrapes.

    The alert uses the rank's own counter, and the service's counter of the firings that the service received. The
    service's counter is needed because a rank that dies at the firing step cannot be scraped any more.
    """
    matcher = f'{{rule="{label_value(rule.name)}"}}'
    counts = [
        increased(counter, age, _KIND_LABELS, window, matcher=matcher)
        for counter, age in (
            (catalogue.ANOMALY_EVENTS, catalogue.ANOMALY_AGE),
            (service_catalogue.ANOMALIES_INGESTED, service_catalogue.ANOMALIES_INGESTED_AGE),
        )
    ]
    return Alert(
        name=f"{rule.name}Events",
        expression=with_all_labels(_OR.join(counts), ("kind",)),
        summary=f"{rule.name} fired in {_KIND_TEXT}, {_RANK_TEXT}",
        description=_description(
            rule, f"The rank counts firings at every step; the rule fired at least once within {window}."
        ),
        severity=str(rule.severity),
        runbook=rule.runbook or type(rule).__name__,
        rule=rule.name,
        panel=ANOMALIES,
        is_detail=True,
        queried=_fired_tensors(rule.name, window) + _latest_step(),
    )


def _description(rule: AnomalyRule, sentence: str) -> str:
    return (
        f"{rule.summary} {sentence}".strip()
        + " `rankscope anomalies {{ $labels.run }}` lists the affected tensors in causal order."
    )


def _selector(rule: AnomalyRule, ops: Sequence[str]) -> str:
    kinds = "" if rule.kinds is None else f'kind=~"{"|".join(rule.kinds)}", '
    return f'{{{kinds}op=~"{"|".join(ops)}"}}'


def _threshold(rule: AnomalyRule) -> str:
    return f'{catalogue.RULE_THRESHOLD.name}{{rule="{label_value(rule.name)}"}}'


# Templates that query Prometheus while it evaluates the alert. If a query returns nothing, for example because the rank
# is gone, the template adds no text. Every active alert runs its queries at each evaluation: use them only in alerts
# with few instances, one per rank and kind and not one per tensor.


def _latest_step() -> str:
    """Return a template that adds the latest step of the rank to the description of an alert.

    The counters of firings do not contain the step of a firing.
    """
    text = ' The rank is at step {{ . | first | value | printf "%.0f" }}.'
    return _with_query(_series_format(catalogue.STEP, _RANK_LABELS), _RANK_LABELS, text)


def _fired_tensors(rule: str, window: str) -> str:
    """Return a template that adds the tensors on which the rule fired most often to the description of an alert.

    Firings count if they occurred within `window`.

    The counter of a tensor appears at the first firing on it, so that `increase` alone would miss this firing.
    """
    fixed = f'rule="{label_value(rule)}", '.replace("%", "%%")
    series = _series_format(catalogue.TENSOR_ANOMALY_EVENTS, _KIND_LABELS, fixed)
    new = f"{series} unless {series} offset {window}"
    by = ", ".join(_SERIES_LABELS)
    query = f"topk({MAX_TENSORS}, max by ({by}) (increase({series}[{window}]) > 0 or ({new})))"
    names = "{{ range $at, $one := . }}{{ if $at }},{{ end }} {{ .Labels.tensor }} ({{ .Labels.op }}){{ end }}"
    return _with_query(query, _KIND_LABELS * 3, f" Tensors:{names}.")


def _series_format(metric: MetricSpec, labels: tuple[str, ...], fixed: str = "") -> str:
    """Return a PromQL selector as a printf format with %q for the value of each label.

    %q quotes texts as PromQL does.
    """
    return f"{metric.name}{{{fixed}{', '.join(f'{name}=%q' for name in labels)}}}"


def _with_query(query: str, labels: tuple[str, ...], text: str) -> str:
    values = " ".join(f"$labels.{name}" for name in labels)
    return f"{{{{ with printf {json.dumps(query)} {values} | query }}}}{text}{{{{ end }}}}"
