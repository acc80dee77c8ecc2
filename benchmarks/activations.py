"""Cost of activations: all inputs, outputs and gradients of 138 modules; 12 layers, d=256, batch 8x128, one thread.

Added: CPU time of our hooks and threads over that of the rest of the same step. Ratio: CPU time of the process for a
step over that of a step without a monitor in the same round. msprobe was measured on this model: with its
activations a step took 2.54 times as long, and 2.43 times when only every 1000th step was collected (also on shared
cores).
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

import torch
from _rows import Row, print_rows, ratio_with_interval
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig

ROUNDS, CALLS = 8, 100
BATCH, CONTEXT, WIDTH, LAYERS = 8, 128, 256, 12
NEVER = 1_000_000_000

CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "all": {},
    "all, torch kernel": {"statistics": "torch"},
    "forward_only": {"forward_only": True},
    "attached, no step sampled": {"start_step": NEVER},
}


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.core, self.proj = nn.Linear(WIDTH, 3 * WIDTH), Core(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Model(nn.Module):
    """138 modules, the lists that hold them included."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(1000, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def run() -> list[Row]:
    logging.getLogger("rankscope").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CONFIGURATIONS}
    for number in range(ROUNDS + 1):
        names = list(CONFIGURATIONS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = _step(model, optimizer, CONFIGURATIONS[name])
            if number:  # the first round warms up
                times[name].append(seconds)
    bare = [seconds for seconds, _ in times["without"]]
    rows = [Row("step without a monitor", 1000 * statistics.median(bare), "ms CPU")]
    for name in list(CONFIGURATIONS)[1:]:
        added = statistics.median(ours / (seconds - ours) for seconds, ours in times[name])
        pairs = [(seconds, other) for (seconds, _), other in zip(times[name], bare, strict=True)]
        ratio, low, high = ratio_with_interval(pairs)
        note = f"95 % interval {low:.3f} to {high:.3f}, {ROUNDS} rounds"
        rows += [Row(f"added, {name}", 100 * added, "%"), Row(f"ratio, {name}", ratio, "x", note)]
    return [*rows, Row("both hooks of a module call in a step that is not sampled", 1e6 * _idle_call(), "µs CPU")]


def _monitor(options: dict[str, Any] | None) -> Monitor:
    settings = dict(options or {})
    kernel = settings.pop("statistics", "auto")
    return Monitor(
        MonitorConfig(
            quantities=("activations",),
            options={"activations": settings},
            enabled=options is not None,
            statistics=kernel,
            console=False,
            exit_wait_seconds=0,
        )
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any] | None) -> tuple[float, float]:
    """Return the CPU seconds of one step, publishing included, and ours of them; after one that finds the entries."""
    monitor = _monitor(options).attach(model, optimizer)
    _train(model, optimizer)
    time.sleep(0.05)  # the publisher is done with it
    began, ours = time.process_time(), sum(monitor.overhead_seconds().values())
    _train(model, optimizer)
    monitor.end_step()
    time.sleep(0.05)
    seconds = time.process_time() - began
    ours = sum(monitor.overhead_seconds().values()) - ours
    monitor.detach()
    return seconds, ours


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    data = torch.randint(1000, (BATCH, CONTEXT + 1))
    nn.functional.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _idle_call() -> float:
    """Return the CPU seconds that both hooks of a module add to its call, the slower way through torch included."""
    net = nn.Sequential(*(nn.Identity() for _ in range(CALLS)))
    x = torch.zeros(1)
    seconds = {}
    for name, options in (("off", None), ("on", {"start_step": NEVER})):
        monitor = _monitor(options).attach(net)
        net(x)
        measured = []
        for _ in range(50):
            began = time.process_time()
            for _ in range(10):
                net(x)
            measured.append((time.process_time() - began) / 10 / CALLS)
        seconds[name] = min(measured)
        monitor.detach()
    return seconds["on"] - seconds["off"]


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
