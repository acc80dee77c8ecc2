"""Each alert fires, keeps quiet and resolves where it should, judged by promtool; and no change of one goes unseen."""

from __future__ import annotations

import copy
import subprocess

import pytest
import yaml

from rankscope_dashboards.rules import alert_groups, rule_file

TENSOR_PART = 'rankscope_tensor_value{op=~"nans|infs"} > 0'
UNLESS = "  unless on (run, rank, kind)\n"

# What a slip of the pen, or a well-meant simplification, could make of each alert: (field, from, to).
MUTANTS = {
    "AnomalyTurbulence": [
        ("expr", "> on (run, rank, kind, tensor, op)", ">= on (run, rank, kind, tensor, op)"),
        ("expr", "> on (run, rank, kind, tensor, op)", "> on (run, rank, kind, op) group_left ()"),
        ("expr", "(1 + rankscope_rule_threshold", "(0 + rankscope_rule_threshold"),
        ("expr", "abs(rankscope_tensor_value", "(rankscope_tensor_value"),
        ("expr", ") < on", ") <= on"),
        ("expr", "} / on", "} * on"),
        ("expr", "on (run, rank) group_left ()", "on (run) group_left ()"),
        ("expr", "grad_unreduced|grad_reduced", "grad_unreduced"),
        ("expr", "grad_unreduced|grad_reduced", "grad_reduced"),
        ("expr", "grad_unreduced|grad_reduced", ".+"),
        ("expr", 'op=~"norm"', 'op=~"norm|mean"'),
        ("expr", "tensor_baseline{", "tensor_value{"),
        ("expr", "group by (run, rank, kind, tensor, op)", "group by (run, rank, kind, op)"),
        ("keep_firing_for", "1m", "0s"),
        ("keep_firing_for", "1m", "10m"),
    ],
    "AnomalyNan": [
        ("expr", "nans|infs", "nans"),
        ("expr", "nans|infs", "infs"),
        ("expr", "nans|infs", "nans|infs|norm"),
        ("expr", TENSOR_PART, TENSOR_PART.replace("> 0", "> 1")),
        ("expr", TENSOR_PART, TENSOR_PART.replace("> 0", ">= 0")),
        *[
            ("expr", f"{metric} != {metric}", f"{metric} > Inf")
            for metric in ("rankscope_loss", "rankscope_grad_norm", "rankscope_learning_rate", "rankscope_scalar")
        ],
        *[
            ("expr", f"abs({metric}) == Inf", f"{metric} == Inf")
            for metric in ("rankscope_loss", "rankscope_grad_norm", "rankscope_learning_rate", "rankscope_scalar")
        ],
        ("expr", "group by (run, rank, kind, tensor, op)", "sum by (run, rank, kind, op)"),
        ("expr", "> on (run, rank) group_left ()", ">= on (run, rank) group_left ()"),
        ("expr", "abs(rankscope_tensor_value", "(rankscope_tensor_value"),
        ("expr", "abs(rankscope_loss) > on", "(rankscope_loss) > on"),
        ("keep_firing_for", "1m", "0s"),
    ],
    "AnomalyNanEvents": [
        *[
            ("expr", before.format(metric), after.format(metric))
            for metric in ("rankscope_anomaly_events_total", "rankscope_ingest_anomaly_events_total")
            for before, after in (
                ("(increase({}", "(-increase({}"),
                ("kind) ({}{{rule", "kind) (0 * {}{{rule"),
                ('unless {}{{rule="AnomalyNan"}} offset 2m', ""),
                ('increase({}{{rule="AnomalyNan"}}[2m]', 'increase({}{{rule="AnomalyNan"}}[1m]'),
                ('increase({}{{rule="AnomalyNan"}}', 'increase({}{{rule=~".+"}}'),
            )
        ],
        ("expr", "offset 2m", "offset 1m"),
        ("expr", "> 0", ">= 0"),
        ("expr", "> 0", "> 1"),
        ("expr", "sum by (run, rank, kind)", "sum by (run, rank)"),
    ],
    "ReplicaDesync": [
        ("expr", "!=", ">="),
        ("expr", "!= min", "!= max"),
        ("expr", "== min", ">= min"),
        ("expr", "  and max", "  or max"),
        ("expr", "by (run, replicas)", "by (run)"),
        ("expr", "by (run, replicas)", "by (replicas)"),
        ("keep_firing_for", "1m", "0s"),
        ("keep_firing_for", "1m", "10m"),
    ],
    "ReplicaDesyncEvents": [
        ("expr", "(increase(", "(-increase("),
        ("expr", "kind) (rankscope", "kind) (0 * rankscope"),
        ("expr", 'unless rankscope_ingest_anomaly_events_total{rule="ReplicaDesync"} offset 2m', ""),
        ("expr", "[2m]", "[1m]"),
        ("expr", "offset 2m", "offset 1m"),
        ("expr", 'rule="ReplicaDesync"', 'rule=~".+"'),
        ("expr", "sum by (run, rank, kind)", "sum by (run, rank)"),
        ("expr", "> 0", ">= 0"),
        ("expr", "> 0", "> 1"),
    ],
    "RunFailed": [
        ("expr", 'state="failed"', 'state="stalled"'),
        ("expr", 'state="failed"', 'state=~"failed|stopped"'),
        ("expr", "== 1", ">= 0"),
        ("expr", "max by (run)", "max"),
    ],
    "RunStalled": [("expr", 'state="stalled"', 'state="running"'), ("expr", "== 1", "== 0")],
    "RankGone": [
        ("expr", "max by (run, rank)", "max by (run)"),
        ("expr", "== 1", "== 0"),
        ("expr", "== 1", ">= 0"),
    ],
    "IngestLosing": [
        ("expr", "(increase(", "(-increase("),
        ("expr", "(run) (rankscope", "(run) (0 * rankscope"),
        ("expr", "unless rankscope_ingest_lost_records_total offset 5m", ""),
        ("expr", "[5m]", "[1m]"),
        ("expr", "offset 5m", "offset 1m"),
        ("expr", "sum by (run)", "sum"),
        ("expr", "> 0", ">= 0"),
    ],
    "ServiceDown": [
        ("expr", "== 0", "== 1"),
        ("expr", "absent(", "0 > absent("),
        ("expr", "absent(", "sum("),
        ("for", "30s", "0s"),
        ("for", "30s", "2m"),
    ],
    "RuleDisagreement": [
        ("expr", UNLESS + "rankscope_rule_firing", UNLESS + "0 * rankscope_rule_firing"),
        ("expr", "== 1\n)", ">= 0\n)"),
        ("expr", "== 1)", ">= 0)"),
        ("expr", 'kind!=""', 'kind=~".*"'),
        ("expr", "unless on (run, rank, kind)", "unless on (run, kind)"),
        ("expr", "unless on (run, rank, kind)", "unless on (run, rank)"),
        ("expr", 'reason=~"series_.+"', 'reason=~".+"'),
        ("expr", 'reason=~"series_.+"} > 0', 'reason=~"series_.+"} >= 0'),
        ("expr", 'reason=~"series_.+"} > 0', 'reason=~"series_.+"} > 9'),
        ("keep_firing_for", "5m", "0s"),
    ],
}


