"""Boards use only metrics and labels of the catalog, in expressions that Prometheus parses. Runs without Grafana."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml
from tests.dashboards.conftest import BOARDS, FILES, PANELS, promql_error, substituted

from rankscope_dashboards import boards as boards_package
from rankscope_dashboards.boards import boards
from rankscope_dashboards.boards.elements.pages import BOARD_PAGES, PANEL_PAGES, all_panels, with_pages
from rankscope_dashboards.generate import PROVISIONING, stale_files
from rankscope_storage.api.store import Store
from rankscope_storage.base.service_catalogue import CATALOG
from rankscope_view.site import Site

DOCS = Path(__file__).parents[3] / "docs"
EXPRESSIONS = [(panel["title"], target["expr"]) for _, panel in PANELS for target in panel["targets"]]
ANNOTATIONS = [one for board in BOARDS.values() for one in board["annotations"]["list"] if not one.get("builtIn")]
VARIABLES = {name: {one["name"]: one for one in board["templating"]["list"]} for name, board in BOARDS.items()}
RUN_LIST = re.fullmatch(r"query_result\((.+)\)", VARIABLES["runs"]["run"]["query"])[1]
SCRAPED_OR_STORED = re.compile(
    r"""(?x) (?P<how>rate|increase) \( (?P<counter>\w+) \{ (?P<who>[^}]*) \} \[\$__rate_interval\] \)
    \ or\ (?P=how) \( (?P=counter) \{ job="rankscope",\ (?P=who) \} \[\$__rate_interval\] \)
    \ unless\ on\ \(run,\ rank\)\ present_over_time
    \( rankscope_step \{ run=~?"\$run"(,\ rank=~"\$rank")? \} \[\$__rate_interval\] \)"""
)
"""Rate or increase of a counter: of the scraped samples, or of the stored samples for ranks that were not scraped."""
UNITS = set(json.loads(Path(__file__).with_name("data").joinpath("grafana_units.json").read_text())["units"])


def defaults(panel: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = panel["fieldConfig"]["defaults"]
    return settings


def columns(panel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of columns or lines by the name, or the pattern of names, to which they apply."""
    overrides = panel["fieldConfig"]["overrides"] or ()
    return {one["matcher"]["options"]: {each["id"]: each["value"] for each in one["properties"]} for one in overrides}


def test_committed_files_equal_the_generated_ones():
    assert [] == stale_files(PROVISIONING)


def test_stale_files_lists_changed_missing_and_obsolete_files(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "prometheus/prometheus.yml").write_text("changed", encoding="utf-8")
    (tmp_path / "prometheus/rankscope.rules.yml").unlink()
    (tmp_path / "dashboards/rankscope/old.json").write_text("{}", encoding="utf-8")

    changed = ["prometheus/prometheus.yml", "prometheus/rankscope.rules.yml"]
    assert ["dashboards/rankscope/old.json", *changed] == stale_files(tmp_path)


def test_every_query_selects_the_chosen_run_by_labels_of_the_catalog():
    for title, expression in EXPRESSIONS:
        assert "rankscope_" in expression, title
        for metric, braces, selector in re.findall(r"(rankscope_\w+)(?:(\{)([^}]*)\}|(?!\w))", expression):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert used - {"job"} <= set(CATALOG[metric].all_labels), (title, metric)
            selects = re.search(r'run=~?"\$run"', selector) if braces else "run" not in CATALOG[metric].all_labels
            assert selects, (title, metric)


