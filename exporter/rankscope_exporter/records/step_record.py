"""The record of one step of one rank: the interface between training and serving."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

import pyarrow as pa

from rankscope_contract.model.events import Event
from rankscope_exporter.records.pending_step import Deferred, ExpectedRows, Pending, Scalar
from rankscope_exporter.records.plan_entries import NamedPlan, PlanVersion
from rankscope_exporter.records.selection import Finished

_STEADY_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of one step for the T entries of a plan, of which each describes one measured tensor.

    `values` is a float32 array with len(plan.value_ops) * T elements: first the values of all entries for the first op,
    then for the second, and so on. A null is a missing value. `counts` is an int64 array with len(plan.count_ops) * T
    elements in the same order. An entry whose counts are null was absent at this step.
    """

    plan: NamedPlan
    values: pa.FloatArray
    counts: pa.Int64Array
    ops: Sequence[frozenset[str]] | None = None
    """Names of the statistics that are published, for each entry of the plan; None if all are published.

    The sequence may be longer than the plan; further elements are ignored.
    """
    measured: pa.Int64Array | None = None
    """Counts of all count ops, such as the number of NaN values, including those that are not published.

    None if all statistics are published (`ops` is None). Rules need the number of NaN values, because a norm does not
    show them.
    """


class StatisticsCopy(Protocol):
    """The statistics of a step on their way from the device to the host."""

    def finish(self, ops: Sequence[str]) -> Finished:
        """Wait for the copy, and return the statistics `ops`. Called once, on the publisher thread."""
        ...


@dataclass(slots=True)
class StepBacklog:
    """Counters of sampled steps.

    The number of measured steps minus the number of read steps is the number of steps that wait for the publisher. Each
    counter is changed by one thread only.
    """

    measured: int = 0
    """Steps that the training thread has measured."""
    published: int = 0
    """Steps whose statistics the publisher thread has read."""


def now_microseconds() -> int:
    """Return the current UTC time in microseconds since the epoch."""
    return time.time_ns() // 1000


def monotonic_microseconds() -> int:
    """Return the current time in microseconds of a clock that is never set and that also runs while the host sleeps."""
    return time.clock_gettime_ns(_STEADY_CLOCK) // 1000


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """All data of one step of one rank, or of a point in time between steps. The ring assigns the sequence number.

    Hooks and observers add data while the step is open. The publisher thread reads the data that were not known then,
    such as copies of tensors, and releases them before it publishes the record.
    """

    ts: int  # UTC microseconds
    step: int | None = None
    micro_step: int | None = None
    statistics: Statistics | None = None
    scalars: Sequence[Scalar] = ()
    events: list[Event] = field(default_factory=list)
    features: Sequence[Mapping[str, Any]] = ()
    histograms: Sequence[Mapping[str, Any]] = ()
    hashes: Sequence[Mapping[str, Any]] = ()
    collectives: Sequence[Mapping[str, Any]] = ()
    modules: Sequence[Mapping[str, Any]] = ()
    firing: frozenset[tuple[str, str]] = frozenset()  # (rule, kind) pairs that fire at this step
    monotonic: int | None = None  # microseconds of a clock that is never set, at the time `ts`; None if not read
    clock_offset: int = 0  # microseconds by which the wall clock was set forward since the process began
    sampled: bool = False
    ended_at: float | None = None  # seconds of time.monotonic(); None if not known yet
    is_skipped: bool | None = None  # whether the step has gradients and no update; None without the end of a step
    skip_is_certain: bool = False  # the script has ended the step

    # Read by the publisher thread, which then releases them.
    copy: StatisticsCopy | None = None
    plan: PlanVersion | None = None  # the plan of `copy`
    pending: list[Pending] = field(default_factory=list)
    learning_rates: list[Pending] = field(default_factory=list)
    found_inf: list[Pending] = field(default_factory=list)
    later: list[Callable[[], Iterable[Scalar]]] = field(default_factory=list)  # scalars computed on that thread
    deferred: list[Deferred] = field(default_factory=list)
    rows: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)  # rows of other datasets, by name
    expected: Sequence[ExpectedRows] = ()  # empty for a step without an update
    call_order: list[int] = field(default_factory=list)
    """By parameter: position of its gradient in the order of arrival, -1 if it did not arrive."""

    @classmethod
    def now(cls, step: int | None = None, **more: Any) -> Self:
        """Return a record of the present time."""
        return cls(ts=now_microseconds(), monotonic=monotonic_microseconds(), step=step, **more)

    def release(self) -> None:
        """Release the data that only the publisher thread reads: the ring keeps the record."""
        nothing: list[Any] = []
        self.pending = self.learning_rates = self.found_inf = self.later = self.deferred = self.call_order = nothing
        self.copy = self.plan = None
        self.rows, self.expected = {}, ()