def grouped(suite, alert):
    """Return the scenarios of `alert` by the rules they are about."""
    groups = {}
    for scenario in suite:
        if scenario.alert == alert:
            groups.setdefault(tuple(scenario.rules), []).append(scenario)
    return groups


def alone(rules, name):
    """Return the rule file without any other alert than `name`: promtool evaluates all that there are."""
    kept = [rule for group in rule_file(rules)["groups"] for rule in group["rules"] if rule["alert"] == name]
    return {"groups": [{"name": "alone", "rules": kept}]}


def mutated(document, field, old, new):
    """Return the rule file with its alerts changed, or None where there is nothing to change."""
    changed = copy.deepcopy(document)
    for rule in changed["groups"][0]["rules"]:
        rule[field] = rule[field].replace(old, new)
    return None if changed == document else changed


def test_every_alert_does_what_its_scenarios_say(judge, scenarios):
    suite = scenarios.SUITE
    alerts = {scenario.alert for scenario in suite}
    cases = [
        (alone(rules, alert), scenarios.test_file(mine))
        for alert in sorted(alerts)
        for rules, mine in grouped(suite, alert).items()
    ]

    assert [] == [objection for objection in judge(cases) if objection]


def test_the_texts_of_an_alert_name_what_it_is_about(judge, scenarios):
    """One scenario of each alert, of tensors and of logged numbers; promtool compares the annotations too."""
    firing = [scenario for scenario in scenarios.SUITE if any(scenario.expected.values())]
    first = {
        (scenario.alert, "kind" in labels): scenario
        for scenario in reversed(firing)
        for alerts in scenario.expected.values()
        for labels in alerts
    }
    cases = [
        (alone(scenario.rules, name), {"evaluation_interval": "10s", "tests": [scenario.document()]})
        for (name, _), scenario in first.items()
    ]

    assert [] == [objection for objection in judge(cases) if objection]


def test_every_alert_has_scenarios_in_which_it_stands_and_in_which_it_does_not(scenarios):
    for name in {alert.name for group in alert_groups() for alert in group.alerts}:
        moments = [at for scenario in scenarios.SUITE if scenario.alert == name for at in scenario.expected.values()]

        assert any(moments), name
        assert not all(moments), name


@pytest.mark.parametrize("alert", MUTANTS)
def test_no_change_of_an_alert_goes_unseen(judge, promtool, scenarios, tmp_path, alert):
    cases, names = [], []
    for mutant in MUTANTS[alert]:
        changed = [
            (document, scenarios.test_file(mine))
            for rules, mine in grouped(scenarios.SUITE, alert).items()
            if (document := mutated(alone(rules, alert), *mutant))
        ]
        assert changed, f"nothing to change: {mutant}"
        cases += changed
        names += [mutant] * len(changed)
    for number, (document, _) in enumerate(cases):  # a mutant that does not parse would prove nothing
        (tmp_path / f"mutant{number}.yml").write_text(yaml.safe_dump(document), encoding="utf-8")
    check = [promtool, "check", "rules", *sorted(tmp_path.glob("mutant*.yml"))]
    parsed = subprocess.run(check, capture_output=True, text=True, check=False)
    killed = {name for name, objection in zip(names, judge(cases), strict=True) if objection}

    assert 0 == parsed.returncode, parsed.stderr
    assert [] == [mutant for mutant in MUTANTS[alert] if mutant not in killed]


def test_whatever_an_alert_leaves_over_is_above_zero(judge, scenarios):
    """Prometheus takes any value for a firing one; Grafana's condition on the same expression asks for > 0."""
    cases = []
    for name in sorted({scenario.alert for scenario in scenarios.SUITE}):
        for rules, mine in grouped(scenarios.SUITE, name).items():
            document = alone(rules, name)
            for rule in document["groups"][0]["rules"]:
                cases += [(document, scenarios.values_above_zero(rule["expr"], mine))]

    assert [] == [objection for objection in judge(cases) if objection]
