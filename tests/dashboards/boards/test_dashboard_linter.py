"""The rules of Grafana's dashboard-linter, reimplemented from their descriptions, with the exceptions in `.lint`."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from tests.dashboards.generated import FILES

from rankscope_contract.metrics.catalogue import CATALOG
from rankscope_dashboards.boards.elements.pages import all_panels
from rankscope_dashboards.generate import LINT_EXCEPTIONS, PROVISIONING

BOARDS = {name: json.loads(text) for name, text in FILES.items() if name.endswith(".json")}
EXCLUSIONS = yaml.safe_load((PROVISIONING / LINT_EXCEPTIONS).read_text(encoding="utf-8"))["exclusions"]
WITH_UNITS = {"stat", "singlestat", "graph", "table", "timeseries", "gauge"}


def variables(board):
    return {variable["name"]: variable for variable in board["templating"]["list"]}


def panels(board):
    return [panel for panel in all_panels(board) if panel["type"] != "row"]


def targets(board):
    return [(panel["title"], target["expr"]) for panel in panels(board) for target in panel["targets"]]


def template_datasource(board):
    sources = [variable for variable in board["templating"]["list"] if variable["type"] == "datasource"]
    names = [(source["name"], source["label"], source["query"]) for source in sources]
    if names != [("datasource", "Data source", "prometheus")]:
        yield "board", names


def template_of(name, *, multi=True, all_value=".+"):
    def rule(board):
        found = variables(board).get(name)
        expected = (multi, all_value, "${datasource}")
        if not found or (found["multi"], found.get("allValue"), found["datasource"]["uid"]) != expected:
            yield "board", f"no variable {name}, or with other settings"

    return rule


def template_label_promql(board):
    for name, variable in variables(board).items():
        values = r"label_values\([a-z_]+(\{[^}]*\})?, [a-z_]+\)"  # promtool parses the query of a query_result
        if variable["type"] == "query" and not re.fullmatch(rf"{values}|query_result\(.+\)", variable["query"]):
            yield name, variable["query"]


def template_on_time_change_reload(board):
    for name, variable in variables(board).items():
        if variable["type"] == "query" and variable["refresh"] != 2:
            yield name, variable["refresh"]


def panel_datasource(board):
    for panel in panels(board):
        if panel["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
            yield panel["title"], panel["datasource"]


def panel_title_description(board):
    for panel in panels(board):
        if not panel["title"] or not panel["description"]:
            yield panel["title"], "no title or description"


def panel_units(board):
    for panel in panels(board):
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] in WITH_UNITS and not defaults.get("unit") and not defaults.get("mappings"):
            yield panel["title"], "no unit"


def panel_no_targets(board):
    for panel in panels(board):
        if not panel["targets"]:
            yield panel["title"], "no query"


def target_rate_interval(board):
    for title, expression in targets(board):
        for window in re.findall(r"\b(?:rate|irate|increase)\([^)]*\[([^]]+)\]", expression):
            if window != "$__rate_interval":
                yield title, window


def target_label(label):
    def rule(board):
        for title, expression in targets(board):
            if not all(re.search(rf"\b{label}=~", selector) for selector in re.findall(r"\{([^}]*)\}", expression)):
                yield title, f"no matcher for {label}"

    return rule


def target_counter_agg(board):
    for title, expression in targets(board):
        bare = re.sub(r"\b(?:rate|irate|increase)\([^)]*\)", "", expression)
        for name in re.findall(r"\w+_total\b", bare):
            yield title, name


def uneditable_dashboard(board):
    if board["editable"]:
        yield "board", "editable"


RULES = {
    "template-datasource-rule": template_datasource,
    "template-job-rule": template_of("job"),
    "template-instance-rule": template_of("instance"),
    "template-label-promql-rule": template_label_promql,
    "template-on-time-change-reload-rule": template_on_time_change_reload,
    "panel-datasource-rule": panel_datasource,
    "panel-title-description-rule": panel_title_description,
    "panel-units-rule": panel_units,
    "panel-no-targets-rule": panel_no_targets,
    "target-rate-interval-rule": target_rate_interval,
    "target-job-rule": target_label("job"),
    "target-instance-rule": target_label("instance"),
    "target-counter-agg-rule": target_counter_agg,
    "uneditable-dashboard": uneditable_dashboard,
}
"""All rules except the two about logs, and target-promql: `test_boards.py` parses all queries with promtool."""

REPLACEMENTS = {
    "template-job-rule": template_of("run", multi=False, all_value=None),
    "template-instance-rule": template_of("rank"),
}


def excluded(rule, where):
    entry = EXCLUSIONS.get(rule)
    return entry is not None and ("entries" not in entry or {"panel": where} in entry["entries"])


@pytest.mark.parametrize("rule", RULES)
def test_boards_follow_the_linter_rule_or_have_an_exception(rule):
    for board in BOARDS.values():
        assert [] == [found for found in RULES[rule](board) if not excluded(rule, found[0])], board["uid"]


@pytest.mark.parametrize("rule", REPLACEMENTS)
@pytest.mark.parametrize("board", [board for board in BOARDS.values() if board["uid"] != "rankscope-runs"])
def test_run_and_rank_variables_follow_the_rules_for_job_and_instance(rule, board):
    assert [] == list(REPLACEMENTS[rule](board))


def test_every_linter_exception_is_needed_and_has_a_reason():
    found = {(rule, where) for rule, check in RULES.items() for board in BOARDS.values() for where, _ in check(board)}

    for rule, entry in EXCLUSIONS.items():
        assert len(entry["reason"]) > 20
        places = [place["panel"] for place in entry.get("entries", [])]
        assert all((rule, place) in found for place in places)
        assert rule in {name for name, _ in found}


def test_exceptions_cover_only_job_instance_and_incident_counters():
    """Panels show a rate of each counter, except for counters of incidents: a single incident matters."""
    assert {"template-job-rule", "template-instance-rule", "target-job-rule", "target-instance-rule"} == {
        rule for rule, entry in EXCLUSIONS.items() if "entries" not in entry
    }
    shown = {name for board in BOARDS.values() for _, name in target_counter_agg(board)}
    assert shown == {
        "rankscope_anomaly_events_total",
        "rankscope_ingest_anomaly_events_total",
        "rankscope_tensor_anomaly_events_total",
        "rankscope_ingest_lost_records_total",
        "rankscope_gpu_ecc_errors_total",
        "rankscope_ingest_rows_set_aside_total",
        "rankscope_exporter_faults_total",
        "rankscope_ingest_background_errors_total",
        "rankscope_dropped_total",
        "rankscope_gpu_energy_joules_total",
        "rankscope_gpu_pcie_replays_total",
    }
    assert shown <= CATALOG.keys()
