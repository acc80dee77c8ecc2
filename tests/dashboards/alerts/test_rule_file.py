"""The rule file is valid and complete, and each alert has a runbook. `test_scenarios.py` tests when alerts fire."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rankscope_contract.metrics.catalogue import CATALOG
from rankscope_contract.rules import rule_classes
from rankscope_contract.rules.curve import CurveRule
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_dashboards.alerts.anomaly import rule_expression
from rankscope_dashboards.alerts.groups import DEFAULT_RULES, alert_groups, rule_file
from rankscope_dashboards.generate import PROVISIONING

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

    assert DEFAULT_RULES == tuple(rule for rule in MonitorConfig().rules if not isinstance(rule, CurveRule))


def test_every_rule_class_has_a_promql_form():
    arguments = {"AnomalyTurbulence": {"threshold": 0.5}, "CurveRule": {"ratio": 4.0, "names": ["loss"]}}
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
