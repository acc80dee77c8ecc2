"""The monitor's share of a training step: 12 layers, d=256, batch 8x128, one thread, polled every 2 s.

Share: CPU of our hooks, publisher and server threads over CPU of the process, while monitored. Ratios: wall and CPU
time of blocks of steps with the monitor over the adjacent block without it, in alternating order.
"""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from _rows import Row, print_rows, ratio_with_interval
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.measure.kernels.compiled import backend_name

BLOCK_STEPS = 2
PAIRS = 16
BATCH, CONTEXT, WIDTH, LAYERS = 8, 128, 256, 12

# A reader of its own process, as the service is: it polls the record channel and throws the bytes away.
POLLER = """
import sys, time, urllib.request, urllib.error
after, lease = -1, None
while True:
    url = sys.argv[1] + f"/records?after={after}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Rankscope-Schema": "1"})) as answer:
            answer.read()
            after = int(answer.headers.get("Rankscope-Last", after))
    except OSError:
        sys.exit()
    time.sleep(2)
"""


class Model(nn.Module):
    """A byte-level transformer of 9.6 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x)))


def run() -> list[Row]:
    logging.getLogger("rankscope").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows: list[Row] = []
    for backend in ("auto", "torch"):
        config = MonitorConfig(console=False, exit_wait_seconds=0, statistics=backend)
        rows += _measure(model, optimizer, config, f"{backend_name() if backend == 'auto' else backend} kernel")
    return rows


def _measure(model: nn.Module, optimizer: torch.optim.Optimizer, config: MonitorConfig, name: str) -> list[Row]:
    wall, cpu, shares = [], [], []
    for number in range(PAIRS + 1):
        order = (True, False) if number % 2 else (False, True)
        blocks = {monitored: _block(model, optimizer, config if monitored else None) for monitored in order}
        if number:  # the first pair warms up
            wall.append((blocks[True].wall, blocks[False].wall))
            cpu.append((blocks[True].cpu, blocks[False].cpu))
            shares.append(blocks[True].ours / blocks[True].cpu)
    step = statistics.median(plain for _, plain in wall) / BLOCK_STEPS
    rows = [Row(f"share of step CPU, {name}", 100 * statistics.median(shares), "%", f"step {step * 1000:.0f} ms")]
    for what, pairs in (("wall", wall), ("CPU", cpu)):
        ratio, low, high = ratio_with_interval(pairs)
        note = f"95 % interval {low:.3f} to {high:.3f}, {PAIRS} pairs of {BLOCK_STEPS} steps"
        rows.append(Row(f"paired {what} ratio, {name}", ratio, "x", note))
    return rows


@dataclass(frozen=True, slots=True)
class _Cost:
    wall: float
    cpu: float  # of the whole process
    ours: float  # of our threads and hooks


def _block(model: nn.Module, optimizer: torch.optim.Optimizer, config: MonitorConfig | None) -> _Cost:
    monitor = Monitor(config)
    poller = None
    if config is not None:
        monitor.attach(model, optimizer)
        poller = subprocess.Popen([sys.executable, "-c", POLLER, str(monitor.address)])
    try:
        _train(model, optimizer, monitor)  # state that is made once is made here
        cpu, ours, wall = time.process_time(), _own_cpu(monitor), time.perf_counter()
        for _ in range(BLOCK_STEPS):
            _train(model, optimizer, monitor)
        monitor.end_step()
        wall = time.perf_counter() - wall
        cpu = time.process_time() - cpu
        return _Cost(wall, cpu, _own_cpu(monitor) - ours)
    finally:
        monitor.detach()
        if poller is not None:
            poller.kill()
            poller.wait()


def _own_cpu(monitor: Monitor) -> float:
    return sum(monitor.overhead_seconds().values())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: Monitor) -> None:
    data = torch.randint(256, (BATCH, CONTEXT + 1))
    loss = nn.functional.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.log(loss=loss, tokens=BATCH * CONTEXT)


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
