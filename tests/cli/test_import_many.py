"""`rankscope import` of many small logs: few files and commits, and a short summary."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from rankscope.base.log_import import ImportResults
from rankscope_ingest.importers import GROUP_ROWS, ImportReport
from rankscope_storage.files.encoding import STAGING


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Return a folder with 120 logs of five steps, 30 of them with a malformed line."""
    folder = tmp_path_factory.mktemp("sweep")
    for number in range(120):
        lines = [json.dumps({"step": step, "loss": number + 1 / step, "learning_rate": 1e-3}) for step in range(1, 6)]
        lines += ["noise"] * (number % 4 == 0)
        (folder / f"run{number:03d}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.thorough
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


class BreakingOutput(io.StringIO):
    """A standard output that makes a store unwritable when it gets the first text."""

    def __init__(self, store):
        super().__init__()
        self.staging = store / STAGING

    def write(self, text):
        if self.staging.is_dir():
            shutil.rmtree(self.staging)
            self.staging.write_text("no folder")
        return super().write(text)


def test_results_of_stored_logs_are_printed_before_an_error_of_the_store(in_process, tmp_path, monkeypatch):
    """The rows of the first two logs are stored while the second one is read; then the store fails."""
    for name, steps in (("a", 5), ("b", GROUP_ROWS), ("d", 5)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in range(steps)))
    (tmp_path / "c.jsonl").write_text('{"step": 1, "text": "no number"}\n{"loss": "none"}\n')
    output = BreakingOutput(tmp_path / "history")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        done = in_process("import", *sorted(tmp_path.glob("*.jsonl")), "--store", tmp_path / "history")
    rows = in_process("sql", "--store", tmp_path / "history", "--format", "csv", "select count(*) from scalars")

    assert 1 == done.returncode
    assert f"{tmp_path}/a.jsonl: jsonl, 5 records, up to step 4; 5 new rows in a\n" == output.getvalue()
    assert "rankscope: cannot write to " in done.stderr.splitlines()[-1]
    assert str(5 + GROUP_ROWS) == rows.stdout.splitlines()[1]


def test_totals_of_a_failed_import_count_only_the_stored_logs():
    out = io.StringIO()
    results = ImportResults(21, 3, out)
    for number in range(15):
        counts = {"records": 5, "rows_stored": 5, "last_step": 4, "malformed": 0, "faults": ()}
        results.add(Path(f"r{number}.jsonl"), ImportReport(run=f"r{number}", source_kind="jsonl", **counts))
        if number == 9:
            results.print_stored()
    results.stop()

    assert "10 logs: 10 jsonl; 50 records; 50 new rows in 10 runs\n" == out.getvalue()
