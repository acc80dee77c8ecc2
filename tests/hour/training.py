"""A two-rank training for the person's hour, which writes its own record of each step, without Rankscope.

    torchrun --nproc-per-node 2 training.py PLAN
PLAN is a JSON file: `run`, `folder`, `steps`, `seconds` (duration of a step), `seed`, and faults: `nan` (`[step, rank,
tensor]`, lasts to the end), `crash` (`[step, rank]`, in the first attempt), `spike` (`[step, factor]` of the logged
loss), `loader` (`[rank, seconds]` of waiting for data in each step). `own` is true for logged metrics of its own.
"""

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope

CRASH = "disk quota exceeded on /data"
KEPT_STEPS = 5  # A checkpoint is written after each of these numbers of steps


class Loader:
    """Batches of the training. On the slow rank, each batch takes time, as from a slow disk."""

    def __init__(self, plan: dict[str, Any], rank: int, first: int) -> None:
        self.generator = torch.Generator().manual_seed(plan["seed"] * 1000 + rank)
        slow, seconds = plan.get("loader") or (-1, 0.0)
        self.seconds = seconds if slow == rank else 0.0
        self.steps = range(first, plan["steps"] + 1)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for step in self.steps:
            time.sleep(self.seconds)
            yield step, torch.randn(16, 8, generator=self.generator)


class Work(nn.Module):
    """The duration of a step on a device: the identity, which takes time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return batch


def build(plan: dict[str, Any], rank: int, attempt: int) -> tuple[nn.Module, torch.optim.Optimizer, list[int]]:
    """Return the model, its optimizer, and a list with the current step, at which a NaN is planted."""
    torch.manual_seed(plan["seed"])
    work = Work(plan["seconds"])
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), work)
    now = [0]
    at, on, name = plan.get("nan") or (0, -1, "")
    for key, parameter in net.named_parameters():
        if key == name and rank == on and attempt == 0:
            parameter.register_hook(lambda grad: grad * math.nan if now[0] == at else grad)
    return net, torch.optim.AdamW(net.parameters(), lr=3e-3), now


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(plan["folder"])
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    net, optimizer, now = build(plan, rank, attempt)
    checkpoint, first = folder / "checkpoint.pt", 1
    if checkpoint.exists():
        state = torch.load(checkpoint)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    model = DistributedDataParallel(net)
    chance = random.Random(plan["seed"])
    loader = Loader(plan, rank, first)
    config = rankscope.MonitorConfig(hyperparameters={"width": 32, "optimizer": "AdamW", "learning_rate": 3e-3})
    monitor = rankscope.Monitor(config, total_steps=plan["steps"], first_step=first).attach(model, optimizer)
    crash_at, crash_on = plan.get("crash") or (0, -1)
    spike_at, factor = plan.get("spike") or (0, 1.0)
    with monitor, (folder / f"truth-{rank}.jsonl").open("a", buffering=1) as truth:
        before = time.time()
        for step, batch in loader:
            waited = time.time() - before
            now[0] = step
            loss = ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
            loss.backward()
            if attempt == 0 and (step, rank) == (crash_at, crash_on):
                raise RuntimeError(CRASH)
            norms = {name: parameter.grad.double().norm().item() for name, parameter in net.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            shown = loss.item() * (factor if step == spike_at else 1.0)
            own: dict[str, float] = {}
            if plan.get("own"):
                own = {"my/accuracy": chance.random(), "reward": 100 * chance.random()}
                if step % 10 == 0:
                    own["val/loss"] = shown * 1.25
            monitor.log(loss=shown, tokens=batch.numel(), **own)
            done = time.time()
            line = {"rank": rank, "attempt": attempt, "step": step, "time": done, "seconds": done - before}
            truth.write(json.dumps(line | {"waited": waited, "loss": shown, "norms": norms, "own": own}) + "\n")
            before = time.time()
            if rank == 0 and step % KEPT_STEPS == 0:
                torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, checkpoint)
    dist.destroy_process_group()


main()
