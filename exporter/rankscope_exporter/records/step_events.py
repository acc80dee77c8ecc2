"""The events of a step: one interface for all observers, and the object that calls them.

An observer derives from `StepObserver` and overrides the events that it needs. It is called between two lines of the
training. It may read a clock or keep a reference; it performs no I/O, does not wait, and does not grow without a limit.

A quantity has the events of the same names that begin with a measurement, at sampled steps only and with the table to
write to (see `quantities.base.Quantity`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, Literal, ParamSpec

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.records.pending_step import PendingStep
from rankscope_exporter.records.step_record import StepRecord

P = ParamSpec("P")

Cause = Literal["forward", "backward", "update", "script"]
"""The reason why a step ended: the next step began with one of the first three, or the script ended it."""


class StepObserver:
    """Base class of observers of training steps. Every event does nothing unless a subclass overrides it.

    All events are called on the training thread, except `on_record`, which is called on the publisher thread, and
    `on_step_end`, which the publisher thread calls for a step that waits too long for the next one. The class has more
    than 20 methods because it lists all events in one place.
    """

    def on_before_step(self, step: int) -> None:
        """Step number `step` is about to begin. Changes of the sampling configuration take effect here."""

    def on_step_begin(self, step: int) -> None:
        """A step has begun. A forward pass, a backward pass or an optimizer step follows immediately."""

    def on_sampling_decided(self, sampled: bool) -> None:  # noqa: FBT001 - an event has positional arguments
        """The step that has just begun is a sampled step, or is not."""

    def on_forward_begin(self) -> None:
        """A training forward pass of the whole model begins; once for each micro-batch."""

    def on_forward_end(self) -> None:
        """The training forward pass has returned or raised."""

    def on_evaluation_begin(self) -> None:
        """A forward pass of the whole model begins in evaluation mode or without gradients."""

    def on_evaluation_end(self) -> None:
        """The evaluation forward pass has returned or raised."""

    def on_backward_begin(self) -> None:
        """The first gradient of a backward pass has reached a parameter."""

    def on_gradients_ready(self) -> None:
        """All gradients of the backward pass are computed. DDP has not yet waited for its reductions."""

    def on_backward_end(self) -> None:
        """The framework has finished its work at the end of the backward pass."""

    def on_gradients_reduced(self) -> None:
        """A framework has reduced gradients outside of a backward pass."""

    def on_optimizer_step_begin(self) -> None:
        """An optimizer is about to step. With a closure, forward and backward passes may follow inside the step."""

    def on_optimizer_step_end(self) -> None:
        """An optimizer has stepped, or its gradient scaler has skipped the step."""

    def on_update_applied(self) -> None:
        """An update was recorded: after `on_optimizer_step_end`, or for a compiled update in which no hook runs."""

    def on_measurement_begin(self) -> None:
        """Quantities are about to read tensors at an event of a sampled step. Hooks of single tensors do not count."""

    def on_measurement_end(self) -> None:
        """The quantities have read their tensors."""

    def on_phase_begin(self, name: str) -> None:
        """The script has entered the phase `name`. Phases can be nested."""

    def on_phase_end(self, name: str) -> None:
        """The script has left the phase `name`, which was the innermost one."""

    def on_step_end(self, pending_step: PendingStep) -> None:
        """The step has ended. This is the last opportunity to add data to its record."""

    def on_step_timed(self, pending_step: PendingStep, cause: Cause) -> None:
        """The duration of the step is known and is part of `pending_step`; `cause` names the reason of its end.

        `pending_step` is the record of the step. If that record was published before the end was known, it is a second
        record with the same step number.
        """

    def on_training_end(self) -> None:
        """No step follows the one that is still open, if there is one."""

    def on_record(self, record: StepRecord) -> None:
        """The record of a step has been published. Called on the publisher thread, in the order of the steps."""


class StepEvents:
    """Calls the observers. Each event of `StepObserver` is an attribute to call: `events.on_step_begin(7)`.

    The observers are called in the given order, those that do not override an event are left out. An error of an
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
