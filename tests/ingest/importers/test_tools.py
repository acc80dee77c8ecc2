"""Each tool of the table is read as its entry states, and `--pattern` reads lines of other tools."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, ImportedBlock, Options, find_importer, importers

TOOLS = tomllib.loads((Path(__file__).parents[3] / "docs/tools.toml").read_text(encoding="utf-8"))["tool"]
UNKEPT = {"fastai", "DeepSpeed", "icefall", "BigDL"}
"""Tools that print numbers without a name, or durations as the time."""


def read(tmp_path, text, pattern=(), kind=None):
    path = tmp_path / "train.log"
    path.write_text(text, encoding="utf-8")
    importer = find_importer(path) if kind is None else importers()[kind]
    faults = Faults(options=Options(pattern=pattern))
    blocks = [item for item in importer.read(path, faults) if isinstance(item, ImportedBlock)]
    rows = [row for block in blocks for row in block.tables["scalars"].to_pylist()]
    return rows, faults


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool["name"])
def test_example_of_a_tool_is_read(tmp_path, tool):
    axis = tool.get("axis", "step")
    rows, faults = read(tmp_path, tool["example"] + "\n")
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


def test_pattern_of_the_user_reads_lines_without_names(tmp_path):
    first, last = "> 10 of 100 >> 2.5 / 0.125 (lr: 0.1)", "> 20 of 100 >> 2.25 / 0.25 (lr: 0.2)"
    lines = f"2026-01-17 10:00:00 {first}\nstep 3 loss 9.5\n{last}\n"
    pattern = r"> (?P<step>\d+) of (?P<total>\d+) >> (?P<loss>[\d.]+) / (?P<grad__norm>[\d.]+)"
    rows, _ = read(tmp_path, lines, (pattern,), "textlog")
    found = {
        name: [(row["step"], row["value"]) for row in rows if row["name"] == name]
        for name in ("loss", "grad/norm", "learning_rate")
    }

    assert [(10, 2.5), (3, 9.5), (20, 2.25)] == found["loss"]
    assert [(10, 0.125), (20, 0.25)] == found["grad/norm"]
    assert [(10, 0.1), (20, 0.2)] == found["learning_rate"]
    assert rows[0]["ts"]


def test_pattern_without_a_counter_gives_records_without_a_step(tmp_path):
    rows, _ = read(tmp_path, "now 2.5\nnow 2.25\n", (r"now (?P<loss>[\d.]+)",), "textlog")

    assert [(None, 2.5), (None, 2.25)] == [(row["step"], row["value"]) for row in rows]


@pytest.mark.parametrize(
    ("pattern", "said"), [("(?P<loss>", "no regular expression"), (r"(?P<step>\d+)", "names no quantity")]
)
def test_invalid_pattern_is_refused_with_the_reason(tmp_path, pattern, said):
    with pytest.raises(IngestError, match=said):
        read(tmp_path, "step 1 loss 2.5\n", (pattern,), "textlog")


@pytest.mark.parametrize(
    "line",
    [
        "第 {} 步，损失：2.5",
        "轮次 1/10, 步数：{}, 损失：2.5",
        "训练轮次：[1/10] 迭代：[{}/400] 训练损失: 2.5",
        "Epoch 1 第{}步 loss：2.5",
    ],
)
def test_chinese_words_are_read(tmp_path, line):
    rows, _ = read(tmp_path, "".join(line.format(step) + "\n" for step in (10, 20)))

    assert [(10, 2.5), (20, 2.5)] == [(row["step"], row["value"]) for row in rows if row["name"] == "loss"]


def test_table_of_ultralytics_has_the_rows_of_complete_epochs(tmp_path):
    """A row is drawn again and again until its epoch is complete; the rows of single classes are not stored."""
    text = ""
    for epoch in (1, 2):
        head = f"{epoch}/2      2.62G      {3 - epoch}.5      1.5      1.25       215        640:"
        bars = "\r".join(f"  {head}  {percent}%|██        | 1/8 [00:01<00:05,  1.5it/s]" for percent in (10, 50, 100))
        text += f"      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n{bars}\n"
        text += "      Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100% ━━━━ 4/4 1.2s\n"
        text += "      all        128        929       0.66      0.542       0.61      0.451\n"
        text += "   person        128        254       0.66      0.542       0.61      0.451\n"
    rows, faults = read(tmp_path, text)
    found = [(row["step"], row["value"]) for row in rows if row["name"] == "box_loss"]

    assert [(1, 2.5), (2, 1.5)] == found
    assert [0.66] * 2 == [row["value"] for row in rows if row["name"] == "eval_Box/P"]
    assert not faults.unkept
