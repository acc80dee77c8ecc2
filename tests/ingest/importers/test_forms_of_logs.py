"""Logs of tools in forms in which restarts, evaluations and averages are easily confused with rows of training."""

from __future__ import annotations

import pytest
from tests.ingest.importers.field_logs import read, series

COMPOSER = [
    line
    for batch in (1, 2, 3)
    for line in (
        f"[batch={batch}/500]:", "\t Train time/epoch: 0", f"\t Train time/token: {batch}", "\t Train time/sample: 8",
        "\t Train trainer/device_train_microbatch_size: 8", "\t Train time/remaining_estimate: 1.25",
        f"\t Train loss/train/total: {11.5 - batch}",
    )
]  # fmt: skip
KERAS = [line for e in (1, 2) for line in (f"Epoch {e}/2", f"9/9 - 5s - 50ms/step - loss: {3.5 - e} - val_loss: 4.5")]
BAR = "{name}:  {step}0%|█   | {step}/9 [00:0{step}<00:09{rate}, {rest}]"


def bars(name, rate="", rest="loss={step}.5"):
    states = [BAR.format(name=name, step=step, rate=rate, rest=rest.format(step=step)) for step in (1, 2)]
    return "\r" + "\r".join(states)


LOGS = {
    "many lines a step": (COMPOSER, {"loss": [(0, 1, 10.5), (0, 2, 9.5), (0, 3, 8.5)]}),
    "Keras, evaluation after training": (
        [*KERAS, "3/3 - 1s - loss: 0.75 - accuracy: 0.5"],
        {"loss": [(0, 1, 2.5), (0, 2, 1.5)], "eval_loss": [(0, 1, 4.5), (0, 2, 4.5), (0, 2, 0.75)]},
    ),
    "NeMo 1, bar without a rate": (
        [bars("Epoch 0: ", rest="v_num=0, reduced_train_loss={step}.5, global_step={step}.0")],
        {"loss": [(0, 1, 1.5), (0, 2, 2.5)]},
    ),
    "bar with another unit": ([bars("Epoch 0", ", 2.0batch/s")], {"loss": [(0, 1, 1.5), (0, 2, 2.5)]}),
    "bar of an evaluation": (
        [bars("Training", ", 2.0it/s"), bars("Evaluating", ", 2.0it/s", "loss={step}.25")],
        {"loss": [(0, 1, 1.5), (0, 2, 2.5)], "eval_loss": [(0, 1, 1.25), (0, 2, 2.25)]},
    ),
    "torchtitan, validation": (
        ["step: 10  loss: 2.5  tps: 5", "step: 20  loss: 2.0  tps: 5", "validate step: 20  loss: 7.5  tps: 6"],
        {"loss": [(0, 10, 2.5), (0, 20, 2.0)], "eval_loss": [(0, 20, 7.5)]},
    ),
    "icefall": (
        [
            *(
                f"Epoch 1, batch {b}, loss[loss={b}.5, ctc_loss=0.5, ], tot_loss[loss=3.5, ctc_loss=0.25, ], lr: 1e-2"
                for b in (0, 50)
            ),
            "Epoch 1, validation: loss=0.25, ctc_loss=0.125",
        ],
        {
            "loss": [(0, 0, 0.5), (0, 50, 50.5)],
            "tot_loss/loss": [(0, 0, 3.5), (0, 50, 3.5)],
            "eval_loss": [(0, None, 0.25)],
        },
    ),
    "heading of an evaluation": (
        ["Step: 1, Loss: 2.5", "Evaluation | loss: 2.75 | acc: 0.5", "Step: 2, Loss: 2.25"],
        {"loss": [(0, 1, 2.5), (0, 2, 2.25)], "eval_loss": [(0, 1, 2.75)]},
    ),
    "both losses of an epoch": (
        [f"Epoch {e} | train loss {e}.5 | val loss {e}.75" for e in (1, 2)],
        {"loss": [(0, 1, 1.5), (0, 2, 2.5)], "eval_loss": [(0, 1, 1.75), (0, 2, 2.75)]},
    ),
    "averages in padded parentheses": (
        ["Epoch: [0][  10/20]\tTime  0.512 ( 0.600)\tLoss 2.5000e+00 (2.7500e+00)"],
        {"loss": [(0, 10, 2.5)], "Time_average": [(0, 10, 0.6)]},
    ),
    "durations": (
        ["step 1 | loss 2.5 | ETA 1d 02:03:04 | elapsed: 1h 2m 3s"],
        {"remaining_seconds": [(0, 1, 93784.0)], "elapsed_seconds": [(0, 1, 3723.0)]},
    ),
    "open_clip, name behind a rate": (
        ["Train Epoch: 0 [ 10/100 (1%)] Batch (t): 0.5, 280.7/s/gpu LR: 0.001 Loss: 2.5 (2.75)"],
        {"loss": [(0, 10, 2.5)], "learning_rate": [(0, 10, 0.001)]},
    ),
    "full-width equals sign": (["第 1 步，损失＝2.5，学习率＝1e-4"], {"learning_rate": [(0, 1, 1e-4)]}),
}


@pytest.mark.parametrize("form", LOGS)
def test_form_of_a_log_is_read(tmp_path, form):
    lines, wanted = LOGS[form]
    found, _ = series(tmp_path, lines)

    assert wanted == {name: found.get(name) for name in wanted}


def test_total_of_an_evaluation_is_not_the_plan(logs):
    training = "".join(f"Iter(train) [ {step}0/1000]  lr: 1e-5  loss: 2.5\n" for step in (1, 2))
    logs.import_log(logs.write("train.log", f"{training}Iter(val) [100/100]    acc: 0.5\n"))

    assert [{"planned_steps": 1000, "state": "stopped"}] == logs.query("SELECT planned_steps, state FROM runs")


def test_number_in_parentheses_that_is_no_average_is_counted(tmp_path):
    _, faults = series(tmp_path, ["step 1 loss 2.5 time 0.5s (3.5 in total)"])

    assert faults.unkept.total()


@pytest.mark.parametrize("moment", ["I20260117 10:00:00 1234 dinov2", "2026-01-17,10:00:00 | INFO |"])
def test_complete_time_in_other_forms_is_read(tmp_path, moment):
    path = tmp_path / "train.log"
    path.write_text(f"{moment} Training  [ 10/1250]  lr: 0.5  total_loss: 2.5\n")
    rows, _ = read(path)

    assert {1768644000000000} == {row["ts"] and int(row["ts"].timestamp() * 1e6) for row in rows}
