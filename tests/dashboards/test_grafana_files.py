"""The files a Grafana server reads at its start. No server is here: keys and values are held against its documentation.

A wrong value in the alerting file keeps the whole server from starting, and an unknown key is dropped without a word:
both are closed lists here.
"""

from __future__ import annotations

import json
import re

import pytest
import yaml

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_dashboards.alerts import Alert, AlertGroup
from rankscope_dashboards.generate import files
from rankscope_dashboards.grafana_alerts import Shown, alert_rules
from rankscope_dashboards.rules import alert_groups

FILES = files()
BOARDS = {json.loads(text)["uid"]: json.loads(text) for name, text in FILES.items() if name.endswith(".json")}
SOURCES = yaml.safe_load(FILES["datasources/rankscope.yaml"])
PROVIDERS = yaml.safe_load(FILES["dashboards/rankscope.yaml"])
ALERTING = yaml.safe_load(FILES["alerting/rules.yaml"])
PROMETHEUS = yaml.safe_load(FILES["prometheus/prometheus.yml"])
PROMETHEUS_RULES = yaml.safe_load(FILES["prometheus/rankscope.rules.yml"])
RULES = [rule for group in ALERTING["groups"] for rule in group["rules"]]
ANYWHERE = Shown(board="b", panels={"State": 1, "Anomalies": 2})

# Keys of the file form, as Grafana's provisioning structures name them; the HTTP API spells some of them otherwise.
GROUP_KEYS = {"orgId", "name", "folder", "interval", "rules"}
RULE_KEYS = {
    "uid",
    "title",
    "condition",
    "data",
    "dashboardUid",
    "panelId",
    "noDataState",
    "execErrState",
    "for",
    "keepFiringFor",
    "annotations",
    "labels",
    "isPaused",
    "notification_settings",
    "record",
    "missing_series_evals_to_resolve",
}
MANDATORY_RULE_KEYS = {"uid", "title", "condition", "data"}
QUERY_KEYS = {"refId", "queryType", "relativeTimeRange", "datasourceUid", "model"}
SOURCE_KEYS = {"name", "uid", "type", "access", "orgId", "url", "isDefault", "editable", "jsonData"}
SOURCE_OPTIONS = {"httpMethod", "timeInterval", "prometheusType", "seriesEndpoint", "manageAlerts"}
PROVIDER_KEYS = {
    "name",
    "orgId",
    "folder",
    "folderUid",
    "type",
    "disableDeletion",
    "updateIntervalSeconds",
    "allowUiUpdates",
    "options",
}


def an_alert(**changes):
    told = {"name": "A", "expression": "up", "summary": "s", "description": "d", "severity": "info", "runbook": "A"}
    return Alert(**{**told, **changes})


def a_rule(**changes):
    (group,) = alert_rules([AlertGroup("g", [an_alert(**changes)])], ANYWHERE)["groups"]
    return group["rules"][0]


def test_only_keys_that_grafana_knows_are_written():
    assert {"apiVersion", "groups"} == ALERTING.keys()
    assert {"apiVersion", "datasources"} == SOURCES.keys()
    assert {"apiVersion", "providers"} == PROVIDERS.keys()
    assert [1, 1, 1] == [document["apiVersion"] for document in (ALERTING, SOURCES, PROVIDERS)]
    for group in ALERTING["groups"]:
        assert GROUP_KEYS == group.keys()
    for rule in RULES:
        assert MANDATORY_RULE_KEYS <= rule.keys() <= RULE_KEYS
        assert all(QUERY_KEYS - {"queryType"} == query.keys() for query in rule["data"])
    for source in SOURCES["datasources"]:
        assert source.keys() <= SOURCE_KEYS
        assert source["jsonData"].keys() <= SOURCE_OPTIONS
    for provider in PROVIDERS["providers"]:
        assert provider.keys() <= PROVIDER_KEYS
        assert {"path", "foldersFromFilesStructure"} == provider["options"].keys()


def test_intervals_are_multiples_of_grafana_s_ten_seconds():
    assert ["30s"] * 5 == [group["interval"] for group in ALERTING["groups"]]


def test_names_are_unique_and_not_too_long():
    uids, titles = [rule["uid"] for rule in RULES], [rule["title"] for rule in RULES]

    assert len(RULES) == len(set(uids)) == len(set(titles))
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", uid) for uid in uids)
    assert all(1 <= len(title) <= 190 for title in titles)
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", uid) for uid in BOARDS)
    assert len(BOARDS) == sum(name.endswith(".json") for name in FILES)
    assert "rankscope-anomaly-nan" in uids


