"""Tests of the variants of Megatron text logs. Each S0-… number refers to a behaviour in the checklist."""

from __future__ import annotations

import json
import math

import pytest

from rankscope_ingest.importers import megatron
from rankscope_ingest.importers.common.importer import Faults, ImportedRun
from rankscope_ingest.importers.megatron import MegatronText
from rankscope_ingest.importers.megatron.rows import parse_rows

HEAD = "[2025-02-28 16:26:20] iteration {step:8d}/ 1000 | consumed samples: {samples:12d} | "
REST = (
    "elapsed time per iteration (ms): 4647.8 | throughput per GPU (TFLOP/s/GPU): 341.2 | "
    "learning rate: 3.000000E-06 | global batch size:   512 | lm loss: 9.763827E+00 | "
    "load_balancing_loss: 9.884709E-01 | loss scale: 1.0 | grad norm: 5.127 | num zeros: 111392856.0 | "
    "params norm: 2120.040 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def row(step, rest=REST):
    return HEAD.format(step=step, samples=step * 512) + rest


def read(tmp_path, text, name="train.log"):
    """Return scalars, events, the run and the faults of a log, in the order of the log."""
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    faults = Faults()
    scalars, events, run, records = [], [], None, 0
    for item in MegatronText().read(path, faults):
        if isinstance(item, ImportedRun):
            run = item
            continue
        for table, rows in (("scalars", scalars), ("events", events)):
            if table in item.tables:
                for one in item.tables[table].to_pylist():
                    one["record"] += records
                    rows.append(one)
        records += item.records
    return scalars, events, run, faults


def series(scalars, name):
    rows = sorted((one for one in scalars if one["name"] == name), key=lambda one: one["record"])
    return [(one["step"], one["value"]) for one in rows]


def test_row_becomes_scalars_with_stored_names_and_units(tmp_path):
    """S0-07, S0-16, contract 4: stored names, milliseconds become seconds, the names of the source are kept."""
    scalars, events, run, faults = read(tmp_path, row(7) + "\n")
    found = {one["name"]: (one["value"], one["unit"]) for one in scalars}

    assert {
        "samples_total": (3584.0, "samples"),
        "step_seconds": (4647.8 * 1e-3, "seconds"),
        "tflops_per_gpu": (341.2, "TFLOP/s"),
        "learning_rate": (3e-06, None),
        "global_batch_size": (512.0, "samples"),
        "loss": (9.763827, None),
        "load_balancing_loss": (0.9884709, None),
        "loss_scale": (1.0, None),
        "grad_norm": (5.127, None),
        "num_zeros": (111392856.0, None),
        "params_norm": (2120.04, None),
        "skipped_iterations": (0.0, "iterations"),
        "nan_iterations": (0.0, "iterations"),
    } == found
    assert {(7, None, 0)} == {(one["step"], one["rank"], one["attempt"]) for one in scalars}
    assert {"2025-02-28T16:26:20+00:00"} == {one["ts"].isoformat() for one in scalars}
    labels = {one["name"]: json.loads(one["labels"]) for one in scalars if one["labels"]}
    assert {"source_name": "lm loss"} == labels["loss"]
    assert "ms" == labels["step_seconds"]["source_unit"]
    assert [] == events
    assert (1000, 0) == (run.planned_steps, faults.count)


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("", None),
        (" ", None),
        ("[default7]: ", 7),
        ("[node-1:3]: ", 3),
        ("node-1: ", None),
        ("10.0.0.12: ", None),
        ("node-1: [default2]: ", 2),
        ("12: ", None),
        ("[rank5]: ", 5),
        ("[rank-7/8][INFO ] [--------trainer.py:2199] :  ", 7),
        ("\x1b[32m[default7]:\x1b[0m ", 7),
        (" 45%|####5     | 45/100 [00:10<00:12,  4.5it/s]\r", None),
        (" 45%|####5     | 45/100 [00:10<00:12,  4.5it/s] ", None),
        ("[", None),
    ],
)
@pytest.mark.parametrize("count", [1, 40])
def test_row_is_read_after_any_prefix(tmp_path, prefix, rank, count):
    """S0-07, S0-08 (variant 1): prefixes of torchrun, srun and pdsh, colours, a progress bar before the row, CRLF."""
    text = "".join(f"{prefix}{row(step)}\r\n" for step in range(1, count + 1))
    scalars, _, _, faults = read(tmp_path, text)

    assert 0 == faults.count
    assert [(step, 9.763827) for step in range(1, count + 1)] == series(scalars, "loss")
    assert {rank} == {one["rank"] for one in scalars}
    assert {"2025-02-28T16:26:20+00:00"} == {one["ts"].isoformat() for one in scalars}


