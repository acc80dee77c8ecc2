"""The record of one step of one rank, its parts, and the events of a training step, in which observers add data to it.

Copies of tensors to the host start without waiting for the device, and the publisher thread reads them. Rows are made
from numpy arrays, because a torch operation on the publisher thread would start a team of OpenMP threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

import numpy.typing as npt
import pyarrow as pa

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.schema import canonical_labels
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.plan import Finished, NamedPlan, PlanVersion

if TYPE_CHECKING:
    import torch

    from rankscope_exporter.records.optimizer_settings import OptimizerSettings

Row = Mapping[str, Any]
"""One row of a dataset of the step record, such as `scalars`: a mapping from field names to values.

A missing field is null.
"""

Numbers = npt.NDArray[Any]
"""The elements of a tensor on the host as a numpy array. The dtype must exist in numpy; bfloat16 does not."""


@dataclass(slots=True)
class Transfer:
    """A copy of a tensor to the host, which may be in progress. A CPU tensor is copied immediately."""

    value: torch.Tensor
    copied: Any = None  # the CUDA event after the copy

    def wait(self) -> torch.Tensor:
        """Return the copied tensor on the host. Waits for the copy: not to be called on the training thread."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.value


@dataclass(slots=True)
class Deferred:
    """A tensor that is copied to the host, and the function `rows`, which converts its elements to rows.

    These rows belong to `dataset`, a dataset of the step record such as `features`.
    """

    dataset: str
    transfer: Transfer
    rows: Callable[[Numbers], Iterable[Row]]

    def read(self) -> list[Row]:
        """Return the rows made from the copied tensor. Waits for the copy, on the publisher thread."""
        return list(self.rows(self.transfer.wait().cpu().numpy()))


AMOUNTS: Final = ("tokens", "samples")
"""Names of logged numbers that are amounts per step.

Their rate per second and their running total are published as well.
"""
UNITS: Final[dict[str, str]] = {
    **dict(zip(AMOUNTS, AMOUNTS, strict=True)),
    **{f"{name}_per_second": f"{name}/s" for name in AMOUNTS},
    "step_seconds": "seconds",
}
LABEL_OF_GROUP: Final[dict[str, str]] = {"loss": "loss", "learning_rate": "group"}
"""Name of the label of the numbers in a logged mapping, by the name under which the script logs the mapping.

A logged mapping gives one number per key, and the key is the value of the label. If a name is
not a key of LABEL_OF_GROUP, the label is `key`.
"""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number that the script or the monitor has logged. `value` may be NaN or Inf.

    A scalar that was not logged has no object.
    """

    name: str
    value: float
    unit: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels_text(self) -> str | None:
        """Return the labels of this scalar as the text that the column `labels` of the dataset `scalars` contains."""
        return _labels_text(tuple(self.labels.items()))


@lru_cache(maxsize=1024)
def _labels_text(labels: tuple[tuple[str, str], ...]) -> str | None:
    return canonical_labels(dict(labels))  # a record has about ten labels, and the next record has the same ones


@dataclass(slots=True)
class Pending:
    """One logged number: a float, or a tensor that is being copied to the host."""

    name: str
    value: float | Transfer
    labels: Mapping[str, str] = field(default_factory=dict)

    def scalar(self) -> Scalar:
        """Return the number as a scalar. Waits for the copy of a tensor: not to be called on the training thread."""
        value = self.value.wait() if isinstance(self.value, Transfer) else self.value
        return Scalar(self.name, float(value), UNITS.get(self.name), self.labels)


OF_MICRO_BATCHES: Final = "grad_unreduced of micro-batches"
"""Name of the rows of `grad_unreduced` with a number of a micro-batch, as a kind of expected rows."""


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The kinds of rows of a quantity that a step with an update has, unless something is wrong.

    Kinds that are absent by definition are left out.
    """

    quantity: str
    kinds: frozenset[str] = frozenset()
    remark: str = ""
    """The likely reason if rows are absent, as text."""
    names_unmeasured: bool = False
    """True if the quantity itself names the tensors that it has never measured."""


def skipped_event(*, is_certain: bool = True) -> Event:
    """Return the event of a step in which the optimizer did not update the parameters."""
    text = "gradients were computed, but the optimizer did not run"
    hint = '; if this pass belongs to an update, set steps="explicit" and call end_step() after each update'
    message = text if is_certain else text + hint
    return Event(type=EventType.STEP_SKIPPED, severity=Severity.INFO, message=message)


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
    skip_is_certain: bool = False  # the script has ended the step, or a gradient is not finite

    # Read by the publisher thread, which then releases them.
    copy: StatisticsCopy | None = None
    plan: PlanVersion | None = None  # the plan of `copy`
    pending: list[Pending] = field(default_factory=list)
    learning_rates: list[Pending] = field(default_factory=list)
    settings: OptimizerSettings | None = None  # of the update
    is_loaded: bool = False  # since the step before, a state dict was loaded, or an optimizer was added
    updates: tuple[int, ...] = ()  # updates of each group of `settings`; empty if each had one
    found_inf: list[Pending] = field(default_factory=list)
    later: list[Callable[[], Iterable[Scalar]]] = field(default_factory=list)  # scalars computed on that thread
    deferred: list[Deferred] = field(default_factory=list)
    rows: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)  # rows of other datasets, by name
    expected: Sequence[ExpectedRows] = ()  # empty for a step without an update
    arrived: list[int] = field(default_factory=list)
    """Positions of the parameters whose gradients have arrived, in order, also several times."""

    @classmethod
    def now(cls, step: int | None = None, **more: Any) -> Self:
        """Return a record of the present time."""
        return cls(ts=now_microseconds(), monotonic=monotonic_microseconds(), step=step, **more)

    def release(self) -> None:
        """Release the data that only the publisher thread reads: the ring keeps the record."""
        nothing: list[Any] = []
        self.pending = self.learning_rates = self.found_inf = self.later = self.deferred = self.arrived = nothing
        self.copy = self.plan = None
        self.rows, self.expected = {}, ()


