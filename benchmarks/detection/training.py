"""One rank of the trainings: it reads a list of runs as JSON lines from its standard input, and trains each of them.

Each run is `{"run", "seed", "steps", "fault", "at", "scaler"}`; `fault` is a name of the corpus, or null. A line of
JSON is printed after each run.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
import sysconfig
import time
from typing import Any, Final

import torch
import torch.distributed as dist
from benchmarks.detection.faults import Fault, State, corpus
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import rankscope

WIDTH, CONTEXT, BATCH, WARM_UP, SCHEDULE = 32, 32, 8, 60, 2000
_MOST_TEXT: Final = 20_000_000


class Block(nn.Module):
    """A block of attention and MLP without biases: six tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(len(x), -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A byte-level GPT of 16 tensors and 42,000 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.body = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.body(self.embedding(tokens) + self.positions.weight)))
        return logits


def library_text() -> torch.Tensor:
    """Return the source of the standard library as bytes, uint8 [characters]."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    text = b"".join(path.read_bytes() for path in sources)[:_MOST_TEXT]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def train(job: dict[str, Any], text: torch.Tensor, fault: Fault | None) -> None:
    """Train one run. The training is equal to the healthy one of its seed up to the step of the fault."""
    rank = dist.get_rank()
    torch.manual_seed(job["seed"])
    net = Gpt()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    state = State(model=net, optimizer=optimizer, rank=rank)
    if fault is not None and fault.gradient is not None:
        for name, parameter in net.named_parameters():
            parameter.register_hook(lambda grad, name=name: fault.gradient(state, name, grad))
    if fault is not None and fault.update is not None:
        optimizer.register_step_post_hook(lambda *_: _within_update(state, fault))
    model = DistributedDataParallel(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=job["scaler"])
    batches = torch.Generator().manual_seed(job["seed"] * 1000 + rank)
    torch.manual_seed(job["seed"] * 77 + rank)  # of faults alone
    monitor = rankscope.Monitor({"run": job["run"]}, total_steps=job["steps"]).attach(model, optimizer)
    with monitor:
        for number in range(1, job["steps"] + 1):
            began = time.perf_counter()
            rate = min(number / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * number / SCHEDULE))
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * rate
            state.step = number - job["at"]
            loss = _step(_batch(text, batches), model, state, scaler, fault if state.step >= 0 else None)
            monitor.log(loss=loss, tokens=BATCH * CONTEXT)
            if number < job["at"]:
                state.step_seconds += 0.05 * (time.perf_counter() - began - state.step_seconds)


def _batch(text: torch.Tensor, batches: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=batches)
    return text[starts + torch.arange(CONTEXT + 1)].long()


def _step(
    batch: torch.Tensor, model: nn.Module, state: State, scaler: torch.amp.GradScaler, fault: Fault | None
) -> torch.Tensor:
    if fault is not None:
        with torch.no_grad():
            for change in (fault.once if state.step == 0 else None, fault.each):
                if change is not None:
                    change(state)
        batch = batch if fault.batch is None else fault.batch(state, batch)
    labels = batch[:, 1:]
    labels = labels if fault is None or fault.labels is None else fault.labels(state, labels)
    loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), labels.flatten())
    scaler.scale(loss).backward()
    if fault is not None and fault.after_backward is not None:
        fault.after_backward(state)
    scaler.unscale_(state.optimizer)
    if state.clip is not None:
        nn.utils.clip_grad_norm_(state.model.parameters(), state.clip)
    scaler.step(state.optimizer)
    scaler.update()
    state.optimizer.zero_grad()
    return loss.detach()


def _within_update(state: State, fault: Fault) -> None:
    if state.step >= 0 and fault.update is not None:
        with torch.no_grad():
            fault.update(state)


def main() -> None:
    """Train all runs of the list."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text, faults = library_text(), {fault.name: fault for fault in corpus()}
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # each run has its own name
        began = time.monotonic()
        train(job, text, faults[job["fault"]] if job["fault"] else None)
        print(json.dumps({"run": job["run"], "seconds": round(time.monotonic() - began, 1)}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
