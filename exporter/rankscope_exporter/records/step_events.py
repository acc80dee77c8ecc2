"""Events of a step on the training thread, for observers that run on every step, sampled or not.

An observer derives from `StepObserver` and implements the events that it needs. Training waits for each call. An
observer may note the time or keep a reference; it must not do I/O, wait, or accumulate data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from rankscope_exporter.base.errors import Guard
from rankscope_exporter.records.pending_step import PendingStep

Moment = Literal[
    "step_begins",
    "forward_begins",
    "forward_ended",
    "evaluation_begins",
    "evaluation_ended",
    "backward_begins",
    "backward_ends",
    "backward_ended",
    "reduced",
    "update_begins",
    "updated",
    "reading_begins",
    "reading_ended",
    "phase_begins",
    "phase_ended",
    "step_ends",
    "step_timed",
    "training_ends",
]

Cause = Literal["forward", "backward", "update", "script"]
"""Event that ends a step: the next forward pass, backward pass or update begins, or the script ends it."""


class StepObserver:
    """Base class whose methods do nothing. The framework decides which events occur, and how often."""

    def step_begins(self, step: int) -> None:
        """A step has begun with a forward pass, a backward pass or an update, whose event follows immediately."""

    def forward_begins(self) -> None:
        """A training forward pass of the whole model begins; one per micro-batch."""

    def forward_ended(self) -> None:
        """The forward pass has ended, possibly with an exception."""

    def evaluation_begins(self) -> None:
        """A forward pass of the whole model begins in evaluation mode, or without gradients."""

    def evaluation_ended(self) -> None:
        """The evaluation forward pass has ended, possibly with an exception."""

    def backward_begins(self) -> None:
        """The first gradient of a backward pass has arrived at a parameter."""

    def backward_ends(self) -> None:
        """All gradients of the pass are computed. DDP has not yet waited for its reductions."""

    def backward_ended(self) -> None:
        """The framework has completed its work at the end of a backward pass."""

    def reduced(self) -> None:
        """A framework has reduced gradients outside of a backward pass."""

    def update_begins(self) -> None:
        """An optimizer step begins. With a closure, forward and backward events may precede `updated`."""

    def updated(self) -> None:
        """The optimizer step has ended."""

    def reading_begins(self) -> None:
        """Tensors are about to be measured, on a sampled step. Tensors that hooks measure one by one cause no event."""

    def reading_ended(self) -> None:
        """The tensors were measured."""

    def phase_begins(self, name: str) -> None:
        """The script announces a phase. Phases can be nested."""

    def phase_ended(self, name: str) -> None:
        """The innermost phase, `name`, has ended."""

    def step_ends(self, pending_step: PendingStep) -> None:
        """The step has ended and is about to be passed to the publisher: the last chance to add to its record.

        If the next step is late, the publisher thread takes the step before this event.
        """

    def step_timed(self, pending_step: PendingStep, cause: Cause) -> None:
        """The duration of the step is known and is stored in `pending_step`; `cause` is the event that ended the step.

        Usually this is the record of the step. If the step was already published, it is a second record with its
        number.
        """

    def training_ends(self) -> None:
        """No step follows the current one, if there is one."""


class StepEvents:
    """Calls the observers. If an observer raises, the error is counted and the other observers are still called."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._calls: dict[str, list[Callable[..., None]]] = {moment: [] for moment in get_args(Moment)}

    def follow(self, follower: StepObserver) -> None:
        """Call `follower` for later events, for those that it implements."""
        for moment, calls in self._calls.items():
            if getattr(type(follower), moment) is not getattr(StepObserver, moment):
                calls.append(getattr(follower, moment))

    def tell(self, moment: Moment, *args: object) -> None:
        """Call the method `moment` of every observer."""
        for call in self._calls[moment]:
            try:
                call(*args)
            except Exception as error:  # noqa: BLE001 - as the guard does, without a call more at every moment
                self._guard.report("following a step", error)
