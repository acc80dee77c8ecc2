"""promtool runs the scenarios of each alert, and the scenarios detect each mutation of an alert."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.dashboards.boards.promql import OTHER_JOB, OTHER_REPLICA, scraped_twice
from tests.properties import few

from rankscope_dashboards.alerts.groups import alert_groups, rule_file
from rankscope_dashboards.generate import PROVISIONING

FIELD_OPERATIONS = Path(__file__).parents[2] / "data" / "field_operations"
RULES = PROVISIONING / "prometheus" / "rankscope.rules.yml"
TENSOR_PART = 'rankscope_tensor_value{op=~"nans|infs"} > 0'
UNLESS = "  unless on (run, rank, kind)\n"

# Mutations of the part that reads the counters of firings.
COUNTED = [
    ("expr", "(increase(", "(-increase("),
    ("expr", "op) (last_over_time", "op) (0 * last_over_time"),
    ("expr", "[2m]", "[1m]"),
    ("expr", "offset 2m", "offset 1m"),
    ("expr", "events_total{rule=", "events_total{rule!="),
    ("expr", "  unless on (run, rank, kind)\nmin", "  or\n-min"),
    ("expr", "> 120", "> 1200"),
    ("expr", "> 120", "> 60"),
]

# Mutations of the part that holds an alert while the service is away.
HELD = [
    ("expr", " unless on (run) rankscope_run_state", ""),
    ("expr", "or last_over_time", "and last_over_time"),
    ("expr", "[5m]", "[1m]"),
]

# Mutations of each alert, such as typing errors and wrong simplifications: (field, old text, new text).
MUTANTS = {
    "AnomalyTurbulence": [
        ("expr", "> (rankscope_tensor_baseline", ">= (rankscope_tensor_baseline"),
        ("expr", "> (rankscope_tensor_baseline", "> ignoring (tensor) group_left () (rankscope_tensor_baseline"),
        ("expr", "(1 + rankscope_rule_threshold", "(0 + rankscope_rule_threshold"),
        ("expr", "abs(rankscope_tensor_value", "(rankscope_tensor_value"),
        ("expr", ") < (", ") <= ("),
        ("expr", "} / ignoring", "} * ignoring"),
        ("expr", "ignoring (kind, tensor, op, rule) group_left ()", "on (run) group_left ()"),
        ("expr", "grad_unreduced|grad_reduced", "grad_unreduced"),
        ("expr", "grad_unreduced|grad_reduced", "grad_reduced"),
        ("expr", "grad_unreduced|grad_reduced", ".+"),
        ("expr", 'op=~"norm"', 'op=~"norm|mean"'),
        ("expr", "tensor_baseline{", "tensor_value{"),
        ("expr", "group by (run, rank, kind, tensor, op)", "group by (run, rank, kind, op)"),
        *COUNTED,
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
        *COUNTED,
        ("expr", '"kind", "n/a"', '"kind", ""'),
        ("expr", "> ignoring", ">= ignoring"),
        ("expr", "abs(rankscope_tensor_value", "(rankscope_tensor_value"),
        ("expr", "abs(rankscope_loss) > ignoring", "(rankscope_loss) > ignoring"),
        ("keep_firing_for", "1m", "0s"),
    ],
    "AnomalyIncident": [
        ("expr", "< 120", "< 60"),
        ("expr", "< 120", "< 130"),
        ("expr", "run, rank, rule, severity, kind, tensor, op, step", "run, rank, rule, severity, kind, tensor, op"),
        *[("expr", f'"{name}", "")', f'"{name}", "x")') for name in ("rank", "kind", "tensor", "op", "step")],
        *HELD,
    ],
    "AnomalyWithoutService": [
        ("expr", "< 120", "< 60"),
        ("expr", "< 120", "< 130"),
        ("expr", "unless on (run)", "unless on ()"),
        ("expr", "unless on (run)", "unless on (run, rule)"),
        ("expr", "unless on (run, rank, rule, kind)", "or"),
        ("expr", "unless on (run, rank, rule, kind)", "unless on (run)"),
        ("expr", "- 10 >", "+ 60 >"),
        ("expr", "- 10 >", "- 100 >"),
        ("expr", "[2m:10s]", "[20s:10s]"),
        ("for", "1m", "0s"),
    ],
    "AnomalyNanEvents": [
        *[
            ("expr", before.format(metric), after.format(metric))
            for metric in ("rankscope_anomaly_events_total", "rankscope_ingest_anomaly_events_total")
            for before, after in (
                ("(increase({}", "(-increase({}"),
                ("kind) (last_over_time({}{{rule", "kind) (0 * last_over_time({}{{rule"),
                ('unless {}{{rule="AnomalyNan"}} offset 2m', ""),
                ('increase({}{{rule="AnomalyNan"}}[2m]', 'increase({}{{rule="AnomalyNan"}}[1m]'),
                ('increase({}{{rule="AnomalyNan"}}', 'increase({}{{rule=~".+"}}'),
            )
        ],
        ("expr", "offset 2m", "offset 1m"),
        ("expr", "> 0", ">= 0"),
        ("expr", "> 0", "> 1"),
        ("expr", "max by (run, rank, kind)", "max by (run, rank)"),
        ("expr", "> 120", "> 1200"),
        ("expr", "> 120", "> 60"),
        ("expr", "anomaly_age_seconds{", "anomaly_age_seconds{kind='none', "),
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
        ("expr", "kind) (last_over_time", "kind) (0 * last_over_time"),
        ("expr", 'unless rankscope_ingest_anomaly_events_total{rule="ReplicaDesync"} offset 2m', ""),
        ("expr", "[2m]", "[1m]"),
        ("expr", "offset 2m", "offset 1m"),
        ("expr", 'rule="ReplicaDesync"', 'rule=~".+"'),
        ("expr", "> 120", "> 1200"),
        ("expr", "max by (run, rank, kind)", "max by (run, rank)"),
        ("expr", "> 0", ">= 0"),
        ("expr", "> 0", "> 1"),
    ],
    "RunFailed": [
        ("expr", "== 1", ">= 0"),
        ("expr", "topk by (run) (1, ", "(("),
        ("expr", "topk by (run)", "topk"),
        ("expr", "max by (run, rank, reason)", "max by (run)"),
        *HELD,
    ],
    "RunStalled": [("expr", 'state="stalled"', 'state="running"'), ("expr", "== 1", "== 0")],
    "RankGone": [
        ("expr", "max by (run, rank)", "max by (run)"),
        ("expr", "== 1", "== 0"),
        ("expr", "== 1", ">= 0"),
        *HELD,
    ],
    "IngestLosing": [
        ("expr", "(increase(", "(-increase("),
        ("expr", "(run) (last_over_time", "(run) (0 * last_over_time"),
        ("expr", "unless rankscope_ingest_lost_records_total offset 5m", ""),
        ("expr", "last_over_time(rankscope_ingest_lost_records_total[5m])", "rankscope_ingest_lost_records_total"),
        ("expr", "[5m]", "[1m]"),
        ("expr", "offset 5m", "offset 1m"),
        ("expr", "max by (run)", "max"),
        ("expr", "> 0", ">= 0"),
        ("expr", "> 300", "> 1200"),
        ("expr", "> 300", "> 60"),
        ("expr", "- timestamp(rankscope_ingest_lost_records_age_seconds) + time()", ""),
    ],
    "ServiceDown": [
        ("expr", "== 0", "== 1"),
        ("expr", "absent(", "0 > absent("),
        ("expr", "absent(", "sum("),
        ("expr", '"instance", "an', '"instance", "un'),
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
    """Return the scenarios of `alert`, grouped by their rules."""
    groups = {}
    for scenario in suite:
        if scenario.alert == alert:
            groups.setdefault(tuple(scenario.rules), []).append(scenario)
    return groups


def alone(rules, name):
    """Return the rule file with only the alert `name`. promtool would evaluate all alerts of the file."""
    kept = [rule for group in rule_file(rules)["groups"] for rule in group["rules"] if rule["alert"] == name]
    return {"groups": [{"name": "alone", "rules": kept}]}


def mutated(document, field, old, new):
    """Return the rule file with `old` replaced in a field of its alerts, or None if nothing changed."""
    changed = copy.deepcopy(document)
    for rule in changed["groups"][0]["rules"]:
        rule[field] = rule[field].replace(old, new)
    return None if changed == document else changed


def test_every_alert_behaves_as_its_scenarios_specify(judge, scenarios):
    suite = scenarios.SUITE
    alerts = {scenario.alert for scenario in suite}
    cases = [
        (alone(rules, alert), scenarios.test_file(mine))
        for alert in sorted(alerts)
        for rules, mine in grouped(suite, alert).items()
    ]

    assert [] == [objection for objection in judge(cases) if objection]


@pytest.mark.thorough
def test_alerts_are_the_same_if_every_target_is_scraped_twice(judge, scenarios):
    """Prometheus has each series under two jobs, and both of them from a pair of servers with the label `replica`."""
    under_two_jobs = [(one, scraped_twice(one.given, **OTHER_JOB)) for one in scenarios.SUITE]
    doubled = [replace(one, given=scraped_twice(given, **OTHER_REPLICA)) for one, given in under_two_jobs]
    cases = [
        (alone(rules, alert), scenarios.test_file(mine))
        for alert in sorted({one.alert for one in doubled})
        for rules, mine in grouped(doubled, alert).items()
    ]

    assert [] == [objection for objection in judge(cases) if objection]


def test_rank_under_two_jobs_does_not_stop_the_alerts_of_others(promtool):
    command = ["bash", FIELD_OPERATIONS / "alerts_when_a_rank_is_scraped_twice.sh"]
    settings = {"RANKSCOPE_BIN": str(Path(sys.executable).parent), "RANKSCOPE_RULES": str(RULES), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)

    assert (0, "right: both alerts are evaluated\n") == (done.returncode, done.stdout), done.stderr


def test_annotations_contain_the_labels_of_the_alert(judge, scenarios):
    """Promtool compares the annotations for one scenario of each alert, with tensors and with logged scalars."""
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


def test_all_instances_of_an_alert_have_the_same_labels(scenarios):
    """Grafana mixes up the values of instances if the labels of one contain the labels of another."""
    for name in {alert.name for group in alert_groups() for alert in group.alerts}:
        mine = [scenario for scenario in scenarios.SUITE if scenario.alert == name]
        fired = [one for scenario in mine for alerts in scenario.expected.values() for one in alerts]

        assert 1 == len({frozenset(labels) for labels in fired}), name


def test_every_alert_has_scenarios_that_fire_and_scenarios_that_do_not(scenarios):
    for name in {alert.name for group in alert_groups() for alert in group.alerts}:
        moments = [at for scenario in scenarios.SUITE if scenario.alert == name for at in scenario.expected.values()]

        assert any(moments), name
        assert not all(moments), name


@pytest.mark.thorough
@pytest.mark.parametrize("alert", few(1, MUTANTS))
def test_scenarios_detect_every_mutation_of_an_alert(judge, promtool, scenarios, tmp_path, alert):
    cases, names = [], []
    for mutant in MUTANTS[alert]:
        changed = [
            (document, scenarios.test_file(mine))
            for rules, mine in grouped(scenarios.SUITE, alert).items()
            if (document := mutated(alone(rules, alert), *mutant))
        ]
        assert changed, f"mutation changes nothing: {mutant}"
        cases += changed
        names += [mutant] * len(changed)
    for number, (document, _) in enumerate(cases):  # an invalid mutant would be detected without any scenario
        (tmp_path / f"mutant{number}.yml").write_text(yaml.safe_dump(document), encoding="utf-8")
    check = [promtool, "check", "rules", *sorted(tmp_path.glob("mutant*.yml"))]
    parsed = subprocess.run(check, capture_output=True, text=True, check=False)
    killed = {name for name, objection in zip(names, judge(cases), strict=True) if objection}

    assert 0 == parsed.returncode, parsed.stderr
    assert [] == [mutant for mutant in MUTANTS[alert] if mutant not in killed]


def test_alert_expressions_return_only_values_above_zero(judge, scenarios):
    """In Prometheus any value fires. Grafana evaluates the same expression and requires a value above zero."""
    cases = []
    for name in sorted({scenario.alert for scenario in scenarios.SUITE}):
        for rules, mine in grouped(scenarios.SUITE, name).items():
            document = alone(rules, name)
            for rule in document["groups"][0]["rules"]:
                cases += [(document, scenarios.values_above_zero(rule["expr"], mine))]

    assert [] == [objection for objection in judge(cases) if objection]
