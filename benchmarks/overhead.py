"""Accuracy of `rankscope_overhead_seconds_total`: its sum divided by the additional CPU time of the process.

CPU time of the whole process for the same steps with and without the monitor, alternating, without scrapes. Runs with
one and with two threads of torch, with every step sampled, and with no sampled step after the first.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any, Final

import torch
from _rows import Row, print_rows
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig

PAIRS = 6
SETTLING_STEPS = 20
CASES: Final[tuple[Any, ...]] = (
    ("12 small layers, every step, torch kernel", 1, 12, 16, 60, {"statistics": "torch"}),
    ("12 small layers, every step, compiled kernel", 1, 12, 16, 60, {}),
    ("12 small layers, not measured", 1, 12, 16, 150, {"every": 1_000_000}),
    ("4 layers of 512, every step, torch kernel", 1, 4, 512, 20, {"statistics": "torch"}),
    ("the same on two threads of torch's", 2, 4, 512, 20, {"statistics": "torch"}),
)


def run() -> list[Row]:
    logging.getLogger("rankscope").setLevel(logging.ERROR)
    return [_row(name, threads, shape, settings) for name, threads, *shape, settings in CASES]


def _row(name: str, threads: int, shape: list[int], settings: dict[str, object]) -> Row:
    layers, width, steps = shape
    torch.set_num_threads(threads)
    config = MonitorConfig.from_mapping(
        {"console": False, "exit_wait_seconds": 0, "hang_after_seconds": 0, "throughput": {"method": "off"}, **settings}
    )
    ratios, extra = [], []
    for pair in range(PAIRS):
        order = (True, False) if pair % 2 else (False, True)
        spent = {attached: _spent(config if attached else None, layers, width, steps) for attached in order}
        more = spent[True][0] - spent[False][0]
        extra.append(1e6 * more / steps)
        ratios.append(spent[True][1] / more)
    note = f"{min(ratios):.2f} to {max(ratios):.2f} in {PAIRS} pairs; {statistics.median(extra):,.0f} us more a step"
    return Row(name, statistics.median(ratios), "x", note)


def _spent(config: MonitorConfig | None, layers: int, width: int, steps: int) -> tuple[float, float]:
    """Return CPU seconds of the process, and the CPU seconds that the monitor reports as its overhead."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.Adam(net.parameters())
    inputs = torch.randn(32, width)
    monitor = Monitor(config)
    if config is not None:
        monitor.attach(net, optimizer)
    _train(net, optimizer, inputs, monitor, SETTLING_STEPS)
    before, own = time.process_time(), sum(monitor.overhead_seconds().values())
    _train(net, optimizer, inputs, monitor, steps)
    result = time.process_time() - before, sum(monitor.overhead_seconds().values()) - own
    monitor.detach()
    return result


def _train(
    net: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, monitor: Monitor, steps: int
) -> None:
    for step in range(steps):
        loss = net(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss, tokens=32)
        monitor.batch([step])
    session = monitor._session  # noqa: SLF001 - to wait for its threads
    if session is not None:
        monitor.end_step()
        session.publisher.catch_up(60)


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
