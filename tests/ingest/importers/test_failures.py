"""Lines of logs that report a failure or the end become events, and end the run if no record follows."""

from __future__ import annotations

import json
import os
import time

import pytest

from rankscope_contract.model.events import RunState
from rankscope_ingest.importers.common.failures import failure_event
from rankscope_ingest.importers.common.importer import SETTLED_SECONDS

BAR = "  7%|█         | 124/1752 [04:08<1:10:01,  2.83s/it]"
WATCHDOG = (
    "[rank5]:[E602 11:17:52.185 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation timeout: …"
)
CANCELLED = "slurmstepd: error: *** STEP 18.0 ON n3 CANCELLED AT 2026-05-24T09:50:34 DUE TO TIME LIMIT ***"
ROWS = {
    "textlog": [f"step {step} loss: {5 - step / 10:.2f}" for step in range(1, 9)],
    "jsonl": [json.dumps({"step": step, "loss": 5 - step / 10}) for step in range(1, 9)],
    "columns": ["step,loss", *(f"{step},{5 - step / 10}" for step in range(1, 9))],
}
FAILURES = {
    WATCHDOG: ("nccl", 5, RunState.FAILED),
    BAR + WATCHDOG: ("nccl", 5, RunState.FAILED),
    BAR + "Traceback (most recent call last):": ("exception", None, RunState.FAILED),
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate": ("out_of_memory", 0, RunState.FAILED),
    "RuntimeError: CUDA error: an illegal memory access": ("cuda", None, RunState.FAILED),
    "[E] ProcessGroupHCCL.cpp:71 [Rank 2] operation timeout: SeqNum=7": ("hccl", 2, RunState.FAILED),
    "EI0002: The wait execution of the Notify register times out.": ("hccl", None, RunState.FAILED),
    "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:5] Timed out waiting 1800000ms": ("gloo", 1, RunState.FAILED),
    "RuntimeError: DataLoader worker (pid 42) is killed by signal: Killed.": ("exception", None, RunState.FAILED),
    CANCELLED: ("cancelled", None, RunState.STOPPED),
    "srun: error: n3: task 3: Killed": ("signal", None, RunState.STOPPED),
    "W0811 api.py:1 Sending process 44 closing signal SIGTERM": ("signal", None, RunState.STOPPED),
    "bash: line 1: 7 Segmentation fault (core dumped) python": ("segmentation_fault", None, RunState.FAILED),
}
FAILED = "RuntimeError: CUDA error: an illegal memory access"
HARMLESS = (
    "NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
    "n3:1:2 [0] NCCL WARN Call to ibv_reg failed",
    "[Rank 0] ProcessGroupNCCL initialized with options: NCCL_ASYNC_ERROR_HANDLING: 1, TIMEOUT(ms): 600000",
    "[Gloo] Rank 0 is connected to 3 peer ranks; gloo timeout is 1800 s",
    "[Rank 0] NCCL watchdog thread terminated normally",
    "ProcessGroupNCCL aborts successfully.",
    "Installed handlers for the signals SIGTERM and SIGINT",
    "urllib3 retrying (ConnectionResetError, Connection reset by peer): Read timed out",
    "cat: /etc/hostname: No such file or directory",
    "the test error rate is 0.1; training without error",
)


ENDS = (
    "2026-11-29 09:35:13,123 INFO training is done",
    "Training completed. Do not forget to share your model on huggingface.co/models =)",
    "[2026-01-01 00:00:00,123] [INFO] [train.py:100] Training finished successfully",
    "2022-01-01 00:00:00 | INFO | fairseq_cli.train | done training in 123.4 seconds",
    "`Trainer.fit` stopped: `max_epochs=3` reached.",
    "Finished Training",
    "[rank0] training done",
    "=== TRAINING COMPLETED ===",
    "Training finished at step 500",
    "Training completed after 10 epochs.",
    "Training done. (3h 20m)",
)
NO_ENDS = (
    "training is done in 8 epochs of 100 steps",
    "evaluation done",
    "Epoch 3: training finished",
    "Finished training epoch 3",
    "tokenizer training finished",
    "training done, starting validation",
    "Training done. Evaluating on the test set",
    "waiting until training is finished",
    "Training done: 30/100",
    "training completed 10%",
    "training finished: False",
    "pretraining done",
)


def write(tmp_path, kind: str, *lines: str):
    path = tmp_path / f"{kind}.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def errors(logs) -> list[tuple]:
    rows = logs.query("SELECT op, rank, step, attempt FROM events WHERE type = 'error' ORDER BY seq")
    return [tuple(row.values()) for row in rows]


@pytest.mark.usual(12)
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    "line", FAILURES, ids=[f"{name} {place}" for place, (name, *_) in enumerate(FAILURES.values())]
)
def test_failure_is_an_event_and_the_state_of_the_run(logs, tmp_path, kind, line):
    report = logs.import_log(write(tmp_path, kind, *ROWS[kind], line, line), kind=kind)
    name, rank, state = FAILURES[line]

    assert [(name, rank, 8, 0)] == errors(logs)
    assert state == report.state
    assert state == logs.value("SELECT state FROM runs")


@pytest.mark.parametrize("kind", ROWS)
def test_failure_before_later_records_does_not_end_the_run(logs, tmp_path, kind):
    rows = ROWS[kind]
    report = logs.import_log(write(tmp_path, kind, *rows[:5], CANCELLED, *rows[5:]), kind=kind)

    assert ["cancelled"] == [row[0] for row in errors(logs)]
    assert report.state is None


@pytest.mark.parametrize("kind", ROWS)
def test_harmless_lines_are_no_failures(logs, tmp_path, kind):
    report = logs.import_log(write(tmp_path, kind, *ROWS[kind], *HARMLESS), kind=kind)

    assert [] == errors(logs)
    assert report.state is None


