"""Finds where one step ends and the next begins, and optimizer steps in which no hook runs.

A training loop does not announce its steps. Forward passes, backward passes and optimizer steps call hooks. A skipped
optimizer step, for example by a gradient scaler or a check for NaN, calls no hook. It is detected by the gradients,
which are deleted when the next step begins. A loop that zeroes gradients in place and skips the optimizer cannot be
detected: it must call `Monitor.end_step(skipped=True)`. Dynamo removes the hooks of a compiled optimizer step (see
`adapters.tracing`). Compiled optimizer steps are detected by changes in the state of the optimizer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_exporter.adapters.torch_private import in_place_changes, is_in_optimizer_step


class UnseenUpdates:
    """Detects optimizer steps without hook calls, from changes in the state of the optimizers.

    A call of `look` compares the state with that at the last call of `look`, and costs about 0.1 µs per parameter. No
    state is compared until an optimizer step is compiled. Used on the training thread only.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._traces: dict[int, tuple[int, ...]] = {}  # by identity of the optimizer
        self.are_expected = False
        """True if the step of an optimizer was compiled."""

    @property
    def may_leave_no_trace(self) -> bool:
        """True if a compiled optimizer step may remain undetected, as with fused SGD, which has no step counter."""
        return self.are_expected and any(_leaves_no_trace(optimizer) for optimizer in self._optimizers)

    def expect(self) -> None:
        """Detect compiled optimizer steps from now on; called while the first is compiled, before it runs."""
        if not self.are_expected:
            self.are_expected = True
            self._traces = {id(optimizer): _trace(optimizer) for optimizer in self._optimizers}

    def look(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have stepped since the last call, in the order of `Monitor.attach`.

        Must not be called before `expect`.
        """
        before, self._traces = self._traces, {id(optimizer): _trace(optimizer) for optimizer in self._optimizers}
        known = [item for item in self._optimizers if id(item) in before]  # without those that were added meanwhile
        return [item for item in known if before[id(item)] != self._traces[id(item)]]


def _trace(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Return numbers that change with an optimizer step.

    They are the sums of the parameters' versions and of the step counters (a tensor: its version), and the number of
    parameters with a state, which the first update creates. Fused kernels do not change the versions of the parameters,
    but increment the step counters.
    """
    parameters = (item for group in optimizer.param_groups for item in group["params"])
    steps = (state.get("step") for state in optimizer.state.values() if isinstance(state, dict))
    versions = sum(in_place_changes(item) or 0 for item in parameters)
    return versions, sum(map(_count, steps)), len(optimizer.state)


def _count(step: Any) -> int:
    if isinstance(step, torch.Tensor):
        return in_place_changes(step) or 0
    return step if isinstance(step, int) else 0


def _leaves_no_trace(optimizer: torch.optim.Optimizer) -> bool:
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return fused and not any("step" in state for state in optimizer.state.values() if isinstance(state, dict))


class StepStage(enum.Enum):
    """The stage that the present training step has reached."""

    IDLE = "idle"  # between two steps
    OPEN = "open"  # a training forward pass has begun
    GRADIENTS = "gradients"  # a backward pass has begun
    UPDATED = "updated"  # the optimizer has stepped; numbers that are logged now still belong to this step


_MAY_BE_OVER: Final = (StepStage.GRADIENTS, StepStage.UPDATED)


@dataclass(frozen=True, slots=True)
class Ended:
    """A training step that has ended. `skipped` is true if the step had gradients but no optimizer step."""

    step: int
    skipped: bool
    is_certain: bool = False
    """True if the script has ended the step, so that the step is no single pass of an update with several passes."""


Cleared = Callable[[], bool]
"""Function that returns whether the gradients of the last backward pass were deleted.

It is called only if the result is needed.
"""


class StepTracker:
    """Numbers the steps from `first_step` on, including skipped steps, and detects the end of each step.

    If `has_optimizer` is false, no step counts as skipped until an optimizer steps. If `explicit` is true, only a call
    of `end` ends a step. This is needed for training loops that use a model in several ways per step, such as
    adversarial training.

    The function `is_in_update` returns whether an optimizer step that has begun still runs. It may compute gradients in
    a closure, or it has raised.
    """

    def __init__(
        self,
        first_step: int = 1,
        *,
        has_optimizer: bool = True,
        explicit: bool = False,
        is_in_update: Callable[[], bool] = is_in_optimizer_step,
    ) -> None:
        self._has_optimizer = has_optimizer
        self._explicit = explicit
        self._is_in_update = is_in_update
        self._updating = False
        self._has_forward = False  # a forward pass has begun in the present step
        self.stage = StepStage.IDLE
        self.step = first_step
        """Number of the present step; between two steps (stage IDLE), the number of the next step."""

    def forward_begins(self, cleared: Cleared) -> Ended | None:
        """Handle the beginning of a training forward pass of the whole model.

        Return the previous step if this forward pass ends it, otherwise None.
        """
        ended = self._end_if_over(cleared) if self.stage in _MAY_BE_OVER else None
        if self.stage is StepStage.IDLE:
            self.stage = StepStage.OPEN
        self._has_forward = True
        return ended

    def backward_begins(self, cleared: Cleared) -> Ended | None:
        """Return the previous step if this pass ends it: several passes after one forward pass are one step."""
        is_same = self._has_forward and self.stage is StepStage.GRADIENTS
        ended = self._end_if_over(cleared) if self.stage in _MAY_BE_OVER and not is_same else None
        self.stage = StepStage.GRADIENTS
        return ended

    def update_begins(self, *, repeated: bool) -> Ended | None:
        """Return the previous training step if this step of an optimizer ends it.

        `repeated`: the same optimizer has stepped in it already. A closure may run several passes before `updated`.
        """
        over = self.stage is StepStage.UPDATED and repeated and not self._explicit
        ended = self.end() if over else None
        if self.stage is StepStage.IDLE:
            self.stage = StepStage.OPEN
        self._updating = True
        return ended

    def updated(self) -> None:
        """Handle the end of an optimizer step."""
        self._has_optimizer = True  # it may have been created after attach
        self.stage = StepStage.UPDATED
        self._updating = False

    def end(self, *, skipped: bool | None = None) -> Ended | None:
        """End the present step and return it; return None if no step is open.

        If `skipped` is None, a step with gradients and without an optimizer step counts as skipped.
        """
        if self.stage is StepStage.IDLE:
            return None
        is_certain = self._explicit or bool(skipped)
        if skipped is None:
            skipped = self.stage is StepStage.GRADIENTS and self._has_optimizer
        ended = Ended(self.step, skipped, skipped and is_certain)
        self.step += 1
        self.stage = StepStage.IDLE
        self._updating = self._has_forward = False
        return ended

    def _end_if_over(self, cleared: Cleared) -> Ended | None:
        if self._explicit or (self._updating and self._is_in_update()):  # a closure computes the gradients
            return None
        has_failed, self._updating = self._updating, False  # the optimizer has raised
        return self.end() if has_failed or self.stage is StepStage.UPDATED or cleared() else None
