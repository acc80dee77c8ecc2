"""Data of a record that the publisher thread reads, and the scalars that the script logged for a step.

A logged tensor is copied without waiting for the device. The publisher thread reads the copy.

Copy tensors to the host and convert them to rows of a dataset of the step record.

Each tensor is copied without waiting for the device, and the publisher thread reads the copy. Rows are made from numpy
arrays, because a torch operation on the publisher thread would start a team of OpenMP threads.

The events of a training step: one interface for all observers, and the object that calls the observers.

An observer derives from `StepObserver` and overrides methods for the events that it needs. The training waits while
such a method runs. The methods may read a clock or store a reference; they perform no I/O, do not wait, and store a
limited amount of data.

Quantities (`quantities.base.Quantity`) have methods with the same names for some of the events. These methods are
called at sampled steps only. A method that may measure gets the table to which it writes the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Final, Literal, ParamSpec

import numpy.typing as npt
import torch

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.redaction import MAX_LABEL, redacted_name
from rankscope_contract.model.scalar_names import logged_name
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.base.tracing import untransformed
from rankscope_exporter.records.step_record import Scalar, StepRecord
from rankscope_exporter.statistics.table import queued_event

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

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Transfer:
        """Start to copy `tensor` to the host.

        Never waits for the device. Afterwards `tensor` may be changed in place.
        """
        tensor = tensor.detach()
        if tensor.device.type != "cuda":
            return cls(tensor.clone())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return cls(host, queued_event(tensor.device))

    def wait(self) -> torch.Tensor:
        """Return the copied tensor on the host.

        Waits until the copy is complete; do not call it on the training thread.
        """
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
        """Return the rows that the function `rows` makes from the copied tensor.

        Called on the publisher thread; waits until the copy is complete.
        """
        return list(self.rows(self.transfer.wait().cpu().numpy()))


UNITS: Final[dict[str, str]] = {
    "tokens": "tokens",
    "samples": "samples",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "step_seconds": "seconds",
}
LABEL_OF_GROUP: Final[dict[str, str]] = {"loss": "loss", "learning_rate": "group"}
"""Name of the label of the numbers in a logged mapping, by the name under which the script logs the mapping.

A logged mapping gives one number per key, and the key is the value of the label. If a name is
not a key of LABEL_OF_GROUP, the label is `key`.
"""


@dataclass(slots=True)
class Pending:
    """One logged number: a float, or a tensor that is being copied to the host."""

    name: str
    value: float | Transfer
    labels: Mapping[str, str] = field(default_factory=dict)

    def scalar(self) -> Scalar:
        """Return the number as a scalar of the record.

        Waits until a tensor is copied; do not call it on the training thread.
        """
        value = self.value.wait() if isinstance(self.value, Transfer) else self.value
        return Scalar(self.name, float(value), UNITS.get(self.name), self.labels)


def take(name: str, value: Any) -> Iterator[Pending]:
    """Yield the numbers of a call `log(name=value)`: one number, or one per key of a mapping.

    Other names of losses, such as `val/loss`, are replaced. Yield nothing if the value is None. Raises TypeError if the
    value is not a number, ValueError for a tensor with several elements.
    """
    if value is None:
        return
    stored, labels = logged_name(name)
    if isinstance(value, Mapping):
        label = LABEL_OF_GROUP.get(stored, "key")
        for key, item in value.items():
            for pending in take(name, item):
                yield Pending(stored, pending.value, {**pending.labels, label: redacted_name(str(key), MAX_LABEL)})
    else:
        number = _copied(name, value) if isinstance(value, torch.Tensor) else float(value)
        yield Pending(stored, number, labels)


def _copied(name: str, value: torch.Tensor) -> Transfer:
    value = _without_mesh(name, untransformed(value).detach())
    if value.numel() != 1:
        raise ValueError(f"log({name}=…) takes one number, not a tensor of shape {tuple(value.shape)}")
    if value.is_complex() or value.is_meta:
        raise ValueError(f"log({name}=…) must be a real number, not a tensor of {value.dtype} on device {value.device}")
    return Transfer.of(value.reshape(()))


def _without_mesh(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor that is replicated on every rank; any other tensor unchanged.

    Raises ValueError for other DTensors.

    Reading a DTensor that is divided among ranks is a collective. On the monitor's thread, it would pair with a
    collective of the training.
    """
    placements = getattr(value, "placements", None)
    if placements is None:
        return value
    if not all(placement.is_replicate() for placement in placements):
        raise ValueError(f"log({name}=…) takes no DTensor that is divided among ranks: log its .full_tensor()")
    local: torch.Tensor = value.to_local()  # type: ignore[attr-defined]  # a DTensor: it has placements
    return local


