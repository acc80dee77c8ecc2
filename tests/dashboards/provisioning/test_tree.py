"""The tree of configuration files is written with real addresses, and has only keys and values that Grafana reads."""

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.dashboards.conftest import BOARDS as GENERATED
from tests.dashboards.conftest import FILES

from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_dashboards.alerts.alert import Alert, AlertGroup, Panel
from rankscope_dashboards.alerts.groups import alert_groups
from rankscope_dashboards.boards.elements.pages import all_panels
from rankscope_dashboards.deploy.prometheus import seconds
from rankscope_dashboards.generate import PROVISIONING, generated_files
from rankscope_dashboards.provisioning import tree
from rankscope_dashboards.provisioning.alert_rules import alert_rules, panel_ids
from rankscope_dashboards.provisioning.tree import MANIFEST, TreeError, TreeSettings, tree_files, write_tree
from rankscope_ingest.base.config import IngestSection, NotifySection

PACKAGED = tree.packaged_boards()
WRITTEN = tree_files(PACKAGED)


def written(folder):
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    return {name: text for name, text in found.items() if name != MANIFEST}


def test_tree_has_the_files_that_are_committed():
    committed = {path.relative_to(PROVISIONING).as_posix() for path in PROVISIONING.rglob("*") if path.is_file()}

    assert committed - {"dashboards/.lint"} == WRITTEN.keys()
    without_headers = {name: text.partition("\n")[2] for name, text in WRITTEN.items() if name not in tree.HAND_WRITTEN}
    assert without_headers == {name: text.partition("\n")[2] for name, text in generated_files().items()}


def test_addresses_and_paths_are_filled_in():
    settings = TreeSettings(
        prometheus_url="http://prometheus.example:9090",
        history_url="http://history.example:9090",
        runbooks_url="https://wiki.example/rankscope",
        boards_path="/srv/grafana/boards",
    )
    files, same = tree_files(PACKAGED, settings), tree_files(PACKAGED, TreeSettings(prometheus_url="http://p.example"))
    sources, own = (yaml.safe_load(one["datasources/rankscope.yaml"])["datasources"] for one in (files, same))
    (provider,) = yaml.safe_load(files["dashboards/rankscope.yaml"])["providers"]

    assert ["http://prometheus.example:9090", "http://history.example:9090"] == [source["url"] for source in sources]
    assert ["http://p.example"] * 2 == [source["url"] for source in own], "history without an address of its own"
    assert "/srv/grafana/boards" == provider["options"]["path"]
    for name in ("alerting/rules.yaml", "prometheus/rankscope.rules.yml"):
        assert "runbook_url: https://wiki.example/rankscope#servicedown" in files[name]
        assert "runbook_url" not in WRITTEN[name]


def test_address_of_the_pages_is_the_value_of_a_variable_of_the_boards():
    def address(**settings):
        text = tree_files(PACKAGED, TreeSettings(**settings))["dashboards/rankscope/run_overview.json"]
        (variable,) = (one for one in json.loads(text)["templating"]["list"] if one["name"] == "pages")
        return variable["query"], variable.get("current", {}).get("value", "")

    assert ("", "") == address()
    assert ("https://pages.example", "https://pages.example") == address(pages_url="https://pages.example")


def test_address_that_grafana_would_not_use_is_rejected():
    for name, url, message in (
        ("prometheus_url", "", "prometheus-url is ''"),
        ("history_url", "history.example:9090", "history-url is 'history.example:9090': write an address such as"),
        ("pages_url", "ftp://pages", "pages-url is"),
        ("runbooks_url", "docs/runbooks.md", "runbooks-url is"),
        ("prometheus_url", "http://user:$PASSWORD@host", "write it as %24"),
    ):
        with pytest.raises(ValueError, match=message):
            TreeSettings(**{name: url})


