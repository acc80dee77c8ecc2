"""Boards have the types of the package `@grafana/schema` and follow the rules of Grafana's dashboard-linter."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.dashboards.conftest import BOARDS

from rankscope_dashboards.boards.elements.pages import all_panels
from rankscope_dashboards.generate import LINT_EXCEPTIONS, PROVISIONING
from rankscope_storage.base.service_catalogue import CATALOG

MODULES = {  # Modules of the package with the types `Options` and `FieldConfig`, by type of panel
    "stat": "stat/panelcfg/x/StatPanelCfg",
    "status-history": "statushistory/panelcfg/x/StatusHistoryPanelCfg",
    "table": "table/panelcfg/x/TablePanelCfg",
    "timeseries": "timeseries/panelcfg/x/TimeSeriesPanelCfg",
}

WITH_SETTINGS = {"status-history", "table", "timeseries"}
"""Types of panels that have settings for each field: the type `FieldConfig`."""

BEFORE_9_5 = "custom.displayMode"
"""Setting of Grafana 9.4 for the colour of a cell, which newer releases ignore. Its newer name is next to it."""

HEADER = """
import type { AnnotationQuery, Dashboard } from '@grafana/schema';

// The package has enumerations, and a board has their values.
type Plain<T> =
  unknown extends T ? T :
  T extends string ? `${T}` :
  T extends number | boolean | null | undefined ? T :
  T extends (infer E)[] ? Plain<E>[] :
  T extends object ? { [K in keyof T]: Plain<T[K]> } : T;

