"""`rankscope watch`: output, exit codes and errors of a log on this machine."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from rankscope.commands.watch import WatchView, watch, with_password
from rankscope.shell.errors import CommandError
from rankscope_ingest.watch.judge import Condition
from rankscope_ingest.watch.watcher import LogStatus


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(f"{json.dumps({'step': n, 'loss': 3.0 - n / 50, 'step_time_s': 1.0})}\n" for n in range(40))
    )
    return path


@pytest.fixture
def watched(tmp_path, capsys):
    """Return a function that runs the command, and returns its output and its error."""

    def run(*logs, once=True, **options):
        error = None
        try:
            watch([str(log) for log in logs], store=tmp_path / "history", once=once, **options)
        except CommandError as raised:
            error = raised
        return capsys.readouterr().out, error

    return run


def test_once_prints_the_state_and_stores_the_rows(watched, log, rows):
    printed, error = watched(log)

    assert error is None
    assert f"following {log} as the run train, every 10 s" in printed
    assert "train  training  step 39, a row every 1 s; clock of this machine" in printed
    assert ["40"] == rows("SELECT count(*) AS n FROM scalars WHERE run = 'train' AND name = 'loss'")


def test_each_call_names_the_open_incident_of_a_log_without_an_end(watched, log):
    """The second call, of another process, has nothing new to report."""
    log.write_text(log.read_text() + "".join(f'{{"step": {n}, "loss": NaN, "step_time_s": 1.0}}\n' for n in (40, 41)))
    calls = [watched(log), watched(log)]
    state = "train  training  step 41, a row every 1 s, with 1 open incident: loss became NaN at step 40; clock of"
    line = "critical: train: loss became NaN at step 40"

    assert [(4, True)] * 2 == [(error.code, state in printed) for printed, error in calls]
    assert all(str(error).startswith("train: not normal") for _, error in calls)
    assert [1, 0] == [printed.splitlines().count(line) for printed, _ in calls]


@pytest.mark.parametrize(
    ("lines", "age", "code", "state"),
    [
        (
            "Traceback (most recent call last):\nRuntimeError: disk full", 0, 4,
            "training  step 39, a row every 1 s, followed by exception: RuntimeError: disk full",
        ),
        (
            '{"step": 40, "total_steps": 40, "loss": NaN, "step_time_s": 1.0}', 61, 4,
            "finished  with 1 open incident: loss became NaN at step 40",
        ),
        ("INFO Training completed in 40.2 s", 61, None, "finished  Training completed; clock of"),
        ("", 500, 4, "stalled  "),
    ],
    ids=["error", "ended with NaN", "line that reports the end", "stalled"],
)  # fmt: skip
def test_exit_code_and_state_of_the_last_lines(watched, log, lines, age, code, state):
    """A log is settled after a minute; then the command ends without --once."""
    log.write_text(f"{log.read_text()}{lines}\n")
    os.utime(log, (time.time() - age,) * 2)
    options = {"once": False, "until_finished": True, "poll_seconds": 0.1} if age == 61 else {}
    printed, error = watched(log, **options)

    assert code == (error and error.code)
    assert error is None or str(error).startswith("train: not normal")
    assert f"train  {state}" in printed


def test_watch_prints_immediately_that_it_reads_and_how_long_it_waits(log, tmp_path):
    program = ["env", "--default-signal=HUP", sys.executable, "-m", "rankscope"]  # tests may run under nohup
    command = [*program, "watch", str(log), "--store", str(tmp_path / "history")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = [watching.stdout.readline().rstrip() for _ in range(3)]
        watching.send_signal(signal.SIGHUP)

    assert 0 == watching.returncode  # as after SIGTERM
    expected = "train: reading the log; a log that has just begun is stored after 60 s, when its format is certain"
    assert expected == lines[2]


def test_unreadable_log_fails_and_does_not_stop_the_others(watched, log, rows, tmp_path):
    _, error = watched(log, tmp_path / "gone.log")

    assert 1 == error.code
    assert "gone: a log cannot be read" in str(error)
    assert ["train"] == rows("SELECT DISTINCT run FROM scalars")


@pytest.mark.parametrize(
    ("logs", "options", "message"),
    [
        ([], {}, "no log: give a path"),
        (["ssh://host"], {}, "has no path of a file"),
        (["a/train.log", "b/train.log"], {}, "several logs would be stored as the run 'train'"),
        (["a.log", "b.log", "c.log"], {"run": ["x", "y"]}, "2 runs for 3 logs"),
        (["a.log"], {"format_": "megatronn"}, "unknown format 'megatronn'; known formats: "),
        (["a.log"], {"slow_factor": 0.5}, "--slow-factor: Input should be greater than 1"),
    ],
)
def test_wrong_arguments_create_no_store(watched, tmp_path, logs, options, message):
    _, error = watched(*logs, **options)

    assert 2 == error.code
    assert message in str(error)
    assert not (tmp_path / "history").exists()


def test_log_over_ssh_without_asyncssh_names_the_extra(watched, monkeypatch):
    monkeypatch.setitem(sys.modules, "asyncssh", None)

    assert "run pip install '.[ssh]'" in str(watched("ssh://host/train.log")[1])


def test_terminal_shows_a_line_per_change_and_a_table():
    def status(condition, step, unreadable=None):
        fixed = {"address": "ssh://node7/train.log", "run": "r", "planned_steps": 100, "silence": 2.0}
        own = {"condition": condition, "reason": f"step {step}", "step": step, "unreadable": unreadable}
        return LogStatus(**fixed, **own, clock="date over SSH")

    printed = io.StringIO()
    with WatchView(Console(file=printed, force_terminal=True, width=100, no_color=True)) as view:
        for shown in ((1,), (2,), (2, "connection refused")):
            view.change(status(Condition.TRAINING, *shown))
    text = printed.getvalue()

    assert 1 == text.count("r  training  step 1; date over SSH")
    assert 0 == text.count("r  training  step 2; date over SSH")
    assert 1 == text.count("r  unreadable  cannot read the log: connection refused")
    assert "step 2 / 100  last row 2 s ago" in text


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mailto://me@mail.example?to=ops@x.org", "mailto://me:p%40ss@mail.example?to=ops@x.org"),
        ("mailto://me:known@mail.example", "mailto://me:known@mail.example"),
        ("mailto://mail.example", "mailto://mail.example"),
        ("feishu://token", "feishu://token"),
    ],
)
def test_password_of_mail_is_asked_for_if_the_url_has_none(url, expected):
    """S0-04: the password is in no file and on no command line."""
    assert expected == with_password(url, lambda _: "p@ss")