def test_boards_have_all_documented_metrics_that_the_docs_do_not_except():
    documented = re.findall(r"^\| `(rankscope_\w+)`", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    section = (DOCS / "dashboards.md").read_text(encoding="utf-8").partition("in a panel or a mark, except these:")[2]
    rows = [row.split("|") for row in section.strip().partition("\n\n")[0].splitlines()[2:]]
    listed = {name: reason for _, names, reason, _ in rows for name in re.findall(r"`(\w+)`", names)}
    texts = (*(one for _, one in EXPRESSIONS), *(one["expr"] for one in ANNOTATIONS), RUN_LIST)
    shown = {name for text in texts for name in re.findall(r"rankscope_\w+", text)}

    assert len(documented) > 100
    assert set(documented) - shown == listed.keys()
    assert all(len(reason) > 20 for reason in listed.values())


def test_only_queries_on_rank_metrics_name_the_job_and_read_the_store():
    """A selector with the job also reads the store. Rates are exempt: they query both kinds of samples separately."""
    # Queries on metrics of the service that the store has too contain one selector without and one with the job.
    for title, expression in EXPRESSIONS:
        without = re.sub(SCRAPED_OR_STORED, "", expression)
        for metric, selector in re.findall(r"(rankscope_\w+)\{([^}]*)\}", without):
            spec, names_job = CATALOG[metric], 'job="rankscope"' in selector
            assert names_job or spec.page == "service" or not spec.stored_as, (title, metric)
            if names_job and spec.page == "service":
                live = selector.removeprefix('job="rankscope", ')
                assert spec.stored_as, (title, metric)
                assert f"{metric}{{{live}}}" in expression, (title, metric)


def test_rates_never_mix_scraped_and_stored_samples():
    """Stored samples are a few milliseconds older than scraped ones, so a merged counter would seem to reset."""
    # Only metrics of ranks are stored.
    for title, expression in EXPRESSIONS:
        without = re.sub(SCRAPED_OR_STORED, "", expression)
        for metric in re.findall(r"\b(?:rate|irate|increase)\((\w+)", without):
            assert "service" == CATALOG[metric].page, title


def test_every_panel_is_described_and_names_the_probable_reason_for_no_data():
    """A description defines the quantity and recommends an action. A tile only names the place of the reason."""
    for _, panel in PANELS:
        reason = panel["description"].rpartition(" Without data: ")[2].removesuffix(".")
        text = reason if reason.startswith("No data") else f"No data. Probable reason: {reason}"

        assert len(panel["description"]) > 80, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert len(reason.split()) >= 4, panel["title"]
        assert defaults(panel)["noValue"] == ("No data, see (i)" if panel["type"] == "stat" else text), panel["title"]
        if any("rankscope_gpu_" in target["expr"] for target in panel["targets"]):
            assert re.search(r"\bno GPU\b|\bis none\b", reason, re.IGNORECASE)


def test_units_are_known_to_grafana():
    units = [(panel["title"], defaults(panel)["unit"]) for _, panel in PANELS]
    units += [(name, one["unit"]) for _, panel in PANELS for name, one in columns(panel).items() if "unit" in one]

    assert 273 == len(UNITS)
    for title, unit in units:
        assert unit in UNITS or re.fullmatch(r"(suffix|prefix|currency|time):.+", unit), (title, unit)


def test_tensors_in_tables_link_to_their_board_and_have_the_remaining_width():
    """Tables with tensors have the whole width of the board, and all other columns have a fixed width."""
    tables = [panel for _, panel in PANELS if panel["type"] == "table"]
    tables = [panel for panel in tables if {"Kind", "Tensor"} <= set(re.findall(r"\w+", json.dumps(panel)))]

    assert 6 == len(tables)
    for panel in tables:
        found = columns(panel)
        (organize,) = [one for one in panel["transformations"] if one["id"] == "organize"]
        fixed = {name for name, settings in found.items() if "custom.width" in settings}
        assert 24 == panel["gridPos"]["w"]
        assert {"Tensor"} == set(organize["options"]["renameByName"].values()) - fixed
        url = found["Tensor"]["links"][0]["url"]
        assert url.startswith(f"/d/{BOARDS['tensors']['uid']}?"), panel["title"]
        assert "&var-tensor=${__data.fields.Tensor:percentencode}&" in url


LEAST_SIZES = {"stat": (3, 4), "timeseries": (6, 7), "table": (8, 7), "status-history": (12, 7)}


def test_panels_have_the_size_the_legend_and_the_thresholds_of_their_type():
    """The SDK and the Grafana editor would otherwise set red from 80 on every panel."""
    thresholds = ([None], [None, 1], [None, 0.5, 1.5, 3], [None, sys.float_info.max])
    for name, panel in PANELS:
        place, (width, height) = panel["gridPos"], LEAST_SIZES[panel["type"]]
        steps = [step["value"] for step in defaults(panel)["thresholds"]["steps"]]
        is_beside = panel["type"] == "timeseries" and panel["options"]["legend"]["placement"] == "right"

        assert place["w"] >= (12 if is_beside else width), panel["title"]
        assert place["h"] >= height, panel["title"]
        assert steps in thresholds, panel["title"]
        assert len(steps) < 4 or "baseline" in panel["description"]
        for target in panel["targets"]:
            assert ("{{run}}" in target.get("legendFormat", "")) <= (name == "runs"), panel["title"]


def test_table_of_runs_fits_1440_pixels_and_links_to_a_run_with_its_range():
    (found,) = [columns(panel) for _, panel in PANELS if panel["title"] == "Runs"]
    urls = [link["url"] for link in found["Run"]["links"]]

    assert {"Loss", "Tokens/s", "Anomalies"} <= found.keys()
    assert sum(one.get("custom.width", 0) for one in found.values()) <= 1150, "200 px remain for names"
    for url in urls:
        assert url.startswith(f"/d/{BOARDS['run_overview']['uid']}?")
        assert "var-run=${__data.fields.Run" in url
        assert "var-datasource=${datasource}" in url
    assert urls[0].endswith("&${__url_time_range}")
    assert urls[1].endswith("&from=${__data.fields.Started.numeric}&to=${__data.fields.Latest.numeric}")


def test_boards_open_with_at_most_20_panels_with_unique_titles():
    assert {"runs", "run_overview", "ranks", "tensors", "incidents", "pipeline"} == BOARDS.keys()
    titles = [panel["title"] for _, panel in PANELS]

    assert len(titles) == len(set(titles))
    for board in BOARDS.values():
        assert sum(panel["type"] != "row" for panel in board["panels"]) <= 20, "without those of folded rows"


def test_annotations_mark_restarts_checkpoints_and_incidents():
    names = {"run_overview", "ranks", "tensors", "incidents"}
    marks = {name: [one["name"] for one in BOARDS[name]["annotations"]["list"][1:]] for name in names}

    assert {name: ["Restarts", "Checkpoints", "Incidents"] for name in names} == marks
    for board in BOARDS.values():
        first = board["annotations"]["list"][0]
        assert (1, False) == (first["builtIn"], first["enable"]), "alerts of all runs"
    for annotation in ANNOTATIONS:
        assert "${datasource}" == annotation["datasource"]["uid"]
        assert 'run="$run"' in annotation["expr"]


@pytest.mark.parametrize("job", [None, "rankscope"])
def test_each_event_has_one_mark_at_every_range(judge, job):
    """The run has the last two hours of a day. Grafana evaluates marks about 100 times. The store has few samples."""
    # The last evaluation is at a whole interval, up to an interval before the end of the range.
    of_run = 'run="r"' + (f', job="{job}"' if job else "")
    ages, saves = ("0+10x360", "{}x89") if job is None else ("0 _x2 0 _x357", "{} _x89")
    saved = " ".join(saves.format(3 * number) for number in range(1, 9))
    attempts = "0x419 1x299" if job is None else " ".join(["0 _x5"] * 70 + ["1 _x5"] * 50)
    given = {f"rankscope_run_attempt{{{of_run}}}": f"_x7920 {attempts}"}
    for rank in range(2):
        given[f'rankscope_phase_seconds_total{{{of_run}, rank="{rank}", phase="checkpoint"}}'] = f"_x7950 {saved}"
    for start, step in ((8_100, 7), (8_590, 9)):
        labels = f'{of_run}, rank="0", rule="AnomalyNan", kind="loss", tensor="", step="{step}"'
        given[f"rankscope_ingest_incident_age_seconds{{{labels}}}"] = f"_x{start} {ages}"
    tests = [
        {"expr": f"sum(count_over_time({expression}[{range_}:{step}]))", "eval_time": f"{end}s", "exp_samples": samples}
        for range_, step, end, counts in (
            *(("15m", "15s", 86_400, (0, 1, 1)), ("6h", "5m", 86_400, (1, 8, 2)), ("24h", "15m", 86_400, (1, 8, 2))),
            ("24h", "15m", 85_500, (1, 8, 2)),
        )
        for one, count in zip(BOARDS["ranks"]["annotations"]["list"][1:], counts, strict=True)
        for expression in [substituted(one["expr"], {"$__interval_ms": "300000", "$__interval": step, "$run": "r"})]
        for samples in [[{"labels": "{}", "value": count}] if count else []]
    ]
    series_of_test = [{"series": name, "values": values} for name, values in given.items()]
    document = {"tests": [{"interval": "10s", "input_series": series_of_test, "promql_expr_test": tests}]}

    assert [None] == judge([({"groups": []}, document)])


@pytest.mark.parametrize("name", BOARDS)
def test_board_has_a_stable_uid_links_to_the_others_and_fills_the_grid(name):
    board = BOARDS[name]
    (link,) = board["links"]
    panels = [*all_panels(board)]
    places = [panel["gridPos"] for panel in panels]
    taken = [(one["x"] + x, one["y"] + y) for one in places for x in range(one["w"]) for y in range(one["h"])]

    assert f"rankscope-{name.replace('_', '-')}" == board["uid"]
    assert not {"id", "__inputs"} & board.keys()
    assert 39 <= board["schemaVersion"] <= 42
    assert ["rankscope"] == board["tags"] == link["tags"]
    assert link["keepTime"]
    assert link["includeVars"]
    assert [*range(1, len(panels) + 1)] == [panel["id"] for panel in panels]
    assert len(taken) == len(set(taken))
    assert {(x, y) for x in range(24) for y in range(max(y for _, y in taken) + 1)} == set(taken)


VARIABLES_OF = {
    "runs": ["datasource", "run", "pages"],
    "run_overview": ["datasource", "run", "rank", "smooth", "pages"],
    "ranks": ["datasource", "run", "host", "rank", "pages"],
    "tensors": ["datasource", "run", "rank", "kind", "tensor", "lines", "rows", "pages"],
    "incidents": ["datasource", "run", "rank", "pages"],
    "pipeline": ["datasource", "run", "rank", "pages"],
}


@pytest.mark.parametrize("name", BOARDS)
def test_variables_select_one_run_and_several_ranks_from_series(name):
    """Lists also contain runs from before Prometheus started: remote read returns series, but no label values."""
    # Without options and a choice, Grafana 9.4 sends an empty value, as in a window `[]`, which Prometheus rejects.
    found = VARIABLES[name]

    assert VARIABLES_OF[name] == list(found)
    step, value = 'rankscope_step{job="rankscope"', 'rankscope_tensor_value{job="rankscope", run="$run"'
    queries = {
        "run": f"query_result({RUN_LIST})",
        "host": 'label_values(rankscope_run_info{run="$run"}, host)',
        "rank": f'label_values({step}, run="$run"}}, rank)',
        "kind": 'label_values(rankscope_kind_step{job="rankscope", run="$run"}, kind)',
        "tensor": f'label_values({value}, rank=~"$rank", kind="$kind", op="norm"}}, tensor)',
    }
    for variable in (one for one in found.values() if one["type"] == "query" and one["name"] in queries):
        has_all = variable["name"] in {"host", "rank", "tensor"} or name == "runs"
        assert queries[variable["name"]] == variable["query"]
        assert has_all == variable["multi"] == variable["includeAll"]
        assert (".+" if has_all else None) == variable.get("allValue")
        assert variable["sort"] in range(7), "Grafana 9.4 does not know other orders"
        assert (variable["name"] == "run") == (variable["sort"] == 0), "the query orders the runs"
        assert ('/{run="(.*)"}/' if variable["name"] == "run" else None) == (variable.get("regex") or None)
    for variable in (one for one in found.values() if one["type"] == "custom"):
        assert variable["query"].split(",") == [option["value"] for option in variable["options"]]
        assert [variable["current"]] == [option for option in variable["options"] if option["selected"]]


def test_board_of_tensors_reads_the_curves_of_those_that_rose_most(judge):
    """Panels have the same six tensors at all times. Grafana inserts the values of the hidden variable as `(a|b)`."""
    lines = VARIABLES["tensors"]["lines"]
    curves = [target["expr"] for _, one in PANELS if "Norm, " in one["title"] for target in one["targets"]]
    labels = 'job="rankscope", run="r", rank="0", kind="grad_reduced", op="norm"'
    given = {}
    for place in range(9):
        given[f'rankscope_tensor_value{{{labels}, tensor="w{place}"}}'] = f"1x10 {10 * (1 + place)} 1x20"
        given[f'rankscope_tensor_baseline{{{labels}, tensor="w{place}"}}'] = f"{1 if place != 8 else 100}x40"
    query = substituted(re.fullmatch(r"query_result\((.+)\)", lines["query"])[1])
    others = f'({query}) and (label_replace(vector(1), "tensor", "w0", "", "") or {{tensor=~"w(0|1|8)"}})'

    assert 3 == len(curves)
    assert all('tensor=~"$lines"' in curve for curve in curves)
    assert (2, True, True) == (lines["hide"], lines["multi"], lines["includeAll"])
    assert "30s" == BOARDS["tensors"]["refresh"]
    assert promql_error(judge, given, [(f"count({query})", "{}", 6), (f"count({others})", None, 0)]) is None


@pytest.mark.parametrize("name", ["z-old", "a-new"])
def test_first_run_of_the_list_is_the_newest_one_that_trains(judge, name):
    """Grafana opens a board with the first run. The name of a run does not show its age."""
    start = "rankscope_run_start_timestamp_seconds"
    given = {
        f'{start}{{run="z-old"}}': "100x30",
        f'{start}{{run="a-new"}}': "200x30",
        f'{start}{{run="b-ended"}}': "300x10 stale",
        f'{start}{{job="rankscope", run="c-stored"}}': "_x5 250",
        'rankscope_step{run="z-old", rank="0"}': "1x30",
        'rankscope_step{run="a-new", rank="0"}': "1x30" if name == "a-new" else "1x10 stale",
    }
    values = {"z-old": 1e10 + 100, "a-new": 200.0, "b-ended": 300.0, "c-stored": 250.0}
    values |= {"a-new": 1e10 + 200} if name == "a-new" else {}
    checks = [(f"topk(1, {substituted(RUN_LIST)})", f'{{run="{name}"}}', values[name])]
    checks += [(f"{substituted(RUN_LIST)} == {value:.0f}", f'{{run="{run}"}}', value) for run, value in values.items()]

    assert promql_error(judge, given, checks) is None


def test_panels_link_to_the_pages_only_if_their_address_is_known():
    for board in BOARDS.values():
        linked = with_pages(board, "https://host:9470/base/")
        (variable,) = [one for one in linked["templating"]["list"] if one["name"] == "pages"]

        assert board == with_pages(board, "")
        assert (2, "https://host:9470/base") == (variable["hide"], variable["query"])
        assert all("links" not in panel for panel in all_panels(board))
        urls = [panel["links"][0]["url"] for panel in all_panels(linked) if panel["type"] != "row"]
        assert all(url.startswith("${pages}/") for url in urls)
        linked["templating"]["list"] = board["templating"]["list"]
        for panel in all_panels(linked):
            panel.pop("links", None)
        assert board == linked
    with pytest.raises(ValueError, match="https://host:port/path"):
        with_pages(BOARDS["runs"], "host:9470")


def test_links_to_the_pages_lead_to_a_page(tmp_path):
    Store.open(tmp_path, create=True)
    site = Site(tmp_path)
    for path in {*BOARD_PAGES.values(), *PANEL_PAGES.values()} - {"/service"}:
        target = urlsplit(path.replace("${run:percentencode}", "r").replace("${kind:percentencode}", "grad_reduced"))
        answer = site.respond([one for one in target.path.split("/") if one], dict(parse_qsl(target.query)))

        assert b"There is no page" not in answer.body
        assert answer.status in {200, 404}


def test_prometheus_parses_every_expression(promtool, tmp_path):
    texts = [RUN_LIST, *(text for _, text in EXPRESSIONS), *(annotation["expr"] for annotation in ANNOTATIONS)]
    rules = [{"record": f"panel:{number}", "expr": substituted(text)} for number, text in enumerate(texts)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_module_with_a_board_function_adds_a_board(tmp_path, monkeypatch):
    page = (DOCS / "dashboards.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_board.py").write_text(example, encoding="utf-8")
    monkeypatch.setattr(boards_package, "__path__", [*boards_package.__path__, str(tmp_path)])
    made = boards()["my_board"].build()

    assert {"my_board", "run_overview"} <= boards().keys()
    assert ("rankscope-my-board", "Rankscope · Memory") == (made.uid, made.title)