def test_folder_of_the_user_is_refused_without_force(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    with pytest.raises(TreeError, match="is not empty: name another folder, or add --force"):
        write_tree(tmp_path, {"one.yaml": "1"})

    assert {"mine.yaml": "mine"} == written(tmp_path)
    write_tree(tmp_path, {"one.yaml": "1"}, force=True)
    assert {"mine.yaml": "mine", "one.yaml": "1"} == written(tmp_path)


def test_file_that_the_user_changed_is_refused_without_force(tmp_path):
    write_tree(tmp_path / "tree", {"one.yaml": "1", "two.yaml": "1"})
    (tmp_path / "tree" / "one.yaml").write_text("mine")
    with pytest.raises(TreeError, match=r"were changed: one\.yaml; add --force"):
        write_tree(tmp_path / "tree", {"one.yaml": "2", "two.yaml": "2"})

    assert {"one.yaml": "mine", "two.yaml": "1"} == written(tmp_path / "tree")
    write_tree(tmp_path / "tree", {"one.yaml": "2", "two.yaml": "2"}, force=True)
    assert {"one.yaml": "2", "two.yaml": "2"} == written(tmp_path / "tree")


def test_second_call_updates_the_files_but_none_of_the_user(tmp_path):
    folder = tmp_path / "tree"
    write_tree(folder, {"a/one.yaml": "1", "dropped.yaml": "1", "old.json": "{}"})
    for name in ("new.yaml", "dropped.yaml"):
        (folder / name).write_text("mine")

    with pytest.raises(TreeError, match=r"were changed: new\.yaml"):
        write_tree(folder, {"a/one.yaml": "2", "new.yaml": "2"})
    write_tree(folder, {"a/one.yaml": "2", "b/new.yaml": "3"})
    assert {"a/one.yaml": "2", "b/new.yaml": "3", "dropped.yaml": "mine", "new.yaml": "mine"} == written(folder)


def test_call_after_an_interrupted_one_completes_the_files(tmp_path):
    folder = tmp_path / "tree"
    write_tree(folder, {"one.yaml": "1", "two.yaml": "1"})
    (folder / "two.yaml").unlink()
    (folder / "two.yaml").mkdir()  # writing fails at this file
    with pytest.raises(IsADirectoryError):
        write_tree(folder, {"one.yaml": "2", "two.yaml": "2", "three.yaml": "2"})
    (folder / "two.yaml").rmdir()
    (folder / "two.yaml").write_text("1")
    write_tree(folder, {"one.yaml": "3", "two.yaml": "3", "three.yaml": "3"})

    assert {"one.yaml": "3", "two.yaml": "3", "three.yaml": "3"} == written(folder)


@pytest.mark.parametrize("manifest", ["", "[]", "{", '{"../outside.yaml": "x"}'])
def test_damaged_manifest_counts_as_a_folder_of_the_user(tmp_path, manifest):
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / MANIFEST).write_text(manifest)
    (tmp_path / "outside.yaml").write_text("mine")

    with pytest.raises(TreeError, match="is not empty"):
        write_tree(folder, {"one.yaml": "1"})
    write_tree(folder, {"one.yaml": "1"}, force=True)
    assert "mine" == (tmp_path / "outside.yaml").read_text()


def test_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")

    with pytest.raises(TreeError, match="is not a folder"):
        write_tree(tmp_path / "file", {"one.yaml": "1"})


DOCUMENTATION = Path(__file__).parents[3] / "docs" / "dashboards.md"
(ROUTE,) = yaml.safe_load(WRITTEN["examples/alerting/policies.yaml"])["policies"][0]["routes"]
OWN_GROUP_WAIT_SECONDS = seconds(ROUTE["group_wait"])

BOARDS = {board["uid"]: board for board in GENERATED.values()}
SOURCES = yaml.safe_load(FILES["datasources/rankscope.yaml"])
PROVIDERS = yaml.safe_load(FILES["dashboards/rankscope.yaml"])
ALERTING = yaml.safe_load(FILES["alerting/rules.yaml"])
PROMETHEUS = yaml.safe_load(FILES["prometheus/prometheus.yml"])
PROMETHEUS_RULES = yaml.safe_load(FILES["prometheus/rankscope.rules.yml"])
RULES = [rule for group in ALERTING["groups"] for rule in group["rules"]]
WATCH = next(rule for rule in RULES if rule["title"] == "DatasourceUnreachable")
JUDGING = [rule for rule in RULES if rule is not WATCH]
PANELS = panel_ids(text for name, text in FILES.items() if name.endswith(".json"))

