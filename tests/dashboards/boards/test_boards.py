"""Boards use only metrics and labels of the catalog, in expressions that Prometheus parses. Runs without Grafana."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rankscope_contract.metrics.catalogue import CATALOG
from rankscope_dashboards import boards as boards_package
from rankscope_dashboards.boards import boards
from rankscope_dashboards.generate import PROVISIONING, generated_files, stale_files

BOARDS = {Path(name).stem: json.loads(text) for name, text in generated_files().items() if name.endswith(".json")}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for _, panel in PANELS for target in panel["targets"]]
VARIABLES = {"$__rate_interval": "1m", "$__interval": "30s", "$run": "demo", "$rank": ".+"}
SCRAPED_OR_STORED = re.compile(
    r"""(?x) (?P<how>rate|increase) \( (?P<counter>\w+) \{ (?P<who>[^}]*) \} \[\$__rate_interval\] \)
    \ or\ (?P=how) \( (?P=counter) \{ job="rankscope",\ (?P=who) \} \[\$__rate_interval\] \)
    \ unless\ on\ \(run,\ rank\)\ present_over_time
    \( rankscope_step \{ run=~"\$run",\ rank=~"\$rank" \} \[\$__rate_interval\] \)"""
)
"""Rate or increase of a counter: of the scraped samples, or of the stored samples for ranks that were not scraped."""
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


def test_committed_files_equal_the_generated_ones():
    assert [] == stale_files(PROVISIONING)


def test_stale_files_lists_changed_missing_and_obsolete_files(tmp_path):
    for name, text in generated_files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "prometheus/prometheus.yml").write_text("changed", encoding="utf-8")
    (tmp_path / "prometheus/rankscope.rules.yml").unlink()
    (tmp_path / "dashboards/rankscope/old.json").write_text("{}", encoding="utf-8")

    changed = ["prometheus/prometheus.yml", "prometheus/rankscope.rules.yml"]
    assert ["dashboards/rankscope/old.json", *changed] == stale_files(tmp_path)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_panel_metrics_are_in_the_metric_catalog(title, expression):
    names = set(re.findall(r"rankscope_\w+", expression))

    assert names
    assert names <= CATALOG.keys()


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_panel_labels_exist_on_their_metrics(title, expression):
    for metric, selector in re.findall(r"(rankscope_\w+)\{([^}]*)\}", expression):
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))

        assert used - {"job"} <= set(CATALOG[metric].all_labels), metric


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_only_queries_on_rank_metrics_name_the_job_and_read_the_store(title, expression):
    """A selector with the job also reads the store. Rates are exempt: they query both kinds of samples separately."""
    without = re.sub(SCRAPED_OR_STORED, "", expression)
    for metric, selector in re.findall(r"(rankscope_\w+)\{([^}]*)\}", without):
        assert ('job="rankscope"' in selector) == (CATALOG[metric].page != "service"), metric


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_rates_never_mix_scraped_and_stored_samples(title, expression):
    """Stored samples are a few milliseconds older than scraped ones, so a merged counter would seem to reset."""
    without = re.sub(SCRAPED_OR_STORED, "", expression)

    assert not re.search(r"\b(rate|irate|increase)\(", without)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_every_query_selects_the_chosen_run(title, expression):
    for metric in re.findall(r"(rankscope_\w+)(?:$|[^\w{])", expression):
        assert "run" not in CATALOG[metric].all_labels, f"{metric} is queried without a run"
    for selector in re.findall(r"rankscope_\w+\{([^}]*)\}", expression):
        assert 'run=~"$run"' in selector


def test_every_panel_has_a_description_longer_than_80_characters():
    """A description defines the quantity, names good values and recommends an action: it is longer than a title."""
    for _, panel in PANELS:
        assert len(panel["description"]) > 80, panel["title"]
        assert panel["description"].endswith("."), panel["title"]


def test_units_are_known_to_grafana():
    assert 273 == len(UNITS)
    for _, panel in PANELS:
        unit = panel["fieldConfig"]["defaults"]["unit"]

        assert unit in UNITS or re.fullmatch(r"(suffix|prefix|currency|time):.+", unit), (panel["title"], unit)


def test_thresholds_are_one_colour_or_zero_is_good():
    """The SDK and the Grafana editor would otherwise set red from 80 on every panel."""
    for _, panel in PANELS:
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]

        assert [step["value"] for step in steps] in ([None], [None, 1]), panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_board_has_a_stable_uid_and_links_to_the_other_boards(name):
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
def test_run_and_rank_variables_allow_several_values_and_list_series(name):
    """Lists also contain runs from before Prometheus started: remote read returns series, but no label values."""
    run, rank = BOARDS[name]["templating"]["list"][1:]

    runs, ranks = 'rankscope_step{job="rankscope"}', 'rankscope_step{job="rankscope", run=~"$run"}'
    assert ("run", f"label_values({runs}, run)") == (run["name"], run["query"])
    assert ("rank", f"label_values({ranks}, rank)") == (rank["name"], rank["query"])
    for variable in (run, rank):
        assert (True, True, ".+") == (variable["multi"], variable["includeAll"], variable["allValue"])


@pytest.mark.parametrize("name", BOARDS)
def test_panels_fill_the_grid_without_gaps_or_overlaps(name):
    taken = [cell for panel in BOARDS[name]["panels"] for cell in cells(panel)]
    height = max(y for _, y in taken) + 1

    assert len(taken) == len(set(taken))
    assert {(x, y) for x in range(24) for y in range(height)} == set(taken)


def test_panels_have_the_minimum_size_of_their_type():
    for _, panel in PANELS:
        least = {"stat": (3, 4), "gauge": (4, 5), "timeseries": (8, 7), "table": (8, 7)}[panel["type"]]

        assert (panel["gridPos"]["w"], panel["gridPos"]["h"]) >= least, panel["title"]


def test_prometheus_parses_every_expression(promtool, tmp_path):
    rules = [{"record": f"panel:{number}", "expr": substituted(text)} for number, (_, text) in enumerate(EXPRESSIONS)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_module_with_a_board_function_adds_a_board(tmp_path, monkeypatch):
    page = Path(__file__).parents[3] / "docs" / "dashboards.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_board.py").write_text(example, encoding="utf-8")
    monkeypatch.setattr(boards_package, "__path__", [*boards_package.__path__, str(tmp_path)])
    made = boards()["my_board"].build()

    assert {"my_board", "run_overview"} <= boards().keys()
    assert ("rankscope-my-board", "Rankscope · Memory") == (made.uid, made.title)