@pytest.mark.parametrize(("lines", "state"), [(ENDS, RunState.COMPLETED), (NO_ENDS, None)])
def test_line_that_reports_the_end_of_the_training_is_its_end(lines, state):
    found = {line: failure_event(line) for line in lines}

    assert dict.fromkeys(lines, state) == {line: None if end is None else end[1][0] for line, end in found.items()}


@pytest.mark.parametrize("kind", [*ROWS, "megatron"])
def test_end_is_the_state_of_the_run_until_training_continues(logs, tmp_path, kind):
    rows = ROWS.get(kind) or [f" iteration {step}/ 99 | lm loss: {5 - step / 10} |" for step in range(1, 9)]
    report = logs.import_log(write(tmp_path, kind, *rows, ENDS[0], "Error closing a file"), kind=kind)
    restarted = logs.import_log(write(tmp_path, kind, *rows, ENDS[0], *rows[4:7]), kind=kind)

    assert (RunState.COMPLETED, "training is done") == (report.state, report.reason)
    assert [{"step": 8}] == logs.query("SELECT step FROM events WHERE type = 'exit'")
    assert restarted.state is None
    attempts = logs.query("SELECT state FROM attempts ORDER BY attempt")
    assert [RunState.COMPLETED, RunState.STOPPED] == [row["state"] for row in attempts]


@pytest.mark.parametrize("line", [{"message": "training finished"}, {"msg": "Training completed in 3 s", "s": 3.0}])
def test_message_of_an_object_reports_the_end_until_training_continues(logs, tmp_path, line):
    report = logs.import_log(write(tmp_path, "jsonl", *ROWS["jsonl"], json.dumps(line)), kind="jsonl")
    continued = [*ROWS["jsonl"], json.dumps(line), '{"step": 9, "loss": 4.0}']

    assert (RunState.COMPLETED, "the log reports the end of training") == (report.state, report.reason)
    assert logs.import_log(write(tmp_path, "jsonl", *continued), kind="jsonl").state is None


def test_object_with_the_text_of_an_error_is_no_failure(logs, tmp_path):
    logs.import_log(
        write(tmp_path, "jsonl", '{"step": 9, "loss": 1.0, "prompt": "Traceback (most recent call last):"}')
    )

    assert [] == errors(logs)


@pytest.mark.parametrize("kind", ["textlog", "jsonl"])
def test_torn_last_line_is_no_failure_yet(logs, tmp_path, kind):
    path = write(tmp_path, kind, *ROWS[kind], CANCELLED)
    complete = path.read_bytes()
    path.write_bytes(complete.rstrip(b"\n"))
    first = logs.import_log(path, kind=kind)
    path.write_bytes(complete)
    second = logs.import_log(path, kind=kind)

    assert (None, RunState.STOPPED) == (first.state, second.state)
    assert ["cancelled"] == [row[0] for row in errors(logs)]


def test_torn_last_line_of_a_finished_log_is_a_failure(logs, tmp_path):
    path = write(tmp_path, "textlog", *ROWS["textlog"], CANCELLED)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    logs.import_again(path)
    os.utime(path, (0, time.time() - 2 * SETTLED_SECONDS))
    report = logs.import_again(path)

    assert RunState.STOPPED == report.state
    assert ["cancelled"] == [row[0] for row in errors(logs)]


@pytest.mark.parametrize(
    "line", ["saving checkpoint at step 9 to out/", "val loss: 3.5", "step 8 | val_loss 3.5", ROWS["textlog"][-1]]
)
def test_failure_remains_the_end_until_training_continues(logs, tmp_path, line):
    report = logs.import_log(write(tmp_path, "textlog", *ROWS["textlog"], FAILED, line), kind="textlog")

    assert RunState.FAILED == report.state


def test_restart_from_an_earlier_step_ends_no_run(logs, tmp_path):
    report = logs.import_log(
        write(tmp_path, "textlog", *ROWS["textlog"], FAILED, *ROWS["textlog"][4:6]), kind="textlog"
    )

    assert report.state is None


HEADING, FRAME = "Traceback (most recent call last):", '  File "train.py", line 80, in main'
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
CHAIN = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([HEADING, FRAME, OUT_OF_MEMORY], f"out of memory: {OUT_OF_MEMORY}"),
        ([HEADING, FRAME, FAILED], f"cuda: {FAILED}"),
        ([HEADING, FRAME, "OSError: disk full"], "exception: OSError: disk full"),
        ([HEADING, "KeyError: 'w'", "", CHAIN, "", HEADING, "ValueError: no w"], "exception: ValueError: no w"),
        ([HEADING, OUT_OF_MEMORY, "", CHAIN, "", HEADING, "ValueError: x"], f"out of memory: {OUT_OF_MEMORY}"),
        ([HEADING, "OSError: disk full", "[rank1]: DistBackendError: NCCL error"], "exception: OSError: disk full"),
        ([HEADING, FRAME, "KeyboardInterrupt"], "signal: KeyboardInterrupt"),
        ([HEADING, "OSError: disk full", CANCELLED], "exception: OSError: disk full"),
        ([HEADING, FRAME], f"exception: {HEADING}"),
    ],
)
def test_cause_is_the_exception_and_not_the_first_line_of_its_traceback(logs, tmp_path, lines, reason):
    logs.import_log(write(tmp_path, "textlog", *ROWS["textlog"], *lines), kind="textlog")

    assert reason == logs.value("SELECT reason FROM runs")
    assert reason.partition(": ")[2] in [row["message"] for row in logs.query("SELECT message FROM events")]