@pytest.mark.parametrize(
    ("stamp", "moment"),
    [
        ("", None),
        ("[2025-02-28 16:25:40.545549] ", "2025-02-28T16:25:40.545549+00:00"),
        ("[2025-02-28T16:25:40,545] ", "2025-02-28T16:25:40.545000+00:00"),
        ("[[2025-02-28 16:25:40] ", "2025-02-28T16:25:40+00:00"),
        ("[2025-02-28T16:25:40+08:00] ", "2025-02-28T08:25:40+00:00"),
        ("[2025-02-28 16:25:40.5Z] ", "2025-02-28T16:25:40.500000+00:00"),
        ("[2025/02/28 16:25:40] ", "2025-02-28T16:25:40+00:00"),
        ("[2025-02-31 16:25:40] ", None),
        ("[20250228 16:25:40][rank-7/8][INFO ] [--------trainer.py:2199] :  ", "2025-02-28T16:25:40+00:00"),
        ("2025-02-28 16:25:40,545 INFO training: ", "2025-02-28T16:25:40.545000+00:00"),
        ("2025-02-28 16:25:40.545 | INFO     | megatron:train:12 - ", "2025-02-28T16:25:40.545000+00:00"),
    ],
)
def test_time_of_a_row_may_be_absent_or_finer(tmp_path, stamp, moment):
    """S0-08 (variant 2): no time, seconds, microseconds; an impossible date is no time."""
    body = row(1).partition("] ")[2]
    scalars, *_ = read(tmp_path, f"{stamp}{body}\n" * 6)

    assert {moment} == {one["ts"] and one["ts"].isoformat() for one in scalars}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("elapsed time per iteration (ms): 4647.8", {"step_seconds": 4647.8 * 1e-3}),
        ("elapsed time per iteration (s): 105.22", {"step_seconds": 105.22}),
        (
            "elapsed time per iteration (ms): 2098.9/2101.3",
            {"step_seconds": 2098.9 * 1e-3, "step_seconds_average": 2101.3 * 1e-3},
        ),
        (
            "tokens per GPU (tokens/s/GPU): 12130.4/12525.5",
            {"tokens_per_second_per_gpu": 12130.4, "tokens_per_second_per_gpu_average": 12525.5},
        ),
        ("TFLOPs: 149.02", {"tflops_per_gpu": 149.02}),
        ("samples per second: 19.463", {"samples_per_second": 19.463}),
        ("consumed tokens:  20155564032", {"tokens_total": 20155564032.0}),
        ("tokens per gpu per second (tgs): 3411.5", {"tokens_per_second_per_gpu": 3411.5}),
        ("actual seqlen:  2048", {"sequence_length": 2048.0}),
        ("curriculum seqlen:   72", {"curriculum_sequence_length": 72.0}),
        ("world size:   64", {"world_size": 64.0}),
        ("z_loss: 1.2E-03", {"z_loss": 1.2e-3}),
        ("mem-reserved-bytes: 123.0", {"mem-reserved-bytes": 123.0}),
        ("decoupled learning rate: 1.0E-04", {"decoupled_learning_rate": 1e-4}),
        ("learning rate: 8e-08", {"learning_rate": 8e-08}),
        ("brand new number: 42", {"brand_new_number": 42.0}),
        ("grad norm: 1,234.5", {"grad_norm": 1234.5}),
        ("consumed samples: 1,234,567", {"samples_total": 1234567.0}),
        ("learning rate: 3,000000E-06", {"learning_rate": 3e-06}),
        ("grad norm 5.127", {"grad_norm": 5.127}),
        ("elapsed time per iteration (ms) 1234.5", {"step_seconds": 1234.5 * 1e-3}),
        ("ETA: 1:02:03", {"remaining_seconds": 3723.0}),
        ("iteration state: warm", {}),
        (
            "hip mem usage/free/total/usage_ratio: 144.89GB/47.10GB/191.98GB/75.47%",
            {
                "hip_mem_usage": 144.89e9,
                "hip_mem_free": 47.10e9,
                "hip_mem_total": 191.98e9,
                "hip_mem_usage_ratio": 75.47,
            },
        ),
    ],
)
@pytest.mark.parametrize("count", [1, 12])
def test_every_key_is_stored_under_a_stored_or_its_original_name(tmp_path, part, expected, count):
    """S0-08 (variants 3, 5, 9): seconds or milliseconds, `current/average`, extra fields; both parsers agree."""
    text = "".join(f" iteration {step}/ 100 | {part} | lm loss: 1.0E+00 |\n" for step in range(1, count + 1))
    scalars, _, _, faults = read(tmp_path, text)
    found = {one["name"]: one["value"] for one in scalars if one["name"] != "loss"}

    assert expected == found
    assert 0 == faults.count
    assert count == len(series(scalars, "loss"))


