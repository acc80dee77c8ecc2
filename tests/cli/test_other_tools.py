"""Commands on a store whose files delta-rs rewrote: the same output as before."""

from __future__ import annotations

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
    ("diff", "my-run", "--ranks", "0", "1"),
    ("sql", "--format", "csv", "SELECT * FROM tensor_timeline ORDER BY ALL"),
    ("store", "retain", "--days", "30", "--dry-run"),
)
FILES = (
    ("report", "my-run", "--output", "out.html"),
    ("plot", "my-run", "--kind", "overview", "--output", "out.svg"),
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


@pytest.mark.parametrize("rewrite", ["compact", "z_order"])
def test_commands_give_the_same_output_after_a_rewrite(in_process, history, rewrite):
    before = [in_process(*command) for command in COMMANDS]
    optimize = DeltaTable(str(history)).optimize
    optimize.compact() if rewrite == "compact" else optimize.z_order(["rank", "step"])
    after = [in_process(*command) for command in COMMANDS]

    for one, another in zip(before, after, strict=True):
        assert (one.returncode, one.stdout) == (another.returncode, another.stdout), (one.args, another.stderr)


def test_commands_that_write_succeed_after_a_rewrite(in_process, history):
    DeltaTable(str(history)).optimize.z_order(["rank", "step"])
    for command in (*FILES, *CHANGES):
        done = in_process(*command)

        assert 0 == done.returncode, (command, done.stdout, done.stderr)
