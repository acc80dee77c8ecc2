"""Tests of text lines in the dialects of training scripts, and of tables of numbers."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, find_importer
from rankscope_ingest.importers.columns import Columns
from rankscope_ingest.importers.common.bars import Bars, bar_lines
from rankscope_ingest.importers.common.failures import FailureLines
from rankscope_ingest.importers.textlog import TextLog


def scalars(logs):
    rows = logs.query("SELECT step, name, value FROM scalars ORDER BY seq, name, labels")
    return [(row["step"], row["name"], row["value"]) for row in rows]


DIALECTS = {
    "nanogpt": (
        "iter 10: loss 9.6100, time 62.30ms, mfu 3.40%",
        [(10, "loss", 9.61), (10, "mfu", 3.4), (10, "step_seconds", 62.3 / 1000)],
    ),
    "nanogpt_estimate": (
        "step 0: train loss 10.9899, val loss 10.9897",
        [(0, "eval_loss", 10.9897), (0, "train_loss_estimate", 10.9899)],
    ),
    "modded_nanogpt": (
        "step:13/6200 train_loss:6.5125 train_time:641ms step_avg:213.66ms",
        [(13, "elapsed_seconds", 0.641), (13, "loss", 6.5125), (13, "step_avg", 0.21366)],
    ),
    "llmc_file": (
        "s:7 trl:10.1872 lr:0.000007 norm:6.18",
        [(7, "grad_norm", 6.18), (7, "learning_rate", 7e-6), (7, "loss", 10.1872)],
    ),
    "llmc_validation": ("s:250 tel:6.4591", [(250, "eval_loss", 6.4591)]),
    "llmc_console": (
        (
            "step    1/18865 | loss 11.009123 (+nanz)| norm 15.3722 (+nanz)| lr 1.00e-06 | 1234.50 ms | 45.6% bf16 MFU"
            " | 123456 tok/s"
        ),
        [
            (1, "grad_norm", 15.3722),
            (1, "learning_rate", 1e-6),
            (1, "loss", 11.009123),
            (1, "mfu", 45.6),
            (1, "step_seconds", 1.2345),
            (1, "tokens_per_second", 123456.0),
        ],
    ),
    "build_nanogpt": (
        "step   100 | loss: 6.05 | lr 8.4e-05 | norm: 1.3 | dt: 339.1ms | tok/sec: 1544.2",
        [
            (100, "grad_norm", 1.3),
            (100, "learning_rate", 8.4e-05),
            (100, "loss", 6.05),
            (100, "step_seconds", 339.1 / 1000),
            (100, "tokens_per_second", 1544.2),
        ],
    ),
    "build_nanogpt_file": ("250 val 6.4000", [(250, "eval_loss", 6.4)]),
    "torchtitan": (
        (
            "\x1b[31m[rank0]:[titan] 2024-10-01 12:00:00,123 - root - INFO - \x1b[0mstep:  1  loss:  8.0490  "
            "grad_norm:  1.2  memory:  2.00GiB(2.01%)  tps: 1,234  tflops: 12.3  mfu: 3.4%"
        ),
        [
            (1, "device_memory_bytes", 2.0 * 2**30),
            (1, "grad_norm", 1.2),
            (1, "loss", 8.049),
            (1, "memory_percent", 2.01),
            (1, "mfu", 3.4),
            (1, "tflops_per_gpu", 12.3),
            (1, "tokens_per_second_per_gpu", 1234.0),
        ],
    ),
    "deepspeed": (
        (
            "[2023-05-01 10:00:00,001] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, "
            "lr=[9.5e-06, 9.5e-06], loss=2.5"
        ),
        [(10, "learning_rate", 9.5e-06), (10, "learning_rate", 9.5e-06), (10, "loss", 2.5), (10, "skipped", 0.0)],
    ),
    "deepspeed_timer": (
        (
            "[2024-05-01 10:00:03,125] [INFO] [timer.py:260:stop] epoch=0/micro_step=30/global_step=30, "
            "RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.5, MemAllocated=1.2GB, MaxMemAllocated=3.4GB"
        ),
        [
            (30, "MaxMemAllocated", 3.4e9),
            (30, "MemAllocated", 1.2e9),
            (30, "RunningAvgSamplesPerSec", 12.3),
            (30, "epoch", 0.0),
            (30, "micro_step", 30.0),
            (30, "samples_per_second", 12.5),
        ],
    ),
    "deepspeed_without_loss": (
        "[2024-05-01 10:00:03,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=30, skipped=0, lr=[1e-05]",
        [(30, "learning_rate", 1e-05), (30, "skipped", 0.0)],
    ),
    "verl": (
        (
            "(TaskRunner pid=123) step:3 - actor/pg_loss:1.85 - actor/grad_norm:1.2 - critic/score/mean:0.5 "
            "- timing_s/step:12.3 - timing_s/gen:np.float64(3.5) - x:tensor(0.25, device='cuda:0')"
        ),
        [
            (3, "actor/grad_norm", 1.2),
            (3, "actor/pg_loss", 1.85),
            (3, "critic/score/mean", 0.5),
            (3, "timing_s/gen", 3.5),
            (3, "timing_s/step", 12.3),
            (3, "x", 0.25),
        ],
    ),
    "deepspeed_pipeline": (
        "steps: 10 loss: 2.3012 iter time (s): 0.512 samples/sec: 62.500",
        [(10, "loss", 2.3012), (10, "samples_per_second", 62.5), (10, "step_seconds", 0.512)],
    ),
    "torchtune": (
        "Step 1 | loss:1.234 lr:2e-05 tokens_per_second_per_gpu:1234",
        [(1, "learning_rate", 2e-05), (1, "loss", 1.234), (1, "tokens_per_second_per_gpu", 1234.0)],
    ),
    "litgpt": (
        "Epoch 1 | iter 10 step 10 | loss train: 2.3, val: n/a | iter time: 345.67 ms (step) remaining time: 0:01:02",
        [
            (10, "epoch", 1.0),
            (10, "iter", 10.0),
            (10, "loss", 2.3),
            (10, "remaining_seconds", 62.0),
            (10, "step_seconds", 345.67 / 1000),
        ],
    ),
    "epochs_and_end_of_sentence": (
        "epoch 2 | step 100 | loss: 49.43 ~ mse: 49.06. kl: 0.75 lr=1e-5 tok/s=12.0",
        [
            (100, "epoch", 2.0),
            (100, "kl", 0.75),
            (100, "learning_rate", 1e-05),
            (100, "loss", 49.43),
            (100, "mse", 49.06),
            (100, "tokens_per_second", 12.0),
        ],
    ),
    "own_metrics_after_spaces": (
        "step 120/900: loss 2.31 my_reward 0.44 kl/actor 1e-3, wait 5ms entropy 0.7 lr 1e-4 took 3 of 4",
        [
            (120, "entropy", 0.7),
            (120, "kl/actor", 1e-3),
            (120, "learning_rate", 1e-4),
            (120, "loss", 2.31),
            (120, "my_reward", 0.44),
            (120, "wait", 0.005),
        ],
    ),
    "own_metrics_before_prose": (
        "step 5 loss 2.5 my_reward 0.4 done 3 grad 1.25 in 3.5 s, saved 3 files",
        [(5, "done", 3.0), (5, "grad", 1.25), (5, "loss", 2.5), (5, "my_reward", 0.4)],
    ),
    "prose_behind_a_loss": ("step 5 loss 2.5 saved 3 files after 2.5 s", [(5, "loss", 2.5)]),
    "validation_row": ("| valid | step 500 | loss 2.1 |", [(500, "eval_loss", 2.1)]),
    "nan": ("iteration 5/10 loss=nan grad_norm=inf", [(5, "grad_norm", math.inf), (5, "loss", math.nan)]),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialect_is_read(logs, dialect):
    """S3-13: the result equals that of a regular expression for the dialect, with normalized units."""
    line, expected = DIALECTS[dialect]
    report = logs.import_log(logs.write("train.log", f"Loading…\n{line}\nDone.\n"), kind="textlog")

    assert repr(expected) == repr(scalars(logs))
    assert (1, 0) == (report.records, report.malformed)


@pytest.mark.parametrize(
    "dialect", sorted(set(DIALECTS) - {"build_nanogpt_file", "llmc_validation", "nanogpt_estimate"})
)
def test_dialect_is_recognised(tmp_path, dialect):
    line, _ = DIALECTS[dialect]
    path = tmp_path / "train.log"
    path.write_text("\n".join(["Starting"] * 3 + [line] * 5), encoding="utf-8")

    assert "textlog" == find_importer(path).name


def test_each_state_of_a_progress_bar_is_a_record(logs):
    """As in Accelerate's examples, one line has many states; a repeated state is no new record."""
    bars = [f"Steps:  5%|▌   | {k}/20 [00:10<01:30,  1.00s/it, lr=1e-05, step_loss={k}.5]" for k in (1, 1, 2, 3)]
    path = logs.write("train.log", "Loading…\n" + "\r".join(bars) + "\n")
    logs.import_log(path)

    assert "textlog" == find_importer(path).name
    assert [
        (k, name, value)
        for k in (1, 2, 3)
        for name, value in (("learning_rate", 1e-5), ("loss", k + 0.5), ("step_loss", k + 0.5))
    ] == (scalars(logs))
    assert 20 == logs.value("SELECT planned_steps FROM runs")