@pytest.mark.parametrize(
    ("parts", "loss", "others"),
    [
        ("lm loss: 2.0 | mtp_1 loss: 3.0 | load_balancing_loss: 0.9", 2.0, {"mtp_1_loss": 3.0}),
        ("loss: 2.0 | z_loss: 1.0", 2.0, {"z_loss": 1.0}),
        ("sft loss: 1.5", 1.5, {}),
        ("mtp_1 loss: 3.0 | retrieval loss: 0.5", 0.5, {"mtp_1_loss": 3.0}),
        ("sop loss: 0.7 | lm loss: 2.5", 2.5, {"sop_loss": 0.7}),
    ],
)
def test_only_the_training_loss_is_named_loss(tmp_path, parts, loss, others):
    """S0-08 (variant 4): the training loss is named loss, and other losses keep their names."""
    scalars, events, *_ = read(tmp_path, f"iteration 5/ 10 | {parts} | grad norm: 1.0 |\n")
    found = {one["name"]: one["value"] for one in scalars}

    assert loss == found["loss"]
    assert others.items() <= found.items()
    assert [] == events


@pytest.mark.parametrize("count", [1, 20])
def test_row_without_a_loss_adds_a_loss_missing_event(tmp_path, count):
    """S0-08 (variant 4): Megatron omits a loss that is not above zero, so NaN is visible as a missing loss only."""
    rest = REST.replace("lm loss: 9.763827E+00 | ", "")
    scalars, events, *_ = read(tmp_path, "".join(row(step, rest) + "\n" for step in range(1, count + 1)))

    assert [] == series(scalars, "loss")
    assert [("loss_missing", "warning", step) for step in range(1, count + 1)] == [
        (one["type"], one["severity"], one["step"]) for one in events
    ]


def test_printed_nan_and_inf_are_values(tmp_path):
    """Contract 3: NaN, Inf, absent and 0 are distinguished."""
    rest = REST.replace("9.763827E+00", "NAN").replace("5.127", "inf")
    rest = rest.replace("341.2", "-Infinity").replace("2120.040", "1e999")
    scalars, *_ = read(tmp_path, "".join(row(step, rest) + "\n" for step in range(1, 9)))
    found = {one["name"]: one["value"] for one in scalars}

    assert math.isnan(found["loss"])
    assert (math.inf, -math.inf, math.inf, 0.0) == (
        found["grad_norm"],
        found["tflops_per_gpu"],
        found["params_norm"],
        found["nan_iterations"],
    )


