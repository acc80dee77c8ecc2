"""`rankscope watch`: output, exit codes and errors of a log on this machine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from rankscope.base.errors import CommandError
from rankscope.commands.watch import watch, with_password
from rankscope.output.watch_text import WatchView
from rankscope_ingest.watch.judge import Condition
from rankscope_ingest.watch.watcher import LogStatus
from rankscope_storage.connection import connect


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(f"{json.dumps({'step': n, 'loss': 3.0 - n / 50, 'step_time_s': 1.0})}\n" for n in range(40))
    )
    return path


def run(logs: Sequence[str | Path], **options: object) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        watch([str(log) for log in logs], **options)
    return printed.getvalue()


def test_once_prints_the_state_and_stores_the_rows(log, tmp_path):
    printed = run([log], store=tmp_path / "history", once=True)
    with connect(tmp_path / "history") as connection:
        rows = connection.query("SELECT count(*) AS n FROM scalars WHERE run = 'train' AND name = 'loss'").to_pylist()

    assert f"following {log} as the run train, every 10 s" in printed
    assert "train  training  step 39, a row every 1 s; clock of this machine" in printed
    assert [{"n": 40}] == rows


def test_each_call_names_the_open_incident_of_a_log_without_an_end(log, tmp_path):
    """The second call, of another process, has nothing new to report."""
    log.write_text(log.read_text() + "".join(f'{{"step": {n}, "loss": NaN, "step_time_s": 1.0}}\n' for n in (40, 41)))
    printed = [io.StringIO(), io.StringIO()]
    for output in printed:
        with contextlib.redirect_stdout(output), pytest.raises(CommandError, match="train: not normal") as error:
            watch([str(log)], store=tmp_path / "history", once=True)
        state = "train  training  step 41, a row every 1 s, with 1 open incident: loss became NaN at step 40; clock of"

        assert 4 == error.value.code
        assert state in output.getvalue()

    line = "critical: train: loss became NaN at step 40"
    assert [1, 0] == [output.getvalue().splitlines().count(line) for output in printed]


def test_error_in_the_last_lines_is_printed_before_it_is_a_failure(log, tmp_path):
    log.write_text(f"{log.read_text()}Traceback (most recent call last):\nRuntimeError: disk full\n")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(CommandError, match="train: not normal") as error:
        watch([str(log)], store=tmp_path / "history", once=True)

    assert 4 == error.value.code
    assert (
        "train  training  step 39, a row every 1 s, followed by exception: RuntimeError: disk full"
        in printed.getvalue()
    )


def test_training_that_ended_with_nan_prints_its_incident_and_fails(log, tmp_path):
    end = {"step": 40, "total_steps": 40, "loss": float("nan"), "step_time_s": 1.0}
    log.write_text(f"{log.read_text()}{json.dumps(end)}\n")
    os.utime(log, (0, time.time() - 61))  # the log is settled
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(CommandError, match="train: not normal") as error:
        watch([str(log)], store=tmp_path / "history", until_finished=True, poll_seconds=0.1)

    assert 4 == error.value.code
    assert "train  finished  with 1 open incident: loss became NaN at step 40" in printed.getvalue()


def test_line_that_reports_the_end_ends_the_command(log, tmp_path):
    log.write_text(f"{log.read_text()}INFO Training completed in 40.2 s\n")
    os.utime(log, (0, time.time() - 61))  # the log is settled

    assert "train  finished  Training completed; clock of" in run(
        [log], store=tmp_path / "history", until_finished=True, poll_seconds=0.1
    )


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


def test_stalled_training_has_its_own_exit_code(log, tmp_path):
    then = time.time() - 500
    os.utime(log, (then, then))
    with pytest.raises(CommandError, match="train: not normal") as error:
        run([log], store=tmp_path / "history", once=True)

    assert 4 == error.value.code


def test_unreadable_log_fails_and_does_not_stop_the_others(log, tmp_path):
    with pytest.raises(CommandError, match="gone: a log cannot be read") as error:
        run([log, tmp_path / "gone.log"], store=tmp_path / "history", once=True)
    with connect(tmp_path / "history") as connection:
        rows = connection.query("SELECT DISTINCT run FROM scalars").to_pylist()

    assert 1 == error.value.code
    assert [{"run": "train"}] == rows


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
def test_wrong_arguments_create_no_store(tmp_path, logs, options, message):
    with pytest.raises(CommandError, match=message) as error:
        run(logs, store=tmp_path / "history", once=True, **options)

    assert 2 == error.value.code
    assert not (tmp_path / "history").exists()


def test_log_over_ssh_without_asyncssh_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    with pytest.raises(CommandError, match=r"run pip install '\.\[ssh\]'"):
        run(["ssh://host/train.log"], store=tmp_path / "history", once=True)


def test_terminal_shows_a_line_per_change_and_a_table():
    def status(condition: Condition, step: int, unreadable: str | None = None) -> LogStatus:
        return LogStatus(
            address="ssh://node7/train.log",
            run="r",
            condition=condition,
            reason=f"step {step}",
            step=step,
            planned_steps=100,
            silence=2.0,
            clock="date over SSH",
            unreadable=unreadable,
        )

    printed = io.StringIO()
    with WatchView(Console(file=printed, force_terminal=True, width=100, no_color=True)) as view:
        for shown in (
            status(Condition.TRAINING, 1),
            status(Condition.TRAINING, 2),
            status(Condition.TRAINING, 2, "connection refused"),
        ):
            view.change(shown)
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
