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


def test_error_and_checkpoint_without_a_time_have_that_of_the_row_before(rankscope, tmp_path):
    log, store = tmp_path / "train.log", str(tmp_path / "history")
    rows = [f"2026-11-28 10:00:{n:02d} step {n} loss {3 - n / 100:.2f}\n" for n in range(40)]
    log.write_text("".join([*rows, "Saved checkpoint at step 39\n", "RuntimeError: disk full\n"]))
    rankscope("import", str(log), "--store", store)
    asked = "SELECT type, strftime(ts, '%H:%M:%S') AS at FROM events WHERE step = 39 ORDER BY seq"

    assert (
        "type,at\ncheckpoint,10:00:39\nerror,10:00:39\n"
        == rankscope("sql", asked, "--format", "csv", "--store", store).stdout
    )


def test_log_with_times_only_at_its_start_has_no_duration(rankscope, tmp_path):
    log, store = tmp_path / "train.log", str(tmp_path / "history")
    head = "2026-11-28 10:00:00 step 0/62 loss 3.0\n2026-11-28 10:00:01 step 1/62 loss 2.9\n"
    log.write_text(head + "".join(f"step {n}/62 loss {3 - n / 100:.2f}\n" for n in range(2, 63)))
    rankscope("import", str(log), "--store", store)
    listed = rankscope("runs", "--store", store).stdout.splitlines()

    assert "2026-11-28 10:00" == listed[1][listed[0].index("started") : listed[0].index("reason")].strip()


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


def test_failure_of_a_log_is_an_incident_with_its_cause_in_every_command(in_process, tmp_path):
    """A log that lack of memory ends; its second attempt passes the step of the failure."""
    cause = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"
    rows = [f"step {step} loss {4 - step / 50:.4f}" for step in range(1, 61)]
    log = tmp_path / "oom.log"
    log.write_text("\n".join([*rows[:40], "Traceback (most recent call last):", cause, ""]))
    imported = in_process("import", log, "--store", tmp_path / "history")
    of_run = in_process("incidents", "oom", "--store", tmp_path / "history")
    of_log = in_process("incidents", log)
    summary = in_process("summary", log)
    incident = f"Out of memory: {cause} at step 40"
    with log.open("a") as more:
        more.write("\n".join([*rows[10:], ""]))
    in_process("import", log, "--store", tmp_path / "history")
    after = in_process("incidents", "oom", "--store", tmp_path / "history", "--format", "json")

    assert imported.stdout.endswith(f"new rows in oom; failed: out of memory: {cause}\n")
    assert incident in of_run.stdout
    assert "close one with: rankscope incidents close oom N" in of_run.stdout
    assert incident in of_log.stdout
    assert "close one with" not in of_log.stdout
    assert f"  end: Failed at step 40: out of memory: {cause}." in summary.stdout
    assert "  incidents: 1 open, 0 resolved or closed, see rankscope incidents oom" in summary.stdout
    assert '"state": "resolved"' in after.stdout


def test_log_that_reached_its_last_planned_step_does_not_report_the_end(in_process, tmp_path):
    log = tmp_path / "train.jsonl"
    log.write_text("".join(f'{{"step": {step}, "max_steps": 30, "loss": {5 / step}}}\n' for step in range(1, 31)))
    done = in_process("summary", log)

    assert "train, completed (the last planned step, 30, was reached)" in done.stdout.splitlines()


def test_default_rules_can_be_turned_off(rankscope, log, tmp_path):
    done = rankscope("import", str(log), "--no-default-rules", "--store", str(tmp_path / "history"))

    assert f"{log}: jsonl, 2 records, up to step 2; 2 new rows in metrics\n" == done.stdout


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