def test_restarts_are_counted_per_rank(tmp_path):
    """S0-09, contract 6: rank 0 returns to step 2, rank 1 does not; their rows are interleaved."""
    printed = [(0, 1), (1, 1), (0, 2), (0, 3), (1, 2), (0, 2), (1, 3), (0, 3), (1, 4), (0, 1)]
    text = "".join(f"[default{rank}]: {row(step)}\n" for rank, step in printed)
    scalars, *_ = read(tmp_path, text)
    rows = sorted((one for one in scalars if one["name"] == "loss"), key=lambda one: one["record"])

    assert [(0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 2, 1), (0, 3, 1), (0, 1, 2)] == [
        (one["rank"], one["step"], one["attempt"]) for one in rows if one["rank"] == 0
    ]
    assert [0, 0, 0, 0] == [one["attempt"] for one in rows if one["rank"] == 1]


@pytest.mark.parametrize("rows", [(), (6, 7)])
def test_start_lines_are_of_the_attempt_that_begins_with_them(tmp_path, rows):
    """A load before its first row is of the next attempt, too, if it returns to an earlier step."""
    text = "".join(f"{row(step)}\n" for step in range(1, 9))
    text += " successfully loaded checkpoint from /ckpt [ t 1, p 1 ] at iteration 5\n"
    text += "[after dataloaders are built] datetime: 2025-02-28 17:00:00\n" if rows else ""
    _, events, *_ = read(tmp_path, text + "".join(f"{row(step)}\n" for step in rows))

    want = [("checkpoint", 5, 1), ("phase", None, 1)]
    assert want[: 1 + bool(rows)] == [(one["type"], one["step"], one["attempt"]) for one in events]


def test_repeated_row_is_no_restart_but_a_repeated_step_is(tmp_path):
    """S0-09 (variant 8): several ranks print the same row; a step that runs again has another loss."""
    again = row(3).replace("9.763827E+00", "9.763999E+00")
    scalars, *_ = read(tmp_path, "\n".join([row(2), row(3), row(3), again, row(4)]) + "\n")
    rows = sorted((one for one in scalars if one["name"] == "loss"), key=lambda one: one["record"])

    assert [(2, 0), (3, 0), (3, 0), (3, 1), (4, 1)] == [(one["step"], one["attempt"]) for one in rows]


@pytest.mark.parametrize(("labels", "ranks"), [((0, 1, 2), {None}), ((0, 0, 0), {None})])
def test_srun_number_is_no_rank_if_tasks_print_different_steps(tmp_path, labels, ranks):
    text = "".join(f"{label}: {row(step)}\n" for step, label in enumerate(labels * 4, 1))
    scalars, *_ = read(tmp_path, text)

    assert ranks == {one["rank"] for one in scalars}
    assert {0} == {one["attempt"] for one in scalars}


def test_srun_number_is_the_rank_if_tasks_print_the_same_steps(tmp_path):
    text = "".join(f"{label}: {row(step)}\n" for step in range(1, 5) for label in range(3))
    scalars, *_ = read(tmp_path, text)

    assert {0, 1, 2} == {one["rank"] for one in scalars}
    assert {0} == {one["attempt"] for one in scalars}


def wrapped(text, width):
    return "".join(text[at : at + width] + "\n" for at in range(0, len(text), width))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 132, 160, 200, 250])
def test_rows_wrapped_at_any_width_are_joined(tmp_path, width):
    """S0-08 (variant 8): a terminal wraps lines anywhere, also in words and numbers."""
    expected, *_ = read(tmp_path, "".join(row(step) + "\n" for step in range(1, 6)), "whole.log")
    scalars, _, _, faults = read(tmp_path, "".join(wrapped(row(step), width) for step in range(1, 6)), "wrapped.log")

    assert 0 == faults.count
    assert sorted(map(str, expected)) == sorted(map(str, scalars))


def test_rows_wrapped_between_words_are_joined(tmp_path):
    """The spaces at the line breaks are missing, as in text copied from a wiki."""
    text = (
        "[default7]: iteration 42780/ 115311 | consumed samples: 714 | elapsed time per iteration (s): 1.1 | learning\n"
        " rate: 4.475E-05 | lm loss: 2.117073E+00 | grad norm: 0.1 | number of skipped iterations:  0 | number of nan\n"
        "iterations:  0 | samples per second: 19.474 | TFLOPs: 149.10 |\n"
    )
    scalars, _, _, faults = read(tmp_path, text * 2)

    assert 0 == faults.count
    assert {"learning_rate": 4.475e-05, "nan_iterations": 0.0}.items() <= {
        one["name"]: one["value"] for one in scalars
    }.items()


