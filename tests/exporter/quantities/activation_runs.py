"""Runs of one model with and without the monitor. Without it, the model records its own inputs and outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.observers.throughput import ThroughputConfig
from rankscope_exporter.records.step_record import StepRecord

KINDS = {"in": ("act_in", "act_grad_in"), "out": ("act_out", "act_grad_out")}


class Key(NamedTuple):
    """The key of a row within a step."""

    kind: str
    module: str
    number: int | None = None
    micro_step: int = 0
    call: int | None = None


class Notes:
    """References: the content of tensors when they are noted, and the gradients that `retain_grad` leaves on them."""

    def __init__(self) -> None:
        self.micro_step = 0
        self._values: dict[Key, torch.Tensor] = {}
        self._retained: dict[Key, torch.Tensor] = {}

    def __call__(
        self, side: str, module: str, tensor: torch.Tensor, number: int | None = None, call: int | None = None
    ) -> torch.Tensor:
        forward, backward = KINDS[side]
        if not tensor.is_floating_point():  # token ids and masks are not measured
            return tensor
        self._values[Key(forward, module, number, self.micro_step, call)] = tensor.detach().clone()
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.retain_grad()
            self._retained[Key(backward, module, number, self.micro_step, call)] = tensor
        return tensor

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return the tensors and their gradients. A tensor without a gradient has no entry for it."""
        gradients = {key: tensor.grad for key, tensor in self._retained.items()}
        return {**self._values, **{key: gradient for key, gradient in gradients.items() if gradient is not None}}


def nothing(_side: str, _module: str, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Record nothing, for the run with the monitor."""
    return tensor


class Run(NamedTuple):
    """The results of a monitored run: rows by step, notices, parameters and losses."""

    rows: dict[int, dict[Key, dict[str, Any]]]
    notices: list[str]
    state: dict[str, torch.Tensor]
    losses: list[float]
    faults: int
    placements: set[str]


Loss = Callable[[nn.Module, int], torch.Tensor]


def train(
    model: nn.Module, loss_of: Sequence[Loss] | Loss, steps: int, options: Mapping[str, Any] | None, *, lr: float = 0.1
) -> Run:
    """Train `steps` steps with one loss for each micro-batch. If `options` is None, no monitor is used."""
    losses: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = MonitorConfig(
        quantities=("activations",),
        options={"activations": options or {}},
        enabled=options is not None,
        console=False,
        exit_wait_seconds=0,
        statistics="torch",
        throughput=ThroughputConfig(method="off"),  # on a GPU, its absence would be one more notice
    )
    monitor = Monitor(config).attach(model, optimizer)
    for step in range(1, steps + 1):
        for one in loss_of if isinstance(loss_of, Sequence) else (loss_of,):
            loss = one(model, step)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    monitor.end_step()
    rows, notices, placements = read(monitor, steps) if options is not None else ({}, [], set())
    monitor.detach()
    state = {name: local(parameter).detach().clone() for name, parameter in model.named_parameters()}
    return Run(rows, notices, state, losses, monitor.faults, placements)


def published(monitor: Monitor, last_step: int) -> tuple[Sequence[StepRecord], list[str]]:
    """Return the records and the notices in them, after `last_step` was published."""
    session = session_of(monitor)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        records = session.channel.ring.after(-1, 1 << 30).records
        if any(record.step == last_step and record.scalars for record in records):
            break
        time.sleep(0.005)
    return records, [event.message for record in records for event in record.events if event.type in ("note", "fault")]


def read(monitor: Monitor, last_step: int) -> tuple[dict[int, dict[Key, dict[str, Any]]], list[str], set[str]]:
    """Return the rows by step and the notices, after `last_step` was published."""
    records, notices = published(monitor, last_step)
    rows: dict[int, dict[Key, dict[str, Any]]] = {}
    placements = set()
    for record in records:
        if record.step is None or record.statistics is None:
            continue
        entries = record.statistics.plan.plan.entries
        values = record.statistics.values.to_pylist()
        counts = record.statistics.counts.to_pylist()
        for position, entry in enumerate(entries):
            if counts[position] is None:
                continue
            names = ("norm", "min", "max", "mean")
            numbers = dict(zip(names, values[position :: len(entries)], strict=False))
            numbers |= dict(zip(("nans", "infs", "zeros", "numel"), counts[position :: len(entries)], strict=True))
            key = Key(entry.kind, entry.tensor, entry.index, entry.micro_step, entry.call_seq)
            assert key not in rows.setdefault(record.step, {}), "two rows of one name"
            rows[record.step][key] = numbers
            placements.add(entry.placement)
    return rows, notices, placements


def same(expected: Mapping[Key, torch.Tensor], rows: Mapping[Key, Mapping[str, Any]], rtol: float = 1e-5) -> None:
    """Assert that there is exactly one row for each tensor, with the tensor's statistics."""
    assert set(expected) == set(rows)
    for key, tensor in expected.items():
        wide = tensor.double()
        wanted = {
            "norm": float(wide.norm()),
            "min": float(wide.min()),
            "max": float(wide.max()),
            "mean": float(wide.mean()),
        }
        for op, value in wanted.items():
            scale = float(wide.abs().max())
            assert abs(value - rows[key][op]) <= rtol * max(abs(value), scale), (key, op, value, rows[key][op])
        assert (0, 0, int((tensor == 0).sum()), tensor.numel()) == tuple(
            rows[key][op] for op in ("nans", "infs", "zeros", "numel")
        ), key


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def equal_bits(one: Run, other: Run) -> bool:
    """Return whether two runs have bit-identical parameters and losses."""
    states = one.state.keys() == other.state.keys()
    return states and one.losses == other.losses and all(torch.equal(one.state[n], other.state[n]) for n in one.state)
