"""Cost of an unsampled step: switched off, and attached but not due, for two models.

The tensors are small, so that our calls dominate; a test checks that their number is equal for both models. The figure
is CPU time of the training thread in adjacent blocks of steps, in alternating order. The cost of registering and
removing the hooks of a sampled step is measured separately.
"""

from __future__ import annotations

import logging
import statistics
import time
import timeit
from collections.abc import Callable

import torch
from _rows import Row, print_rows
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.monitors.throughput import ThroughputConfig

LAYERS = (1, 24)
BLOCK_STEPS = 50
PAIRS = 24


def _block(dim: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim))


def run() -> list[Row]:
    logging.getLogger("rankscope").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # TFLOP/s has a benchmark of its own: benchmarks/throughput.py.
    common = {"console": False, "exit_wait_seconds": 0, "throughput": ThroughputConfig(method="off")}
    off = MonitorConfig(quantities=("parameters", "gradients"), **common)
    idle = MonitorConfig(quantities=("parameters", "gradients", "activations"), every=1_000_000, **common)
    rows = []
    for layers in LAYERS:
        model = nn.Sequential(*(_block(16) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        tensors = sum(1 for _ in model.parameters())
        for name, config, switch in (("switched off", off, True), ("not due, with activations", idle, False)):
            alone, extra = _pairs(model, optimizer, config, switch=switch)
            note = f"on top of {alone:.0f} us without a monitor, {100 * extra / alone:.2f} %"
            rows.append(Row(f"a step of {tensors} tensors, {name}", extra, "us", note))
        rows.append(_coming_and_going(model, optimizer, idle, tensors))
    return rows


def _coming_and_going(model: nn.Module, optimizer: torch.optim.Optimizer, config: MonitorConfig, tensors: int) -> Row:
    """Return the cost of registering the hooks of a sampled step and removing them again."""
    monitor = Monitor(config).attach(model, optimizer)
    _steps(model, optimizer, 3)
    hooks = monitor._session.hooks  # noqa: SLF001 - the calls themselves
    member = next(item for item in monitor._session.active_quantities._members if item.quantity.name == "activations")  # noqa: SLF001 - see above

    def come_and_go() -> None:
        hooks._gradients.on_sampling_decided(True)  # noqa: SLF001 - see above
        hooks._gradients.on_sampling_decided(False)  # noqa: SLF001 - see above
        member.transient.register()
        for transient in member.transient._all:  # noqa: SLF001 - see above
            transient.hook.was_called = True  # as after a sampled step
        member.transient.remove_called()

    seconds = min(timeit.repeat(come_and_go, number=1, repeat=200))
    monitor.detach()
    label, note = f"register and remove the hooks of {tensors} tensors", f"{1e6 * seconds / tensors:.2f} us per tensor"
    return Row(label, 1e6 * seconds, "us", note)


def _pairs(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: MonitorConfig, *, switch: bool
) -> tuple[float, float]:
    bare, extra = [], []
    for pair in range(PAIRS):
        monitored = lambda: _monitored(model, optimizer, config, switch=switch)  # noqa: E731 - one of two
        alone = lambda: _seconds(model, optimizer)  # noqa: E731 - the other
        first, second = (alone, monitored) if pair % 2 else (monitored, alone)
        a, b = first(), second()
        without, with_it = (a, b) if pair % 2 else (b, a)
        bare.append(without)
        extra.append(with_it - without)
    return statistics.median(bare) * 1e6, statistics.median(extra) * 1e6


def _monitored(model: nn.Module, optimizer: torch.optim.Optimizer, config: MonitorConfig, *, switch: bool) -> float:
    monitor = Monitor(config).attach(model, optimizer)
    if switch:
        monitor.switch(on=False)
    _steps(model, optimizer, 2)  # the first may be due
    seconds = _seconds(model, optimizer)
    monitor.detach()
    return seconds


def _seconds(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    began = time.thread_time()
    _steps(model, optimizer, BLOCK_STEPS)
    return (time.thread_time() - began) / BLOCK_STEPS


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    work: Callable[[], object] = lambda: model(torch.ones(1, 16)).sum().backward()  # noqa: E731 - short
    for _ in range(count):
        optimizer.zero_grad()
        work()
        optimizer.step()


if __name__ == "__main__":
    print_rows("switching", run())
