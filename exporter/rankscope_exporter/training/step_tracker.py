"""Finds where one step ends and the next begins, optimizer steps in which no hook runs, and logged values of a step.

A training loop does not announce its steps. Forward passes, backward passes and optimizer steps call hooks. A skipped
optimizer step, for example by a gradient scaler or a check for NaN, calls no hook. It is detected by the gradients,
which are deleted when the next step begins. A loop that zeroes gradients in place and skips the optimizer cannot be
detected: it must call `Monitor.end_step(skipped=True)`. Dynamo removes the hooks of a compiled optimizer step (see
`adapters.tracing`). Compiled optimizer steps are detected by changes in the state of the optimizer.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.redaction import MAX_LABEL, redacted_name
from rankscope_contract.model.scalar_names import logged_name
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.torch_private import in_place_changes, is_in_optimizer_step
from rankscope_exporter.adapters.tracing import untransformed
from rankscope_exporter.measure.kernels.statistics_table import copied_to_host
from rankscope_exporter.records.record import (
    LABEL_OF_GROUP,
    Pending,
    Scalar,
    StepRecord,
    Transfer,
)


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


class CurrentStep:
    """The open step of one attached model, or the state between two steps.

    `lock` serializes the training thread, the publisher thread and other threads of the script. A caller of `log`
    must hold the lock.
    """

    def __init__(self, hand_over: Callable[[StepRecord], None], backward_begins: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self.backward_begins = backward_begins
        """Function that lets the publisher work now."""
        self.hand_over = hand_over
        """Function that passes a record to the publisher; it never blocks."""
        self.pending: StepRecord | None = None
        """The record of the open step; None between two steps."""
        self.is_sampled = False
        """True if a step is open and sampled.

        This is a field instead of a property, because gradient hooks read it at each call.
        """
        self.is_numbered = False
        """True if the script has set the number of the open step, or that of the next step if none is open."""
        self.last_is_numbered = False
        """True if the script has set the number of the step that was closed last."""
        self.last_step: int | None = None
        """Number of the step that was closed last; None before the first step was closed."""
        self._next_step: int | None = None  # number of `next_values`
        self._has_gone_back = False
        self.next_values: list[Pending] = []
        self.next_events: list[Event] = []
        """Values and events that were added while no step is open. They belong to the next step."""

    def log(self, values: Sequence[Pending], step: int | None) -> bool:
        """Add logged values to the open, the last or the next step.

        If a step is open, it gets the values, and `step` becomes its number. If no step is open, and `step` is None or
        the number of the last step, the last step gets the values. Otherwise the next step gets the values, and `step`
        is its number.

        Return whether this call has set the number of the open or of the next step.
        """
        if self.pending is not None:
            self.pending.pending += values
            if step is not None:
                self.pending.step = step
        elif step is None or step == self.last_step:
            self.hand_over(StepRecord.now(self.last_step, pending=list(values)))
            return False
        else:
            if step != self._next_step:
                self.publish_next()
            self.next_values += values
            self._next_step = step
        self.is_numbered |= step is not None
        return step is not None

    def is_over(self, step: int) -> bool:
        """Return whether `step` is no new number: steps were counted beyond it, and not by numbers of the script."""
        if self.last_step is None or self.last_is_numbered:
            return False
        return step < self.last_step + (self.pending is not None)

    def log_apart(self, values: Sequence[Pending], step: int) -> None:
        """Publish logged values with the number `step` of an earlier step: training steps keep their numbers."""
        events = []
        if step != self.last_step and not self._has_gone_back:
            self._has_gone_back = True
            text = (
                f"log(step={step}) is below the number of the last step, {self.last_step}: such values are stored with "
                "their own number, and the steps of the training keep theirs"
            )
            events = [Event(type=EventType.NOTE, severity=Severity.WARNING, message=text)]
        self.hand_over(StepRecord.now(step, pending=list(values), events=events))

    def publish_next(self) -> None:
        """Publish the values of the next step, which does not begin: another number follows, or training ends."""
        if self.next_values:
            self.hand_over(StepRecord.now(self._next_step, pending=self.next_values))
            self.next_values = []

    def note_learning_rates(self, monitored: MonitoredModel) -> None:
        """Store the learning rates of all groups for the open step, without waiting for a device."""
        if self.pending is not None:
            rates: dict[str, Any] = {}
            for optimizer in monitored.optimizers.present():
                for group in monitored.framework.groups_of(optimizer):
                    rates[str(len(rates))] = group.get("lr")
            self.pending.learning_rates = take("learning_rate", rates)

    def add(self, later: Callable[[], Iterable[Scalar]]) -> None:
        """Add the scalars that `later` returns to the open step, or publish them immediately if no step is open.

        The publisher thread calls `later`, once for each step.
        """
        with self.lock:
            if self.pending is None:
                self.hand_over(StepRecord.now(self.last_step, later=[later]))
            elif later not in self.pending.later:
                self.pending.later.append(later)

    def add_event(self, event: Event) -> None:
        """Add an event to the record of the open step, or to the record of the next step if no step is open."""
        with self.lock:
            (self.next_events if self.pending is None else self.pending.events).append(event)

    def publish_event(self, event: Event) -> None:
        """Publish an event immediately, in a record of its own with the number of the open or last step."""
        with self.lock:
            step = self.pending.step if self.pending is not None else self.last_step
            self.hand_over(StepRecord.now(step, events=[event]))


def take(name: str, value: Any) -> list[Pending]:
    """Return the numbers of a call `log(name=value)`: one number, or one per key of a mapping.

    Other names of losses, such as `val/loss`, are replaced. The list is empty if the value is None. Raises TypeError if
    the value is not a number, ValueError for a tensor with several elements.
    """
    if value is None:
        return []
    stored, labels = logged_name(name)
    if not isinstance(value, Mapping):
        number = _copied(name, value) if isinstance(value, torch.Tensor) else float(value)
        return [Pending(stored, number, labels)]
    label, found = LABEL_OF_GROUP.get(stored, "key"), []
    for key, item in value.items():
        for pending in take(name, item):
            of_item = {**pending.labels, label: _label(key)}
            found.append(Pending(stored, pending.value, of_item))
    return found


@functools.lru_cache(maxsize=1024, typed=True)
def _label(key: Any) -> str:
    return redacted_name(str(key), MAX_LABEL)


def _copied(name: str, value: torch.Tensor) -> Transfer:
    value = untransformed(value).detach()
    placements = getattr(value, "placements", None)
    if placements is not None:  # a DTensor. If it is divided among ranks, reading it would be a collective.
        if not all(placement.is_replicate() for placement in placements):
            raise ValueError(f"log({name}=…) takes no DTensor that is divided among ranks: log its .full_tensor()")
        value = value.to_local()  # type: ignore[attr-defined]  # see above
    if value.numel() != 1:
        raise ValueError(f"log({name}=…) takes one number, not a tensor of shape {tuple(value.shape)}")
    if value.is_complex() or value.is_meta:
        raise ValueError(f"log({name}=…) must be a real number, not a tensor of {value.dtype} on device {value.device}")
    return copied_to_host(value.reshape(()))
