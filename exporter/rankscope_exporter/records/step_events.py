"""The events of a training step: one interface for all observers, and the object that calls the observers.

An observer derives from `StepObserver` and overrides methods for the events that it needs. The training waits while
such a method runs. The methods may read a clock or store a reference; they perform no I/O, do not wait, and store a
limited amount of data.

Quantities (`measure.quantities.base.Quantity`) have methods with the same names for some of the events. These methods
are called at sampled steps only. A method that may measure gets the table to which it writes the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Concatenate, Literal, ParamSpec

from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.pending_step import AMOUNTS, Pending
from rankscope_exporter.records.step_record import StepRecord

P = ParamSpec("P")

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

    Events are called on the training thread, with two exceptions. `on_record` is always called on the publisher thread.
    `on_step_end` is called on the publisher thread if the next step does not begin in time.
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
        self.on_sampling_decided = event(StepObserver.on_sampling_decided)
        self.on_forward_begin = event(StepObserver.on_forward_begin)
        self.on_evaluation_begin = event(StepObserver.on_evaluation_begin)
        self.on_backward_begin = event(StepObserver.on_backward_begin)
        self.on_update_applied = event(StepObserver.on_update_applied)
        self.on_step_end = event(StepObserver.on_step_end)
        self.on_step_timed = event(StepObserver.on_step_timed)
        self.on_training_end = event(StepObserver.on_training_end)
        self.on_record = event(StepObserver.on_record)