Cause = Literal["forward", "backward", "update", "script", "end"]
"""Reason why a step ended.

With "forward", "backward" or "update", a forward pass, a backward pass or an optimizer update began the next step. With
"script", the script ended the step. With "end", training ended: the duration of the step lacks the time until a next
step, such as a wait for data, or the step raised. Neither its duration nor its rates per second are published.
"""


def timing(seconds: float, logged: Iterable[Pending], cause: Cause) -> list[Pending]:
    """Return the duration of a step in seconds, and the rates per second of the amounts that were logged in it.

    An amount that was logged as a tensor has no rate, because its value is not known yet.
    """
    if cause == "end":
        return []
    amounts: dict[str, float] = {}
    for item in logged if seconds > 0 else ():
        if item.name in AMOUNTS and isinstance(item.value, float):
            amounts[item.name] = amounts.get(item.name, 0.0) + item.value
    found = [Pending("step_seconds", seconds)]
    for name, amount in amounts.items():
        found.append(Pending(f"{name}_per_second", amount / seconds))
    return found


class StepObserver:
    """Base class of observers of training steps. Every event does nothing unless a subclass overrides it.

    Events are called on the training thread, which waits: they perform no I/O and store a limited amount of data. There
    are two exceptions. `on_publish` and `on_anomalies` are always called on the publisher thread, and `on_step_end` if
    the next step does not begin in time.

    Quantities have methods with the same names for some of the events, which are called at sampled steps only.
    """

    def on_before_step(self, step: int) -> None:
        """Called before step number `step` begins. Changes of the sampling configuration take effect here."""

    def on_sampling_decided(self, sampled: bool) -> None:  # noqa: FBT001 - an event has positional arguments
        """Called when a step has begun. A forward pass, a backward pass or an optimizer step follows immediately.

        `sampled` is true if the step is a sampled step.
        """

    def on_forward_begin(self) -> None:
        """Called when a training forward pass of the whole model begins, once for each micro-batch."""

    def on_evaluation_begin(self) -> None:
        """Called when a forward pass of the whole model begins in evaluation mode or without gradients."""

    def on_backward_begin(self) -> None:
        """Called when the first gradient of a backward pass has reached a parameter."""

    def on_update_applied(self) -> None:
        """Called when an optimizer has stepped. A compiled update is detected later, see `training.step_tracker`."""

    def on_step_end(self, record: StepRecord) -> None:
        """Called when the step has ended. This is the last opportunity to add data to the record of the step."""

    def on_step_timed(self, record: StepRecord, cause: Cause, logged: Sequence[Pending]) -> None:
        """Called when the duration of the step is known and stored in `record`.

        `cause` is the reason why the step ended, `logged` are the numbers that were logged in it.

        `record` is the record of the step. If the record of the step was published before its duration was known,
        `record` is a second record with the same step number.
        """

    def on_training_end(self) -> None:
        """Called at the end of training. The current step, if there is one, is the last one."""

    def on_publish(self, record: StepRecord) -> None:
        """Called on the publisher thread before a record is published, in the order of the records: to add data."""

    def on_anomalies(self, step: int | None, anomalies: Sequence[Event]) -> None:
        """Called on the publisher thread when a record with anomalies, in causal order, has been published."""


class StepEvents(StepObserver):
    """Calls the observers of step events: `events.on_before_step(7)` calls this method of all observers.

    The observers are called in the given order. Observers that do not override an event are left out. An error of an
    observer is counted and logged; the other observers are called nevertheless.
    """

    def __init__(self, boundary: ErrorBoundary, observers: Sequence[StepObserver] = ()) -> None:
        def event(name: str, method: object) -> Callable[..., None]:
            calls = [getattr(item, name) for item in observers if getattr(type(item), name) is not method]

            def emit(*args: Any) -> None:
                for call in calls:
                    try:
                        call(*args)
                    except Exception as error:  # noqa: BLE001 - as the error boundary does, without another call
                        boundary.report(call.__qualname__, error)

            return emit

        events = {name: method for name, method in vars(StepObserver).items() if name.startswith("on_")}
        vars(self).update({name: event(name, method) for name, method in events.items()})
