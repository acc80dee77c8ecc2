"""Commands on a store whose files delta-rs rewrote: the same output as before."""

import re
import shutil

import pytest
from deltalake import DeltaTable

COMMANDS = (
    ("runs", "--format", "json"),
    ("runs", "show", "my-run", "--format", "json"),
    ("summary", "my-run", "--format", "json"),
    ("events", "my-run", "--format", "json"),
    ("anomalies", "my-run", "--format", "json"),
    ("compare", "my-run", "../other run", "--no-figure", "--format", "json"),
    ("diff", "my-run", "--ranks", "0", "1", "--kind", "grad_unreduced"),
    *(("sql", "--format", "csv", f"SELECT * FROM {view} ORDER BY ALL") for view in ("tensor_timeline", "goodput")),
)
FILES = (
    ("report", "my-run", "--output", "out.html"),
    ("plot", "my-run", "--kind", "tensors", "--output", "out.png"),
    ("export", "my-run", "--format", "csv", "--output", "out"),
    ("export", "my-run", "--format", "parquet", "--output", "parquet"),
)
CHANGES = (
    ("store", "check", "--deep"),
    ("store", "stats", "--by", "run"),
    ("runs", "tag", "my-run", "team=ours"),
    ("runs", "rename", "my-run", "new"),
    ("runs", "merge", "new", "../other run"),
    ("store", "compact"),
    ("store", "retain", "--days", "1", "--scalars-days", "1"),
    ("store", "repair"),
    ("store", "check", "--deep"),
    ("runs", "rm", "../other run", "--yes"),
)


@pytest.fixture
def history(sample_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKSCOPE_STORE", "history")
    return shutil.copytree(sample_store, tmp_path / "history")


def outputs(in_process):
    """Return the lines of each command, sorted, because events of one time have no order."""
    found = [(command, in_process(*command)) for command in COMMANDS]
    shown = ((name, done.returncode, re.sub('"bytes_on_disk": .*', "", done.stdout)) for name, done in found)
    return [(name, code, sorted(line.strip(" ,") for line in text.splitlines())) for name, code, text in shown]


@pytest.mark.thorough
def test_commands_give_the_same_output_after_a_rewrite(in_process, history):
    before = outputs(in_process)
    DeltaTable(str(history)).optimize.z_order(["rank", "step"])

    assert before == outputs(in_process)
    assert {0, 1} == {code for _, code, _ in before}  # 1: ranks differ


@pytest.mark.thorough
def test_commands_that_write_succeed_after_a_rewrite(in_process, history):
    DeltaTable(str(history)).optimize.z_order(["rank", "step"])
    for command in (*FILES, *CHANGES):
        done = in_process(*command)

        assert 0 == done.returncode, (command, done.stdout, done.stderr)
