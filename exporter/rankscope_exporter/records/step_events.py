"""Events of a step on the training thread, for observers that run on every step, sampled or not.

An observer derives from `StepObserver` and implements the events that it needs. It is called between two lines of
the training: it may note the time or keep a reference, and does no I/O, waits for nothing, and grows with nothing.
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
"""What ends a step: the begin of the next one with one of these, or the script by its own word."""


class StepObserver:
    """Does nothing at any moment. Which moments come, and how often, is the training's affair."""

    def step_begins(self, step: int) -> None:
        """A step has begun, with a forward pass, a backward pass or an update that follows at once."""

    def forward_begins(self) -> None:
        """A training forward of the whole model begins: one for each micro-batch."""

    def forward_ended(self) -> None:
        """It is over, also when it raised."""

    def evaluation_begins(self) -> None:
        """A forward of the whole model begins in evaluation mode, or without gradients."""

    def evaluation_ended(self) -> None:
        """It is over, also when it raised."""

    def backward_begins(self) -> None:
        """The first gradient of a backward pass has arrived at a parameter."""

    def backward_ends(self) -> None:
        """All gradients of the pass were computed; DDP has not yet waited for its reductions."""

    def backward_ended(self) -> None:
        """What the framework does at the end of a backward pass is done."""

    def reduced(self) -> None:
        """A framework has reduced gradients outside of a backward pass."""

    def update_begins(self) -> None:
        """An optimizer is about to step; with a closure, forward and backward may come before `updated`."""

    def updated(self) -> None:
        """It has stepped."""

    def reading_begins(self) -> None:
        """Tensors are about to be measured, on a measured step; what hooks read one by one does not come by here."""

    def reading_ended(self) -> None:
        """They were."""

    def phase_begins(self, name: str) -> None:
        """The script announces a phase; phases nest."""

    def phase_ended(self, name: str) -> None:
        """The innermost phase, which is called `name`, is over."""

    def step_ends(self, pending_step: PendingStep) -> None:
        """The step is over and about to be handed over: the last chance to add to its record.

        One that waits long for the next step is handed over meanwhile, by the publisher's thread.
        """

    def step_timed(self, pending_step: PendingStep, cause: Cause) -> None:
        """How long the step took is known, and stands in `draft`; `cause` is what has ended it.

        Mostly the record of the step. Of one that was handed over before, it is a second one with its number.
        """

    def training_ends(self) -> None:
        """No step follows the one that is under way, if there is one."""


class StepEvents:
    """Tells the followers; what one of them raises is counted, and the others hear all the same."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._calls: dict[str, list[Callable[..., None]]] = {moment: [] for moment in get_args(Moment)}

    def follow(self, follower: StepObserver) -> None:
        """Let `follower` hear of what comes from now on, of the moments that it has something to do at."""
        for moment, calls in self._calls.items():
            if getattr(type(follower), moment) is not getattr(StepObserver, moment):
                calls.append(getattr(follower, moment))

    def tell(self, moment: Moment, *args: object) -> None:
        """Call `moment` of every follower."""
        for call in self._calls[moment]:
            try:
                call(*args)
            except Exception as error:  # noqa: BLE001 - as the guard does, without a call more at every moment
                self._guard.report("following a step", error)
