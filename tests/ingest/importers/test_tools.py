"""Each tool of the table in the documentation is read as its entry states."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from tests.ingest.importers.field_logs import read

TOOLS = tomllib.loads((Path(__file__).parents[3] / "docs/tools.toml").read_text(encoding="utf-8"))["tool"]
UNKEPT = {"fastai", "DeepSpeed", "icefall", "BigDL"}
"""Tools that print numbers without a name, or durations as the time."""


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool["name"])
def test_example_of_a_tool_is_read(tmp_path, tool):
    axis, path = tool.get("axis", "step"), tmp_path / "train.log"
    path.write_text(tool["example"] + "\n", encoding="utf-8")
    rows, faults = read(path)
    losses = [row for row in rows if row["name"] == "loss"]
    steps = faults.choices["steps"]

    assert rows
    assert (tool.get("loss") == "") == (not losses)
    assert losses == [] or losses[0]["value"] == 2.5
    assert axis in {"step", "step within the epoch", "epoch", "number of the record"}
    assert (axis == "epoch") == (steps[:1] == ("epoch",))
    assert (axis == "number of the record") == (not steps)
    assert axis != "step within the epoch" or any(row["name"] == "epoch" for row in rows)
    assert (tool["name"] in UNKEPT) == bool(faults.unkept)


def test_names_of_the_tools_are_unique():
    assert len(TOOLS) == len({tool["name"] for tool in TOOLS})