def test_torn_rows_are_counted_with_their_lines_and_not_stored(tmp_path):
    """S0-08 (variant 8), S3-01: the last number of an incomplete row is not stored."""
    whole = "".join(f"[default1]: {row(step)}\n" for step in range(1, 5))
    torn = "[default0]: " + row(9)[:140] + "\n"
    glued = "[default0]: " + row(9)[:140] + "[default1]: " + row(5) + "\n"
    scalars, _, _, faults = read(tmp_path, whole + torn + glued + "[default1]: " + row(6) + "\n")

    assert [(step, 9.763827) for step in range(1, 7)] == series(scalars, "loss")
    assert [5, 6] == [fault.line for fault in faults.first]
    assert {1} == {one["rank"] for one in scalars}


@pytest.mark.parametrize("count", [1, 6])
def test_row_cut_at_a_bar_adds_no_loss_missing_event(tmp_path, count):
    """S0-08 (variant 8): it has only the first keys of other rows; a row without a loss has the later keys."""
    torn = row(9).partition("learning rate")[0] + "\n"
    scalars, events, _, faults = read(tmp_path, row(8) + "\n" + torn * count + (row(10) + "\n") * 2)

    assert [] == events
    assert {8, 10} == {step for step, _ in series(scalars, "step_seconds")}
    assert [*range(2, 2 + count)] == [fault.line for fault in faults.first]


def test_row_without_its_last_key_the_loss_is_complete(tmp_path):
    text = "iteration 1/ 9 | grad norm: 1.0 | lm loss: 2.0 |\niteration 2/ 9 | grad norm: 1.0 |\n"
    _, events, _, faults = read(tmp_path, text)

    assert ["loss_missing"] == [one["type"] for one in events]
    assert 0 == faults.count


@pytest.mark.parametrize("count", [1, 12])
def test_rows_without_colons_of_early_megatron_are_read(tmp_path, count):
    text = (
        " iteration {}/  320000 | elapsed time per iteration (ms): 1234.5 | learning rate 1.5E-04 | lm loss 9.5E+00 |"
    )
    rows = "".join(f"{text.format(step * 100)} loss scale 65536.0 |\n" for step in range(1, count + 1))
    scalars, events, _, faults = read(tmp_path, rows)
    last = {one["name"]: one["value"] for one in scalars if one["step"] == count * 100}

    assert {"step_seconds": 1234.5 * 1e-3, "learning_rate": 1.5e-4, "loss": 9.5, "loss_scale": 65536.0} == last
    assert ([], 0) == (events, faults.count)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("nan", math.nan), ("-NaN", math.nan), ("-nan(ind)", math.nan), ("1.#QNAN", math.nan), ("-1.#IND00", math.nan),
        ("inf", math.inf), ("-INF", -math.inf), ("1.#INF", math.inf), ("-1.#INF00", -math.inf), ("1e400", math.inf),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 12])
def test_all_spellings_of_nan_and_inf_are_read(tmp_path, text, value, count):
    scalars, _, _, faults = read(tmp_path, f"iteration 5/ 10 | lm loss: {text} | grad norm: 1.0 |\n" * count)

    assert [repr(value)] * count == [repr(found) for _, found in series(scalars, "loss")]
    assert 0 == faults.count


@pytest.mark.parametrize("text", ["5,127", "1.2.3", "0x1F", "--5"])
def test_unreadable_number_is_reported(tmp_path, text):
    """With a comma it may be 5127 or a little above 5."""
    scalars, _, _, faults = read(tmp_path, f"iteration 5/ 10 | lm loss: 2.0 | grad norm: {text} |\n")

    assert ["loss"] == [one["name"] for one in scalars]
    assert ["part of the row is unreadable"] == [fault.text.partition(":")[0] for fault in faults.first]


def test_iteration_may_begin_with_a_capital_letter(tmp_path):
    assert [(5, 2.0)] * 9 == series(read(tmp_path, "Iteration 5/ 10 | lm loss: 2.0 |\n" * 9)[0], "loss")


