"""`rankscope import`: repeated imports, detection of formats, and error messages."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import pytest

LINES = '{"step": 1, "loss": 2.5}\nnoise of the launcher\n{"step": 2, "loss": NaN}\n'


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(LINES, encoding="utf-8")
    return path


def test_imported_log_can_be_queried_as_a_run(rankscope, log, tmp_path):
    store = str(tmp_path / "history")
    done = rankscope("import", str(log), "--run", "old", "--store", store)
    asked = rankscope("sql", "select run, step, value from scalars order by step", "--format", "csv", "--store", store)

    assert 0 == done.returncode, done.stderr
    assert f"{log}: jsonl, 2 records, up to step 2; 3 new rows in old (1 anomalies)\n" == done.stdout
    assert "1 malformed lines (line 2: " in done.stderr
    assert "run,step,value\nold,1,2.5\nold,2,NaN\n" == asked.stdout


def test_repeated_import_stores_only_new_lines(rankscope, log, tmp_path):
    store = str(tmp_path / "history")
    rankscope("import", str(log), "--store", store)
    with log.open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss": 2.0}\n')
    done = rankscope("import", str(log), "--store", store)

    assert f"{log}: jsonl, 3 records, up to step 3; 1 new rows in metrics\n" == done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.jsonl"], 1, "missing.jsonl cannot be read"),
        (["/etc/passwd"], 1, "has an unknown format; known formats: "),
        (["/etc/passwd", "--format", "jsonll"], 2, "Did you mean 'jsonl'?"),
    ],
)
def test_import_errors_are_one_line(rankscope, tmp_path, arguments, code, message):
    done = rankscope("import", *arguments, "--store", str(tmp_path / "history"))

    assert code == done.returncode
    assert message in done.stderr
    assert 1 == done.stderr.count("\n")
    assert not (tmp_path / "history").exists()


ROWS = "".join(
    f" [2025-02-28 16:26:{step:02d}] iteration {step}/ 40 | lm loss: 2.5 | grad norm: 1.0 |\n" for step in range(1, 41)
)


def test_explain_prints_the_detected_formats_and_imports_nothing(rankscope, log, tmp_path):
    (tmp_path / "train.log").write_text(ROWS)
    done = rankscope("import", str(log), str(tmp_path / "train.log"), "--explain", "--store", str(tmp_path / "history"))
    lines = done.stdout.splitlines()

    assert 0 == done.returncode, done.stderr
    assert f"{log}: jsonl" == lines[0]
    assert f"{tmp_path}/train.log: megatron" in lines
    assert "   95%  megatron: 40 of its first lines are rows `iteration N/ M | …`" in lines
    assert not (tmp_path / "history").exists()


def test_folder_import_reads_every_log_in_it(rankscope, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(LINES)
    (folder / "train.log").write_text(ROWS)
    (folder / "README").write_text("nothing of interest")
    done = rankscope("import", str(folder), "--store", str(tmp_path / "history"))

    assert 0 == done.returncode, done.stderr
    assert [f"{folder}/metrics.jsonl: jsonl, 2 records", f"{folder}/train.log: megatron, 40 records"] == [
        line.partition(", up to")[0] for line in done.stdout.splitlines()
    ]


def test_rotated_logs_are_not_stored_twice(rankscope, tmp_path):
    """S0-06: no row is stored twice, even if files were renamed."""
    log, store = tmp_path / "train.log", str(tmp_path / "history")
    log.write_text(ROWS)
    rankscope("import", str(log), "--store", store)
    log.rename(tmp_path / "train.log.1")
    log.write_text(ROWS.replace("2.5", "2.0"))
    done = rankscope("import", str(tmp_path / "train.log.1"), str(log), "--store", store)

    first, second = done.stdout.splitlines()
    assert first.endswith("; 0 new rows in train")
    assert second.endswith("; 80 new rows in train")


def test_anomaly_rules_can_come_from_a_file(rankscope, tmp_path):
    (tmp_path / "train.log").write_text(ROWS)
    (tmp_path / "rules.json").write_text('[{"rule_name": "AnomalyNan", "args": {"threshold": 2.0}}]')
    (tmp_path / "bad.json").write_text('[{"rule_name": "AnomalyNann"}]')
    store = str(tmp_path / "history")
    done = rankscope("import", str(tmp_path / "train.log"), "--rules", str(tmp_path / "rules.json"), "--store", store)
    bad = rankscope("import", str(tmp_path / "train.log"), "--rules", str(tmp_path / "bad.json"), "--store", store)

    assert "120 new rows in train (40 anomalies)" in done.stdout
    assert 2 == bad.returncode
    assert "Did you mean 'AnomalyNan'?" in bad.stderr


def test_progress_bar_is_shown_only_on_a_terminal(rankscope, tmp_path):
    """The bar is written to standard error, so that a pipe or a file receives only the report."""
    (tmp_path / "train.log").write_text(ROWS)
    command = [sys.executable, "-m", "rankscope", "import", str(tmp_path / "train.log"), "--store", str(tmp_path / "h")]
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, stdin=subprocess.DEVNULL)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux raises EIO when the other end is closed
            while data := os.read(ours, 4096):
                shown += data
        report = process.communicate()[0]
    finally:
        os.close(ours)
    piped = rankscope("import", str(tmp_path / "train.log"), "--store", str(tmp_path / "other"))

    assert "train.log" in shown.decode()
    assert "━" in shown.decode()
    assert "80 new rows" in report.decode()
    assert "━" not in report.decode()
    assert "" == piped.stderr


def test_import_without_a_record_fails(rankscope, tmp_path):
    """S3-05: also for a format of the user's choice, and a state without entries."""
    (tmp_path / "train.log").write_text("iteration 50/ 1000 | consumed samples: 200 | learning rate:\n")
    (tmp_path / "state.json").write_text('{"log_history": [], "max_steps": 5}')
    (tmp_path / "notes.txt").write_text("nothing of interest\n")
    store = str(tmp_path / "history")
    done = [
        rankscope("import", str(tmp_path / name), *more, "--store", store)
        for name, more in (("train.log", ()), ("state.json", ()), ("notes.txt", ("--format", "textlog")))
    ]

    assert [1, 1, 1] == [one.returncode for one in done]
    assert ["megatron", "trainer_state", "textlog"] == [
        one.stderr.partition("contains no record in the format ")[2].partition(":")[0] for one in done
    ]


