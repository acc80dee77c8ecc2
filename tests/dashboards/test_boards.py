"""Boards say only what the contract has, in expressions that Prometheus understands. None of this is Grafana itself."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rankscope_contract.metrics import CATALOG
from rankscope_dashboards import boards as boards_package
from rankscope_dashboards.boards import boards
from rankscope_dashboards.generate import PROVISIONING, files, stale

BOARDS = {Path(name).stem: json.loads(text) for name, text in files().items() if name.endswith(".json")}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for _, panel in PANELS for target in panel["targets"]]
VARIABLES = {"$__rate_interval": "1m", "$__interval": "30s", "$run": "demo", "$rank": ".+"}
SCRAPED_OR_STORED = re.compile(
    r"""(?x) (?P<how>rate|increase) \( (?P<counter>\w+) \{ (?P<who>[^}]*) \} \[\$__rate_interval\] \)
    \ or\ (?P=how) \( (?P=counter) \{ job="rankscope",\ (?P=who) \} \[\$__rate_interval\] \)
    \ unless\ on\ \(run,\ rank\)\ present_over_time
    \( rankscope_step \{ run=~"\$run",\ rank=~"\$rank" \} \[\$__rate_interval\] \)"""
)
"""The rise of a counter: of what was scraped, and where nothing was, of what is stored."""
UNITS = set(json.loads(Path(__file__).with_name("data").joinpath("grafana_units.json").read_text())["units"])


def substituted(expression: str) -> str:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def cells(panel):
    place = panel["gridPos"]
    return [
        (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    ]


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

        assert used - {"job"} <= set(CATALOG[metric].all_labels), metric


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_what_ranks_tell_is_asked_of_the_store_too_and_what_the_service_tells_is_not(title, expression):
    """The store is asked where the job is named. What was scraped alone is asked for without, beside the same with."""
    without = re.sub(SCRAPED_OR_STORED, "", expression)
    for metric, selector in re.findall(r"(rankscope_\w+)\{([^}]*)\}", without):
        assert ('job="rankscope"' in selector) == (CATALOG[metric].page != "service"), metric


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_no_rate_is_of_scraped_and_stored_samples_together(title, expression):
    """What is stored is some milliseconds older than a page shows it: a counter would seem to fall and begin anew."""
    without = re.sub(SCRAPED_OR_STORED, "", expression)

    assert not re.search(r"\b(rate|irate|increase)\(", without)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_every_query_is_about_the_run_that_is_chosen(title, expression):
    for metric in re.findall(r"(rankscope_\w+)(?:$|[^\w{])", expression):
        assert "run" not in CATALOG[metric].all_labels, f"{metric} is asked for without a run"
    for selector in re.findall(r"rankscope_\w+\{([^}]*)\}", expression):
        assert 'run=~"$run"' in selector


def test_every_panel_teaches_what_it_shows():
    """What it is, what is good or what else it may be, and where it helps what to do: more than its title."""
    for _, panel in PANELS:
        assert len(panel["description"]) > 80, panel["title"]
        assert panel["description"].endswith("."), panel["title"]


def test_units_are_grafana_s():
    assert 273 == len(UNITS)
    for _, panel in PANELS:
        unit = panel["fieldConfig"]["defaults"]["unit"]

        assert unit in UNITS or re.fullmatch(r"(suffix|prefix|currency|time):.+", unit), (panel["title"], unit)


def test_colours_have_a_meaning():
    """Thresholds are one plain colour or "none is good"; the SDK and the editor put red at 80 on everything."""
    for _, panel in PANELS:
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]

        assert [step["value"] for step in steps] in ([None], [None, 1]), panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_board_has_a_stable_uid_and_finds_its_like(name):
    board = BOARDS[name]
    (link,) = board["links"]

    assert f"rankscope-{name.replace('_', '-')}" == board["uid"]
    assert "id" not in board
    assert "__inputs" not in board
    assert 39 <= board["schemaVersion"] <= 42
    assert ["rankscope"] == board["tags"] == link["tags"]
    assert link["keepTime"]
    assert link["includeVars"]
    assert [*range(1, len(board["panels"]) + 1)] == [panel["id"] for panel in board["panels"]]


@pytest.mark.parametrize("name", BOARDS)
def test_run_and_rank_are_choices_of_several_among_what_made_steps_then(name):
    """Also before Prometheus began: series, other than values of labels, are asked of the store too."""
    run, rank = BOARDS[name]["templating"]["list"][1:]

    runs, ranks = 'rankscope_step{job="rankscope"}', 'rankscope_step{job="rankscope", run=~"$run"}'
    assert ("run", f"label_values({runs}, run)") == (run["name"], run["query"])
    assert ("rank", f"label_values({ranks}, rank)") == (rank["name"], rank["query"])
    for variable in (run, rank):
        assert (True, True, ".+") == (variable["multi"], variable["includeAll"], variable["allValue"])


@pytest.mark.parametrize("name", BOARDS)
def test_panels_fill_whole_lines_and_do_not_overlap(name):
    taken = [cell for panel in BOARDS[name]["panels"] for cell in cells(panel)]
    height = max(y for _, y in taken) + 1

    assert len(taken) == len(set(taken))
    assert {(x, y) for x in range(24) for y in range(height)} == set(taken)


def test_panels_are_large_enough_to_be_read():
    for _, panel in PANELS:
        least = {"stat": (3, 4), "gauge": (4, 5), "timeseries": (8, 7), "table": (8, 7)}[panel["type"]]

        assert (panel["gridPos"]["w"], panel["gridPos"]["h"]) >= least, panel["title"]


def test_prometheus_parses_every_expression(promtool, tmp_path):
    rules = [{"record": f"panel:{number}", "expr": substituted(text)} for number, (_, text) in enumerate(EXPRESSIONS)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_a_board_is_added_by_adding_a_file(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "dashboards.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_board.py").write_text(example, encoding="utf-8")
    monkeypatch.setattr(boards_package, "__path__", [*boards_package.__path__, str(tmp_path)])
    made = boards()["my_board"].build()

    assert {"my_board", "run_overview"} <= boards().keys()
    assert ("rankscope-my-board", "Rankscope · Memory") == (made.uid, made.title)
