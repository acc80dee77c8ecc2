"""Cost of a call of a collective: without interception, intercepted on an unsampled step, and measured.

The figures are minima of many repeats, which are stable on a busy machine. The called function does nothing, so that
only our code is measured. The measured call is an all-reduce of 1,000 elements in a group of one rank.
"""

from __future__ import annotations

import logging
import tempfile
import timeit
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _rows import Row, print_rows

from rankscope_exporter import Monitor, MonitorConfig

CALLS = 20_000
MEASURED_CALLS = 60
REPEATS = 15


def _nothing(_tensor: torch.Tensor) -> None:
    return None


def _attached(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Monitor:
    config = MonitorConfig(quantities=("collectives",), console=False, exit_wait_seconds=0)
    return Monitor(config).attach(net, optimizer)


def _least(call: Any, number: int) -> float:
    """Return microseconds of one call."""
    return min(timeit.repeat(call, number=number, repeat=REPEATS)) / number * 1e6


def run() -> list[Row]:
    logging.getLogger("rankscope").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tensor = torch.ones(1000)
    original: Any = dist.all_reduce
    dist.all_reduce = _nothing
    bare = _least(lambda: dist.all_reduce(tensor), CALLS)
    monitor = _attached(net, optimizer)
    closed = _least(lambda: dist.all_reduce(tensor), CALLS)
    monitor.detach()
    dist.all_reduce = original
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'group')}", rank=0, world_size=1)
        plain = _least(lambda: dist.all_reduce(tensor), MEASURED_CALLS)
        monitor = _attached(net, optimizer)
        steps = [_step(net, optimizer, tensor) for _ in range(REPEATS)]
        monitor.detach()
        dist.destroy_process_group()
    return [
        Row("on an unsampled step", (closed - bare) * 1000, "ns", "more, for each call"),
        Row("on a sampled step", min(steps) - plain, "us", f"more, 1,000 elements; the call itself {plain:.0f} us"),
    ]


def _step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> float:
    """Train a step and return microseconds of one of its calls."""
    net(torch.ones(1, 2)).sum().backward()
    cost = timeit.timeit(lambda: dist.all_reduce(tensor), number=MEASURED_CALLS) / MEASURED_CALLS * 1e6
    optimizer.step()
    optimizer.zero_grad()
    return cost


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
