"""Each log of the table in `cases`, and each field log, becomes exactly the expected rows."""

import functools
import json
import re
import tomllib
from pathlib import Path

import pytest
from tests.ingest.importers.cases import cases, results
from tests.ingest.importers.conftest import DATA
from tests.ingest.importers.field_logs import differences, read

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import importers
from rankscope_ingest.importers.common.log_names import canonical

CASES = cases()
DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return a function that imports all logs of a format together, and returns their results by name."""

    @functools.cache
    def of(kind):
        return results([case for case in CASES if case.kind == kind], tmp_path_factory.mktemp(kind))

    return of


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_log_becomes_the_rows_of_its_case(imported, case):
    assert case.expected == imported(case.kind)[case.name]


def test_names_of_cases_and_tools_are_unique():
    assert len(CASES) == len({case.name for case in CASES})
    assert len(TOOLS) == len({tool["name"] for tool in TOOLS})


def test_page_uses_existing_names_and_formats():
    text = (DOCS / "importing-training-logs.md").read_text(encoding="utf-8")
    formats, names = text.split("## Names and units")[0], text.split("## Names and units")[1].split("Any other")[0]
    shown = [cell for line in names.splitlines() if line.startswith("| `") for cell in line.split("|")[1:2]]

    assert set(re.findall(r"\| `(\w+)` \|", formats)) <= set(importers())
    for cell in shown:
        for name in re.findall(r"`(\w+)`", cell):
            assert name.removesuffix("_mean") == canonical(name.removesuffix("_mean")).name


# Each tool of the table in the documentation is read as its entry states.

TOOLS = tomllib.loads((DOCS / "tools.toml").read_text(encoding="utf-8"))["tool"]
TOOLS_WITHOUT_ALL = {"fastai", "Darknet", "DeepSpeed", "icefall", "BigDL"}
"""Tools that print numbers without a name, or durations as the time."""


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool["name"])
def test_example_of_a_tool_is_read(tmp_path, tool):
    axis, path = tool.get("axis", "step"), tmp_path / "train.log"
    path.write_text(tool["example"] + "\n", encoding="utf-8")
    rows, faults = read(path)
    losses = [row for row in rows if row["name"] == "loss"]
    steps = faults.choices.steps

    assert rows
    assert (tool.get("loss") == "") == (not losses)
    assert losses == [] or losses[0]["value"] == 2.5
    assert axis in {"step", "step within the epoch", "epoch", "number of the record"}
    assert (axis == "epoch") == (steps[:1] == ("epoch",))
    assert (axis == "number of the record") == (not steps)
    assert axis != "step within the epoch" or any(row["name"] == "epoch" for row in rows)
    assert (tool["name"] in TOOLS_WITHOUT_ALL) == bool(faults.unkept)


# Logs of many tools, imported without options: the right axis, the right numbers, and nothing lost.

FOLDER = DATA / "field_logs"
INPUTS = sorted(path.name.removesuffix(".expected.json") for path in FOLDER.glob("*.expected.json"))
REFUSED = {"no_log_at_all.txt", "run-demo.wandb"}

UNKEPT = {
    "bigdl_console.log": {"Train": 40, "in": 40},  # "Train 1792 in 4.3878seconds"
    "metriclogger_console.log": {"Total time": 2},  # "Total time: 0:03:45 (0.5645 s / it)"
}

READ = [name for name in INPUTS if name not in REFUSED]
needs_inputs = pytest.mark.skipif(not INPUTS, reason=f"the recorded logs are not here ({DATA})")
ABSENT = [pytest.param("", marks=needs_inputs)]


@pytest.mark.usual(21)
@pytest.mark.parametrize("name", READ or ABSENT)
def test_log_of_a_tool_has_the_expected_series(logs, name):
    logs.import_log(FOLDER / name)
    want = json.loads((FOLDER / f"{name}.expected.json").read_text(encoding="utf-8"))
    rows = logs.query(
        "SELECT attempt, rank, step, ts IS NOT NULL AS timed, name, value, labels FROM scalars "
        "ORDER BY attempt, seq, rank, labels"
    )
    others = {row["type"]: row["n"] for row in logs.query("SELECT type, count(*) AS n FROM events GROUP BY type")}
    others["planned"] = logs.value("SELECT max(planned_steps) FROM runs")

    assert [] == differences(rows, others, want)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_inputs) for name in sorted(REFUSED)])
def test_file_that_is_no_log_is_refused_with_the_remedy(logs, name):
    words = json.loads((FOLDER / f"{name}.expected.json").read_text(encoding="utf-8"))["refused"]["words_one_of"]

    with pytest.raises(IngestError, match="|".join(map(re.escape, words))):
        logs.import_log(FOLDER / name)


@needs_inputs
def test_almost_all_numbers_of_the_logs_are_stored():
    stored, unkept = 0, {}
    for name in READ:
        rows, faults = read(FOLDER / name)
        stored += len(rows)
        unkept |= {name: dict(faults.unkept)} if faults.unkept else {}

    assert UNKEPT == unkept
    assert stored > 19 * sum(sum(counts.values()) for counts in unkept.values())


@pytest.mark.usual(9)
@pytest.mark.parametrize("name", READ or ABSENT)
def test_growing_log_gives_the_same_records_in_any_number_of_imports(tmp_path, name):
    path, content = tmp_path / name, (FOLDER / name).read_bytes()
    whole, _ = read(FOLDER / name)
    choices = None
    for part in range(1, 11):
        path.write_bytes(content[: len(content) * part // 10])
        try:
            rows, faults = read(path, choices)
        except IngestError:
            continue  # too short to be recognized
        choices = faults.choices

        assert repr(whole[: len(rows)]) == repr(rows)
    assert len(whole) == len(rows)