def test_progress_bars_of_epochs_are_one_attempt(logs):
    bars = [
        f"Epoch {e}:  50%|███ | {k}/2 [00:01<00:02,  3.21it/s, v_num=3, train_loss=0.5]" for e in (0, 1) for k in (1, 2)
    ]
    logs.import_log(logs.write("train.log", "\r".join(bars) + "\n"))
    rows = logs.query("SELECT step, attempt FROM scalars WHERE name = 'loss' ORDER BY seq")

    assert [(1, 0), (2, 0), (1, 0), (2, 0)] == [tuple(row.values()) for row in rows]


def test_table_with_semicolons_may_have_decimal_commas(logs):
    logs.import_log(logs.write("loss.csv", "step;loss;lr\n1;2,125;1e-4\n2;1,5;1,5E-4\n"))

    assert [
        (1, "learning_rate", 1e-4), (1, "loss", 2.125), (2, "learning_rate", 1.5e-4), (2, "loss", 1.5),
    ] == scalars(logs)  # fmt: skip


def test_time_and_rank_before_a_record_are_stored(logs):
    line = DIALECTS["torchtitan"][0]
    logs.import_log(logs.write("train.log", f"{line}\n{line.replace('rank0', 'rank5')}\n"))
    rows = logs.query("SELECT DISTINCT rank, attempt, epoch_ms(ts) AS ms FROM scalars ORDER BY rank")

    assert [(0, 0, 1727784000123), (5, 0, 1727784000123)] == [tuple(row.values()) for row in rows]