AMOUNTS = ("tokens", "samples")
"""Names of logged numbers that are amounts per step.

Their rate per second and their running total are published as well.
"""


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


def skipped_event() -> Event:
    """Return the event of a step in which the optimizer did not update the parameters."""
    return Event(
        type=EventType.STEP_SKIPPED,
        severity=Severity.INFO,
        message="gradients were computed, but the optimizer did not run",
    )


def amounts_of(pending: Iterable[Pending]) -> dict[str, float]:
    """Return the sum of each logged amount by name.

    An amount that was logged as a tensor is left out, because its value is not known yet.
    """
    amounts: dict[str, float] = {}
    for item in pending:
        if item.name in AMOUNTS and not isinstance(item.value, Transfer):
            amounts[item.name] = amounts.get(item.name, 0.0) + item.value
    return amounts


P = ParamSpec("P")

Cause = Literal["forward", "backward", "update", "script", "end"]
"""Reason why a step ended.

With "forward", "backward" or "update", a forward pass, a backward pass or an optimizer update began the next step. With
"script", the script ended the step. With "end", training ended: the duration of the step lacks the time until a next
step, such as a wait for data, or the step raised. Neither its duration nor its rates per second are published.
"""


def timing(seconds: float, amounts: Mapping[str, float], cause: Cause) -> list[Pending]:
    """Return the duration of a step in seconds, and the rates per second of its logged amounts."""
    rates = [Pending(f"{name}_per_second", amount / seconds) for name, amount in amounts.items() if seconds > 0]
    return [] if cause == "end" else [Pending("step_seconds", seconds), *rates]


class StepObserver:
    """Base class of observers of training steps. Every event does nothing unless a subclass overrides it.

    Events are called on the training thread, with two exceptions. `on_record` is always called on the publisher thread.
    `on_step_end` is called on the publisher thread if the next step does not begin in time. The class has more than 20
    methods because it lists all events in one place.
    """

    def on_before_step(self, step: int) -> None:
        """Called before step number `step` begins. Changes of the sampling configuration take effect here."""

    def on_step_begin(self, step: int) -> None:
        """Called when a step has begun. A forward pass, a backward pass or an optimizer step follows immediately."""

    def on_sampling_decided(self, sampled: bool) -> None:  # noqa: FBT001 - an event has positional arguments
        """Called after `on_step_begin`, when it is known whether the step is sampled.

        `sampled` is true if the step is a sampled step.
        """

    def on_forward_begin(self) -> None:
        """Called when a training forward pass of the whole model begins, once for each micro-batch."""

    def on_forward_end(self) -> None:
        """Called when the training forward pass has returned or raised."""

    def on_forward_failed(self) -> None:
        """Called after `on_forward_end` if the forward pass has raised. The micro-batch does not count."""

    def on_evaluation_begin(self) -> None:
        """Called when a forward pass of the whole model begins in evaluation mode or without gradients."""

    def on_evaluation_end(self) -> None:
        """Called when the evaluation forward pass has returned or raised."""

    def on_backward_begin(self) -> None:
        """Called when the first gradient of a backward pass has reached a parameter."""

    def on_gradients_ready(self) -> None:
        """Called when all gradients of a backward pass are computed. DDP has not yet waited for its reductions."""

    def on_backward_end(self) -> None:
        """Called when the framework, such as DDP, has finished its work at the end of a backward pass."""

    def on_gradients_reduced(self) -> None:
        """Called when a framework has reduced gradients outside of a backward pass."""

    def on_optimizer_step_begin(self) -> None:
        """Called before an optimizer step.

        If the optimizer has a closure, forward and backward passes may follow inside of the optimizer step.
        """

    def on_optimizer_step_end(self) -> None:
        """Called after an optimizer step, or after the gradient scaler has skipped the step."""

    def on_update_applied(self) -> None:
        """Called when an update of the parameters is recorded.

        An update with hooks is recorded after the call of `on_optimizer_step_end`. A compiled update calls no hooks: it
        is recorded without a call of `on_optimizer_step_end`.
        """

    def on_measurement_begin(self) -> None:
        """Called before quantities read tensors at an event of a sampled step.

        This method is not called before hooks of single tensors.
        """

    def on_measurement_end(self) -> None:
        """Called when quantities have read tensors at an event of a sampled step."""

    def on_phase_begin(self, name: str) -> None:
        """Called when the script has entered the phase `name`. Phases can be nested."""

    def on_phase_end(self, name: str) -> None:
        """Called when the script has left the phase `name`, which was the innermost one."""

    def on_step_end(self, record: StepRecord) -> None:
        """Called when the step has ended. This is the last opportunity to add data to the record of the step."""

    def on_step_timed(self, record: StepRecord, cause: Cause) -> None:
        """Called when the duration of the step is known and stored in `record`.

        `cause` is the reason why the step ended.

        `record` is the record of the step. If the record of the step was published before its duration was known,
        `record` is a second record with the same step number.
        """

    def on_training_end(self) -> None:
        """Called at the end of training. The current step, if there is one, is the last one."""

    def on_record(self, record: StepRecord) -> None:
        """Called on the publisher thread when the record of a step has been published, in the order of the steps."""


