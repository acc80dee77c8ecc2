"""One step on its way from the training thread to the publisher, and the numbers that follow from its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rankscope_contract.events import Event, EventType, Severity
from rankscope_exporter.deferred import Deferred, Row, Transfer
from rankscope_exporter.logged import Pending
from rankscope_exporter.record import Scalar
from rankscope_exporter.sampling.ops import Ops
from rankscope_exporter.statistics import HostCopy

AMOUNTS = ("tokens", "samples")
"""Logged numbers that are amounts of a step: they get a rate and a running total."""


@dataclass(slots=True)
class Draft:
    """One step, or a moment between steps."""

    step: int | None
    ts: int  # UTC microseconds
    ended_at: float | None = None  # by the monotonic clock; None where that is not known yet
    sampled: bool = False
    copy: HostCopy | None = None
    ops: Sequence[Ops] = ()  # by entry of the plan: which statistics leave the rank
    pending: list[Pending] = field(default_factory=list)
    learning_rates: list[Pending] = field(default_factory=list)
    found_inf: list[Pending] = field(default_factory=list)
    later: list[Callable[[], Iterable[Scalar]]] = field(default_factory=list)  # numbers made on the publisher's thread
    events: list[Event] = field(default_factory=list)
    deferred: list[Deferred] = field(default_factory=list)
    rows: dict[str, list[Row]] = field(default_factory=dict)  # of other datasets, by name
    call_order: list[int] = field(default_factory=list)  # by parameter: when its gradient arrived, -1 for never


def skipped_event() -> Event:
    """Return the event of a step whose optimizer changed nothing."""
    return Event(
        type=EventType.STEP_SKIPPED,
        severity=Severity.INFO,
        message="gradients were computed, the optimizer was not run",
    )


def amounts_of(pending: Iterable[Pending]) -> dict[str, float]:
    """Return what was logged as amounts; a tensor's value is not known yet and gives no rate."""
    amounts: dict[str, float] = {}
    for item in pending:
        if item.name in AMOUNTS and not isinstance(item.value, Transfer):
            amounts[item.name] = amounts.get(item.name, 0.0) + item.value
    return amounts


def timing(seconds: float, amounts: Mapping[str, float]) -> list[Pending]:
    """Return the duration of a step and its rates."""
    rates = [Pending(f"{name}_per_second", amount / seconds) for name, amount in amounts.items() if seconds > 0]
    return [Pending("step_seconds", seconds), *rates]


def now_microseconds() -> int:
    """Return the time, UTC."""
    return time.time_ns() // 1000
