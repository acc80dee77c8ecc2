"""A small deterministic store with two runs, and the `rankscope` command as a user starts it."""

import datetime as dt
import json
import math
import os
import subprocess
import sys

import pyarrow as pa
import pytest
from tests.programs import run_command

from rankscope.commands import main
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.schema import dataset_schema

START = dt.datetime(2026, 3, 1, 12, 0, tzinfo=dt.UTC)
STEPS = 30
TENSORS = ("blocks.0.weight", "odd 'name' = \"学\"")
NAN_STEP = 10


def table(dataset, rows):
    empty = dict.fromkeys(field.name for field in DATASETS[dataset])
    return pa.Table.from_pylist([empty | row for row in rows], schema=dataset_schema(dataset))


def common(rank, step, seq, run="my-run"):
    process = {"incarnation": None if rank is None else f"{run}-{rank}", "seq": None if rank is None else seq}
    time = {"ordinal": 1000 * step + seq, "step": step, "ts": START + dt.timedelta(seconds=step), "ts_origin": "rank"}
    return {"run": run, "attempt": 0, "rank": rank} | process | time


def tensor_rows(rank):
    for step in range(1, STEPS + 1):
        kinds = ["grad_unreduced", "grad_reduced"]
        kinds += [] if step == NAN_STEP else ["param_before", "param_after", "exp_avg", "exp_avg_sq"]
        for kind in kinds:
            for number, tensor in enumerate(TENSORS):
                bad = step == NAN_STEP and number == 0 and (rank == 1 or kind == "grad_reduced")
                norm = 1.0 / step + (0.001 if kind == "param_after" else 0.0)
                baselines = {"norm_baseline": 0.9 / step if step % 9 else 0.1 / step, "mean_baseline": 0.01}
                counts = {"nans": 4 if bad else 0, "infs": 0, "zeros": 60 if number else 0, "numel": 64}
                values = {"norm": norm, "min": -0.5, "max": 0.5, "mean": 0.01} | counts | baselines
                yield common(rank, step, step - 1) | {"kind": kind, "tensor": tensor, "placement": "full"} | values


def scalar_rows(rank):
    for step in range(1, STEPS + 1):
        loss = {NAN_STEP: math.nan, NAN_STEP + 1: math.inf}.get(step, 5.0 / step)
        values = [
            ("loss", loss, None, None),
            ("step_seconds", 0.5 + 0.1 * rank, "seconds", None),
            ("tokens_total", 1024.0 * step, "tokens", None),
            ("overhead_seconds", 0.01 * step, "seconds", '{"thread":"hooks"}'),
        ]
        for name, value, unit, labels in values:
            yield common(rank, step, step - 1) | {"name": name, "value": value, "unit": unit, "labels": labels}


def event_rows():
    anomaly = {"type": "anomaly", "severity": "critical", "rule": "AnomalyNan", "tensor": TENSORS[0], "op": "nans"}
    anomaly |= {"value": 4.0, "call_id": 0, "message": "4 NaN in blocks.0.weight"}
    return [
        common(0, NAN_STEP, NAN_STEP - 1) | anomaly | {"kind": "grad_reduced"},
        common(1, NAN_STEP, NAN_STEP - 1) | anomaly | {"kind": "grad_reduced"},
        common(1, NAN_STEP, NAN_STEP - 1) | anomaly | {"kind": "grad_unreduced"},
        *(common(rank, NAN_STEP, NAN_STEP - 1) | {"type": "step_skipped", "severity": "info"} for rank in (0, 1)),
    ]


def run_rows():
    whole = {"started_at": START, "planned_steps": STEPS, "world_size": 2, "source_kind": "live", "ts_origin": "ingest"}
    launch = {"git_commit": "0123456789abcdef" * 2 + "01234567", "argv": ["train.py", "--lr", "3"]}
    code = {"config": json.dumps(launch)}
    end = {"ended_at": START + dt.timedelta(seconds=STEPS), "last_step": STEPS}
    other = {"state": "failed", "reason": "rank 0 vanished", "started_at": START - dt.timedelta(days=1)}
    return [
        common(None, 0, 0) | whole | code | {"state": "running"},
        common(None, STEPS, 0) | whole | end | {"state": "completed"},
        common(None, 7, 0, run="../other run") | whole | other | {"last_step": 7},
    ]


