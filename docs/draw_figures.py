"""Draw the pictures of `docs/figures.md` with the commands that the page shows: `python docs/draw_figures.py [FOLDER]`.

The data are synthetic and seeded. The paths of the repository's packages must be importable, as in `make test`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from tests.view.training import MAIN, Size, append, rows, run_row, write_store

from rankscope.commands import main
from rankscope_storage.api.store import Store

PICTURES = Path(__file__).parent / "pictures"
COMMANDS: dict[str, Sequence[str]] = {
    "figure-overview": ("plot", "--checkpoint", "outputs/checkpoint-873", "--dpi", "72"),
    "figure-speed": ("plot", "resnet50.jsonl", "--kind", "speed", "--dpi", "100"),
    "figure-gpu": ("plot", "resnet50.jsonl", "--kind", "gpu", "--dpi", "100"),
    "figure-compare": ("compare", *(f"outputs/checkpoint-{step}" for step in (291, 582, 873)), "--dpi", "72"),
    "figure-tensors": ("plot", MAIN, "--kind", "tensors", "--dpi", "90"),
    "figure-updates": ("plot", "llama-1b-sft", "--kind", "updates", "--dpi", "90"),
    "figure-ranks": ("plot", MAIN, "--kind", "ranks", "--dpi", "90"),
}
"""The command that draws each picture, without its option --output."""


def draw(folder: Path = PICTURES) -> None:
    """Write all pictures to `folder`, in the order of COMMANDS."""
    target = folder.absolute()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        write_logs(Path())
        write_store(Path("history"), Size(ranks=8, layers=8, steps=600))
        write_updates(Path("history"))
        for name, command in COMMANDS.items():
            run([*command, "--output", os.fspath(target / f"{name}.png")])


def run(arguments: Sequence[str]) -> None:
    """Run `rankscope` with these arguments in this process. Raises SystemExit if it fails."""
    before, sys.argv = sys.argv, ["rankscope", *arguments]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            main()
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.argv = before


def write_logs(folder: Path) -> None:
    """Write the checkpoints of a training with a spike and a range of NaN, and a log in JSONL."""
    random = np.random.default_rng(3)
    step = np.arange(1, 874)
    smooth = np.convolve(random.normal(0, 0.055, 877), np.ones(5) / 5, "valid") * 1.6
    loss = 1.05 * np.exp(-step / 160) + 6.6 * np.exp(-step / 9) + 0.3 + smooth
    loss[430:440] += 0.9 * np.exp(-np.arange(10) / 3)
    norm = 0.32 + 4 * np.exp(-step / 25) + np.abs(random.normal(0, 0.05, 873))
    norm[428:440] *= 1 + 14 * np.exp(-np.arange(12) / 3)
    norm[590:601] *= np.exp(np.linspace(0, 4.4, 11))
    for values in (loss, norm):
        values[601:618] = np.nan
    rate = 2e-4 * np.minimum(step / 87, 0.5 * (1 + np.cos(np.pi * np.clip((step - 87) / 786, 0, 1))))
    entries = [
        {"epoch": at / 291, "step": at, "loss": loss[at - 1], "learning_rate": rate[at - 1], "grad_norm": norm[at - 1]}
        for at in step.tolist()
    ]
    for last, scale in ((291, 1.25), (582, 1.1), (873, 1.0)):
        checkpoint = folder / "outputs" / f"checkpoint-{last}"
        checkpoint.mkdir(parents=True)
        history = [entry | {"loss": entry["loss"] * scale} for entry in entries[:last]]
        state = {"epoch": last / 291, "global_step": last, "max_steps": 873, "num_train_epochs": 3}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state | {"log_history": history}), encoding="utf-8")
    (folder / "resnet50.jsonl").write_text("\n".join(map(json.dumps, _metrics())) + "\n", encoding="utf-8")


def _metrics() -> list[dict[str, object]]:
    random = np.random.default_rng(9)
    step = np.arange(1, 601)
    loss = 1.4 + 2.2 * np.exp(-step / 120) + random.normal(0, 0.06, 600)
    rate = 3e-4 * np.minimum(step / 60, 0.5 * (1 + np.cos(np.pi * np.clip((step - 60) / 540, 0, 1))))
    speed = 812 + random.normal(0, 9, 600)
    speed[random.random(600) < 0.05] -= 160
    speed[99::100] -= 180
    speed[400:450] -= 190 + random.normal(0, 12, 50)
    usual = np.array([74.0, 75.0, 73.0, 74.0, 76.0, 97.0, 74.0, 75.0])
    busy = np.clip(usual + random.normal(0, 3, (600, 8)), 0, 100)
    return [
        {"step": int(at), "loss": loss[at - 1], "lr": rate[at - 1], "throughput": speed[at - 1]}
        | {"step_time_s": 512 / speed[at - 1], "global_batch_size": 512, "gpu_util": busy[at - 1].round(1).tolist()}
        for at in step
    ]


def write_updates(store: Path) -> None:
    """Write the run `llama-1b-sft` with norms of weights and of their updates, which grow in one layer before NaN."""
    random = np.random.default_rng(6)
    step = np.arange(300)
    own = {"run": "llama-1b-sft", "attempt": 0, "rank": 0, "incarnation": "llama-1b-sft-0", "seq": step, "step": step}
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    names = [f"layers.{layer}.{part}.weight" for layer in range(12) for part in parts]
    weights, updates = [], []
    for number, name in enumerate(names):
        growth = np.clip((step - 180 - abs(number - 35) * 0.8) / 30, 0, 2.3)
        ratio = 10 ** (
            -3 + 0.25 * np.sin(number * 2.1) + 0.9 * np.exp(-step / 40) + growth + random.normal(0, 0.06, 300)
        )
        ratio[step >= 260 + abs(number - 35) // 12] = np.nan
        place = own | {"ordinal": step * 100 + number}
        weights.append(rows("tensor_stats", **place, kind="param_before", tensor=name, norm=np.full(300, 40.0)))
        updates.append(rows("features", **place, kind="update_norm", module=name, value=40.0 * ratio))
    with Store.open(store).claim(owner="the pictures of the documentation") as writer:
        tables = {"tensor_stats": pa.concat_tables(weights), "features": pa.concat_tables(updates)}
        append(writer, runs=run_row("llama-1b-sft", "failed"), **tables)


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:2]))