def test_states_and_conditions_are_among_those_that_exist():
    for rule in RULES:
        assert rule["noDataState"] in {"OK", "NoData", "Alerting", "KeepLast"}
        assert rule["execErrState"] in {"OK", "Error", "Alerting", "KeepLast"}
        assert rule["missing_series_evals_to_resolve"] > 0
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert re.fullmatch(r"\d+[smh]", rule.get("keepFiringFor", "1s"))
        query, condition = rule["data"]
        assert rule["condition"] == condition["refId"] == condition["model"]["refId"] != query["refId"]
        assert query["refId"] == query["model"]["refId"] == condition["model"]["expression"]
        assert "__expr__" == condition["datasourceUid"]


def without_look_ups(rule):
    """Return a rule of Prometheus without what its description asks: Grafana's templates have no queries."""
    description = rule["annotations"]["description"].partition("{{ with printf")[0]
    return rule | {"annotations": rule["annotations"] | {"description": description}}


def test_expressions_and_pauses_are_letter_for_letter_those_of_prometheus():
    def said(rule, expression, title):
        return title, expression, rule.get("for", "0s").replace("0s", ""), rule["labels"], rule["annotations"]

    ours = [said(rule, rule["data"][0]["model"]["expr"], rule["title"].split()[0]) for rule in RULES]
    theirs = [
        said(without_look_ups(rule), rule["expr"], rule["alert"])
        for group in PROMETHEUS_RULES["groups"]
        for rule in group["rules"]
    ]
    keep = [rule.get("keep_firing_for") for group in PROMETHEUS_RULES["groups"] for rule in group["rules"]]

    assert theirs == ours
    assert keep == [rule.get("keepFiringFor") for rule in RULES]


def test_alerts_lead_to_a_panel_that_exists_and_shows_the_alert_s_metric():
    for rule in RULES:
        panels = {panel["id"]: panel for panel in BOARDS[rule["dashboardUid"]]["panels"]}

        assert panels[rule["panelId"]].get("targets"), rule["title"]


def test_alerts_ask_the_data_source_that_is_provisioned():
    (source,) = SOURCES["datasources"]

    assert {source["uid"]} == {rule["data"][0]["datasourceUid"] for rule in RULES}
    assert all(board["templating"]["list"][0]["current"]["value"] == source["uid"] for board in BOARDS.values())


def test_the_data_source_knows_the_pace_of_scrapes():
    (source,) = SOURCES["datasources"]

    assert PROMETHEUS["global"]["scrape_interval"] == source["jsonData"]["timeInterval"]


def test_only_two_variables_of_the_environment_are_asked_for():
    """Grafana replaces `$NAME` and `${NAME}` in values; anything else that begins with a dollar would be lost."""
    own = {name: text for name, text in FILES.items() if name.startswith(("datasources/", "dashboards/rankscope.yaml"))}
    asked = {found for text in own.values() for found in re.findall(r"\$\{?\w*\}?", text)}

    assert {"${RANKSCOPE_PROMETHEUS_URL}", "${RANKSCOPE_DASHBOARDS_DIR}"} == asked


def test_nothing_in_an_alert_is_taken_for_a_variable():
    for rule in RULES:
        assert "${" not in "".join(rule["annotations"].values())
        assert "$" not in "".join((rule["title"], rule["uid"], *rule["labels"].values()))


def test_a_dollar_in_a_name_or_label_is_written_twice_and_a_brace_in_a_text_refused():
    rule = a_rule(name="Cost$", labels={"team": "$x"})

    assert ("Cost$$ $$x", "$$x", "Cost$$") == (rule["title"], rule["labels"]["team"], rule["labels"]["rule"])
    with pytest.raises(ValueError, match="without the brace"):
        a_rule(summary="it is ${HOME}")


def test_long_and_foreign_names_get_a_uid_that_fits():
    rules = [a_rule(name=name) for name in ("x" * 41, "学习", "a_b", "a-b", "A B")]

    assert 5 == len({rule["uid"] for rule in rules})
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", rule["uid"]) for rule in rules)
    assert a_rule(name="学习")["uid"] == a_rule(name="学习")["uid"]
    with pytest.raises(ValueError, match="190 characters"):
        a_rule(name="x" * 191)


def test_rules_of_one_s_own_become_alerts_too():
    rules = [AnomalyNan(name="Mine", threshold=3.0), AnomalyTurbulence(threshold=2.0, direction="both")]
    panels = {alert.panel: 1 for group in alert_groups(rules) for alert in group.alerts}
    document = alert_rules(alert_groups(rules), Shown(board="b", panels=panels), "https://wiki.example/r")
    first = document["groups"][0]["rules"][0]

    assert ("Mine", "https://wiki.example/r#anomalynan") == (first["title"], first["annotations"]["runbook_url"])