# Keys of the provisioning file format. Some keys have other names in the HTTP API.
GROUP_KEYS = {"orgId", "name", "folder", "interval", "rules"}
RULE_KEYS = {
    *("uid", "title", "condition", "data", "dashboardUid", "panelId", "noDataState", "execErrState", "for", "record"),
    *("keepFiringFor", "annotations", "labels", "isPaused", "notification_settings", "missing_series_evals_to_resolve"),
}
MANDATORY_RULE_KEYS = {"uid", "title", "condition", "data"}
QUERY_KEYS = {"refId", "queryType", "relativeTimeRange", "datasourceUid", "model"}
SOURCE_KEYS = {"name", "uid", "type", "access", "orgId", "url", "isDefault", "editable", "jsonData"}
SOURCE_OPTIONS = {"httpMethod", "timeInterval", "prometheusType", "seriesEndpoint", "manageAlerts"}
PROVIDER_KEYS = {
    *("name", "orgId", "folder", "folderUid", "type", "disableDeletion", "updateIntervalSeconds", "allowUiUpdates"),
    "options",
}


def a_rule(**changes):
    values = {"name": "A", "expression": "up", "summary": "s", "description": "d", "severity": "info", "runbook": "A"}
    return alert_rules([AlertGroup("g", [Alert(**values | changes)])], PANELS)["groups"][0]["rules"][0]


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


def test_documentation_lists_the_keys_that_the_oldest_release_ignores():
    """Grafana 9.4 was loaded with these files: it dropped the first three keys, and does not use the last one."""
    page = DOCUMENTATION.read_text(encoding="utf-8").partition("### Releases of Grafana")[2].partition("###")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))

    assert {"keepFiringFor", "missing_series_evals_to_resolve", "isPaused", "seriesEndpoint"} == listed
    assert listed <= {key for rule in RULES for key in rule} | SOURCE_OPTIONS


def test_fault_of_one_step_reaches_the_receiver_within_30_seconds():
    """The sum of all waits: poll and incident of the service, scrape, evaluation, group_wait of Rankscope's route."""
    scrape = seconds(PROMETHEUS["global"]["scrape_interval"])
    evaluation = max(seconds(group["interval"]) for group in ALERTING["groups"])
    waits = [seconds(rule["for"]) for rule in JUDGING if rule["title"] == "AnomalyIncident"]

    assert [0] == waits
    incident = IngestSection().poll_seconds + NotifySection().group_wait_seconds
    assert 30 >= incident + scrape + evaluation + OWN_GROUP_WAIT_SECONDS


def test_failed_queries_are_one_message_that_names_no_run():
    """All rules but one are normal if Grafana cannot query Prometheus; this one names the data source."""
    assert {("OK", "OK")} == {(rule["noDataState"], rule["execErrState"]) for rule in JUDGING}
    assert ("Alerting", "Alerting") == (WATCH["noDataState"], WATCH["execErrState"])
    assert {"severity": "critical"} == WATCH["labels"]
    assert "Prometheus (data source rankscope-live)" in WATCH["annotations"]["summary"]
    assert "$labels" not in "".join(WATCH["annotations"].values())
    assert "vector(0)" == WATCH["data"][0]["model"]["expr"], "one series, never above zero"


def test_uids_and_titles_are_unique_and_within_the_length_limit():
    uids, titles = [rule["uid"] for rule in RULES], [rule["title"] for rule in RULES]

    assert len(RULES) == len(set(uids)) == len(set(titles))
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", uid) for uid in uids)
    assert all(1 <= len(title) <= 190 for title in titles)
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", uid) for uid in BOARDS)
    assert len(BOARDS) == sum(name.endswith(".json") for name in FILES)
    assert "rankscope-anomaly-nan" in uids


def test_rules_use_only_states_and_conditions_that_grafana_accepts():
    """The interval is the minimum of Grafana. One that is no multiple of 10 s prevents the start of the server."""
    # Grafana's keepFiringFor does not apply to series that a filter omits, so that evaluations are counted.
    assert {"10s"} == {group["interval"] for group in ALERTING["groups"]}
    for rule in RULES:
        query, condition = rule["data"]
        assert rule["noDataState"] in {"OK", "NoData", "Alerting", "KeepLast"}
        assert rule["execErrState"] in {"OK", "Error", "Alerting", "KeepLast"}
        assert seconds(rule.get("keepFiringFor", "20s")) == 10 * rule["missing_series_evals_to_resolve"], rule["title"]
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert re.fullmatch(r"\d+[smh]", rule.get("keepFiringFor", "1s"))
        assert rule["condition"] == condition["refId"] == condition["model"]["refId"] != query["refId"]
        assert query["refId"] == query["model"]["refId"] == condition["model"]["expression"]
        assert "__expr__" == condition["datasourceUid"]