@pytest.fixture(scope="session")
def sample_store(tmp_path_factory):
    """Return the folder of a store with the runs `my-run` and `../other run`."""
    folder = tmp_path_factory.mktemp("sample") / "history"
    with Store.open(folder, create=True).claim(owner="test") as writer:
        tables = {
            "tensor_stats": table("tensor_stats", [row for rank in (0, 1) for row in tensor_rows(rank)]),
            "scalars": table("scalars", [row for rank in (0, 1) for row in scalar_rows(rank)]),
            "events": table("events", event_rows()),
            "runs": table("runs", run_rows()),
        }
        writer.append(Batch(tables=tables, watermarks={f"my-run-{rank}": STEPS - 1 for rank in (0, 1)}))
    return folder


@pytest.fixture(scope="session")
def rankscope(sample_store):
    def run(*arguments, **options):
        environment = {"RANKSCOPE_STORE": str(sample_store), "COLUMNS": "100", "TERM": "dumb"} | options.pop("env", {})
        if "input" in options:  # programs of the fork server have no standard input
            command, environment = [sys.executable, "-m", "rankscope", *arguments], os.environ | environment
            return subprocess.run(
                command, env=environment, text=True, capture_output=True, check=False, timeout=60, **options
            )
        return run_command(*arguments, folder=options.pop("cwd", None), **environment)

    return run


@pytest.fixture
def in_process(monkeypatch, capsys):
    """Return a function that runs `rankscope ARGUMENTS` in this process, as its entry point does."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["rankscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def on_store(in_process, tmp_path):
    """Return a function that runs `rankscope ARGUMENTS --store STORE` in this process, on a store of the test."""
    return lambda *arguments: in_process(*arguments, "--store", tmp_path / "history")


@pytest.fixture
def rows(on_store):
    """Return a function that returns the rows of a query on the store of the test as lines of CSV."""
    return lambda query: on_store("sql", query, "--format", "csv").stdout.splitlines()[1:]


def history_entries(steps):
    """Return the history of a `trainer_state.json` with two evaluation sets."""
    entries = []
    for step in range(1, steps + 1):
        loss = 0.1 + 7 * math.exp(-step / 20)
        shared = {"epoch": step / 30, "step": step}
        entries.append(shared | {"loss": loss, "learning_rate": 2e-5 * (1 - step / 100), "grad_norm": 0.25})
        if step % 15 == 0:
            entries.append(shared | {"eval_dev_loss": 1 / step, "eval_test_loss": 0.7, "eval_runtime": 2.0})
    return entries


@pytest.fixture(scope="session")
def logs(tmp_path_factory):
    """Return a folder with logs of other tools: `outputs/checkpoint-N`, `metrics.jsonl` and `megatron.log`."""
    folder = tmp_path_factory.mktemp("logs")
    for steps, name in ((60, "checkpoint-60"), (9, "checkpoint-9"), (30, "checkpoint-last")):
        checkpoint = folder / "outputs" / name
        checkpoint.mkdir(parents=True)
        facts = {"epoch": steps / 30, "global_step": steps, "max_steps": 90, "num_train_epochs": 3}
        best = {"best_metric": 0.0667, "best_model_checkpoint": "outputs/checkpoint-15", "best_global_step": 15}
        state = facts | best | {"log_history": history_entries(steps)}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    lines = [
        {"step": step, "loss": 2 - 0.005 * step, "throughput": 60.0 if step % 20 == 0 else 100.0, "lr": 1e-4}
        | {"step_time_s": 0.32, "gpu_util": [80 + step % 5, 60], "global_batch_size": 32, "data_time": 0.1}
        for step in range(1, 101)
    ]
    text = "\n".join(map(json.dumps, lines)) + "\nnot json\n"
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    row = (
        " [2026-03-01 10:00:{second:02}] iteration {step:8d}/     100 | consumed samples: {samples} | "
        "elapsed time per iteration (ms): {time:.1f} | throughput per GPU (TFLOP/s/GPU): {flops:.1f} | "
        "learning rate: 3.0E-06 | global batch size: 1024 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 4.3 | "
        "number of skipped iterations: {skipped} | number of nan iterations: 0 |"
    )
    rows = [
        row.format(second=step, step=step, samples=1024 * step, time=46_300 if step == 1 else 29_700,
                   flops=341.9, loss=11 - step / 10, skipped=int(step < 3))
        for step in range(1, 21)
    ]  # fmt: skip
    (folder / "megatron.log").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder
