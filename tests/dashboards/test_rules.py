"""The alert rules as files: valid, complete, and each with a page that says what to do. Meaning: test_scenarios."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rankscope_contract.metrics import CATALOG
from rankscope_contract.rules import rule_classes
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_dashboards.generate import PROVISIONING
from rankscope_dashboards.rules import DEFAULT_RULES, alert_groups, expression, rule_file

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks.md"
ALERTS = [alert for group in alert_groups() for alert in group.alerts]
NAMES = {
    "AnomalyNan",
    "AnomalyNanEvents",
    "AnomalyTurbulence",
    "AnomalyTurbulenceEvents",
    "ReplicaDesync",
    "ReplicaDesyncEvents",
    "RunFailed",
    "RunStalled",
    "RankGone",
    "IngestLosing",
    "ServiceDown",
    "GpuXid",
    "GpuEccUncorrected",
    "GpuThrottled",
    "RuleDisagreement",
}


def test_committed_rule_file_is_valid(promtool):
    path = PROVISIONING / "prometheus" / "rankscope.rules.yml"
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_committed_prometheus_configuration_is_valid(promtool):
    path = PROVISIONING / "prometheus" / "prometheus.yml"
    done = subprocess.run([promtool, "check", "config", path], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_jobs_that_alerts_name_are_scraped():
    config = yaml.safe_load((PROVISIONING / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    named = {job for alert in ALERTS for job in re.findall(r'job="([^"]+)"', alert.expression)}

    assert {"rankscope-service"} == named
    assert named <= {scrape["job_name"] for scrape in config["scrape_configs"]}


def test_default_rules_are_the_rank_s_own():
    from rankscope_exporter.config import DEFAULT_RULES as RANK_RULES

    assert RANK_RULES == DEFAULT_RULES


def test_every_rule_of_the_contract_has_a_prometheus_form():
    arguments = {"AnomalyTurbulence": {"threshold": 0.5}}
    for name, rule in rule_classes().items():
        assert expression(rule(**arguments.get(name, {})))


def test_alerts_are_those_that_the_documentation_lists():
    listed = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(encoding="utf-8"), re.MULTILINE)

    assert {alert.name for alert in ALERTS} == NAMES
    assert sorted(name for name in NAMES if not name.endswith("Events")) == sorted(listed)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name + alert.labels.get("judged_by", ""))
def test_alert_says_what_happened_how_bad_it_is_and_what_to_do(alert):
    document = alert.document()
    texts = document["annotations"]
    anchors = {f"#{name.lower()}" for name in re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)}

    assert {"summary", "description", "runbook_url"} == texts.keys()
    assert all(len(text) > 15 for text in texts.values())
    assert document["labels"]["severity"] in {"info", "warning", "critical"}
    assert document["labels"]["rule"]
    assert texts["runbook_url"].removeprefix("docs/runbooks.md") in anchors
    assert set(re.findall(r"rankscope_\w+", alert.expression)) <= CATALOG.keys()


def test_runbooks_may_stand_elsewhere():
    document = rule_file([AnomalyNan()], runbooks="https://wiki.example/rankscope")

    assert (
        "https://wiki.example/rankscope#anomalynan" == document["groups"][0]["rules"][0]["annotations"]["runbook_url"]
    )


def test_a_rule_may_have_a_runbook_and_a_name_of_its_own():
    document = rule_file([AnomalyNan(name="Blown", runbook="https://wiki.example/blown", summary="It blew up.")])
    first = document["groups"][0]["rules"][0]

    assert "https://wiki.example/blown" == first["annotations"]["runbook_url"]
    assert ("Blown", "Blown") == (first["alert"], first["labels"]["rule"])
    assert first["annotations"]["description"].startswith("It blew up. ")
