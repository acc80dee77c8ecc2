"""After a training without a service, each command that reads a store finds the records in the working directory."""

import os
import signal
import subprocess
import sys

import pytest
from tests.programs import run_command, run_program

from rankscope.commands import subcommands

TRAINING = """
import torch
from rankscope_exporter import Monitor
for run in ("first", "alone"):
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with Monitor({"run": run}).attach(model, optimizer) as monitor:
        for step in range(1, 13):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            monitor.log(loss=float(step))
"""
READERS = {  # The arguments of each command that reads a store, and a part of its output
    "anomalies": (["alone"], "no anomalies in alone"),
    "compare": (["first", "alone", "--no-figure"], "alone"),
    "diff": (["first", "alone"], "first"),
    "events": ([], "completed"),
    "export": (["alone"], "rows: 144 tensor_stats"),  # 12 steps
    "plot": (["alone", "-o", "figure.svg"], ""),
    "report": ([], "report of alone"),
    "rules replay": ([], "no firings in alone"),
    "runs": ([], "alone"),
    "sql": (["select max(step) as last from scalars where run = 'alone'"], "12"),
    "summary": ([], "alone, completed"),
    "why": ([], "alone: healthy"),
}

WRITERS = {"doctor", "import", "serve", "store", "up", "watch"}  # Commands whose store is never a folder of records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("offline")
    done = run_program(TRAINING, folder=made, RANKSCOPE_SPOOL_DIR="")
    assert 0 == done.returncode, done.stderr
    return made


def test_each_command_with_a_store_is_in_a_list():
    has_store = {name for name, function in subcommands().items() if "store" in function.__annotations__}

    assert {*READERS, *WRITERS, "view"} | ({"incidents"} & has_store) == has_store


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in ("runs", "summary"))) for name in sorted(READERS)],
)
def test_command_without_store_reads_the_records_folder(folder, command):
    arguments, text = READERS[command]
    done = run_command(*command.split(), *arguments, folder=folder, RANKSCOPE_SPOOL_DIR="")

    assert done.returncode in ({0, 1} if command == "diff" else {0}), done.stderr
    assert done.stderr.startswith("history is no store: showing the records in rankscope-records\n")
    assert text in done.stdout


def test_a_named_store_is_never_replaced_by_the_records_folder(folder):
    named = run_command("runs", "--store", "history", folder=folder, RANKSCOPE_SPOOL_DIR="")
    told = run_command("runs", folder=folder, RANKSCOPE_SPOOL_DIR="", RANKSCOPE_STORE="history")

    log = folder / "log.jsonl"
    log.write_text('{"step": 1, "loss": 2.0}\n')
    given = [
        run_command(*words, log, folder=folder, RANKSCOPE_SPOOL_DIR="").stderr for words in (["summary"], ["view"])
    ]

    assert not any("showing the records" in text for text in given)
    assert (2, 2) == (named.returncode, told.returncode)
    assert "history is not a Rankscope store" in named.stderr
    assert "history is not a Rankscope store" in told.stderr


@pytest.mark.usual(1)
@pytest.mark.parametrize("arguments", [[], ["--store", "rankscope-records"], ["rankscope-records"]])
def test_view_takes_its_store_as_other_commands_do(folder, arguments):
    program = ["env", "--default-signal=HUP", sys.executable, "-m", "rankscope"]  # tests may run under nohup
    command = [*program, "view", *arguments]
    environment = os.environ | {"RANKSCOPE_SPOOL_DIR": ""}
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment) as shown:
        assert shown.stdout is not None
        first = shown.stdout.readline()
        shown.send_signal(signal.SIGHUP)

    assert 0 == shown.returncode
    assert "pages of rankscope-records: http://127.0.0.1:" in first
