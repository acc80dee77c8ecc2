"""What a step costs on which nothing is measured: not attached, switched off, and activations attached but not due.

A step of 148 small tensors in 24 layers, so that hooks are all there is to see. CPU time of the training thread, blocks
of steps beside each other, the order changing from pair to pair. And the calls themselves, the least of many repeats:
that holds on a busy machine too.
"""

from __future__ import annotations

import logging
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from _rows import Row, print_rows
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig

LAYERS = 24
BLOCK_STEPS = 20
PAIRS = 24


def _block(dim: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim))


def run() -> list[Row]:
    logging.getLogger("rankscope").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(_block(16) for _ in range(LAYERS)), nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tensors = sum(1 for _ in model.parameters())
    off = MonitorConfig(quantities=("parameters", "gradients"), console=False, exit_wait_seconds=0)
    idle = MonitorConfig(
        quantities=("parameters", "gradients", "activations"), every=1_000_000, console=False, exit_wait_seconds=0
    )
    rows = []
    for name, config, switch in (("switched off", off, True), ("attached, not due, activations", idle, False)):
        alone, extra = _pairs(model, optimizer, config, switch=switch)
        note = f"{extra / tensors:.2f} us a tensor, on top of {alone:.0f} us without a monitor"
        rows.append(Row(f"a step, {name}", extra, "us", note))
    return rows + _bare_calls(model, optimizer, idle)


def _bare_calls(model: nn.Module, optimizer: torch.optim.Optimizer, config: MonitorConfig) -> list[Row]:
    """Return what the hooks of a gradient and of a module cost by themselves on a step that is not measured."""
    monitor = Monitor(config).attach(model, optimizer)
    _steps(model, optimizer, 2)
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    weight, before, after = layer.weight, *(next(iter(hooks.values())) for hooks in _hooks(layer))
    (ready,) = (weight._post_accumulate_grad_hooks or {}).values()  # noqa: SLF001 - the hook itself
    inputs = torch.ones(1, 16)
    found: list[float] = []
    # Inside of a backward pass, as torch calls it.
    probe = weight.register_post_accumulate_grad_hook(lambda _: found.append(_least(lambda: ready(weight))))
    _steps(model, optimizer, 1)
    probe.remove()
    found.append(_least(lambda: before(layer, (inputs,), {})) + _least(lambda: after(layer, (inputs,), {}, inputs)))
    monitor.detach()
    names = ("the hook of a gradient, not due", "both hooks of a module, not due")
    return [Row(name, 1e9 * seconds, "ns", "by itself") for name, seconds in zip(names, found, strict=True)]


def _hooks(layer: nn.Module) -> tuple[Any, Any]:
    return layer._forward_pre_hooks, layer._forward_hooks  # noqa: SLF001 - the hooks themselves


def _least(call: Callable[[], object], number: int = 2000) -> float:
    """Return the seconds of one call, an empty one taken off."""
    times = [min(timeit.repeat(what, number=number, repeat=50)) / number for what in (call, lambda: None)]
    return times[0] - times[1]


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
