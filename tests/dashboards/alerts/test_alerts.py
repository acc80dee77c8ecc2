"""The rule file is valid and complete, and promtool runs the scenarios of each alert and its annotations."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.dashboards.alerts import scenarios
from tests.dashboards.conftest import OTHER_JOB, OTHER_REPLICA, scraped_twice
from tests.properties import few

from rankscope_contract.rules import rule_classes
from rankscope_contract.rules.anomaly import AnomalyNan
from rankscope_dashboards.alerts.anomaly import of_tensors, rule_expression
from rankscope_dashboards.alerts.groups import DEFAULT_RULES, alert_groups, rule_file
from rankscope_dashboards.generate import PROVISIONING
from rankscope_storage.base.service_catalogue import CATALOG

RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks.md"
HEADINGS = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(encoding="utf-8"), re.MULTILINE)
ALERTS = [alert for group in alert_groups() for alert in group.alerts]
FOLDER = PROVISIONING / "prometheus"


@pytest.mark.parametrize(("kind", "name"), [("rules", "rankscope.rules.yml"), ("config", "prometheus.yml")])
def test_committed_file_is_valid(promtool, kind, name):
    done = subprocess.run([promtool, "check", kind, FOLDER / name], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_jobs_in_alert_expressions_are_scraped():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job for alert in ALERTS for job in re.findall(r'job="([^"]+)"', alert.expression)}

    assert {"rankscope-service"} == jobs
    assert jobs <= {scrape["job_name"] for scrape in config["scrape_configs"]}


def test_default_rules_are_those_of_the_exporter_that_prometheus_can_judge():
    from rankscope_exporter.config.monitor_config import MonitorConfig

    assert [*DEFAULT_RULES] == of_tensors(MonitorConfig().rules)


def test_every_rule_class_has_a_promql_form():
    arguments = {
        "AnomalyTurbulence": {"threshold": 0.5},
        "CurveRule": {"ratio": 4.0, "names": ["loss"]},
        "ScoreRule": {"score": 'scalar("loss")', "above": 4.0},
    }
    for name, rule in rule_classes().items():
        assert rule_expression(rule(**arguments.get(name, {})))


def test_runbooks_page_has_one_heading_for_every_alert():
    only_in_grafana = {"DatasourceUnreachable"}
    names = {alert.name for alert in ALERTS}

    assert sorted(name for name in names | only_in_grafana if not name.endswith("Events")) == sorted(HEADINGS)


def test_alert_on_the_service_names_it_and_belongs_to_no_run_or_rule():
    (alert,) = (alert for alert in ALERTS if alert.name == "ServiceDown")

    assert {"severity": "critical"} == alert.all_labels()
    assert "{{ $labels.instance }}" in alert.summary
    assert not re.search(r"\b(run|rule)\b", alert.expression)


def test_texts_name_the_run_and_are_readable_without_one():
    guarded = "{{ if $labels.run }}{{ $labels.run }}{{ else }}unknown{{ end }}"
    for alert in ALERTS:
        texts = alert.annotations("")

        assert ("run" in re.findall(r"\w+", alert.expression)) == ("$labels.run" in texts["summary"]), alert.name
        for text in texts.values():
            assert text.count("{{ $labels.run }}") == text.count(guarded), alert.name


def test_alert_has_summary_description_severity_and_runbook():
    for alert in ALERTS:
        document = alert.document("https://wiki.example/runbooks")
        texts, words = document["annotations"], re.findall(r"\w+", alert.expression)
        own_rule = ("rule" in words or "run" not in words) if alert.rule is None else alert.rule

        assert {"summary", "description", "runbook_url"} == texts.keys(), alert.name
        assert all(len(text) > 15 for text in texts.values()), alert.name
        assert "severity" in words or document["labels"]["severity"] in ("info", "warning", "critical"), alert.name
        assert own_rule in (True, "", document["labels"].get("rule")), alert.name
        assert texts["runbook_url"] in {f"https://wiki.example/runbooks#{name.lower()}" for name in HEADINGS}
        assert set(re.findall(r"rankscope_\w+", alert.expression)) <= CATALOG.keys(), alert.name


def test_runbook_url_is_absent_unless_it_is_absolute():
    for runbooks, has_url in (("", False), ("docs/runbooks.md", False), ("https://wiki.example/rankscope", True)):
        alerts = [rule for group in rule_file(runbooks=runbooks)["groups"] for rule in group["rules"]]
        assert {has_url} == {"runbook_url" in alert["annotations"] for alert in alerts}
    assert "runbook_url" not in (PROVISIONING / "alerting" / "rules.yaml").read_text(encoding="utf-8")


def test_rule_name_and_runbook_can_be_customized():
    document = rule_file([AnomalyNan(name="Blown", runbook="https://wiki.example/blown", summary="It blew up.")])
    first = document["groups"][0]["rules"][0]

    assert "https://wiki.example/blown" == first["annotations"]["runbook_url"]
    assert ("Blown", "Blown") == (first["alert"], first["labels"]["rule"])
    assert first["annotations"]["description"].startswith("It blew up. ")


FIELD_OPERATIONS = Path(__file__).parents[2] / "data" / "field_operations"
RULES = PROVISIONING / "prometheus" / "rankscope.rules.yml"

EVERYWHERE = {
    "(increase(": ["(-increase("],
    "op) (last_over_time": ["op) (0 * last_over_time"],
    "[2m]": ["[1m]"],
    "[5m]": ["[1m]"],
    "offset 2m": ["offset 1m"],
    "events_total{rule=": ["events_total{rule!="],
    "  unless on (run, rank, kind)\nmin": ["  or\n-min"],
    "> 120": ["> 1200", "> 60"],
    "< 120": ["< 60", "< 130"],
    " unless on (run) rankscope_run_state": [""],
    "or last_over_time": ["and last_over_time"],
    "abs(rankscope_tensor_value": ["(rankscope_tensor_value"],
    "keep_firing_for": ["0s", "10m"],
}
"""Mutations of all alerts with a text: its values replace it in the expression, or are new values of the field."""

SCALARS = ("rankscope_loss", "rankscope_grad_norm", "rankscope_learning_rate", "rankscope_scalar")
FIRINGS = ("rankscope_anomaly_events_total", "rankscope_ingest_anomaly_events_total")
MUTANTS = {  # Further mutations of one alert, such as typing errors and wrong simplifications
    "AnomalyTurbulence": {
        "> (rankscope": [">= (rankscope", "> ignoring (tensor) group_left () (rankscope"],
        "(1 + rankscope_rule_threshold": ["(0 + rankscope_rule_threshold"],
        ") < (": [") <= ("],
        "} / ignoring": ["} * ignoring"],
        "ignoring (kind, tensor, op, rule) group_left ()": ["on (run) group_left ()"],
        "grad_unreduced|grad_reduced": ["grad_unreduced", "grad_reduced", ".+"],
        'op=~"norm"': ['op=~"norm|mean"'],
        "tensor_baseline{": ["tensor_value{"],
        "group by (run, rank, kind, tensor, op)": ["group by (run, rank, kind, op)"],
    },
    "AnomalyNan": {
        "nans|infs": ["nans", "infs", "nans|infs|norm"],
        " == 0)": [" >= 0)"],
        'op="infs"': ['op=~".+"'],
        "and on (run, rank, kind)": ["and on (run, rank)"],
        '"nans|infs"} > 0': ['"nans|infs"} > 1', '"nans|infs"} >= 0'],
        **{f"{one} != {one}": [f"{one} > Inf"] for one in SCALARS},
        **{f"abs({one}) == Inf": [f"{one} == Inf"] for one in SCALARS},
        "group by (run, rank, kind, tensor, op)": ["sum by (run, rank, kind, op)"],
        '"kind", "n/a"': ['"kind", ""'],
        "> ignoring": [">= ignoring"],
        "abs(rankscope_loss) > ignoring": ["(rankscope_loss) > ignoring"],
    },
    "ScoreAboveLimit": {
        ">": [">=", "<", "> on (run, rank)  group_left ()", "> on (run, rule) group_left ()", "> bool"],
        "run, rank, rule": ["run, rank", "run, rule"],
    },
    "AnomalyIncident": {
        "rule, severity, kind, tensor, op, step": ["rule, severity, kind, tensor, op"],
        **{f'"{name}", "")': [f'"{name}", "x")'] for name in ("rank", "kind", "tensor", "op", "step")},
    },
    "AnomalyWithoutService": {
        "unless on (run)": ["unless on ()", "unless on (run, rule)"],
        "unless on (run, rank, rule, kind)": ["or", "unless on (run)"],
        "- 10 >": ["+ 60 >", "- 100 >"],
        "[2m:10s]": ["[20s:10s]"],
        "for": ["0s"],
    },
    "AnomalyNanEvents": {
        **{f"(increase({one}": [f"(-increase({one}"] for one in FIRINGS},
        **{f"kind) (last_over_time({one}{{": [f"kind) (0 * last_over_time({one}{{"] for one in FIRINGS},
        **{f'unless {one}{{rule="AnomalyNan"}} offset 2m': [""] for one in FIRINGS},
        **{f'increase({one}{{rule="AnomalyNan"}}[2m': [f'increase({one}{{rule="AnomalyNan"}}[1m'] for one in FIRINGS},
        **{f'increase({one}{{rule="AnomalyNan"}}': [f'increase({one}{{rule=~".+"}}'] for one in FIRINGS},
        "> 0": [">= 0", "> 1"],
        "max by (run, rank, kind)": ["max by (run, rank)"],
        "anomaly_age_seconds{": ["anomaly_age_seconds{kind='none', "],
    },
    "ReplicaDesync": {
        "!=": [">="],
        "!= min": ["!= max"],
        "== min": [">= min"],
        "  and max": ["  or max"],
        "by (run, replicas)": ["by (run)", "by (replicas)"],
    },
    "ReplicaDesyncEvents": {
        "kind) (last_over_time": ["kind) (0 * last_over_time"],
        'unless rankscope_ingest_anomaly_events_total{rule="ReplicaDesync"} offset 2m': [""],
        'rule="ReplicaDesync"': ['rule=~".+"'],
        "max by (run, rank, kind)": ["max by (run, rank)"],
        "> 0": [">= 0", "> 1"],
    },
    "RunFailed": {
        "== 1": [">= 0"],
        "topk by (run) (1, max": ["(max"],
        "topk by (run)": ["topk"],
        "max by (run, rank, reason)": ["max by (run)"],
    },
    "RunStalled": {'state="stalled"': ['state="running"'], "== 1": ["== 0"]},
    "RankGone": {"max by (run, rank)": ["max by (run)"], "== 1": ["== 0", ">= 0"]},
    "IngestLosing": {
        "(run) (last_over_time": ["(run) (0 * last_over_time"],
        "unless rankscope_ingest_lost_records_total offset 5m": [""],
        "last_over_time(rankscope_ingest_lost_records_total[5m])": ["rankscope_ingest_lost_records_total"],
        "offset 5m": ["offset 1m"],
        "max by (run)": ["max"],
        "> 0": [">= 0"],
        "> 300": ["> 1200", "> 60"],
        "- timestamp(rankscope_ingest_lost_records_age_seconds) + time()": [""],
    },
    "ServiceDown": {
        "== 0": ["== 1"],
        "absent(": ["0 > absent(", "sum("],
        '"instance", "an': ['"instance", "un'],
        "for": ["0s", "2m"],
    },
    "RuleDisagreement": {
        "kind)\nrankscope_rule_firing": ["kind)\n0 * rankscope_rule_firing"],
        "== 1\n)": [">= 0\n)"],
        "== 1)": [">= 0)"],
        'kind!=""': ['kind=~".*"'],
        "unless on (run, rank, kind)": ["unless on (run, kind)", "unless on (run, rank)"],
        'reason=~"series_.+"': ['reason=~".+"'],
        'reason=~"series_.+"} > 0': ['reason=~"series_.+"} >= 0', 'reason=~"series_.+"} > 9'],
    },
}


def grouped(suite=scenarios.SUITE, only=None):
    """Yield (alert, rules, scenarios of this alert with these rules)."""
    groups = {}
    for scenario in suite:
        groups.setdefault((scenario.alert, tuple(scenario.rules)), []).append(scenario)
    yield from (
        (alert, rules, mine) for (alert, rules), mine in sorted(groups.items(), key=str) if only in {None, alert}
    )


def alone(rules, name):
    """Return the rule file with only the alert `name`. promtool would evaluate all alerts of the file."""
    kept = [rule for group in rule_file(rules)["groups"] for rule in group["rules"] if rule["alert"] == name]
    return {"groups": [{"name": "alone", "rules": kept}]}


def mutants(alert):
    """Return the mutations of an alert as pairs of an old and a new text."""
    (rule, *_) = alone(DEFAULT_RULES, alert)["groups"][0]["rules"]
    general = {old: news for old, news in EVERYWHERE.items() if old in rule or old in rule["expr"]}
    return [(old, new) for found in (general, MUTANTS[alert]) for old, news in found.items() for new in news]


def mutated(document, old, new):
    """Return the rule file with a mutation, or None if nothing changed."""
    rules = document["groups"][0]["rules"]
    changed = [rule | ({old: new} if old in rule else {"expr": rule["expr"].replace(old, new)}) for rule in rules]
    return None if changed == rules else {"groups": [{"name": "alone", "rules": changed}]}


def test_every_alert_behaves_as_its_scenarios_specify(judge):
    cases = [(alone(rules, alert), scenarios.test_file(mine)) for alert, rules, mine in grouped()]

    assert [] == [objection for objection in judge(cases) if objection]


@pytest.mark.thorough
def test_alerts_are_the_same_if_every_target_is_scraped_twice(judge):
    """Prometheus has each series under two jobs, and both of them from a pair of servers with the label `replica`."""
    under_two_jobs = [(one, scraped_twice(one.given, **OTHER_JOB)) for one in scenarios.SUITE]
    doubled = [replace(one, given=scraped_twice(given, **OTHER_REPLICA)) for one, given in under_two_jobs]
    cases = [(alone(rules, alert), scenarios.test_file(mine)) for alert, rules, mine in grouped(doubled)]

    assert [] == [objection for objection in judge(cases) if objection]


def test_rank_under_two_jobs_does_not_stop_the_alerts_of_others(promtool):
    command = ["bash", FIELD_OPERATIONS / "alerts_when_a_rank_is_scraped_twice.sh"]
    settings = {"RANKSCOPE_BIN": str(Path(sys.executable).parent), "RANKSCOPE_RULES": str(RULES), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)

    assert (0, "right: both alerts are evaluated\n") == (done.returncode, done.stdout), done.stderr


def test_annotations_contain_the_labels_of_the_alert(judge):
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


def test_every_alert_has_scenarios_that_fire_and_scenarios_that_do_not():
    """Grafana mixes up the values of instances if the labels of one contain the labels of another."""
    for name in {alert.name for group in alert_groups() for alert in group.alerts}:
        moments = [alerts for one in scenarios.SUITE if one.alert == name for alerts in one.expected.values()]

        assert any(moments), name
        assert not all(moments), name
        assert 1 == len({frozenset(labels) for alerts in moments for labels in alerts}), name


@pytest.mark.thorough
@pytest.mark.parametrize("alert", few(1, MUTANTS))
def test_scenarios_detect_every_mutation_of_an_alert(judge, promtool, tmp_path, alert):
    cases, names = [], []
    for mutant in mutants(alert):
        changed = [
            (document, scenarios.test_file(mine))
            for _, rules, mine in grouped(only=alert)
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
    assert [] == [name for name in names if name not in killed]


def test_alert_expressions_return_only_values_above_zero(judge):
    """In Prometheus any value fires. Grafana evaluates the same expression and requires a value above zero."""
    cases = [
        (document, scenarios.values_above_zero(rule["expr"], mine))
        for name, rules, mine in grouped()
        for document in [alone(rules, name)]
        for rule in document["groups"][0]["rules"]
    ]

    assert [] == [objection for objection in judge(cases) if objection]


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
