"""One rank of the trainings: it reads a list of runs as JSON lines from its standard input, and trains each of them.

Each run is `{"run", "seed", "steps", "fault", "at", "scaler", "width"}`; `fault` is the name of a fault, or null. A
line of JSON, the run with its seconds, is printed after each run.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from benchmarks.detection.faults import Change, Fault, State, every_fault
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import rankscope

CONTEXT, BATCH, RATE, WARM_UP, SCHEDULE = 32, 8, 3e-3, 60, 2000
_MOST_TEXT: Final = 20_000_000

Wrapper = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """A block of attention and MLP without biases: six tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A byte-level GPT of 16 tensors; of 42,000 elements with the default width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.body = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.body(self.embedding(tokens) + self.positions.weight)))
        return logits


def library_text() -> torch.Tensor:
    """Return the source of the standard library as bytes, uint8 [characters]."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    text = b"".join(path.read_bytes() for path in sources)[:_MOST_TEXT]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Training:
    """A training of one rank. It is equal to the healthy one of its seed before the step `at` of the fault."""

    def __init__(
        self, job: dict[str, Any], text: torch.Tensor, fault: Fault | None, *, rank: int, wrapper: Wrapper | None = None
    ) -> None:
        torch.manual_seed(job["seed"])
        net = Gpt(job["width"])
        self.text, self.fault, self.at = text, fault or Fault(name="none"), job["at"]
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
        self.state = State(model=net, optimizer=self.optimizer, rank=rank)
        if (change := self.fault.gradient) is not None:
            for name, parameter in net.named_parameters():
                parameter.register_hook(lambda grad, name=name: change(self.state, name, grad))
        net.norm.register_forward_pre_hook(lambda *_: self._changed(self.fault.forward))
        self.optimizer.register_step_post_hook(lambda *_: self._changed(self.fault.update))
        self.model = net if wrapper is None else wrapper(net)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=job["scaler"])
        self.batches = torch.Generator().manual_seed(job["seed"] * 1000 + rank)
        torch.manual_seed(job["seed"] * 77 + rank)  # of faults alone

    def step(self, number: int) -> torch.Tensor:
        """Return the loss of step `number`, which is 1 at first."""
        began = time.perf_counter()
        rate = min(number / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * number / SCHEDULE))
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * rate
        self.state.step = number - self.at
        self._changed(self.fault.once if self.state.step == 0 else None)
        self._changed(self.fault.each)
        loss = self._update(self._batch())
        if self.state.step < 0:
            self.state.step_seconds += 0.05 * (time.perf_counter() - began - self.state.step_seconds)
        return loss

    def _batch(self) -> torch.Tensor:
        starts = torch.randint(len(self.text) - CONTEXT - 1, (BATCH, 1), generator=self.batches)
        batch = self.text[starts + torch.arange(CONTEXT + 1)].long()
        is_changed = self.state.step >= 0 and self.fault.batch is not None
        return self.fault.batch(self.state, batch) if is_changed else batch

    def _update(self, batch: torch.Tensor) -> torch.Tensor:
        labels = batch[:, 1:]
        if self.state.step >= 0 and self.fault.labels is not None:
            labels = self.fault.labels(self.state, labels)
        loss = functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), labels.flatten())
        self.scaler.scale(loss).backward()
        self._changed(self.fault.after_backward)
        self.scaler.unscale_(self.optimizer)
        if self.state.clip is not None:
            nn.utils.clip_grad_norm_(self.state.model.parameters(), self.state.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def _changed(self, change: Change | None) -> None:
        if self.state.step >= 0 and change is not None:
            with torch.no_grad():
                change(self.state)


def train(job: dict[str, Any], text: torch.Tensor, fault: Fault | None) -> None:
    """Train one run with a monitor of the default configuration."""
    training = Training(job, text, fault, rank=dist.get_rank(), wrapper=DistributedDataParallel)
    monitor = rankscope.Monitor({"run": job["run"]}, total_steps=job["steps"])
    with monitor.attach(training.model, training.optimizer):
        for number in range(1, job["steps"] + 1):
            monitor.log(loss=training.step(number), tokens=BATCH * CONTEXT)


def main() -> None:
    """Train all runs of the list."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text, faults = library_text(), every_fault()
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # each run has its own name
        began = time.monotonic()
        train(job, text, faults[job["fault"]] if job["fault"] else None)
        print(json.dumps(job | {"seconds": round(time.monotonic() - began, 1)}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
