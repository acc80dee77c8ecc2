"""Runs of a model with features: published rows, notices, and final parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tests.exporter.quantities.activation_runs import published
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig


class Feature(NamedTuple):
    """The key of a row within a step."""

    kind: str
    module: str
    index: int | None = None
    micro_step: int | None = None


class FeatureRun(NamedTuple):
    """The results of a monitored run."""

    rows: dict[int, dict[Feature, float]]
    notices: list[str]
    state: dict[str, torch.Tensor]
    losses: list[float]
    faults: int


def train(
    model: nn.Module,
    losses_of: Sequence[Callable[[nn.Module, int], torch.Tensor]],
    quantities: Mapping[str, Mapping[str, Any]] | None,
    *,
    steps: int = 2,
    watched: nn.Module | None = None,
) -> FeatureRun:
    """Train `steps` steps with one loss for each micro-batch.

    `quantities` has the options of each quantity by its name. If it is None, no monitor is used.
    """
    losses: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = MonitorConfig(
        quantities=tuple(quantities or ()),
        options=quantities or {},
        enabled=quantities is not None,
        console=False,
        exit_wait_seconds=0,
        statistics="torch",
    )
    monitor = Monitor(config).attach(watched or model, optimizer)
    for step in range(1, steps + 1):
        for loss_of in losses_of:
            loss = loss_of(model, step)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    monitor.end_step()
    rows, notices = read_features(monitor, steps) if quantities is not None else ({}, [])
    monitor.detach()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return FeatureRun(rows, notices, state, losses, monitor.faults)


def read_features(monitor: Monitor, last_step: int) -> tuple[dict[int, dict[Feature, float]], list[str]]:
    """Return the features by step and the notices, after `last_step` was published."""
    records, notices = published(monitor, last_step)
    rows: dict[int, dict[Feature, float]] = {}
    for record in records:
        for row in record.features:
            assert record.step is not None
            key = Feature(row["kind"], row["module"], row["index"], row["micro_step"])
            assert key not in rows.setdefault(record.step, {}), "two rows of one name"
            rows[record.step][key] = row["value"]
    return rows, notices


def equal_bits(one: FeatureRun, other: FeatureRun) -> bool:
    """Return whether two runs have bit-identical parameters and losses."""
    return one.losses == other.losses and all(torch.equal(one.state[n], other.state[n]) for n in other.state)