def test_rows_with_many_key_sets_are_read_by_column(tmp_path, monkeypatch):
    """Some programs print the loss of each data set in turn. The parser of single rows is ten times slower."""
    careful = []
    monkeypatch.setattr(megatron, "parse_rows", lambda text: careful.append(text) or parse_rows(text))
    lines = [f"iteration {step}/ 900 | lm loss: {step}.5 | set_{step % 30} loss: 1.0 |\n" for step in range(1, 301)]
    scalars, *_ = read(tmp_path, "".join(lines))

    assert [(step, step + 0.5) for step in range(1, 301)] == series(scalars, "loss")
    assert 30 == len({one["name"] for one in scalars}) - 1
    assert 1 == len(careful)  # the last row, which may continue


def test_last_row_is_stored_when_it_is_complete(tmp_path):
    """S0-06: a log may be read at any length while it is written; its rows are always those of the whole log."""
    text = "".join(row(step) + "\n" for step in range(1, 6))
    whole = series(read(tmp_path, text)[0], "loss")
    third = len(row(3)) * 2

    for cut in range(third, third + len(row(3)) * 2 + 4, 7):
        found = series(read(tmp_path, text[:cut])[0], "loss")

        assert found == whole[: len(found)]
        assert len(found) == text[:cut].count("iterations:   0 |\n") + text[:cut].endswith("nan iterations:   0 |")


def test_row_of_nemo_is_read(tmp_path):
    text = (
        "Training epoch 0, iteration 5/99 | lr: 1.499e-07 | global_batch_size: 512 | global_step: 5 | "
        "reduced_train_loss: 10.97 | train_step_timing in s: 7.612 | consumed_samples: 3072\n"
    )
    found = {one["name"]: one["value"] for one in read(tmp_path, text)[0]}

    assert {
        "loss": 10.97,
        "step_seconds": 7.612,
        "learning_rate": 1.499e-07,
        "samples_total": 3072.0,
    }.items() <= found.items()


def test_rows_of_a_dialect_without_a_last_bar_are_complete(tmp_path):
    text = "".join(f"iteration {step}/ 100 | lm loss: 2.5 | grad norm: 1.25\n" for step in range(1, 6))
    scalars, _, _, faults = read(tmp_path, text)

    assert 0 == faults.count
    assert [(step, 1.25) for step in range(1, 6)] == series(scalars, "grad_norm")


COMPANIONS = """\
using world size: 64, data-parallel-size: 1, tensor-model-parallel size: 4, pipeline-model-parallel size: 16
------------------------ arguments ------------------------
  adam_beta1 ...................................... 0.9
  data_path ....................................... ['/data/a b_text_document']
  wandb_api_key ................................... 1234567890abcdef
  world_size ...................................... 64
-------------------- end of arguments ---------------------
[after megatron is initialized] datetime: 2021-05-23 08:23:57
 loading checkpoint from /ckpt at iteration 0
{row1}
time (ms) | forward-compute: 265.42 | optimizer: 52.20 | batch-generator: 3
[Rank 25] (after 1 iterations) memory (MB) | allocated: 17693.5 | max allocated: 19944.5[Rank 27] (after 1 iterations) \
memory (MB) | allocated: 1.0 | reserved: 2.0
(min, max) time across ranks (ms):
    forward-backward ...............................: (3290.18, 3907.08)
    optimizer ......................................: (52.20, 57.11)
{row2}
max time across ranks (ms):
    forward-backward ...............................: 3907.08
times across ranks (ms):
  forward-backward:
     rank  0: 123.50
     rank  3: 127.25
-----------------------------------------------------------------------------------------------
 validation loss at iteration 2 on validation set | lm loss value: 7.645013E+00 | lm loss PPL: 2.090196E+03 |
 validation loss at iteration 2 on test set | lm loss value: 7.5E+00 | lm loss PPL: 1.8E+03 |
saving checkpoint at iteration       2 to ./ckpt in torch_dist format
  successfully saved checkpoint from iteration       2 to ./ckpt [ t 1/1, p 1/1 ]
steps: 2 loss: 9.7638 iter time (s): 4.647 samples/sec: 110.2
Step Time : 4.65s GPU utilization: 59892.5TFLOP/s/GPU
[after training is done] datetime: 2025-10-06 03:27:07
"""


