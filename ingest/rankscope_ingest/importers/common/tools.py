"""The tools whose logs are read: an example of each, its axis, and the pattern of lines that have no names.

To add a tool, add one value. A tool without a pattern is read by the grammar of names and values in `pairs`, by its
keys in `objects`, or by a module of its own. The page of tools in the documentation is generated from this table, and
a test imports each example.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rankscope_ingest.importers.common.values import NUMBER

STEP: Final = "step"
IN_EPOCH: Final = "step within the epoch"
EPOCH_AXIS: Final = "epoch"
RECORD: Final = "number of the record"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One form of a log of one tool."""

    name: str
    example: str
    """Lines of a log in this form, with at least two records where one is not enough to detect the form."""
    axis: str = STEP
    """The counter by which the records follow each other."""
    loss: str | None = "loss"
    """The quantity in the log that becomes the loss; None if the example has none."""
    pattern: str | None = None
    """A regular expression with a group for each counter and quantity; `shapes` describes the names of the groups."""
    is_seen: bool = True
    """False if the form is from the documentation or the source of the tool, and no real log was available."""


_BAR = "{percent}%|█         | {at}/100 [00:10<01:30,  1.00s/it"

TOOLS: Final = (
    Tool(
        name="build-nanogpt",
        example="0 val 2.75\n0 train 2.5\n1 train 2.25",
        pattern=rf"^(?P<step>\d{{1,15}}) train (?P<loss>{NUMBER})$",
    ),
    Tool(
        name="build-nanogpt, evaluation",
        example="0 train 2.5\n0 val 2.75\n1 train 2.25",
        pattern=rf"^(?P<step>\d{{1,15}}) val (?P<val_loss>{NUMBER})$",
    ),
    Tool(
        name="Keras",
        example="Epoch 1/2\n10/10 [==============================] - 2s 20ms/step - loss: 2.5 - val_loss: 2.25\n"
        "Epoch 2/2\n10/10 [==============================] - 2s 20ms/step - loss: 2.25 - val_loss: 2.0",
        axis=EPOCH_AXIS,
        pattern=r"^(\d+)/\1 (?:\[=*\]|━+|- \d+m?s)[\s-]*(?:\d+m?s\s+)?(?:\d+[mun]?s/(?:step|epoch))?[\s-]*",
    ),
    Tool(
        name="Keras, a line per epoch",
        example="Epoch 1/2\n10/10 - 2s - 20ms/step - loss: 2.5 - val_loss: 2.25\n"
        "Epoch 2/2\n10/10 - 2s - 20ms/step - loss: 2.25 - val_loss: 2.0",
        axis=EPOCH_AXIS,
    ),
    Tool(
        name="torchtune, bar",
        example="1|10|Loss: 2.5:  10%|█         | 10/100 [00:10<01:30,  1.00s/it]",
        pattern=rf"^(?P<epoch>\d{{1,9}})\|(?P<step>\d{{1,15}})\|Loss: (?P<loss>{NUMBER}).*$",
        is_seen=False,
    ),
    Tool(
        name="torchtune, logger",
        example="Step 1 | loss:2.5 lr:2e-05 tokens_per_second_per_gpu:1234.5",
        is_seen=False,
    ),
    Tool(
        name="Composer",
        example="[batch=1/100]:\n\t Train time/batch: 0\n\t Train loss/train/total: 2.5\n"
        "[batch=2/100]:\n\t Train time/batch: 1\n\t Train loss/train/total: 2.25",
        loss="loss/train/total",
        pattern=r"^\[(?:batch|ba|iteration|iter)=(?P<step>\d{1,15})(?:/(?P<total>\d{1,15}))?\]:?$",
        is_seen=False,
    ),
    Tool(
        name="Composer, planned in epochs",
        example="[epoch=1][batch=5/10]:\n\t Train loss/train/total: 2.5\n"
        "[epoch=1][batch=6/10]:\n\t Train loss/train/total: 2.25",
        axis=IN_EPOCH,
        loss="loss/train/total",
        pattern=r"^\[epoch=(?P<epoch>\d{1,9})(?:/\d+)?\]\[batch=(?P<batch>\d{1,15})(?:/(?P<batches>\d{1,15}))?\]:?$",
        is_seen=False,
    ),
    Tool(
        name="Composer, evaluation",
        example="[batch=1/100]:\n\t Train loss/train/total: 2.5\n[batch=2/100]:\n\t Train loss/train/total: 2.25\n"
        "[Eval batch=2/2] Eval on eval data:\n\t Eval metrics/eval/CrossEntropy: 2.25",
        loss="loss/train/total",
        pattern=r"^\[Eval batch=\d+/\d+\] (?P<evaluation>Eval) on .{0,80} data:$",
        is_seen=False,
    ),
    Tool(
        name="timm",
        example="Train: 0 [  50/1251 (  4%)]  Loss: 2.5 (2.75)  LR: 1.0e-06  Data: 0.01 (0.02)",
        axis=IN_EPOCH,
        pattern=r"Train: (?P<epoch>\d{1,9}) \[\s*(?P<batch>\d{1,15})/(?P<batches>\d{1,15}) \(\s*\d+%\)\]",
        is_seen=False,
    ),
    Tool(
        name="ESPnet",
        example="[gpu1] 2026-01-17 10:00:00,123 (trainer:720) INFO: 1epoch:train:1-100batch: loss_ctc=3.5, loss=2.5",
        axis=IN_EPOCH,
        pattern=r"(?<=: )(?P<epoch>\d{1,9})epoch:train:\d{1,15}-(?P<batch>\d{1,15})batch: ",
        is_seen=False,
    ),
    Tool(
        name="Levanter",
        example="Progress on:train 10.0it/100it rate:1.5s/it remaining:02:00 elapsed:00:15 postfix:loss=2.5",
        pattern=r"Progress on:train (?P<step>\d{1,15})(?:\.\d)?it/(?P<total>\d{1,15})(?:\.\d)?it "
        r"rate:(?P<rate>\S{1,20}) remaining:(?P<remaining>\S{1,20}) elapsed:(?P<elapsed>\S{1,20}) postfix:",
        is_seen=False,
    ),
    Tool(
        name="XGBoost, LightGBM",
        example="[10]\ttrain-logloss:0.35\teval-logloss:0.4\n[11]\ttrain-logloss:0.3\teval-logloss:0.35",
        loss=None,
        pattern=r"^\[(?P<step>\d{1,15})\]\t",
        is_seen=False,
    ),
    Tool(
        name="CatBoost",
        example="0:\tlearn: 2.5\ttest: 2.66\ttotal: 50ms\tremaining: 5s\n1:\tlearn: 2.25\ttest: 2.61\ttotal: 51ms",
        loss="learn",
        pattern=rf"^(?P<step>\d{{1,15}}):\tlearn: (?P<loss>{NUMBER})",
        is_seen=False,
    ),
    Tool(
        name="Ultralytics",
        example="      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
        "        1/3      2.62G      1.155      1.387       1.19        215        640: 100%|██████| 8/8 "
        "[00:05<00:00,  1.5it/s]\n"
        "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100%|██████| 4/4\n"
        "                   all        128        929       0.66      0.542       0.61      0.451",
        axis=EPOCH_AXIS,
        loss=None,
    ),
    Tool(
        name="fastai",
        example="epoch     train_loss  valid_loss  accuracy  time\n0         2.5         2.25        0.95      00:12",
        axis=EPOCH_AXIS,
        loss="train_loss",
        is_seen=False,
    ),
    Tool(name="nanoGPT", example="iter 10: loss 2.5, time 62.3ms, mfu 3.40%"),
    Tool(name="modded-nanogpt", example="step:1/6200 train_loss:2.5 train_time:285ms", loss="train_loss"),
    Tool(name="llm.c, log file", example="s:0 trl:2.5 norm:15.4\ns:1 trl:2.25 norm:15.3", loss="trl"),
    Tool(name="llm.c, console", example="step 1/18865 | loss 2.5 | 12.3 ms | 42 tok/s"),
    Tool(name="torchtitan", example="step:  1  loss:  2.5  memory:  1.9GiB(2.0%)  tps: 1,234  mfu: 3.40%"),
    Tool(
        name="litgpt",
        example="Epoch 1 | iter 4 step 1 | loss train: 2.5, val: n/a | iter time: 421.5 ms (step)",
        loss="loss train",
    ),
    Tool(
        name="nanotron",
        example="01/17/2026 16:31:56 [INFO|DP=0|PP=0|TP=0|n0]: iteration: 1 / 10 | lm_loss: 2.5 | lr: 0.000289",
        loss="lm_loss",
    ),
    Tool(
        name="NeMo 2",
        example="Training epoch 0, iteration 1/100 | lr: 1e-05 | global_step: 1 | reduced_train_loss: 2.5",
        loss="reduced_train_loss",
    ),
    Tool(
        name="NeMo 1, bar",
        example="Epoch 0: :  10%|█         | 10/100 [00:10<01:30, v_num=0, reduced_train_loss=2.5, global_step=9.0]",
        loss="reduced_train_loss",
        is_seen=False,
    ),
    Tool(
        name="NeMo Automodel",
        example="step 1 | epoch 0 | loss 2.5000 | grad_norm 1.25 | lr 1e-05 | tps 31354.32(3919.29/gpu)",
    ),
    Tool(name="verl", example="step:10 - actor/pg_loss:0.123 - actor/grad_norm:0.5 - timing_s/step:12.5", loss=None),
    Tool(
        name="OpenRLHF",
        example=f"Train epoch [1/1]: {_BAR.format(percent=10, at=10)}, gpt_loss=2.5, lr=1e-5]",
        axis=IN_EPOCH,
        loss=None,
        is_seen=False,
    ),
    Tool(
        name="MaxText",
        example="I0117 21:54:44.943716 140 metric_logger.py:226] completed step: 1, seconds: 10.25, "
        "TFLOP/s/device: 350.8, loss: 2.5",
    ),
    Tool(
        name="fairseq, metaseq",
        example="2026-01-17 10:00:00 | INFO | train_inner | epoch 001:  10 / 100 loss=2.5, num_updates=10, lr=1e-06",
    ),
    Tool(
        name="MMEngine, mmcv",
        example="2026/01/17 10:00:00 - mmengine - INFO - Epoch(train)  [1][ 10/100]  lr: 1e-2  eta: 0:10:00  loss: 2.5",
        axis=IN_EPOCH,
    ),
    Tool(
        name="XTuner",
        example="01/17 10:00:00 - mmengine - INFO - Iter(train) [  10/1000]  lr: 1.0e-05  time: 1.5  loss: 2.5",
        is_seen=False,
    ),
    Tool(
        name="detectron2",
        example="[01/17 16:40:00 d2.utils.events]:  eta: 2 days, 12:00:00  iter: 19  total_loss: 2.5  lr: 0.006",
        loss="total_loss",
    ),
    Tool(
        name="torchvision, DETR, MAE, DINO",
        example="Epoch: [0]  [ 260/400]  eta: 0:04:26  lr: 0.1  loss: 2.5 (2.25)",
        axis=IN_EPOCH,
    ),
    Tool(
        name="DINOv2",
        example="I20260117 10:00:00 1234 dinov2 helpers.py:103] Training  [  10/1250]  lr: 0.0004 (0.0002)  "
        "total_loss: 2.5 (2.75)",
        loss="total_loss",
        is_seen=False,
    ),
    Tool(
        name="open_clip",
        example="2026-01-17,10:00:00 | INFO | Train Epoch: 0 [  1024/100000 (1%)] LR: 0.000005 Loss: 2.5 (2.75)",
        axis=IN_EPOCH,
        loss="Loss",
        is_seen=False,
    ),
    Tool(
        name="PyTorch examples (MNIST)",
        example="Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.500000",
        axis=IN_EPOCH,
        loss="Loss",
        is_seen=False,
    ),
    Tool(
        name="Lightning, bar",
        example=f"Epoch 0: {_BAR.format(percent=10, at=10)}, v_num=0, train_loss_step=2.5]",
        axis=IN_EPOCH,
        loss="train_loss_step",
        is_seen=False,
    ),
    Tool(name="kohya sd-scripts", example=f"steps: {_BAR.format(percent=10, at=10)}, avr_loss=2.5]", loss="avr_loss"),
    Tool(
        name="ColossalAI",
        example=f"Epoch 0: {_BAR.format(percent=10, at=10)}, loss=2.5, lr=1e-5]",
        axis=IN_EPOCH,
        is_seen=False,
    ),
    Tool(name="DeepSpeed", example="[Rank 0] step=10, skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]\nstep 10 loss 2.5"),
    Tool(
        name="OLMo",
        example="2026-01-17 10:00:00.123 n:0  olmo.train:908  INFO  [step=1/500,epoch=0]\n"
        "    train/CrossEntropyLoss=2.5\n2026-01-17 10:00:01.123 n:0  olmo.train:908  INFO "
        " [step=2/500,epoch=0]\n    train/CrossEntropyLoss=2.25",
        loss="train/CrossEntropyLoss",
    ),
    Tool(
        name="PaddleNLP",
        example="[2026-01-17 10:00:00,123] [    INFO] - loss: 2.5, learning_rate: 1e-05, global_step: 10, "
        "interval_runtime: 12.5",
    ),
    Tool(
        name="PaddleOCR, PaddleDetection",
        example="[2026/01/17 10:00:00] ppocr INFO: epoch: [1/20], global_step: 10, lr: 0.001, loss: 2.5, ips: "
        "32.0 samples/s",
        is_seen=False,
    ),
    Tool(
        name="MindFormers",
        example="INFO - { Epoch:[  1/  2], step:[   10/  100], loss: 2.5, per_step_time: 1234ms, lr: 1e-05, "
        "overflow cond: False }",
        axis=IN_EPOCH,
    ),
    Tool(name="MindSpore", example="epoch: 1 step: 10, loss is 2.5", axis=IN_EPOCH),
    Tool(
        name="icefall",
        example="2026-01-17 10:00:00,123 INFO [train.py:1015] (0/4) Epoch 1, batch 50, loss[loss=2.5, simple_loss=0.4, "
        "over 100.00 frames. ], tot_loss[loss=2.25, simple_loss=0.5, over 1000.00 frames. ], batch size: 10, lr: 1e-02",
        axis=IN_EPOCH,
        is_seen=False,
    ),
    Tool(
        name="SpeechBrain",
        example="epoch: 1, lr: 1.00e+00 - train loss: 2.5 - valid loss: 2.25",
        axis=EPOCH_AXIS,
        loss="train loss",
        is_seen=False,
    ),
    Tool(
        name="BigDL",
        example="[Epoch 1 16/100][Iteration 1][Wall Clock 1.5s] Trained 16.0 records in 0.5 seconds. Loss is 2.5.",
        loss="Loss",
    ),
    Tool(
        name="scripts with a line per epoch",
        example="Epoch [1/10], Loss: 2.5, Val Loss: 2.25",
        axis=EPOCH_AXIS,
        loss="Loss",
    ),
    Tool(
        name="scripts with Chinese words",
        example="第 10 步，损失：2.5，学习率：1e-5\n第 20 步，损失：2.25，学习率：1e-5",
        is_seen=False,
    ),
    Tool(
        name="Hugging Face Trainer, console",
        example="{'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 1e-05, 'epoch': 0.1}\n"
        "{'loss': 2.25, 'grad_norm': 1.2, 'learning_rate': 9e-06, 'epoch': 0.2}",
        axis=RECORD,
    ),
    Tool(
        name="LLaMA-Factory",
        example='{"current_steps": 10, "total_steps": 100, "loss": 2.5, "lr": 1e-05, "epoch": 0.1, "percentage": 10.0}',
    ),
    Tool(
        name="ms-swift",
        example="{'loss': 2.5, 'grad_norm': 1.25, 'memory(GiB)': 12.5, 'global_step/max_steps': '10/100', "
        "'train_speed(iter/s)': 0.5}",
    ),
    Tool(
        name="MMEngine, scalars.json",
        example='{"lr": 0.01, "data_time": 0.1, "loss": 2.5, "epoch": 1, "iter": 10, "memory": 1234, "step": 10}',
    ),
    Tool(
        name="detectron2, metrics.json",
        example='{"iteration": 19, "lr": 0.006, "time": 0.4, "total_loss": 2.5}',
        loss="total_loss",
        is_seen=False,
    ),
    Tool(
        name="DETR, log.txt",
        example='{"train_lr": 0.1, "train_loss": 2.5, "test_loss": 2.25, "epoch": 0}\n'
        '{"train_lr": 0.1, "train_loss": 2.25, "test_loss": 2.0, "epoch": 1}',
        axis=EPOCH_AXIS,
        loss="train_loss",
        is_seen=False,
    ),
    Tool(
        name="JSON lines without a step",
        example='{"loss": 2.5, "throughput": 100.5}\n{"loss": 2.25, "throughput": 102.5}',
        axis=RECORD,
    ),
    Tool(
        name="Keras CSVLogger", example="epoch,accuracy,loss,val_loss\n0,0.5,2.5,2.25\n1,0.6,2.25,2.0", axis=EPOCH_AXIS
    ),
    Tool(
        name="Lightning, metrics.csv",
        example="epoch,step,train_loss,val_loss\n0,49,2.5,\n0,99,2.25,2.125",
        loss="train_loss",
    ),
    Tool(
        name="YOLOv5, results.csv",
        example="               epoch,      train/box_loss,   metrics/precision,              x/lr0\n"
        "                   0,                 2.5,                0.66,               0.01",
        axis=EPOCH_AXIS,
        loss=None,
    ),
    Tool(name="W&B, history as CSV", example='"Step","run-a - loss"\n"0","2.5"\n"1","2.25"', loss=None),
)

_COMPILED: Final = [re.compile(tool.pattern) for tool in TOOLS if tool.pattern]
_AT_BEGINNING: Final = [pattern for pattern in _COMPILED if pattern.pattern.startswith("^")]
_ANYWHERE: Final = [pattern for pattern in _COMPILED if not pattern.pattern.startswith("^")]


def match_of(text: str) -> re.Match[str] | None:
    """Return the match of the pattern of a tool in `text`, or None."""
    for pattern in _AT_BEGINNING:
        if found := pattern.match(text):  # `search` would try each position of the text
            return found
    for pattern in _ANYWHERE:
        if found := pattern.search(text):
            return found
    return None