def test_unit_of_the_source_is_kept(logs):
    """Contract 4: the unit is normalized, and the unit of the source is stored."""
    logs.import_log(logs.write("train.log", "step:1/9 train_loss:2 train_time:10ms\n" * 2))
    row = logs.query("SELECT DISTINCT value, unit, labels FROM scalars WHERE name = 'elapsed_seconds'")[0]

    assert (0.01, "seconds", '{"source_name":"train_time","source_unit":"ms"}') == tuple(row.values())


def test_average_of_no_measurement_is_absent(logs):
    """`step_avg:nanms` is no NaN of the training."""
    logs.import_log(logs.write("train.log", "step:1/9 train_loss:2 step_avg:nanms\n" * 2))

    assert 0 == logs.value("SELECT count(*) FROM scalars WHERE name = 'step_avg'")


def test_steps_within_epochs_are_one_attempt(logs):
    """Steps begin again with each epoch. A restart returns to an earlier epoch and step."""
    epochs = [(1, 50), (1, 100), (2, 50), (2, 100), (2, 50), (2, 100), (3, 50)]
    text = "".join(f"Epoch {epoch}/3 | step {step} | loss=0.5\n" for epoch, step in epochs)
    logs.import_log(logs.write("train.log", text))
    rows = logs.query("SELECT attempt FROM scalars WHERE name = 'loss' ORDER BY seq")

    assert [0, 0, 0, 0, 1, 1, 1] == [row["attempt"] for row in rows]


def test_planned_steps_and_end_are_facts_of_the_run(logs):
    logs.import_log(logs.write("train.log", "step:8/9 train_loss:2\nstep:9/9 train_loss:1\n"))

    assert [{"planned_steps": 9, "state": "completed"}] == logs.query("SELECT planned_steps, state FROM runs")


def test_other_output_is_counted_and_is_no_fault(logs):
    text = "import torch\nstep:1/9 train_loss:2\nsaved 3 files in 2.5s\nstep:2/9 train_loss:1\nat step 5\n"
    report = logs.import_log(logs.write("train.log", text))

    assert (2, 0) == (report.records, report.malformed)
    assert 3 == logs.value("SELECT (config::JSON->>'$.import.other_lines')::INT FROM runs")


