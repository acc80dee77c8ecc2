"""Train a small model under `TrainerMon` and collect its results: rows, features, events, files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.exporter.parts import ended
from torch import nn

from rankscope_exporter import Monitor
from rankscope_exporter.publish.sinks.memory import Row, rows_of
from rankscope_exporter.records.record import StepRecord
from rankscope_msprobe.trainer_mon import TrainerMon

QUIET: dict[str, Any] = {"console": False, "exit_wait_seconds": 0, "statistics": "torch", "switch_poll_seconds": 0.01}
"""Settings of a monitor that may be combined with msprobe's keys."""

LONG_SECONDS = 60.0


class Core(nn.Module):
    """Causal attention over `s,b,h,d` or `b,s,h,d`, as msprobe expects it, without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.is_causal = True

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query * key).mean(dim=2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.core = Core()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = x.view(*x.shape[:2], 2, 2)
        hidden = torch.tanh(self.first(x + self.core(heads, heads).repeat(1, 1, 2)))
        return self.second(hidden), hidden


class Net(nn.Module):
    """Inputs are [sequence, batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.gate = nn.Linear(4, 3)
        self.gate.top_k = 1  # type: ignore[assignment]  # what a router has
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x) * self.gate(x).softmax(-1)[..., :1]


def batch(step: int = 1) -> torch.Tensor:
    return torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(step))


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


@dataclass
class Run:
    records: Sequence[StepRecord]
    net: nn.Module
    faults: int
    folder: Path
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [row for record in self.records for row in rows_of(record, ())]

    def steps(self, *kinds: str) -> list[int]:
        return sorted({row.step for row in self.rows if not kinds or row.entry.kind in kinds})

    def kinds(self) -> set[str]:
        return {row.entry.kind for row in self.rows}

    def names(self, *kinds: str) -> set[str]:
        return {row.entry.tensor for row in self.rows if row.entry.kind in kinds}

    def slots(self, kind: str) -> set[tuple[str, int | None]]:
        return {(row.entry.tensor, row.entry.index) for row in self.rows if row.entry.kind == kind}

    def features(self) -> set[tuple[str, str]]:
        return {(row["kind"], row["module"]) for record in self.records for row in record.features}

    def dataset(self, name: str) -> list[Mapping[str, Any]]:
        return [row for record in self.records for row in getattr(record, name)]

    def said(self) -> list[str]:
        return [event.message for record in self.records for event in record.events if event.type in ("note", "fault")]

    def anomalies(self) -> list[tuple[int | None, str | None, str | None]]:
        found = ((record.step, event) for record in self.records for event in record.events)
        return [(step, event.rule, event.op) for step, event in found if event.type == "anomaly"]


def write(path: Path, document: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(document))
    return path


def train(
    folder: Path,
    document: Mapping[str, Any],
    *,
    steps: int = 2,
    micro_batches: int = 1,
    net: nn.Module | None = None,
    inputs: Callable[[int], torch.Tensor] = batch,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    during: Callable[[int, TrainerMon], None] = lambda _step, _monitor: None,
    **attaching: Any,
) -> Run:
    """Train `steps` steps under msprobe's `document`; `during` is called in each step, before the optimizer."""
    net = model() if net is None else net
    own = optimizer(net)
    monitor = TrainerMon(write(folder / "monitor_config.json", {**QUIET, "format": "api", **document}))
    monitor.set_monitor(net, optimizer=own, grad_acc_steps=micro_batches, **attaching)
    assert monitor.monitor is not None
    for step in range(1, steps + 1):
        for _ in range(micro_batches):
            net(inputs(step)).square().mean().backward()
        during(step, monitor)
        own.step()
        own.zero_grad()
    return left(monitor.monitor, net, folder, monitor.faults)


def left(monitor: Monitor, net: nn.Module, folder: Path, faults: int = 0) -> Run:
    """Detach, and return the results of the run."""
    return Run(ended(monitor).records, net, faults + monitor.faults, folder)