class StepEvents:
    """Calls the observers of step events.

    Each event of `StepObserver` is an attribute to call: `events.on_step_begin(7)`.

    The observers are called in the given order. Observers that do not override an event are left out. An error of an
    observer is counted and logged; the other observers are called nevertheless.
    """

    def __init__(self, boundary: ErrorBoundary, observers: Sequence[StepObserver] = ()) -> None:
        def event(method: Callable[Concatenate[StepObserver, P], None]) -> Callable[P, None]:
            name = method.__name__
            calls = [getattr(item, name) for item in observers if getattr(type(item), name) is not method]

            def emit(*args: P.args, **kwargs: P.kwargs) -> None:
                for call in calls:
                    try:
                        call(*args, **kwargs)
                    except Exception as error:  # noqa: BLE001 - as the error boundary does, without another call
                        boundary.report(call.__qualname__, error)

            return emit

        self.on_before_step = event(StepObserver.on_before_step)
        self.on_step_begin = event(StepObserver.on_step_begin)
        self.on_sampling_decided = event(StepObserver.on_sampling_decided)
        self.on_forward_begin = event(StepObserver.on_forward_begin)
        self.on_forward_end = event(StepObserver.on_forward_end)
        self.on_forward_failed = event(StepObserver.on_forward_failed)
        self.on_evaluation_begin = event(StepObserver.on_evaluation_begin)
        self.on_evaluation_end = event(StepObserver.on_evaluation_end)
        self.on_backward_begin = event(StepObserver.on_backward_begin)
        self.on_gradients_ready = event(StepObserver.on_gradients_ready)
        self.on_backward_end = event(StepObserver.on_backward_end)
        self.on_gradients_reduced = event(StepObserver.on_gradients_reduced)
        self.on_optimizer_step_begin = event(StepObserver.on_optimizer_step_begin)
        self.on_optimizer_step_end = event(StepObserver.on_optimizer_step_end)
        self.on_update_applied = event(StepObserver.on_update_applied)
        self.on_measurement_begin = event(StepObserver.on_measurement_begin)
        self.on_measurement_end = event(StepObserver.on_measurement_end)
        self.on_phase_begin = event(StepObserver.on_phase_begin)
        self.on_phase_end = event(StepObserver.on_phase_end)
        self.on_step_end = event(StepObserver.on_step_end)
        self.on_step_timed = event(StepObserver.on_step_timed)
        self.on_training_end = event(StepObserver.on_training_end)
        self.on_record = event(StepObserver.on_record)
