"""The configuration of small monitored runs, and everything that they published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.exporter.parts import QUIET, records_of, session_of
from torch import nn

from rankscope_contract.model.events import Event
from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.sinks.memory import Row, rows_of


def config_of(*quantities: str, **settings: Any) -> MonitorConfig:
    """Return a configuration without console output and without a wait at the end."""
    return MonitorConfig(quantities=quantities, **QUIET, **settings)


@dataclass(frozen=True, slots=True)
class Published:
    """The records of a run, before they are encoded."""

    records: Sequence[StepRecord]

    @property
    def rows(self) -> list[Row]:
        """Return the statistics of all steps."""
        return [row for record in self.records for row in rows_of(record)]

    @property
    def events(self) -> list[Event]:
        """Return the events of all steps."""
        return [event for record in self.records for event in record.events]

    @property
    def notices(self) -> list[str]:
        """Return the messages about settings, tensors and faults."""
        return [event.message for event in self.events if event.type in ("note", "fault")]

    def of(self, dataset: str) -> list[dict[str, Any]]:
        """Return the rows of another dataset, such as "features", each with its step."""
        return [{"step": record.step, **row} for record in self.records for row in getattr(record, dataset)]

    def norms(self, kind: str) -> dict[tuple[int, str], Any]:
        """Return the norms of a kind by step and tensor, except for those of single micro-batches."""
        return {
            (row.step, row.entry.tensor): row.numbers["norm"]
            for row in self.rows
            if row.entry.kind == kind and row.entry.micro_step is None
        }


def published(monitor: Monitor, seconds: float = 60.0) -> Published:
    """End the last step, and return all that was published."""
    session = session_of(monitor)
    monitor.end_step()
    assert session.publisher.catch_up(seconds)
    return Published(records_of(session))


def ended(monitor: Monitor) -> Published:
    """Detach the monitor, and return all that was published, also at its end."""
    session = session_of(monitor)
    published(monitor)
    monitor.detach()
    return Published(records_of(session))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