@pytest.fixture
def companions(tmp_path):
    return read(tmp_path, COMPANIONS.replace("{row1}", row(1)).replace("{row2}", row(2)))


def test_companion_lines_become_scalars(companions):
    """S0-08 (variant 7): timers, memory, validations; DeepSpeed's own line repeats the step and is ignored."""
    scalars, *_ = companions
    found = {
        (one["name"], json.loads(one["labels"] or "{}").get("timer"), one["rank"], one["step"]): one["value"]
        for one in scalars
    }

    assert 265.42 * 1e-3 == found["timer_seconds", "forward-compute", None, 1]
    assert (3290.18 * 1e-3, 3907.08 * 1e-3) == (
        found["timer_min_seconds", "forward-backward", None, 1],
        found["timer_max_seconds", "forward-backward", None, 1],
    )
    assert 57.11 * 1e-3 == found["timer_max_seconds", "optimizer", None, 1]
    assert 3907.08 * 1e-3 == found["timer_max_seconds", "forward-backward", None, 2]
    assert 127.25 * 1e-3 == found["timer_seconds", "forward-backward", 3, 2]
    assert 17693.5 * 2**20 == found["device_memory_allocated_bytes", None, 25, 1]
    assert 2.0 * 2**20 == found["device_memory_reserved_bytes", None, 27, 1]
    assert [(1, 9.763827), (2, 9.763827)] == series(scalars, "loss")
    assert [(2, 7.645013), (2, 7.5)] == series(scalars, "eval_loss")
    assert [None, '{"dataset":"test"}'] == [one["labels"] for one in scalars if one["name"] == "eval_loss"]
    assert [(2, 2090.196), (2, 1800.0)] == series(scalars, "eval_perplexity")


