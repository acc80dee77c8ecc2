"""The rules' check of themselves: an alert when PromQL and the rank judge the same page differently.

A rank shows value, baseline and threshold beside its own verdict, all of one step, and a scrape takes them together.
So both must always agree, and "the alert means what the rule means" is watched rather than believed. Logged scalars are
left out: the page shows the last value of each, and the verdict is about those of the latest record.
"""

from __future__ import annotations

from rankscope_contract import metrics
from rankscope_contract.escaping import label_value
from rankscope_contract.events import Severity
from rankscope_dashboards.alerts import Alert

_KIND = "(run, rank, kind)"


def disagreement(rule: str, tensors: str) -> Alert:
    """Return the alert for the rule of this name; `tensors` is its PromQL over the series of tensors."""
    name = label_value(rule)
    verdict = f'{metrics.RULE_FIRING.name}{{rule="{name}", kind!=""}} == 1'
    left_out = f'{metrics.DROPPED.name}{{reason=~"series_.+"}} > 0'
    # Where the page leaves tensors out, PromQL cannot see all that the rank judged.
    only_promql = f"group by {_KIND} (\n{tensors}\n)\n  unless on {_KIND}\n{verdict}"
    only_rank = (
        f"group by {_KIND} ({verdict})\n  unless on {_KIND}\n(\n{tensors}\n)\n  unless on (run, rank)\n{left_out}"
    )
    return Alert(
        name="RuleDisagreement",
        expression=f"(\n{only_promql}\n)\n  or\n(\n{only_rank}\n)",
        summary="rank {{ $labels.rank }} of run {{ $labels.run }} and Prometheus disagree on "
        f"{rule} in {{{{ $labels.kind }}}}",
        description="The rank's own verdict and the alert's expression differ on one page. Usually the rank is "
        "configured with other rules than the rule file was generated for.",
        severity=Severity.WARNING,
        runbook="RuleDisagreement",
        labels={"judged_by": rule},
        keep_firing_for="5m",
        panel="Anomalies",
    )
