"""Where one step ends and the next begins, told from what hooks can see. Pure: no tensors, no clock.

A training loop says nothing about its steps. What can be seen is forward, backward and optimizer; what cannot be
seen is a step whose optimizer was *not* called, as a gradient scaler or a guard against NaN does. Such a step shows
by its gradients being gone when the next one begins. (A loop that zeroes gradients in place and skips the optimizer
leaves no trace of it: there `Monitor.end_step(skipped=True)` says so.)
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Stage(enum.Enum):
    """How far the current step has come."""

    IDLE = "idle"  # between steps: the last one is closed, the next has not begun
    OPEN = "open"  # a training forward was seen
    GRADIENTS = "gradients"  # at least one backward was seen
    UPDATED = "updated"  # the optimizer has run; numbers logged now still belong to this step


@dataclass(frozen=True, slots=True)
class Ended:
    """A step is over. `skipped`: it had gradients, yet no optimizer ran."""

    step: int
    skipped: bool


Cleared = Callable[[], bool]
"""Asks whether the gradients of the last backward pass have been dropped since. Only called when it matters."""


class StepTracker:
    """Counts optimizer attempts, skipped ones included, from `first_step` on.

    Without `has_optimizer` there is no update to miss, so no step counts as skipped. With `explicit`, only `end` ends
    a step: for loops that do more than one thing with a model, as adversarial training does.
    """

    def __init__(self, first_step: int = 1, *, has_optimizer: bool = True, explicit: bool = False) -> None:
        self._has_optimizer = has_optimizer
        self._explicit = explicit
        self._updating = False
        self.stage = Stage.IDLE
        self.step = first_step
        """Number of the step under way; in IDLE of the one to come."""

    def forward_begins(self, cleared: Cleared) -> Ended | None:
        """A training forward of the whole model begins."""
        ended = self._end_if_over(cleared)
        if self.stage is Stage.IDLE:
            self.stage = Stage.OPEN
        return ended

    def backward_begins(self, cleared: Cleared) -> Ended | None:
        """The first gradient of a backward pass has arrived."""
        ended = self._end_if_over(cleared)
        self.stage = Stage.GRADIENTS
        return ended

    def update_begins(self, *, repeated: bool) -> Ended | None:
        """An optimizer is about to step; `repeated` when the same one has stepped in this step already.

        A closure-driven optimizer computes its gradients inside, as often as it likes: this is the first sign of a
        new step, and what happens until `updated` belongs to it.
        """
        over = self.stage is Stage.UPDATED and repeated and not self._explicit
        ended = self.end() if over else None
        if self.stage is Stage.IDLE:
            self.stage = Stage.OPEN
        self._updating = True
        return ended

    def updated(self) -> None:
        """The optimizer has stepped."""
        self.stage = Stage.UPDATED
        self._updating = False

    def end(self, *, skipped: bool | None = None) -> Ended | None:
        """End the current step, if one is under way; without `skipped`, gradients without an update mean so."""
        if self.stage is Stage.IDLE:
            return None
        if skipped is None:
            skipped = self.stage is Stage.GRADIENTS and self._has_optimizer
        ended = Ended(self.step, skipped)
        self.step += 1
        self.stage = Stage.IDLE
        self._updating = False
        return ended

    def _end_if_over(self, cleared: Cleared) -> Ended | None:
        if self._explicit or self._updating:
            return None
        if self.stage is Stage.UPDATED or (self.stage is Stage.GRADIENTS and cleared()):
            return self.end()
        return None