// Prometheus has settings of its own in an annotation. The package does not contain them.
type OfPrometheus = { expr: string; step: string; titleFormat: string; textFormat: string };
type Annotation = Plain<AnnotationQuery> & (OfPrometheus | { builtIn: number });
type Board = Omit<Plain<Dashboard>, 'annotations'> & { annotations?: { list?: Annotation[] } };
"""


def columns(panel):
    """Return the settings of each column that belong to the type of the panel."""
    overrides = [one["properties"] for one in panel["fieldConfig"]["overrides"] or ()]
    settings = [{one["id"]: one["value"] for one in properties if one["id"] != BEFORE_9_5} for properties in overrides]
    return [{name[7:]: one[name] for name in one if name.startswith("custom.")} for one in settings]


def script(boards):
    """Return a TypeScript module with each board, and with the options and settings of each panel, as typed values."""
    lines = [HEADER]
    for kind, path in MODULES.items():
        imported = f"@grafana/schema/dist/esm/raw/composable/{path}_types.gen"
        lines.append(f"import type * as {kind.replace('-', '')} from '{imported}';")
    for name, board in boards.items():
        lines.append(f"export const {name}: Board = {json.dumps(board)};")
        for panel in (one for one in all_panels(board) if one["type"] != "row"):
            own, types = f"{name}_{panel['id']}", panel["type"].replace("-", "")
            settings = panel["fieldConfig"]["defaults"].get("custom", {})
            lines.append(f"export const {own}_options: Plain<{types}.Options> = {json.dumps(panel['options'])};")
            typed = f"Plain<{types}.FieldConfig>" if panel["type"] in WITH_SETTINGS else "Record<string, never>"
            lines.append(f"export const {own}_settings: {typed} = {json.dumps(settings)};")
            for number, column in enumerate(filter(None, columns(panel))):  # other settings have no type
                typed = f"Partial<Plain<{types}.FieldConfig>>"
                lines.append(f"export const {own}_column{number}: {typed} = {json.dumps(column)};")
    return "\n".join(lines) + "\n"


@pytest.fixture
def errors(tmp_path):
    """Return a function that returns the errors of the TypeScript compiler for a script."""
    # The packages of Grafana are in the folder of packages that contains the compiler.
    compiler = shutil.which("tsc")
    packages = Path(compiler).resolve().parents[2] if compiler else Path()
    if not (packages / "@grafana" / "schema").is_dir():
        pytest.skip("make boards-check fetches the types of Grafana for this test")

    def compiled(text):
        (tmp_path / "boards.ts").write_text(text, encoding="utf-8")
        (tmp_path / "node_modules").symlink_to(packages)
        options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "esnext"]
        command = [compiler, *options, "--moduleResolution", "bundler", "boards.ts"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout

    return compiled


def test_boards_have_the_types_of_the_newest_release(errors):
    assert "" == errors(script(BOARDS))


EXCLUSIONS = yaml.safe_load((PROVISIONING / LINT_EXCEPTIONS).read_text(encoding="utf-8"))["exclusions"]
WITH_UNITS = {"stat", "singlestat", "graph", "table", "timeseries", "gauge"}
SOURCE = ("datasource", "Data source", "prometheus")
LISTS = r"label_values\([a-z_]+(\{[^}]*\})?, [a-z_]+\)|query_result\(.+\)"
"""Queries of variables. promtool parses that of a query_result."""


def variables(board):
    return {variable["name"]: variable for variable in board["templating"]["list"]}


def queried(board):
    return {name: one for name, one in variables(board).items() if one["type"] == "query"}


def panels(board):
    return [panel for panel in all_panels(board) if panel["type"] != "row"]


def targets(board):
    return [(panel["title"], target["expr"]) for panel in panels(board) for target in panel["targets"]]


def is_source(board):
    sources = [one for one in variables(board).values() if one["type"] == "datasource"]
    return [SOURCE] == [(one["name"], one["label"], one["query"]) for one in sources]


def is_template(board, name, *, multi=True, all_value=".+"):
    found, expected = variables(board).get(name), (multi, all_value, "${datasource}")
    return bool(found) and (found["multi"], found.get("allValue"), found["datasource"]["uid"]) == expected


def has_unit(panel):
    settings = panel["fieldConfig"]["defaults"]
    return panel["type"] not in WITH_UNITS or settings.get("unit") or settings.get("mappings")


def windows(expression):
    return set(re.findall(r"\b(?:rate|irate|increase)\([^)]*\[([^]]+)\]", expression))


def bare_counters(board):
    """Return each counter that a panel shows without its rate."""
    shown = [(title, re.sub(r"\b(?:rate|irate|increase)\([^)]*\)", "", text)) for title, text in targets(board)]
    return [(title, name) for title, bare in shown for name in re.findall(r"\w+_total\b", bare)]


def unlabelled(board, label):
    has = [
        (title, [re.search(rf"\b{label}=~", one) for one in re.findall(r"\{([^}]*)\}", text)])
        for title, text in targets(board)
    ]
    return [title for title, found in has if not all(found)]


RULES = {
    "template-datasource-rule": lambda board: [] if is_source(board) else ["board"],
    "template-job-rule": lambda board: [] if is_template(board, "job") else ["board"],
    "template-instance-rule": lambda board: [] if is_template(board, "instance") else ["board"],
    "template-label-promql-rule": lambda board: [
        name for name, one in queried(board).items() if not re.fullmatch(LISTS, one["query"])
    ],
    "template-on-time-change-reload-rule": lambda board: [
        name for name, one in queried(board).items() if one["refresh"] != 2
    ],
    "panel-datasource-rule": lambda board: [
        one["title"] for one in panels(board) if one["datasource"] != {"type": "prometheus", "uid": "${datasource}"}
    ],
    "panel-title-description-rule": lambda board: [
        one["title"] for one in panels(board) if not one["title"] or not one["description"]
    ],
    "panel-units-rule": lambda board: [one["title"] for one in panels(board) if not has_unit(one)],
    "panel-no-targets-rule": lambda board: [one["title"] for one in panels(board) if not one["targets"]],
    "target-rate-interval-rule": lambda board: [
        title for title, text in targets(board) if not windows(text) <= {"$__rate_interval"}
    ],
    "target-job-rule": lambda board: unlabelled(board, "job"),
    "target-instance-rule": lambda board: unlabelled(board, "instance"),
    "target-counter-agg-rule": lambda board: [title for title, _ in bare_counters(board)],
    "uneditable-dashboard": lambda board: ["board"] if board["editable"] else [],
}
"""The places where a board breaks a rule, for all rules except the two about logs, and target-promql."""


def excluded(rule, where):
    entry = EXCLUSIONS.get(rule)
    return entry is not None and ("entries" not in entry or {"panel": where} in entry["entries"])


@pytest.mark.parametrize("rule", RULES)
def test_boards_follow_the_linter_rule_or_have_an_exception(rule):
    for board in BOARDS.values():
        assert [] == [found for found in RULES[rule](board) if not excluded(rule, found)], board["uid"]


def test_run_and_rank_variables_follow_the_rules_for_job_and_instance():
    for name, board in BOARDS.items():
        assert name == "runs" or is_template(board, "run", multi=False, all_value=None), name
        assert name == "runs" or is_template(board, "rank"), name


def test_every_linter_exception_is_needed_and_has_a_reason():
    found = {(rule, where) for rule, check in RULES.items() for board in BOARDS.values() for where in check(board)}

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
    shown = {name for board in BOARDS.values() for _, name in bare_counters(board)}
    assert shown <= CATALOG.keys()
