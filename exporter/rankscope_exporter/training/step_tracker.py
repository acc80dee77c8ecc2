"""Where one step ends and the next begins, derived from what hooks can see; and optimizer steps without hooks.

A training loop does not announce its steps. Forward, backward and optimizer can be seen; a step whose optimizer was
*not* called cannot, as with a gradient scaler or a guard against NaN. Such a step shows by its gradients being gone
when the next one begins. (A loop that zeroes gradients in place and skips the optimizer leaves no trace of it: there
`Monitor.end_step(skipped=True)` says so.) Dynamo compiles the hooks of an optimizer away (see `base.tracing`); such
steps are found by the optimizer's state.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class _Trace(NamedTuple):
    """Numbers that an update changes. A fused kernel leaves the versions of parameters, but counts its steps."""

    versions: int  # of all parameters, added up
    steps: int  # versions of the step counters that are tensors, and the values of those that are numbers
    states: int  # parameters with a state, which the first update makes


class UnseenUpdates:
    """Compares the traces of updates with those at the last look. Costs nothing until an update is compiled.

    Training thread only; some 0.1 µs a parameter and look.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._traces: dict[int, _Trace] | None = None  # by identity of the optimizer; None: none is expected

    @property
    def are_expected(self) -> bool:
        """Return whether the step of some optimizer was compiled."""
        return self._traces is not None

    @property
    def may_leave_no_trace(self) -> bool:
        """Return whether a step is compiled that would not be found: fused SGD counts no steps."""
        return self._traces is not None and any(_leaves_no_trace(optimizer) for optimizer in self._optimizers)

    def expect(self) -> None:
        """Look for updates from now on. Call it while the first one is compiled, before it runs."""
        if self._traces is None:
            self._traces = {id(optimizer): _trace(optimizer) for optimizer in self._optimizers}

    def look(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have stepped since the last look, in the order of `attach`."""
        if self._traces is None:
            return []
        before, self._traces = self._traces, {id(optimizer): _trace(optimizer) for optimizer in self._optimizers}
        known = (item for item in self._optimizers if id(item) in before)  # one that was added since has no past
        return [item for item in known if before[id(item)] != self._traces[id(item)]]


def _trace(optimizer: torch.optim.Optimizer) -> _Trace:
    parameters = (item for group in optimizer.param_groups for item in group["params"])
    steps = (state.get("step") for state in optimizer.state.values() if isinstance(state, dict))
    return _Trace(sum(map(_version, parameters)), sum(map(_count, steps)), len(optimizer.state))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 - torch has no other name for it


def _count(step: Any) -> int:
    if isinstance(step, torch.Tensor):
        return _version(step)
    return step if isinstance(step, int) else 0


def _leaves_no_trace(optimizer: torch.optim.Optimizer) -> bool:
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return fused and not any("step" in state for state in optimizer.state.values() if isinstance(state, dict))


class StepStage(enum.Enum):
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
        self.stage = StepStage.IDLE
        self.step = first_step
        """Number of the step under way; in IDLE of the one to come."""

    def forward_begins(self, cleared: Cleared) -> Ended | None:
        """A training forward of the whole model begins."""
        ended = self._end_if_over(cleared)
        if self.stage is StepStage.IDLE:
            self.stage = StepStage.OPEN
        return ended

    def backward_begins(self, cleared: Cleared) -> Ended | None:
        """The first gradient of a backward pass has arrived."""
        ended = self._end_if_over(cleared)
        self.stage = StepStage.GRADIENTS
        return ended

    def update_begins(self, *, repeated: bool) -> Ended | None:
        """An optimizer is about to step; `repeated` when the same one has stepped in this step already.

        A closure-driven optimizer computes its gradients inside, as often as it likes: this is the first sign of a
        new step, and what happens until `updated` belongs to it.
        """
        over = self.stage is StepStage.UPDATED and repeated and not self._explicit
        ended = self.end() if over else None
        if self.stage is StepStage.IDLE:
            self.stage = StepStage.OPEN
        self._updating = True
        return ended

    def updated(self) -> None:
        """The optimizer has stepped."""
        self.stage = StepStage.UPDATED
        self._updating = False

    def end(self, *, skipped: bool | None = None) -> Ended | None:
        """End the current step, if one is under way; without `skipped`, gradients without an update mean so."""
        if self.stage is StepStage.IDLE:
            return None
        if skipped is None:
            skipped = self.stage is StepStage.GRADIENTS and self._has_optimizer
        ended = Ended(self.step, skipped)
        self.step += 1
        self.stage = StepStage.IDLE
        self._updating = False
        return ended

    def _end_if_over(self, cleared: Cleared) -> Ended | None:
        if self._explicit or self._updating:
            return None
        if self.stage is StepStage.UPDATED or (self.stage is StepStage.GRADIENTS and cleared()):
            return self.end()
        return None
