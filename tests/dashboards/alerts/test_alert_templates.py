"""Annotations that query Prometheus, as Prometheus expands them."""

from __future__ import annotations

import pytest

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_dashboards.alerts.groups import rule_file

RUN = 'a "b" {c} 100%\\d'


def description_error(judge, given, ending, rule="AnomalyNan"):
    """Return promtool's error, or None if the description of the counting alert ends with `ending`."""
    document = rule_file([AnomalyNan(name=rule)])
    alert = next(one for one in document["groups"][0]["rules"] if one["alert"] == f"{rule}Events")
    labels = {"run": RUN, "rank": "0", "kind": "grad_reduced"}
    annotations = {
        "summary": f"{rule} fired in grad_reduced, run {RUN} rank 0",
        "description": "The rank counts firings at every step; the rule fired at least once within 2m. "
        f"`rankscope anomalies {RUN}` lists the affected tensors in causal order.{ending}",
    }
    active = {"exp_labels": labels | alert["labels"], "exp_annotations": annotations}
    checks = [{"eval_time": "200s", "alertname": alert["alert"], "exp_alerts": [active]}]
    series = [{"series": name, "values": values} for name, values in given.items()]
    tests = [{"interval": "10s", "input_series": series, "alert_rule_test": checks}]
    rules = {"groups": [{"name": "alone", "rules": [alert]}]}
    return judge([(rules, {"evaluation_interval": "10s", "tests": tests})])[0]


def series(metric, **labels):
    values = {"run": RUN, "rank": "0", **labels}
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in values.items()}
    return metric + "{" + ", ".join(f'{name}="{value}"' for name, value in quoted.items()) + "}"


@pytest.mark.parametrize("rule", ["AnomalyNan", 'Blown "100%" \\ up'])
def test_counting_alert_lists_recent_tensors_and_the_step_of_the_rank(judge, rule):
    """First firing, further firings, old firings, another kind, another rank: only the first two are recent."""
    of = {"rule": rule, "kind": "grad_reduced", "op": "nans"}
    given = {
        series("rankscope_anomaly_events_total", rule=rule, kind="grad_reduced"): "0x15 9x10",
        series("rankscope_tensor_anomaly_events_total", tensor="new", **of): "_x15 8x10",
        series("rankscope_tensor_anomaly_events_total", tensor="more", **of): "1x15 3x10",
        series("rankscope_tensor_anomaly_events_total", tensor="old", **of): "7x30",
        series("rankscope_tensor_anomaly_events_total", tensor="other", **{**of, "kind": "exp_avg"}): "0x15 9x10",
        series("rankscope_tensor_anomaly_events_total", tensor="other", **{**of, "rank": "1"}): "0x15 9x10",
        series("rankscope_step"): "1234567x30",
        series("rankscope_step", rank="1"): "5x30",
    }

    ending = " Tensors: new (nans), more (nans). The rank is at step 1234567."
    assert description_error(judge, given, ending, rule) is None


def test_queries_without_result_add_no_text(judge):
    given = {series("rankscope_ingest_anomaly_events_total", rule="AnomalyNan", kind="grad_reduced"): "0x15 9x10"}

    assert description_error(judge, given, "") is None