def test_unknown_file_is_explained_and_the_others_of_a_folder_are_imported(rankscope, log, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("final\nloss: 2.5\n")
    done = rankscope("import", str(tmp_path), "--store", str(tmp_path.parent / "history"))
    explained = rankscope("import", str(notes), "--explain")

    assert 0 == done.returncode, done.stderr
    assert done.stdout.startswith(f"{log}: jsonl, 2 records")
    assert f"not imported: {notes} has an unknown format" in done.stderr
    assert 1 == explained.returncode
    assert explained.stdout.startswith(f"{notes}: unknown format\n")
    assert "line 2 has a loss and no step" in explained.stderr


def test_names_of_numbers_that_are_not_stored_are_printed(rankscope, tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {step} | loss 2.5 | took 3.5x of Train 1792 in\n" for step in (1, 2)))
    done = rankscope("import", str(path), "--store", str(tmp_path / "history"))

    assert f"{path}: not kept: took (2), Train (2)\n" == done.stderr


def test_reimport_replaces_the_rows_of_one_log(rankscope, tmp_path):
    """The first import had to choose the step from one epoch. The other log of the run keeps its rows."""
    store, path, other = str(tmp_path / "history"), tmp_path / "train.log", tmp_path / "other.log"
    other.write_text("step 500 loss 1.5\n" * 2)
    rows = [f"epoch {g // 3} step {g % 3} iter {g} total_loss=2.5 avr_loss=3.5\n" for g in range(6)]
    path.write_text("".join(rows[:3]))
    first = rankscope("import", str(path), str(other), "--run", "r", "--store", store)
    path.write_text("".join(rows))
    second = rankscope("import", str(path), "--run", "r", "--store", store)
    third = rankscope("import", str(path), "--run", "r", "--store", store, "--reimport", "--loss", "avr_loss")
    query = "select step, value from scalars where name = 'loss' order by value, step"
    rows_after = rankscope("sql", query, "--format", "csv", "--store", store).stdout

    assert [0, 0, 0] == [done.returncode for done in (first, second, third)], third.stderr
    assert "no loss was chosen among avr_loss, total_loss: name one with --reimport --loss NAME" in first.stderr
    assert "iter rises where it falls (1 records): --reimport decides again" in second.stderr
    assert f"{path}: loss is avr_loss\n" == third.stderr
    assert "step,value\n500,1.5\n500,1.5\n" + "".join(f"{step},3.5\n" for step in range(6)) == rows_after


STORED = "select step, value, attempt from scalars order by attempt, step, value"


def _scalars(rankscope, store):
    return rankscope("sql", STORED, "--format", "csv", "--store", store).stdout.splitlines()[1:]


def test_reimport_keeps_the_log_that_was_at_the_path_before(rankscope, tmp_path):
    store, path = str(tmp_path / "history"), tmp_path / "train.jsonl"
    for losses in ((5.0, 4.0), (3.0, 2.0)):
        path.write_text("".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses)))
        rankscope("import", str(path), "--run", "r", "--store", store)
    before = _scalars(rankscope, store)
    path.rename(tmp_path / "moved.jsonl")
    done = rankscope("import", str(tmp_path / "moved.jsonl"), "--run", "r", "--store", store, "--reimport")

    assert 0 == done.returncode, done.stderr
    assert 4 == len(before)
    assert before == _scalars(rankscope, store)


@pytest.mark.parametrize("content", ['{"step": 7, "loss": 9.0}\n', '{"step": 1, "loss": 2.5}\n', ""])
def test_reimport_of_an_unknown_or_shorter_log_removes_nothing(rankscope, log, tmp_path, content):
    store = str(tmp_path / "history")
    rankscope("import", str(log), "--store", store)
    before = _scalars(rankscope, store)
    log.write_text(content)
    done = rankscope("import", str(log), "--store", store, "--reimport", "--format", "jsonl")

    assert 1 == done.returncode
    assert "without --reimport" in done.stderr or "--reimport would lose them" in done.stderr
    assert before == _scalars(rankscope, store)


