"""The files that a Grafana server reads at its start, compared with lists of keys and values from its documentation.

These tests run without a server. One invalid value in the alerting file prevents the server from starting, and unknown
keys are ignored without a message.
"""

from __future__ import annotations

import json
import re

import pytest
import yaml

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_dashboards.alerts.alert import Alert, AlertGroup
from rankscope_dashboards.alerts.groups import alert_groups
from rankscope_dashboards.generate import generated_files
from rankscope_dashboards.provisioning.alert_rules import PanelIndex, alert_rules

FILES = generated_files()
BOARDS = {json.loads(text)["uid"]: json.loads(text) for name, text in FILES.items() if name.endswith(".json")}
SOURCES = yaml.safe_load(FILES["datasources/rankscope.yaml"])
PROVIDERS = yaml.safe_load(FILES["dashboards/rankscope.yaml"])
ALERTING = yaml.safe_load(FILES["alerting/rules.yaml"])
PROMETHEUS = yaml.safe_load(FILES["prometheus/prometheus.yml"])
PROMETHEUS_RULES = yaml.safe_load(FILES["prometheus/rankscope.rules.yml"])
RULES = [rule for group in ALERTING["groups"] for rule in group["rules"]]
ANYWHERE = PanelIndex(board="b", panels={"State": 1, "Anomalies": 2})

# Keys of the provisioning file format. Some keys have other names in the HTTP API.
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
    values = {"name": "A", "expression": "up", "summary": "s", "description": "d", "severity": "info", "runbook": "A"}
    return Alert(**{**values, **changes})


def a_rule(**changes):
    (group,) = alert_rules([AlertGroup("g", [an_alert(**changes)])], ANYWHERE)["groups"]
    return group["rules"][0]


def test_files_contain_only_keys_that_grafana_reads():
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


def test_evaluation_intervals_are_multiples_of_ten_seconds():
    assert ["30s"] * 5 == [group["interval"] for group in ALERTING["groups"]]


def test_uids_and_titles_are_unique_and_within_the_length_limit():
    uids, titles = [rule["uid"] for rule in RULES], [rule["title"] for rule in RULES]

    assert len(RULES) == len(set(uids)) == len(set(titles))
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", uid) for uid in uids)
    assert all(1 <= len(title) <= 190 for title in titles)
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", uid) for uid in BOARDS)
    assert len(BOARDS) == sum(name.endswith(".json") for name in FILES)
    assert "rankscope-anomaly-nan" in uids


def test_rules_use_only_states_and_conditions_that_grafana_accepts():
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


def without_queries(rule):
    """Return a Prometheus rule without the queries at the end of its description: Grafana templates cannot query."""
    description = rule["annotations"]["description"].partition("{{ with printf")[0]
    return rule | {"annotations": rule["annotations"] | {"description": description}}


def test_expressions_and_hold_times_equal_those_of_the_prometheus_file():
    def content(rule, expression, title):
        return title, expression, rule.get("for", "0s").replace("0s", ""), rule["labels"], rule["annotations"]

    grafana = [content(rule, rule["data"][0]["model"]["expr"], rule["title"].split()[0]) for rule in RULES]
    prometheus = [
        content(without_queries(rule), rule["expr"], rule["alert"])
        for group in PROMETHEUS_RULES["groups"]
        for rule in group["rules"]
    ]
    keep = [rule.get("keep_firing_for") for group in PROMETHEUS_RULES["groups"] for rule in group["rules"]]

    assert prometheus == grafana
    assert keep == [rule.get("keepFiringFor") for rule in RULES]


def test_alerts_link_to_an_existing_panel_with_queries():
    for rule in RULES:
        panels = {panel["id"]: panel for panel in BOARDS[rule["dashboardUid"]]["panels"]}

        assert panels[rule["panelId"]].get("targets"), rule["title"]


def test_alerts_and_boards_use_the_provisioned_data_source():
    (source,) = SOURCES["datasources"]

    assert {source["uid"]} == {rule["data"][0]["datasourceUid"] for rule in RULES}
    assert all(board["templating"]["list"][0]["current"]["value"] == source["uid"] for board in BOARDS.values())


def test_data_source_has_the_scrape_interval_of_prometheus():
    (source,) = SOURCES["datasources"]

    assert PROMETHEUS["global"]["scrape_interval"] == source["jsonData"]["timeInterval"]


def test_provisioning_files_use_only_two_environment_variables():
    """Grafana replaces `$NAME` and `${NAME}` in values by environment variables, and unset ones by an empty string."""
    texts = {
        name: text for name, text in FILES.items() if name.startswith(("datasources/", "dashboards/rankscope.yaml"))
    }
    variables = {found for text in texts.values() for found in re.findall(r"\$\{?\w*\}?", text)}

    assert {"${RANKSCOPE_PROMETHEUS_URL}", "${RANKSCOPE_DASHBOARDS_DIR}"} == variables


def test_alert_texts_contain_nothing_that_grafana_replaces():
    for rule in RULES:
        assert "${" not in "".join(rule["annotations"].values())
        assert "$" not in "".join((rule["title"], rule["uid"], *rule["labels"].values()))


def test_dollar_in_names_is_doubled_and_dollar_brace_in_texts_is_rejected():
    rule = a_rule(name="Cost$", labels={"team": "$x"})

    assert ("Cost$$ $$x", "$$x", "Cost$$") == (rule["title"], rule["labels"]["team"], rule["labels"]["rule"])
    with pytest.raises(ValueError, match="without the brace"):
        a_rule(summary="it is ${HOME}")


def test_long_and_non_ascii_names_get_a_valid_unique_uid():
    rules = [a_rule(name=name) for name in ("x" * 41, "学习", "a_b", "a-b", "A B")]

    assert 5 == len({rule["uid"] for rule in rules})
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", rule["uid"]) for rule in rules)
    assert a_rule(name="学习")["uid"] == a_rule(name="学习")["uid"]
    with pytest.raises(ValueError, match="190 characters"):
        a_rule(name="x" * 191)


def test_custom_rules_become_grafana_alerts():
    rules = [AnomalyNan(name="Mine", threshold=3.0), AnomalyTurbulence(threshold=2.0, direction="both")]
    panels = {alert.panel: 1 for group in alert_groups(rules) for alert in group.alerts}
    document = alert_rules(alert_groups(rules), PanelIndex(board="b", panels=panels), "https://wiki.example/r")
    first = document["groups"][0]["rules"][0]

    assert ("Mine", "https://wiki.example/r#anomalynan") == (first["title"], first["annotations"]["runbook_url"])
