"""`rankscope import` of many small logs: few files and commits, and a short summary."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Return a folder with 120 logs of five steps, 30 of them with a malformed line."""
    folder = tmp_path_factory.mktemp("sweep")
    for number in range(120):
        lines = [json.dumps({"step": step, "loss": number + 1 / step, "learning_rate": 1e-3}) for step in range(1, 6)]
        lines += ["noise"] * (number % 4 == 0)
        (folder / f"run{number:03d}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_sweep_of_small_logs_becomes_few_files_and_commits(in_process, sweep, tmp_path):
    """`field_operations/many_small_logs.py`: at most 120 data files for 120 logs."""
    store = tmp_path / "history"
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(bytes(range(256)))
    done = in_process("import", sweep, bad, "--store", store)
    again = in_process("import", sweep, "--store", store)
    query = "select count(*), count(distinct run) from scalars where name = 'loss'"
    rows = in_process("sql", "--store", store, "--format", "csv", query)

    assert (1, 0) == (done.returncode, again.returncode)
    assert "120 logs: 120 jsonl; 600 records; 1,200 new rows in 120 runs\n" == done.stdout
    assert "120 logs: 120 jsonl; 600 records; 0 new rows in 120 runs (120 unchanged logs)\n" == again.stdout
    assert 1 == done.stderr.count(f"rankscope: {bad} ")
    assert 20 == done.stderr.count("1 malformed lines (line 6: ")
    assert "10 more messages are not printed\n" in done.stderr
    assert "600,120" == rows.stdout.splitlines()[1]
    assert 4 == len(list(store.rglob("dataset=*/**/*.parquet")))
    assert 4 == len(list((store / "_delta_log").glob("*.json")))  # the store, two claims, one batch


def test_verbose_import_prints_the_result_of_each_log(in_process, sweep, tmp_path):
    done = in_process("import", *sorted(sweep.iterdir())[:21], "--verbose", "--store", tmp_path / "history")

    assert 21 == len(done.stdout.splitlines())
    assert f"{sweep}/run000.jsonl: jsonl, 5 records, up to step 5; 10 new rows in run000\n" in done.stdout