def test_reimport_replaces_the_streams_of_one_openmetrics_file(rankscope, tmp_path):
    store, path = str(tmp_path / "history"), tmp_path / "scrape.txt"
    path.write_text('# TYPE train_loss gauge\ntrain_loss{rank="0"} 2.5 1700000000\n# EOF\n')
    query = ["sql", "select count(*) as n from samples", "--format", "csv", "--store", store]
    first = rankscope("import", str(path), "--run", "r", "--store", store, "--format", "openmetrics")
    counts = [rankscope(*query).stdout]
    second = rankscope("import", str(path), "--run", "r", "--store", store, "--format", "openmetrics", "--reimport")
    counts.append(rankscope(*query).stdout)

    assert [0, 0] == [first.returncode, second.returncode], second.stderr
    assert counts[0] == counts[1]
    assert first.stdout == second.stdout


def test_unknown_name_of_the_loss_is_refused_with_the_names(rankscope, log, tmp_path):
    store = str(tmp_path / "history")
    typo = rankscope("import", str(log), "--store", store, "--loss", "typo")
    right = rankscope("import", str(log), "--store", store, "--loss", "loss")

    assert (1, 0) == (typo.returncode, right.returncode)
    assert f"{log}: no quantity in the first 2 records is named typo; names: loss" in typo.stderr
    assert ["1,2.5,0", "2,NaN,0"] == _scalars(rankscope, store)


@pytest.mark.parametrize("growth", ["", "step 3 a_loss=1.0 total_loss=2.5 avr_loss=3.5\n"])
def test_other_loss_of_an_imported_log_needs_reimport(rankscope, tmp_path, growth):
    store, path = str(tmp_path / "history"), tmp_path / "train.log"
    path.write_text("".join(f"step {step} total_loss=2.5 avr_loss=3.5\n" for step in (1, 2)))
    rankscope("import", str(path), "--store", store)
    with path.open("a") as file:
        file.write(growth)
    other = rankscope("import", str(path), "--store", store, "--loss", "avr_loss")
    again = rankscope("import", str(path), "--store", store, "--loss", "avr_loss", "--reimport")
    same = rankscope("import", str(path), "--store", store, "--loss", "avr_loss")

    assert [1, 0, 0] == [done.returncode for done in (other, again, same)], again.stderr
    assert "`--reimport --loss avr_loss` imports it again" in other.stderr


def test_secret_in_a_run_name_is_masked_and_the_given_name_is_found(in_process, tmp_path):
    log, store, name = tmp_path / "a.jsonl", ("--store", tmp_path / "history"), "https://bob:pa/ss#w0rd@host/x"
    log.write_text('{"step": 1, "loss": 0.5}\n')
    imported = in_process("import", log, "--run", name, *store)
    summary = in_process("summary", name, *store)
    in_process("runs", "rename", name, "ghp_0123456789abcdefghij", *store)
    listed = in_process("runs", "--format", "json", *store)
    watched = in_process("watch", log, "--once", "--run", name, "--store", tmp_path / "other")

    assert "new rows in https://***@host/x\n" in imported.stdout
    assert "https://***@host/x, " in summary.stdout, summary.stderr
    assert '"run": "***"' in listed.stdout
    assert "as the run https://***@host/x" in watched.stdout
    assert "ss#w0rd" not in watched.stdout + watched.stderr + summary.stdout


def test_run_name_that_ranks_could_not_have_is_refused_and_nothing_is_stored(in_process, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    imported = in_process("import", tmp_path / "a.jsonl", "--run", "x" * 1001, "--store", tmp_path / "history")
    watched = in_process("watch", tmp_path / "a.jsonl", "--run", "x" * 1001, "--store", tmp_path / "history", "--once")

    sentence = "the name of the run has 1,001 characters; the maximum is 1,000"
    assert f"rankscope: --run: {sentence}\n" == imported.stderr
    assert (2, 1) == (imported.returncode, watched.stderr.count("\n"))
    assert watched.returncode
    assert sentence in watched.stderr
    assert not (tmp_path / "history").exists()
