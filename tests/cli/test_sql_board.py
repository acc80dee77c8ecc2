"""SQL of the optional Grafana board, executed by DuckDB on plain Parquet files that were exported from a real store."""

import json
import re
from pathlib import Path

import duckdb
import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "dashboards" / "provisioning-sql"
BOARD = json.loads((FOLDER / "dashboards" / "rankscope-sql.json").read_text(encoding="utf-8"))
PANELS = {panel["title"]: panel for panel in BOARD["panels"]}
FROM, TO = "2026-03-01T12:00:00Z", "2026-03-01T13:00:00Z"
TIME_FILTER = re.compile(r"\$__timeFilter\((\w+)\)")


@pytest.fixture(scope="module")
def parquet(rankscope, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parquet")
    for run, name in (("my-run", "my-run"), ("../other run", "other")):
        done = rankscope("export", run, "--format", "parquet", "-o", str(folder / name))
        assert 0 == done.returncode, done.stderr
    return folder


def rows(sql, folder, *, start=FROM, end=TO, run="my-run"):
    """Return the rows of a query, with the macros and variables that the plugin and Grafana replace."""
    text = TIME_FILTER.sub(rf"\1 >= '{start}' AND \1 <= '{end}'", sql)
    text = text.replace("${folder}", str(folder)).replace("${run:sqlstring}", "'" + run.replace("'", "''") + "'")
    assert "$" not in text
    with duckdb.connect() as connection:
        found = connection.execute(text)
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def panel_rows(title, folder, **given):
    (target,) = PANELS[title]["targets"]
    return rows(target["rawSql"], folder, **given)


def test_loss_is_one_ascending_curve_by_step(parquet):
    found = panel_rows("Loss by step", parquet)

    assert [*range(1, 31)] == [row["step"] for row in found]
    assert (5.0, 5.0, 5.0) == (found[0]["mean"], found[0]["lowest"], found[0]["highest"])
    assert PANELS["Loss by step"]["options"]["xField"] in found[0]


def test_first_bad_tensors_begin_with_the_first_step(parquet):
    found = panel_rows("First tensors with NaN or Inf", parquet)

    assert [(10, 0, "grad_reduced"), (10, 1, "grad_reduced"), (10, 1, "grad_unreduced")] == [
        (row["step"], row["rank"], row["kind"]) for row in found
    ]
    assert {4} == {row["nans"] for row in found}


def test_event_log_has_the_newest_events_of_the_time_range(parquet):
    found = panel_rows("Event log", parquet)

    assert ["step_skipped"] * 2 + ["anomaly"] * 3 == sorted((row["type"] for row in found), reverse=True)
    assert "4 NaN in blocks.0.weight" in {row["message"] for row in found}
    assert [] == panel_rows("Event log", parquet, start="2026-03-01T12:30:00Z")
    assert [] == panel_rows("Event log", parquet, run="it's unknown")


def test_list_of_runs_has_each_exported_run_with_scalars(parquet):
    (variable,) = [one for one in BOARD["templating"]["list"] if one["type"] == "query"]

    assert [{"run": "my-run"}] == rows(variable["query"], parquet)


def test_panels_have_a_description_and_the_reason_for_missing_data():
    for title, panel in PANELS.items():
        reason = panel["fieldConfig"]["defaults"]["noValue"]
        assert panel["description"].endswith(f"Without data: {reason}."), title


def test_files_name_one_data_source_and_state_that_they_were_not_loaded():
    (source,) = yaml.safe_load((FOLDER / "datasources" / "rankscope-sql.yaml").read_text())["datasources"]
    texts = [path.read_text() for path in FOLDER.rglob("*.yaml")] + [BOARD["description"]]

    assert all("not loaded into a server" in text.lower() for text in texts)
    assert {(source["type"], source["uid"])} == {
        (panel["datasource"]["type"], panel["datasource"]["uid"]) for panel in BOARD["panels"]
    }