def content(rule, expression, title):
    """Return the content of a rule that both files have. Grafana's templates cannot query, and have links to boards."""
    links = ("__dashboardUid__", "__panelId__", "board")
    texts = {name: text for name, text in rule["annotations"].items() if name not in links}
    texts["description"] = texts["description"].partition("{{ with printf")[0]
    return title, expression, rule.get("for", "0s").replace("0s", ""), rule["labels"], texts


def test_expressions_and_hold_times_equal_those_of_the_prometheus_file():
    rules = [rule for group in PROMETHEUS_RULES["groups"] for rule in group["rules"]]
    grafana = [content(rule, rule["data"][0]["model"]["expr"], rule["title"].split()[0]) for rule in JUDGING]

    assert [content(rule, rule["expr"], rule["alert"]) for rule in rules] == grafana
    assert [rule.get("keep_firing_for") for rule in rules] == [rule.get("keepFiringFor") for rule in JUDGING]


def test_messages_link_to_an_existing_panel_with_queries():
    """Grafana makes the links of a message from two annotations; the keys alone make none."""
    for rule in RULES:
        panels = {panel["id"]: panel for panel in all_panels(BOARDS[rule["dashboardUid"]])}

        assert panels[rule["panelId"]].get("targets"), rule["title"]
        assert rule["dashboardUid"] == rule["annotations"]["__dashboardUid__"]
        assert str(rule["panelId"]) == rule["annotations"]["__panelId__"]


def test_messages_about_a_run_link_to_its_board_in_the_last_hour():
    """The links that Grafana makes have no run and no time, and open the board of another run."""
    for rule in RULES:
        texts = rule["annotations"]
        run = "{{ $labels.run | urlquery }}"
        board = f"{{{{ externalURL }}}}d/{rule['dashboardUid']}?var-run={run}&from=now-1h&to=now"

        assert ("$labels.run" in texts["summary"]) == ("board" in texts), rule["title"]
        assert texts.get("board") in {None, f"{{{{ if $labels.run }}}}{board}{{{{ end }}}}"}
    assert sum("board" in rule["annotations"] for rule in RULES) > 10


def test_panels_in_folded_rows_are_found_and_absent_ones_rejected():
    board = {"uid": "b", "panels": [{"title": "Row", "id": 1, "panels": [{"title": "Inner", "id": 2}]}]}

    assert {"b": {"Row": 1, "Inner": 2}} == panel_ids([json.dumps(board)])
    with pytest.raises(LookupError, match="rankscope-run-overview has no panel with the title 'Gone'"):
        a_rule(panel=Panel("rankscope-run-overview", "Gone"))


def test_data_sources_have_the_scrape_interval_and_read_lists_from_series():
    """With `prometheusVersion`, Grafana 9.4 asks for label values, which remote read does not have."""
    live, history = (source["uid"] for source in SOURCES["datasources"])

    assert ("rankscope-live", "rankscope-history") == (live, history)
    assert {live} == {rule["data"][0]["datasourceUid"] for rule in RULES}
    assert all(board["templating"]["list"][0]["current"]["value"] == live for board in BOARDS.values())
    for source in SOURCES["datasources"]:
        assert PROMETHEUS["global"]["scrape_interval"] == source["jsonData"]["timeInterval"]
        assert source["jsonData"]["seriesEndpoint"] is True
        assert "prometheusVersion" not in source["jsonData"]


def test_addresses_paths_and_texts_contain_nothing_that_grafana_replaces():
    """Grafana replaces `$NAME` and `${NAME}` by environment variables, and unset ones by an empty string."""
    # With an empty path, it would read every JSON file in its working directory as a board.
    (provider,) = PROVIDERS["providers"]
    texts = [text for name, text in FILES.items() if name.startswith(("datasources/", "dashboards/rankscope.yaml"))]

    assert not any("$" in text for text in texts)
    assert "/etc/grafana/provisioning/dashboards/rankscope" == provider["options"]["path"]
    assert ["http://127.0.0.1:9090"] * 2 == [source["url"] for source in SOURCES["datasources"]]
    assert {"dashboards/rankscope"} == {name.rpartition("/")[0] for name in FILES if name.endswith(".json")}
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
    document = alert_rules(alert_groups(rules), PANELS, "https://wiki.example/r")
    first = document["groups"][0]["rules"][0]

    assert ("Mine", "https://wiki.example/r#anomalynan") == (first["title"], first["annotations"]["runbook_url"])
