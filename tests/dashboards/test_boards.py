"""Boards say only what the contract has, in expressions that Prometheus understands. None of this is Grafana itself."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import yaml

from rankscope_contract.metrics import CATALOG
from rankscope_dashboards.boards import boards
from rankscope_dashboards.generate import PROVISIONING, files, stale

BOARDS = {name: json.loads(text) for name, text in files().items() if name.startswith("dashboards/")}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"]]
EXPRESSIONS = [(panel["title"], target["expr"]) for _, panel in PANELS for target in panel["targets"]]
VARIABLES = {"$__rate_interval": "1m", "$__interval": "30s", "$run": "demo", "$rank": ".+"}


def substituted(expression: str) -> str:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def test_committed_files_are_what_the_code_makes():
    assert [] == stale(PROVISIONING)


def test_stale_names_a_changed_a_missing_and_a_left_over_file(tmp_path):
    for name, text in files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "prometheus/prometheus.yml").write_text("changed", encoding="utf-8")
    (tmp_path / "prometheus/rankscope.rules.yml").unlink()
    (tmp_path / "dashboards/old.json").write_text("{}", encoding="utf-8")

    assert ["dashboards/old.json", "prometheus/prometheus.yml", "prometheus/rankscope.rules.yml"] == stale(tmp_path)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_every_metric_of_a_panel_is_in_the_catalogue(title, expression):
    names = set(re.findall(r"rankscope_\w+", expression))

    assert names
    assert names <= CATALOG.keys()


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_labels_of_a_panel_exist_on_its_metrics(title, expression):
    for metric, selector in re.findall(r"(rankscope_\w+)\{([^}]*)\}", expression):
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))

        assert used <= set(CATALOG[metric].all_labels), metric


def test_every_panel_explains_itself_and_has_a_unit_and_a_data_source():
    for _, panel in PANELS:
        assert panel["title"]
        assert len(panel["description"]) > 15
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert {"type": "prometheus", "uid": "${datasource}"} == panel["datasource"]


@pytest.mark.parametrize("name", BOARDS)
def test_board_has_a_stable_uid_and_is_not_editable(name):
    board = BOARDS[name]

    assert re.fullmatch(r"rankscope-[a-z-]{1,30}", board["uid"])
    assert board["editable"] is False
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert ["datasource", "run", "rank"] == [variable["name"] for variable in board["templating"]["list"]]


def test_panels_do_not_overlap():
    for board in BOARDS.values():
        cells = [
            (x, y)
            for panel in board["panels"]
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]

        assert len(cells) == len(set(cells))
        assert all(x < 24 for x, _ in cells)


def test_prometheus_parses_every_expression(require_server, tmp_path):
    promtool = require_server("promtool", "prometheus")
    rules = [{"record": f"panel:{number}", "expr": substituted(text)} for number, (_, text) in enumerate(EXPRESSIONS)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_a_board_is_found_by_its_file():
    assert "run_overview" in boards()
