"""Commands on a store whose files delta-rs rewrote: the same output as before."""

import re
import shutil

import pytest
from deltalake import DeltaTable

COMMANDS = (
    *((name, "my-run", "--format", "json") for name in ("summary", "events", "anomalies")),
    ("runs", "show", "my-run", "--format", "json"),
    ("compare", "my-run", "../other run", "--no-figure", "--format", "json"),
    ("diff", "my-run", "--ranks", "0", "1", "--kind", "grad_unreduced"),
    ("sql", "--format", "csv", "SELECT * FROM goodput ORDER BY ALL"),
    ("plot", "my-run", "--kind", "tensors", "--output", "out.svg"),
    ("report", "my-run", "--output", "out.html"),
)


def outputs(in_process):
    """Return the lines of each command, sorted, because events of one time have no order."""
    found = [(command, in_process(*command)) for command in COMMANDS]
    shown = ((name, done.returncode, re.sub('"bytes_on_disk": .*', "", done.stdout)) for name, done in found)
    return [(name, code, sorted(line.strip(" ,") for line in text.splitlines())) for name, code, text in shown]


@pytest.mark.thorough
def test_commands_give_the_same_output_after_a_rewrite(in_process, sample_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKSCOPE_STORE", "history")
    history = shutil.copytree(sample_store, tmp_path / "history")
    before = outputs(in_process)
    DeltaTable(str(history)).optimize.z_order(["rank", "step"])

    assert before == outputs(in_process)
    assert {0, 1} == {code for _, code, _ in before}  # 1: ranks differ
