"""Cost of live sinks on the publisher thread: 12 layers, d=256, parameters, gradients and Adam's state, one thread.

The rows are those of the model that `activations` trains; the loss is the sum of its squared parameters,
because the published rows, and so the work of a sink, do not depend on the duration of forward and backward.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _rows import Row, print_rows
from activations import Model
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.publish.sinks import event_file

ROUNDS, STEPS = 5, 8

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "without a sink": {},
    "csv, a file a step": {"csv": {}},
    "csv, 100 steps a file": {"csv": {"steps_per_file": 100}},
    "csv, 6 digits": {"csv": {"digits": 6}},
    "tensorboard": {"tensorboard": {}},
    "tensorboard without google-crc32c": {"tensorboard": {}},
    "api": {"api": {}},
}


class Squares(nn.Module):
    """Gives every parameter of the model a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()


def run() -> list[Row]:
    logging.getLogger("rankscope").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    net = Squares()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in CONFIGURATIONS}
    for number in range(ROUNDS):
        names = list(CONFIGURATIONS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            measured[name].append(_with(event_file.crc32c if "without google" in name else None, net, optimizer, name))
    bare = [seconds for seconds, _ in measured["without a sink"]]
    rows = [Row("publisher, without a sink", 1000 * statistics.median(bare), "ms CPU a step")]
    for name in list(CONFIGURATIONS)[1:]:
        added = [seconds - other for (seconds, _), other in zip(measured[name], bare, strict=True)]
        size = statistics.median(octets for _, octets in measured[name])
        spread = f"{1000 * min(added):.2f} to {1000 * max(added):.2f} in {ROUNDS} rounds"
        note = spread + (f"; {size / 1000:,.0f} kB a step" if size else "")
        rows.append(Row(f"added by {name}", 1000 * statistics.median(added), "ms CPU a step", note))
    return rows


def _with(
    crc: Callable[[bytes], int] | None, net: nn.Module, optimizer: torch.optim.Optimizer, name: str
) -> tuple[float, float]:
    """Return the CPU seconds of the publisher and the octets on disk of one step."""
    usual = event_file._crc_function  # noqa: SLF001 - which of the two a rank has
    if crc is not None:
        event_file._crc_function = lambda: crc  # type: ignore[assignment]  # noqa: SLF001 - as above
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _measure(net, optimizer, CONFIGURATIONS[name], folder)
    finally:
        event_file._crc_function = usual  # noqa: SLF001 - as above


def _measure(
    net: nn.Module, optimizer: torch.optim.Optimizer, sinks: dict[str, Any], folder: str
) -> tuple[float, float]:
    placed = {name: {**settings, **({} if name == "api" else {"folder": folder})} for name, settings in sinks.items()}
    monitor = Monitor(MonitorConfig(sinks=placed, console=False, exit_wait_seconds=0))
    monitor.attach(net, optimizer)
    _train(net, optimizer, 2)
    _settle(monitor)
    before, octets = monitor.overhead_seconds()["publisher"], _octets(folder)
    _train(net, optimizer, STEPS)
    _settle(monitor)
    seconds = (monitor.overhead_seconds()["publisher"] - before) / STEPS
    octets = _octets(folder) - octets
    monitor.detach()
    return seconds, octets / STEPS


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net().backward()
        optimizer.step()


def _settle(monitor: Monitor) -> None:
    """End the step under way and wait until it is published."""
    monitor.end_step()
    session = monitor._session  # noqa: SLF001 - no reader needs to know when the publisher is idle
    assert session is not None
    while session.publisher._queue.qsize():  # noqa: SLF001 - as above
        torch.randn(1000).sum()
    publisher = session.publisher
    last = -1.0
    while publisher.cpu_seconds != last:  # the draft that it has in hand
        last = publisher.cpu_seconds
        publisher._thread.join(0.2)  # noqa: SLF001 - as above


def _octets(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
