"""`rankscope import`: repeated imports, detection of formats, and error messages."""

import contextlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.access.log_import import ImportResults
from rankscope_ingest.importers import GROUP_ROWS, ImportReport
from rankscope_storage.files.filesystem import STAGING

LINES = '{"step": 1, "loss": 2.5}\nnoise of the launcher\n{"step": 2, "loss": NaN}\n'
ROWS = "".join(
    f" [2025-02-28 16:26:{step:02d}] iteration {step}/ 40 | lm loss: 2.5 | grad norm: 1.0 |\n" for step in range(1, 41)
)
STORED = "select step, value, attempt from scalars order by attempt, step, value"
LOSSES = "select step, value from scalars where name = 'loss' order by value, step"


@pytest.fixture
def put(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def log(put):
    return put("metrics.jsonl", LINES)


def test_imported_log_is_queried_and_imported_again_only_with_new_lines(on_store, log, rows):
    done = on_store("import", log, "--run", "old")
    asked = rows("select run, step, value from scalars order by step")
    with log.open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss": 2.0}\n')
    again = on_store("import", log, "--run", "old")

    assert (0, 0) == (done.returncode, again.returncode), done.stderr
    assert f"{log}: jsonl, 2 records, up to step 2; 3 new rows in old (1 anomalies)\n" == done.stdout
    assert "1 malformed lines (line 2: " in done.stderr
    assert ["old,1,2.5", "old,2,NaN"] == asked
    assert f"{log}: jsonl, 3 records, up to step 3; 1 new rows in old\n" == again.stdout


def test_log_with_times_only_at_its_start_has_no_duration(on_store, put, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    head = "2026-11-28 10:00:00 step 0/62 loss 3.0\n2026-11-28 10:00:01 step 1/62 loss 2.9\n"
    on_store("import", put("train.log", head + "".join(f"step {n}/62 loss {3 - n / 100:.2f}\n" for n in range(2, 63))))
    listed = on_store("runs").stdout.splitlines()

    assert "2026-11-28 10:00" == listed[1][listed[0].index("started") : listed[0].index("reason")].strip()


def test_explain_prints_the_detected_formats_and_imports_nothing(on_store, log, put, tmp_path):
    done = on_store("import", log, put("train.log", ROWS), "--explain")
    lines = done.stdout.splitlines()

    assert 0 == done.returncode, done.stderr
    assert f"{log}: jsonl" == lines[0]
    assert f"{tmp_path}/train.log: megatron" in lines
    assert "   95%  megatron: 40 of its first lines are rows `iteration N/ M | …`" in lines
    assert not (tmp_path / "history").exists()


def test_folder_import_reads_every_log_and_explains_unknown_files(on_store, put, tmp_path):
    for name, text in {"metrics.jsonl": LINES, "train.log": ROWS, "README": "nothing of interest"}.items():
        put(f"logs/{name}", text)
    notes = put("logs/notes.txt", "final\nloss: 2.5\n")
    folder = notes.parent
    done = on_store("import", folder)
    explained = on_store("import", notes, "--explain")

    assert 0 == done.returncode, done.stderr
    assert [f"{folder}/metrics.jsonl: jsonl, 2 records", f"{folder}/train.log: megatron, 40 records"] == [
        line.partition(", up to")[0] for line in done.stdout.splitlines()
    ]
    assert f"not imported: {notes} has an unknown format" in done.stderr
    assert 1 == explained.returncode
    assert explained.stdout.startswith(f"{notes}: unknown format\n")
    assert "line 2 has a loss and no step" in explained.stderr


def test_failure_of_a_log_is_an_incident_with_its_cause_in_every_command(on_store, in_process, put):
    """A log that lack of memory ends; its second attempt passes the step of the failure."""
    cause = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"
    steps = [f"step {step} loss {4 - step / 50:.4f}" for step in range(1, 61)]
    log = put("oom.log", "\n".join([*steps[:40], "Traceback (most recent call last):", cause, ""]))
    imported = on_store("import", log)
    of_run = on_store("incidents", "oom")
    of_log = in_process("incidents", log)
    summary = in_process("summary", log)
    incident = f"Out of memory: {cause} at step 40"
    with log.open("a") as more:
        more.write("\n".join([*steps[10:], ""]))
    on_store("import", log)
    after = on_store("incidents", "oom", "--format", "json")

    assert imported.stdout.endswith(f"new rows in oom; failed: out of memory: {cause}\n")
    assert incident in of_run.stdout
    assert "close one with: rankscope incidents close oom N" in of_run.stdout
    assert incident in of_log.stdout
    assert "close one with" not in of_log.stdout
    assert f"  end: Failed at step 40: out of memory: {cause}." in summary.stdout
    assert "  incidents: 1 open, 0 resolved or closed, see rankscope incidents oom" in summary.stdout
    assert '"state": "resolved"' in after.stdout


def test_silence_is_listed_with_the_incidents_of_its_runs_until_its_end(on_store, put):
    for name in ("oom", "other"):
        on_store("import", put(f"{name}.log", "".join(f"step {step} loss 1.0\n" for step in range(1, 9))))
    made = on_store("incidents", "silence", "o?m", "--rule", "Gpu*", "--hours", "8", "--note", "fans")
    listed = [on_store("incidents", name).stdout for name in ("oom", "other")]
    ended = on_store("incidents", "silence", "o?m", "--rule", "Gpu*", "--hours", "0")
    wrong = on_store("incidents", "silence", "oom", "other")

    assert re.fullmatch(r"silenced: Gpu\* in o\?m until [-\d]{10} \d\d:\d\d UTC, by \S+ “fans”\n", made.stdout)
    assert [made.stdout + "no incident in oom\n", "no incident in other\n"] == listed
    assert "no longer silenced: Gpu* in o?m\n" == ended.stdout
    assert "no incident in oom\n" == on_store("incidents", "oom").stdout
    assert (2, True) == (wrong.returncode, "rankscope incidents silence RUN" in wrong.stderr)


def test_default_rules_can_be_turned_off_and_replaced_by_a_file(on_store, log, put):
    without = on_store("import", log, "--no-default-rules")
    rules = put("rules.json", '[{"rule_name": "AnomalyNan", "args": {"threshold": 2.0}}]')
    done = on_store("import", put("train.log", ROWS), "--rules", rules)
    bad = on_store("import", log, "--rules", put("bad.json", '[{"rule_name": "AnomalyNann"}]'))

    assert f"{log}: jsonl, 2 records, up to step 2; 2 new rows in metrics\n" == without.stdout
    assert "120 new rows in train (40 anomalies)" in done.stdout
    assert 2 == bad.returncode
    assert "Did you mean 'AnomalyNan'?" in bad.stderr


def test_progress_bar_is_shown_only_on_a_terminal(on_store, put, tmp_path):
    """The bar is written to standard error, so that a pipe or a file receives only the report."""
    log = put("train.log", ROWS)
    command = [sys.executable, "-m", "rankscope", "import", str(log), "--store", str(tmp_path / "h")]
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

    assert "train.log" in shown.decode()
    assert "━" in shown.decode()
    assert "80 new rows" in report.decode()
    assert "━" not in report.decode()
    assert "" == on_store("import", log).stderr


def test_import_without_a_number_fails(on_store, put):
    path = put("train.log", "".join(f'{{"event": "saved", "message": "part {n}"}}\n' for n in "abc"))
    done = on_store("import", path)

    assert 1 == done.returncode
    assert f"rankscope: {path}: no number was found in 3 records of the format jsonl\n" == done.stderr


def test_import_without_a_record_fails(on_store, put):
    """S3-05: also for a format of the user's choice, and a state without entries."""
    row = put("train.log", "iteration 50/ 1000 | consumed samples: 200 | learning rate:\n")
    state = put("state.json", '{"log_history": [], "max_steps": 5}')
    notes = put("notes.txt", "nothing of interest\n")
    done = [on_store("import", *words) for words in ((row,), (state,), (notes, "--format", "textlog"))]

    assert [1, 1, 1] == [one.returncode for one in done]
    assert ["megatron", "trainer_state", "textlog"] == [
        one.stderr.partition("contains no record in the format ")[2].partition(":")[0] for one in done
    ]


def test_path_that_is_no_log_does_not_stop_the_others(on_store, log, put, tmp_path):
    paths = put("notes.txt", "nothing of interest\n"), tmp_path / "missing.jsonl"
    done = on_store("import", paths[0], log, paths[1])
    explained = on_store("import", paths[0], log, "--explain")

    assert (1, 1) == (done.returncode, explained.returncode)
    assert done.stdout.startswith(f"{log}: jsonl, 2 records")
    assert [True, True] == [f"rankscope: {path} " in done.stderr for path in paths]
    assert explained.stdout.startswith(f"{log}: jsonl\n")


@pytest.mark.parametrize("more", [[], ["--run", "given"]])
def test_newer_log_next_to_checkpoints_is_a_run_of_its_own(on_store, put, tmp_path, more):
    state = put("v0/checkpoint-10/trainer_state.json", '{"log_history": [{"step": 10, "loss": 1.0}]}')
    log = put("v0/logging.jsonl", "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (10, 15)))
    os.utime(log, (state.stat().st_mtime + 10,) * 2)
    done = on_store("import", tmp_path / "v0", *more)
    name = more[1] if more else "v0"

    assert 0 == done.returncode, done.stderr
    assert [f"1 new rows in {name}", f"2 new rows in {name}-logging"] == [
        line.rpartition("; ")[2] for line in done.stdout.splitlines()
    ]
    assert f"{log} has later steps than {tmp_path}/v0: imported as the run {name}-logging\n" == done.stderr


def test_reimport_replaces_the_rows_of_one_log(on_store, put, rows):
    """The first import had to choose the step from one epoch. The other log of the run keeps its rows."""
    other = put("other.log", "step 500 loss 1.5\n" * 2)
    lines = [f"epoch {g // 3} step {g % 3} iter {g} total_loss=2.5 avr_loss=3.5\n" for g in range(6)]
    path = put("train.log", "".join(lines[:3]))
    first = on_store("import", path, other, "--run", "r")
    put("train.log", "".join(lines))
    second = on_store("import", path, "--run", "r")
    third = on_store("import", path, "--run", "r", "--reimport", "--loss", "avr_loss")

    assert [0, 0, 0] == [done.returncode for done in (first, second, third)], third.stderr
    assert "no loss was chosen among avr_loss, total_loss: name one with --reimport --loss NAME" in first.stderr
    assert "iter rises where it falls (1 records): --reimport decides again" in second.stderr
    assert f"{path}: loss is avr_loss\n" == third.stderr
    assert ["500,1.5", "500,1.5", *(f"{step},3.5" for step in range(6))] == rows(LOSSES)


def test_reimport_decides_over_all_records_of_a_log(on_store, put, rows):
    """The counters rise together in the 2,000 records over which the first import decides."""
    path = put("train.log", "".join(f"step {g % 2002} iter {g} loss=2.5\n" for g in range(2004)))
    first = on_store("import", path, "--run", "r")
    last = rows("select max(step) from scalars")
    second = on_store("import", path, "--run", "r", "--reimport")

    assert [0, 0] == [first.returncode, second.returncode], second.stderr
    assert "the step is step, but iter rises where it falls (1 records): --reimport decides again" in first.stderr
    assert "" == second.stderr
    assert [["2001"], ["2003"]] == [last, rows("select max(step) from scalars")]


def test_reimport_keeps_the_log_that_was_at_the_path_before(on_store, put, rows, tmp_path):
    for losses in ((5.0, 4.0), (3.0, 2.0)):
        lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses)]
        path = put("train.jsonl", "".join(lines))
        on_store("import", path, "--run", "r")
    before = rows(STORED)
    path.rename(tmp_path / "moved.jsonl")
    done = on_store("import", tmp_path / "moved.jsonl", "--run", "r", "--reimport")

    assert 0 == done.returncode, done.stderr
    assert 4 == len(before)
    assert before == rows(STORED)


@pytest.mark.parametrize("content", ['{"step": 7, "loss": 9.0}\n', '{"step": 1, "loss": 2.5}\n', ""])
def test_reimport_of_an_unknown_or_shorter_log_removes_nothing(on_store, log, rows, content):
    on_store("import", log)
    before = rows(STORED)
    log.write_text(content)
    done = on_store("import", log, "--reimport", "--format", "jsonl")

    assert 1 == done.returncode
    assert "without --reimport" in done.stderr or "--reimport would lose them" in done.stderr
    assert before == rows(STORED)


def test_reimport_replaces_the_streams_of_one_openmetrics_file(on_store, put, rows):
    path = put("scrape.txt", '# TYPE train_loss gauge\ntrain_loss{rank="0"} 2.5 1700000000\n# EOF\n')
    first = on_store("import", path, "--run", "r", "--format", "openmetrics")
    before = rows("select count(*) from samples")
    second = on_store("import", path, "--run", "r", "--format", "openmetrics", "--reimport")

    assert [0, 0] == [first.returncode, second.returncode], second.stderr
    assert before == rows("select count(*) from samples")
    assert first.stdout == second.stdout


def test_unknown_name_of_the_loss_is_refused_with_the_names(on_store, log, rows):
    typo = on_store("import", log, "--loss", "typo")
    right = on_store("import", log, "--loss", "loss")

    assert (1, 0) == (typo.returncode, right.returncode)
    assert f"{log}: no quantity in the first 2 records is named typo; names: loss" in typo.stderr
    assert ["1,2.5,0", "2,NaN,0"] == rows(STORED)


@pytest.mark.parametrize("growth", ["", "step 3 a_loss=1.0 total_loss=2.5 avr_loss=3.5\n"])
def test_other_loss_of_an_imported_log_needs_reimport(on_store, put, growth):
    path = put("train.log", "".join(f"step {step} total_loss=2.5 avr_loss=3.5\n" for step in (1, 2)))
    on_store("import", path)
    with path.open("a") as file:
        file.write(growth)
    done = [on_store("import", path, "--loss", "avr_loss", *more) for more in ((), ("--reimport",), ())]

    assert [1, 0, 0] == [one.returncode for one in done], done[1].stderr
    assert "`--reimport --loss avr_loss` imports it again" in done[0].stderr


def test_secret_in_a_run_name_is_masked_and_the_given_name_is_found(on_store, in_process, put, tmp_path):
    log, name = put("a.jsonl", '{"step": 1, "loss": 0.5}\n'), "https://bob:pa/ss#w0rd@host/x"
    imported = on_store("import", log, "--run", name)
    summary = on_store("summary", name)
    on_store("runs", "rename", name, "ghp_0123456789abcdefghij")
    listed = on_store("runs", "--format", "json")
    watched = in_process("watch", log, "--once", "--run", name, "--store", tmp_path / "other")

    assert "new rows in https://***@host/x\n" in imported.stdout
    assert "https://***@host/x, " in summary.stdout, summary.stderr
    assert '"run": "***"' in listed.stdout
    assert "as the run https://***@host/x" in watched.stdout
    assert "ss#w0rd" not in watched.stdout + watched.stderr + summary.stdout


def test_run_name_that_ranks_could_not_have_is_refused_by_watch(on_store, log, tmp_path):
    watched = on_store("watch", log, "--run", "x" * 1001, "--once")

    assert watched.returncode
    assert 1 == watched.stderr.count("\n")
    assert "the name of the run has 1,001 characters; the maximum is 1,000" in watched.stderr
    assert not (tmp_path / "history").exists()


# Many small logs: few files and commits, and a short summary.


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
