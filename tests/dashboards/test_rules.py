"""The Prometheus form of the rules means what the reference evaluator means; promtool is the judge."""

from __future__ import annotations

import math
import subprocess

import pytest
import yaml

from rankscope_contract.rules import AnomalyRule, rule_classes
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_dashboards.generate import PROVISIONING
from rankscope_dashboards.rules import DEFAULT_RULES, expression, rule_file

IDENTITY = 'run="r", rank="0"'
SERIES = f'{IDENTITY}, kind="grad_unreduced", tensor="w"'


def promtool_test(promtool, folder, *, rules, series, alert, expected):
    """Run one promtool scenario: series from minute 0 on, and whether `alert` fires at each minute."""
    (folder / "rules.yml").write_text(yaml.safe_dump(rule_file(rules)), encoding="utf-8")
    checks = [
        {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": alerts} for minute, alerts in enumerate(expected)
    ]
    scenario = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": checks}],
    }
    path = folder / "tests.yml"
    path.write_text(yaml.safe_dump(scenario), encoding="utf-8")
    done = subprocess.run(
        [promtool, "test", "rules", path.name], cwd=folder, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr


def fired(rule: AnomalyRule, kind: str | None, tensor: str | None, op: str | None) -> list[dict[str, object]]:
    labels = {"run": "r", "rank": "0", "severity": str(rule.severity), "rule": rule.name}
    labels |= {name: value for name, value in (("kind", kind), ("tensor", tensor), ("op", op)) if value}
    summary = f"{rule.name} in {kind or ''} of {tensor or ''} ({op or ''}), run r rank 0"
    return [{"exp_labels": labels, "exp_annotations": {"summary": summary}}]


def written(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf" if value == math.inf else "-Inf" if value == -math.inf else repr(value)


@pytest.fixture
def promtool(require_server):
    return require_server("promtool", "prometheus")


def test_committed_rule_file_is_valid(promtool):
    path = PROVISIONING / "prometheus" / "rankscope.rules.yml"
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_committed_prometheus_configuration_is_valid(promtool):
    path = PROVISIONING / "prometheus" / "prometheus.yml"
    done = subprocess.run([promtool, "check", "config", path], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_default_rules_are_the_rank_s_own():
    from rankscope_exporter.config import DEFAULT_RULES as RANK_RULES

    assert RANK_RULES == DEFAULT_RULES


def test_every_rule_of_the_contract_has_a_prometheus_form():
    arguments = {"AnomalyTurbulence": {"threshold": 0.5}}
    for name, rule in rule_classes().items():
        assert expression(rule(**arguments.get(name, {})))


@pytest.mark.parametrize("direction", ["up", "both"])
def test_turbulence_fires_exactly_where_the_reference_fires(promtool, tmp_path, direction):
    """Boundary, fall, zero baseline, NaN and Inf, judged from value, baseline and threshold as a rank exports them."""
    rule = AnomalyTurbulence(threshold=0.5, direction=direction)
    values = (1.0, 1.5, 1.75, 0.25, 0.0, math.nan, math.inf)
    baselines = (1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0)
    want = [bool(rule.fires("norm", value, baseline)) for value, baseline in zip(values, baselines, strict=True)]
    # Each observation is a tensor of its own, so that keep_firing_for of one does not cover another.
    series = [
        {"series": f'{name}{{{SERIES}{number}", op="norm"}}'.replace('w"' + str(number), f"w{number}"), "values": text}
        for number, (value, baseline) in enumerate(zip(values, baselines, strict=True))
        for name, text in (
            ("rankscope_tensor_value", written(value)),
            ("rankscope_tensor_baseline", written(baseline)),
        )
    ]
    series.append({"series": f'rankscope_rule_threshold{{{IDENTITY}, rule="AnomalyTurbulence"}}', "values": "0.5"})
    alerts = [
        alert
        for number, fires in enumerate(want)
        if fires
        for alert in fired(rule, "grad_unreduced", f"w{number}", "norm")
    ]
    promtool_test(promtool, tmp_path, rules=[rule], series=series, alert=rule.name, expected=[alerts])

    assert [False, False, True, direction == "both", False, False, True] == want


def test_without_a_threshold_on_the_page_turbulence_is_off(promtool, tmp_path):
    rule = AnomalyTurbulence(threshold=0.5)
    series = [
        {"series": f'rankscope_tensor_value{{{SERIES}, op="norm"}}', "values": "9"},
        {"series": f'rankscope_tensor_baseline{{{SERIES}, op="norm"}}', "values": "1"},
    ]

    promtool_test(promtool, tmp_path, rules=[rule], series=series, alert=rule.name, expected=[[]])


def test_nan_fires_on_counts_and_on_scalars(promtool, tmp_path):
    rule = AnomalyNan()
    series = [
        {"series": f'rankscope_tensor_value{{{SERIES}, op="nans"}}', "values": "0 3"},
        {"series": f'rankscope_tensor_value{{{SERIES}, op="norm"}}', "values": "1 1"},
    ]
    expected = [[], fired(rule, "grad_unreduced", "w", "nans")]
    promtool_test(promtool, tmp_path, rules=[rule], series=series, alert=rule.name, expected=expected)

    for value in ("NaN", "+Inf", "-Inf"):
        series = [{"series": f'rankscope_loss{{{IDENTITY}, loss="loss"}}', "values": f"2.5 {value}"}]
        expected = [[], fired(rule, None, None, None)]
        promtool_test(promtool, tmp_path, rules=[rule], series=series, alert=rule.name, expected=expected)


def test_seed_mode_of_nan_leaves_infinity_alone(promtool, tmp_path):
    rule = AnomalyNan(infs=False)
    series = [
        {"series": f'rankscope_tensor_value{{{SERIES}, op="infs"}}', "values": "3"},
        {"series": f'rankscope_loss{{{IDENTITY}, loss="loss"}}', "values": "Inf"},
    ]

    promtool_test(promtool, tmp_path, rules=[rule], series=series, alert=rule.name, expected=[[]])


def test_event_counter_tells_of_a_spike_between_scrapes_and_of_a_series_born_above_zero(promtool, tmp_path):
    rule = AnomalyNan()
    labels = {"run": "r", "rank": "0", "kind": "grad_unreduced", "severity": "critical", "rule": "AnomalyNan"}
    alert = [{"exp_labels": labels, "exp_annotations": {"summary": "AnomalyNan fired in grad_unreduced, run r rank 0"}}]
    name = f'rankscope_anomaly_events_total{{{IDENTITY}, rule="AnomalyNan", kind="grad_unreduced"}}'
    for values, expected in (("0 0 0 1", [[], [], [], alert]), ("1", [alert]), ("0 0", [[], []])):
        series = [{"series": name, "values": values}]
        promtool_test(promtool, tmp_path, rules=[rule], series=series, alert="AnomalyNanEvents", expected=expected)