def test_checkpoint_line_is_an_event(logs):
    """S4-10."""
    logs.import_log(logs.write("train.log", "step 1 loss 2.5\nsaving checkpoint at step 1 to out/\nstep 2 loss 2.0\n"))

    assert [{"step": 1, "line": "saving checkpoint at step 1 to out/"}] == logs.query(
        "SELECT step, details->>'$.line' AS line FROM events WHERE type = 'checkpoint'"
    )


@pytest.mark.parametrize(
    ("line", "step", "action"),
    [
        ("saved ckpt-500.pt", 2, "saved"),
        ("Saving model checkpoint to out/checkpoint-500", 2, "saving"),
        ("checkpoint written: out/last.pt", 2, "saved"),
        ("[rank0] checkpoint out/a.ckpt was successfully saved", 2, "saved"),
        ("Resumed from checkpoint out/a.ckpt", None, "loaded"),
        ("saved checkpoint at step 1 to out/", 1, "saved"),
        ("Checkpoints will be saved to out/", None, None),
        ("checkpoint_every=500 save_total=3", None, None),
        ("Loading checkpoint shards: done", None, None),
    ],
)
def test_line_about_a_saved_checkpoint_is_an_event_at_the_step_before_it(logs, line, step, action):
    logs.import_log(
        logs.write("train.log", f"{line.replace('step 1 ', '')}\nstep 1 loss 3\nstep 2 loss 2\n{line}\nstep 3 loss 1\n")
    )

    assert [{"step": step, "action": action, "message": f"checkpoint {action}"}] * (action is not None) == logs.query(
        "SELECT step, details->>'$.action' AS action, message FROM events WHERE type = 'checkpoint'"
    )


def test_source_code_before_the_rows_does_not_hide_them(tmp_path):
    """Logs of modded-nanogpt begin with the source code of the program, which is longer than the sampled beginning."""
    path = tmp_path / "log.txt"
    path.write_text("import torch  # loss = 3\n" * 8000 + "step:1/9 train_loss:2 train_time:10ms\n" * 4000)

    assert "textlog" == find_importer(path).name


def test_last_line_without_line_end_is_not_stored(logs):
    """It waits for the next import, unless it has the form of the previous line."""
    path = logs.write("train.log", "step:1/9 train_loss:2.512\nstep:2/9 train_loss:2.4")
    first = logs.import_log(path)
    path.write_text("step:1/9 train_loss:2.512\nstep:2/9 train_loss:2.468")
    logs.import_log(path)

    assert (1, 1) == (first.records, first.malformed)
    assert [(1, "loss", 2.512), (2, "loss", 2.468)] == scalars(logs)


def test_recorded_nanogpt_logs_have_the_expected_counts(logs, data):
    """The counts were computed with one regular expression per file."""
    import re

    llmc = data / "textlog" / "modded-nanogpt_llmc_main.log"
    muon = data / "textlog" / "modded-nanogpt_muon_steps.txt"
    for run, path in (("llmc", llmc), ("muon", muon)):
        logs.import_log(path, run=run)
    expected = {
        ("llmc", "loss"): len(re.findall(r"trl:", llmc.read_text())),
        ("llmc", "eval_loss"): len(re.findall(r"tel:", llmc.read_text())),
        ("llmc", "grad_norm"): len(re.findall(r"norm:", llmc.read_text())),
        ("muon", "loss"): len(re.findall(r"train_loss:", muon.read_text())),
        ("muon", "eval_loss"): len(re.findall(r"val_loss:", muon.read_text())),
        ("muon", "step_avg"): len(re.findall(r"step_avg:\d", muon.read_text())),
    }
    rows = logs.query("SELECT run, name, count(*) AS n FROM scalars GROUP BY 1, 2")
    found = {(row["run"], row["name"]): row["n"] for row in rows}

    assert expected == {key: found.get(key, 0) for key in expected}
    assert 1 == logs.value("SELECT count(DISTINCT attempt) FROM scalars WHERE run = 'llmc'")


def test_recorded_two_column_table_is_read(logs, data):
    path = data / "textlog" / "torchtitan_llama3_cuda_losses.txt"
    report = logs.import_log(path)
    expected = [(int(step), "loss", float(loss)) for step, loss in map(str.split, path.read_text().splitlines())]

    assert expected == scalars(logs)
    assert "columns" == report.source_kind