def test_companion_lines_become_events(companions):
    """S0-08 (variant 7), S4-10: checkpoints, evaluations, phases and the end, each with its step."""
    _, events, _, faults = companions
    details = [json.loads(one["details"] or "{}") for one in events]

    assert [
        ("phase", None),
        ("checkpoint", 0),
        ("evaluation", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("checkpoint", 2),
        ("exit", 2),
    ][1:] == [(one["type"], one["step"]) for one in events][1:]
    assert [{"action": "loading", "path": "/ckpt"}, {"action": "saving", "path": "./ckpt"}] == [details[1], details[4]]
    assert {"action": "saved", "path": "./ckpt"} == details[5]
    assert {"reason": "completed"} == details[6]
    assert "2025-10-06T03:27:07+00:00" == events[6]["ts"].isoformat()
    assert 0 == faults.count


def test_arguments_and_end_become_the_run(companions):
    """S0-15: the log reports the end; the arguments are stored without secrets."""
    run = companions[2]
    config = json.loads(run.config)

    assert ("completed", 1000, 64) == (run.state, run.planned_steps, run.world_size)
    assert {"adam_beta1": "0.9", "data_path": "['/data/a b_text_document']", "world_size": "64"} == config


@pytest.mark.parametrize(
    ("line", "kind", "state"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out_of_memory", "failed"),
        ("[rank3]: torch.distributed.DistBackendError: NCCL communicator was aborted", "nccl", "failed"),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", "nccl", "failed"),
        ("RuntimeError: CUDA error: device-side assert triggered", "cuda", "failed"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "cudnn", "failed"),
        ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "rendezvous", "failed"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "connection", "failed"),
        ("OSError: [Errno 28] No space left on device", "no_space", "failed"),
        ("PermissionError: [Errno 13] Permission denied: '/ckpt'", "permission", "failed"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'x'", "file_not_found", "failed"),
        ("Segmentation fault (core dumped)", "segmentation_fault", "failed"),
        ("Traceback (most recent call last):", "exception", "failed"),
        ("Main process received SIGTERM, exiting", "signal", "stopped"),
        ("Killing subprocess 50083", "signal", "stopped"),
        ("srun: error: node1: task 0: Killed", "signal", "stopped"),
        ("Killed", "signal", "stopped"),
        ("slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2021-05-23T08:27:11 ***", "cancelled", "stopped"),
        ("slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT … DUE TO TIME LIMIT ***", "cancelled", "stopped"),
    ],
)
def test_lines_of_errors_become_events_by_class(tmp_path, line, kind, state):
    """S0-17: error classes; one event per step however many ranks print it; the reason why the run ended."""
    _, events, run, _ = read(tmp_path, f"{row(1)}\n{line}\n{line}\n{line}\n")

    assert [("error", kind, 1)] == [(one["type"], one["op"], one["step"]) for one in events]
    assert state == run.state
    assert run.reason.startswith(kind.replace("_", " "))


@pytest.mark.parametrize("label", ["[rank3]:", "[rank3]: ", "[default3]:", "node-1: [rank3]: "])
def test_error_event_has_the_rank_that_printed_it(tmp_path, label):
    """Torch prints no space between its label and the message."""
    said = "[E501 10:00:00.12 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout"
    _, events, *_ = read(tmp_path, f"{row(1)}\n{label}{said}\n")

    assert [(3, "nccl", said)] == [(one["rank"], one["op"], one["message"]) for one in events]


def test_error_before_further_rows_does_not_end_the_run(tmp_path):
    _, events, run, _ = read(tmp_path, f"{row(1)}\nTraceback (most recent call last):\n{row(2)}\n")

    assert 1 == len(events)
    assert run.state is None


def test_run_that_reached_its_last_iteration_is_completed(tmp_path):
    """S0-15: the log does not report the end."""
    assert "completed" == read(tmp_path, row(1000) + "\n")[2].state


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        (row(1) + "\n", 0.95),
        ("noise\n" * 20_000 + "  a ....... b\n" + row(1) + "\n", 0.0),
        ("  adam_beta1 ....... 0.9\n" + "noise\n" * 20_000 + row(1) + "\n", 0.9),
        ("step 1: loss 2.0\n", 0.0),
        ("", 0.0),
    ],
)
def test_rows_are_found_after_a_long_preamble(tmp_path, text, confidence):
    path = tmp_path / "train.log"
    path.write_text(text)
    detection = MegatronText().detect(path, path.read_bytes()[:65_536])

    assert confidence == detection.confidence
    assert detection.because


COLOURED = (
    "[2025-02-28 16:26:{step:02d}] iteration {step}/ 40 | consumed samples: 5 | lm loss: 2.5 | grad norm: 1.0 |\n"
)


@pytest.mark.usual(3)
@pytest.mark.parametrize("part", ["{step}/", "iteration", "lm loss", "lm loss:", "2.5", "grad norm: 1.0", "|"])
def test_colour_within_a_row_loses_no_column(logs, part):
    coloured = COLOURED.replace(part, f"\x1b[1;32m{part}\x1b[0m")
    report = logs.import_log(logs.write("train.log", "".join(coloured.format(step=step) for step in range(1, 41))))
    rows = logs.query("SELECT name, count(*) AS n, sum(value) AS value FROM scalars GROUP BY name ORDER BY name")

    assert ("megatron", 40, 0) == (report.source_kind, report.records, report.malformed)
    assert [("grad_norm", 40, 40.0), ("loss", 40, 100.0), ("samples_total", 40, 200.0)] == [
        tuple(row.values()) for row in rows
    ]


@pytest.mark.parametrize("count", [1, 100, 3 << 20])
def test_row_behind_nul_bytes_is_read(logs, count):
    rows = [COLOURED.format(step=step) for step in range(1, 41)]
    logs.import_log(logs.write("train.log", "".join(rows[:20]) + "\0" * count + "".join(rows[20:])))

    assert list(range(1, 41)) == [row["step"] for row in logs.query("SELECT DISTINCT step FROM scalars ORDER BY step")]


def test_lone_carriage_returns_end_rows(logs):
    rows = "".join(COLOURED.format(step=step) for step in range(1, 41))
    report = logs.import_log(logs.write("train.log", rows.replace("\n", "\r")))

    assert (40, 0) == (report.records, report.malformed)
