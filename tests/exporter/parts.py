"""Trainings with a monitor and their records, and the only access of tests to the private session of a monitor."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from rankscope_contract.model.events import Event
from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.api.session import Session
from rankscope_exporter.publish.sinks.memory import Row, rows_of
from rankscope_exporter.records.record import StepRecord

QUIET: dict[str, Any] = {"console": False, "exit_wait_seconds": 0}


def session_of(monitor: Monitor | None) -> Session:
    """Return the parts of an attached monitor: `channel` with its `ring`, `recorder`, `publisher`, and `hooks`."""
    session = None if monitor is None else monitor._session
    assert session is not None, "the monitor is not attached"
    return session


def records_of(session: Session) -> Sequence[StepRecord]:
    """Return all records in the ring, also after detach."""
    return session.channel.ring.after(-1, 1 << 30).records


class Watched:
    """A training with a monitor. All records can be read after `finish` or the `with` statement."""

    def __init__(
        self,
        net: Any,
        optimizers: Any = (),
        *,
        monitor: Monitor | None = None,
        groups: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.net, self.optimizer = net, optimizers
        self.monitor = monitor or Monitor(QUIET | settings)
        self.session = session_of(self.monitor.attach(net, optimizers, **groups or {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def publish(self) -> None:
        """End the step, and wait until it is published."""
        self.monitor.end_step()
        assert self.session.publisher.catch_up(60)

    def finish(self) -> None:
        self.publish()
        self.monitor.detach()

    @property
    def faults(self) -> int:
        return self.monitor.faults

    @property
    def records(self) -> Sequence[StepRecord]:
        return records_of(self.session)

    def rows(self, *kinds: str) -> list[Row]:
        return [row for record in self.records for row in rows_of(record, kinds)]

    def steps(self, kind: str, tensor: str | None = None) -> list[int]:
        """Return the steps with rows of a kind and, if it is given, of a tensor."""
        return list(dict.fromkeys(row.step for row in self.rows(kind) if tensor in (None, row.entry.tensor)))

    def measured(self) -> list[int]:
        return [record.step for record in self.records if record.statistics is not None and record.step is not None]

    def scalars(self, name: str) -> list[tuple[int | None, float]]:
        return [(record.step, item.value) for record in self.records for item in record.scalars if item.name == name]

    def events(self, type_: str) -> list[tuple[int | None, Event]]:
        """Return the events of a type, each with its step."""
        return [(record.step, event) for record in self.records for event in record.events if event.type == type_]

    def messages(self, type_: str) -> list[str]:
        return [str(event.message) for _, event in self.events(type_)]

    def skipped(self) -> list[int | None]:
        """Return the steps at which the optimizer was not run."""
        return [step for step, _ in self.events("step_skipped")]


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


def small() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()


class Training(Watched):
    def __init__(self, **settings: Any) -> None:
        super().__init__(*small(), **settings)

    def train(self, steps: int = 1, **logged: Any) -> None:
        for _ in range(steps):
            train(self.net, self.optimizer)
            if logged:
                self.monitor.log(**logged)


def hooks_of(net: nn.Module, *optimizers: torch.optim.Optimizer) -> int:
    """Return the number of hooks on modules and, if there are optimizers, on these and on the parameters."""
    tables: list[Any] = [table for m in net.modules() for table in (m._forward_hooks, m._forward_pre_hooks)]
    for optimizer in optimizers:
        tables += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    if optimizers:
        tables += [module._backward_hooks for module in net.modules()]
        tables += [item._post_accumulate_grad_hooks or () for item in net.parameters()]
    return sum(map(len, tables))


class CaptureRuntime:
    """A double of a device runtime that stores the capture mode of a thread."""

    def __init__(self) -> None:
        self.mode = 0
        self.modes: list[int] = []

    def exchange(self, wanted: Any) -> int:
        mode = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int)).contents
        self.mode, mode.value = mode.value, self.mode
        self.modes.append(self.mode)
        return 0