def test_table_with_a_heading_is_read(logs):
    """Lightning's metrics.csv: empty cells are absent, quotes do not matter."""
    text = 'epoch,step,train_loss,val_loss,"lr-AdamW"\n0,9,2.5,,1e-3\n0,9,,2.25,\n1,19,nan,,1e-3\n'
    logs.import_log(logs.write("metrics.csv", text))

    assert repr(
        [
            (9, "epoch", 0.0),
            (9, "loss", 2.5),
            (9, "lr-AdamW", 0.001),
            (9, "epoch", 0.0),
            (9, "eval_loss", 2.25),
            (19, "epoch", 1.0),
            (19, "loss", math.nan),
            (19, "lr-AdamW", 0.001),
        ]
    ) == repr(scalars(logs))


def test_row_with_other_width_or_without_line_end_is_counted(logs):
    report = logs.import_log(logs.write("losses.txt", "1 2.5\n2 2.4\n3 2.3 9\n4 2.2\n5 oops\n6 2."))

    assert [1, 2, 4] == [step for step, _, _ in scalars(logs)]
    assert [3, 5, 6] == [fault.line for fault in report.faults]


@pytest.mark.parametrize(
    "text",
    ["hello world\n" * 10, "name,step,max,min\nw,1,2,3\n", "1 2\n1 2\n1 2\n", "3.5 2\n4.5 2\n", "key: value\n", ""],
)
def test_table_without_training_values_is_not_detected(tmp_path, text):
    path = tmp_path / "some.txt"
    path.write_text(text)

    assert 0.0 == Columns().detect(path, text.encode()).confidence
    assert 0.0 == TextLog().detect(path, text.encode()).confidence


ALPHABET = "step iter:=/|,[]() loss0123456789.e+-nanmsGiB%\r\x1b\t"


@pytest.mark.parametrize("importer", [TextLog(), Columns()], ids=lambda importer: importer.name)
@given(text=st.binary(max_size=200) | st.text(alphabet=ALPHABET, max_size=200))
@settings(deadline=None, max_examples=examples(300))
def test_fuzzed_lines_are_read_or_rejected(tmp_path_factory, importer, text):
    body = text if isinstance(text, bytes) else text.encode()
    path = tmp_path_factory.getbasetemp() / f"{importer.name}.log"
    path.write_bytes(b"step,loss\n" + body + b"\nstep:1 loss:2 " + body)
    importer.detect(path, path.read_bytes())
    with contextlib.suppress(IngestError):
        list(importer.read(path, Faults()))


@pytest.mark.usual(2)
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["step:1 " + "a " * 4000, "step:1 " + "a" * 8000, "step:1 " + "1" * 8000, "a (b) " * 1300]
)
def test_long_lines_are_parsed_without_backtracking(tmp_path, text):
    """Patterns with backtracking would need seconds for these lines."""
    path = tmp_path / "train.log"
    path.write_text(f"{text}\n" * 200)
    list(TextLog().read(path, Faults()))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    ["x" + " " * 200_000 + "| it/s", "|[it/s" * 33_000, "1%||" + " " * 200_000 + "it/s", "1%|| 1/2 [0,1it/s, " * 10_000,
     "ProcessGroupNCCL error " * 9_000, ("\r" + " " * 240) * 800 + "| it/s"],
)  # fmt: skip
def test_long_lines_with_bars_are_read_without_backtracking(text):
    """These lines have 200,000 characters. A pattern that matches them in two ways needs hours."""
    bars = Bars()

    assert not bars.see(text)
    assert [text] == bar_lines(text)
    FailureLines.found_in(text, {})


def test_bar_behind_blanks_or_another_bar_is_read():
    bars = Bars()
    text = "\r" + " " * 240 + "\rEval:  50%|█ | 1/2 [0,1it/s]Epoch 3:   5%|▌ | 7/20 [00:10<01:30,  1.00s/it, loss=2.5]"

    assert bars.see(text)
    assert {"loss": 1.0, "bar_step": "7/20"} == bars.with_step({"loss": 1.0})
    assert ["epoch 3 bar_step 7 loss=2.5"] == bar_lines(text.replace("Eval:  50%|█ | 1/2 [0,1it/s]", ""))