def test_path_that_is_no_log_does_not_stop_the_others(rankscope, log, tmp_path):
    (tmp_path / "notes.txt").write_text("nothing of interest\n")
    paths = [str(tmp_path / name) for name in ("notes.txt", "missing.jsonl")]
    done = rankscope("import", paths[0], str(log), paths[1], "--store", str(tmp_path / "history"))
    explained = rankscope("import", paths[0], str(log), "--explain", "--store", str(tmp_path / "history"))

    assert (1, 1) == (done.returncode, explained.returncode)
    assert done.stdout.startswith(f"{log}: jsonl, 2 records")
    assert [True, True] == [f"rankscope: {path} " in done.stderr for path in paths]
    assert explained.stdout.startswith(f"{log}: jsonl\n")


@pytest.mark.parametrize("more", [[], ["--run", "given"]])
def test_newer_log_next_to_checkpoints_is_a_run_of_its_own(rankscope, tmp_path, more):
    state = tmp_path / "v0/checkpoint-10/trainer_state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"log_history": [{"step": 10, "loss": 1.0}]}')
    log = tmp_path / "v0/logging.jsonl"
    log.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (10, 15)))
    os.utime(log, (state.stat().st_mtime + 10,) * 2)
    done = rankscope("import", str(tmp_path / "v0"), *more, "--store", str(tmp_path / "history"))
    name = more[1] if more else "v0"

    assert 0 == done.returncode, done.stderr
    assert [f"1 new rows in {name}", f"2 new rows in {name}-logging"] == [
        line.rpartition("; ")[2] for line in done.stdout.splitlines()
    ]
    assert f"{log} has later steps than {tmp_path}/v0: imported as the run {name}-logging\n" == done.stderr
