"""What an alert says beyond its labels, as Prometheus fills it in."""

from __future__ import annotations

import pytest

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_dashboards.rules import rule_file

RUN = 'a "b" {c} 100%\\d'


def told(judge, given, ending, rule="AnomalyNan"):
    """Return promtool's objection to the counted alert of one kind on one rank having a text that ends so."""
    document = rule_file([AnomalyNan(name=rule)])
    alert = next(one for one in document["groups"][0]["rules"] if one["alert"] == f"{rule}Events")
    labels = {"run": RUN, "rank": "0", "kind": "grad_reduced"}
    annotations = {
        "summary": f"{rule} fired in grad_reduced, run {RUN} rank 0",
        "description": "Counted on the rank at every step; within 2m it fired at least once. "
        f"`rankscope anomalies {RUN}` puts the tensors in causal order.{ending}",
        "runbook_url": "docs/runbooks.md#anomalynan",
    }
    stands = {"exp_labels": labels | alert["labels"], "exp_annotations": annotations}
    tests = [
        {
            "interval": "10s",
            "input_series": [{"series": name, "values": values} for name, values in given.items()],
            "alert_rule_test": [{"eval_time": "200s", "alertname": alert["alert"], "exp_alerts": [stands]}],
        }
    ]
    rules = {"groups": [{"name": "alone", "rules": [alert]}]}
    return judge([(rules, {"evaluation_interval": "10s", "tests": tests})])[0]


def series(metric, **labels):
    words = {"run": RUN, "rank": "0", **labels}
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in words.items()}
    return metric + "{" + ", ".join(f'{name}="{value}"' for name, value in quoted.items()) + "}"


@pytest.mark.parametrize("rule", ["AnomalyNan", 'Blown "100%" \\ up'])
def test_counted_alert_names_the_tensors_that_fired_lately_and_where_the_rank_is(judge, rule):
    """Born firing, fired more often, fired long ago; and another kind, another rank."""
    of = {"rule": rule, "kind": "grad_reduced", "op": "nans"}
    given = {
        series("rankscope_anomaly_events_total", rule=rule, kind="grad_reduced"): "0x15 9x10",
        series("rankscope_tensor_anomaly_events_total", tensor="born", **of): "_x15 8x10",
        series("rankscope_tensor_anomaly_events_total", tensor="more", **of): "1x15 3x10",
        series("rankscope_tensor_anomaly_events_total", tensor="long ago", **of): "7x30",
        series("rankscope_tensor_anomaly_events_total", tensor="other", **{**of, "kind": "exp_avg"}): "0x15 9x10",
        series("rankscope_tensor_anomaly_events_total", tensor="other", **{**of, "rank": "1"}): "0x15 9x10",
        series("rankscope_step"): "1234567x30",
        series("rankscope_step", rank="1"): "5x30",
    }

    assert told(judge, given, " Tensors: born (nans), more (nans). The rank is at step 1234567.", rule) is None


def test_a_rank_whose_page_is_gone_leaves_no_words_behind(judge):
    given = {series("rankscope_ingest_anomaly_events_total", rule="AnomalyNan", kind="grad_reduced"): "0x15 9x10"}

    assert told(judge, given, "") is None
