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
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.redaction import MAX_LABEL, redacted_name
from rankscope_contract.model.scalar_names import logged_name
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.torch_private import in_place_changes, running_optimizer_steps
from rankscope_exporter.adapters.tracing import untransformed
from rankscope_exporter.measure.kernels.statistics_table import copied_to_host
from rankscope_exporter.records.optimizer_settings import GroupSettings, OptimizerSettings
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


_SETTINGS: Final = ("betas", "weight_decay", "eps", "maximize", "decoupled_weight_decay")
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class SettingsReader:
    """Reads the settings of all parameter groups before each update. Used on the training thread only."""

    def __init__(self) -> None:
        self.latest: OptimizerSettings | None = None
        """The settings of the latest update."""
        self.owners: list[int] = []
        """The id() of the optimizer of each group in the settings."""
        self._values: list[object] = []  # from which the settings were read
        self._sizes: list[tuple[int, int, int]] = []  # of each group: identity, parameters, states of its optimizer

    def read(
        self,
        monitored: MonitoredModel,
        owned: Sequence[tuple[torch.optim.Optimizer, Mapping[str, Any]]],
        *,
        is_loaded: bool,
    ) -> OptimizerSettings:
        """Return the settings of the groups `owned`, in the same object as before unless they have changed.

        `is_loaded` is true if a state dict was loaded since the last call.
        """
        values: list[object] = []
        sizes: list[tuple[int, int, int]] = []
        self.owners = []
        for optimizer, group in owned:  # without functions, which would cost more than the loop
            self.owners.append(id(optimizer))
            values += map(group.get, _SETTINGS)
            sizes.append((id(group), len(group["params"]), len(optimizer.state)))
        latest, is_same = self.latest, sizes == self._sizes and not is_loaded
        # By identity: the comparison of a tensor with another one would wait for its device.
        if latest is not None and is_same and all(map(operator.is_, values, self._values)):
            return latest
        groups = tuple(GroupSettings.of(*one) for one in owned)
        if latest is None or not is_same:
            self.latest = OptimizerSettings(groups, *_of_parameters(monitored, [group for _, group in owned]))
        elif groups != latest.groups:
            self.latest = replace(latest, groups=groups)
        self._values, self._sizes = values, sizes
        assert self.latest is not None
        return self.latest


def _of_parameters(
    monitored: MonitoredModel, groups: Sequence[Mapping[str, Any]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the group of each parameter, and whether its moments are float32 (see `OptimizerSettings`)."""
    numbers = {id(group): number for number, group in enumerate(groups)}
    count = max(monitored.owners, default=-1) + 1
    group_of, are_float32 = np.full(count, -1, np.int64), np.zeros(count, np.bool_)
    for owner, own in zip(monitored.owners, monitored.states(monitored.tensors()), strict=True):
        if own is not None:
            group_of[owner] = numbers.get(id(own.group), -1)
            moments = map(own.state.get, _MOMENTS)
            are_float32[owner] = all(getattr(moment, "dtype", None) is torch.float32 for moment in moments)
    return group_of, are_float32


class StepStage(enum.Enum):
    """The stage that the present training step has reached."""

    IDLE = "idle"  # between two steps
    OPEN = "open"  # a training forward pass or an update has begun
    GRADIENTS = "gradients"  # a backward pass has begun
    UPDATED = "updated"  # the optimizer has stepped; numbers that are logged now still belong to this step


class Signal(enum.Enum):
    """An action of the training that moves a step from one stage to the next."""

    FORWARD = "forward"  # a training forward pass of the whole model begins
    BACKWARD = "backward"  # a backward pass begins
    UPDATE = "update"  # an optimizer step begins; a closure may run several passes before it ends
    UPDATED = "updated"  # an optimizer step ends


@dataclass(frozen=True, slots=True)
class Ended:
    """A training step that has ended. `skipped` is true if the step had gradients but no optimizer step."""

    step: int
    skipped: bool
    is_certain: bool = False
    """True if the script has ended the step, or its update has raised: it is no pass of an update with several."""


Cleared = Callable[[], bool]
"""Function that returns whether the gradients of the last backward pass were deleted.

It is called only if the result is needed.
"""


class StepTracker:
    """Numbers the steps from `first_step` on, including skipped steps, and detects the end of each step.

    `docs/steps.md` has the diagram of the stages. A test compares it with `move`.

    If `has_optimizer` is false, no step counts as skipped until an optimizer steps. If `explicit` is true, only a call
    of `end` ends a step. This is needed for training loops that use a model in several ways per step, such as
    adversarial training.

    The function `running_updates` returns how many optimizer steps run, one inside of the other. A step that has begun
    and not ended computes gradients in a closure, or it has raised.
    """

    def __init__(
        self,
        first_step: int = 1,
        *,
        has_optimizer: bool = True,
        explicit: bool = False,
        running_updates: Callable[[], int] = running_optimizer_steps,
    ) -> None:
        self._has_optimizer = has_optimizer
        self.explicit = explicit
        self._running_updates = running_updates
        self._updating = self._has_closure = False
        self._has_failed = False  # an update of the present step has raised
        self._has_forward = False  # a forward pass has begun in the present step
        self.stage = StepStage.IDLE
        self.step = first_step
        """Number of the present step; between two steps (stage IDLE), the number of the next step."""

    def move(
        self,
        signal: Signal,
        cleared: Cleared = lambda: False,
        *,
        repeated: bool = False,
        computes_gradients: bool = False,
    ) -> Ended | None:
        """Move to the stage after `signal`. Return the previous step if `signal` ends it, otherwise None.

        `repeated`: the optimizer whose step begins has already begun a step in the present step.
        `computes_gradients`: it has a closure.
        """
        is_over = signal is not Signal.UPDATED and self._is_over(signal, cleared, repeated, computes_gradients)
        ended = self.end() if is_over and not self.explicit else None
        match signal:
            case Signal.BACKWARD:
                self.stage = StepStage.GRADIENTS
            case Signal.UPDATED:
                self.stage = StepStage.UPDATED
                self._has_optimizer = True  # it may have been created after attach
            case _ if self.stage is StepStage.IDLE:
                self.stage = StepStage.OPEN
        self._has_forward |= signal is Signal.FORWARD
        if signal in (Signal.UPDATE, Signal.UPDATED):
            self._updating, self._has_closure = signal is Signal.UPDATE, computes_gradients
        return ended

    def end(self, *, skipped: bool | None = None) -> Ended | None:
        """End the present step and return it; return None if no step is open.

        If `skipped` is None, a step with gradients and without an optimizer step counts as skipped.
        """
        if self.stage is StepStage.IDLE:
            return None
        is_certain = self.explicit or bool(skipped) or self._has_failed
        if skipped is None:
            skipped = self.stage is StepStage.GRADIENTS and self._has_optimizer
        ended = Ended(self.step, skipped, skipped and is_certain)
        self.step += 1
        self.stage = StepStage.IDLE
        self._updating = self._has_forward = self._has_failed = False
        return ended

    def _is_over(self, signal: Signal, cleared: Cleared, repeated: bool, computes_gradients: bool) -> bool:  # noqa: FBT001
        is_update = signal is Signal.UPDATE
        if self._updating:
            # A closure runs, or this update is inside of another one.
            if self._running_updates() > is_update or (is_update and not repeated):
                return False
            self._updating, self._has_failed = False, True
        if self.stage is StepStage.UPDATED:
            return repeated or not is_update
        if is_update and not (computes_gradients and self._has_failed):
            return False
        if self.stage is StepStage.GRADIENTS:
            is_same = signal is Signal.BACKWARD and self._has_forward  # several passes after one forward pass
            return not is_same and (self._has_failed or cleared())
        # A closure that raises in its forward pass is a forward pass that raises.
        return self.stage is StepStage.OPEN and self._has_failed and not self._has_closure


def _key(value: Pending) -> tuple[str, tuple[tuple[str, str], ...]]:
    return value.name, tuple(value.labels.items())


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
        self._next_step: int | None = None  # number of `_next_values`; None if the script has not set it
        self._has_gone_back = False
        self._next_values: list[Pending] = []  # added while no step is open or after an update
        self._next_events: list[Event] = []
        self.settings = SettingsReader()
        self.is_loaded = False
        """True if a state dict was loaded since the latest update."""
        self._early: set[Any] = set()  # names and labels that were first logged before the first step
        self.logged: set[Any] = set()
        """Names and labels of the numbers that were logged since the last forward pass of the open or last step."""

    def open(self, step: int, *, sampled: bool) -> None:
        """Begin the record of step `step`, with the values and events that wait for it."""
        values, self._next_values = self._next_values, []
        events, self._next_events = self._next_events, []
        self._next_step, self.is_sampled = None, sampled
        self.logged.clear()
        # The times are set when the record is closed.
        self.pending = StepRecord(ts=0, step=step, sampled=sampled, pending=values, events=events)

    def log(self, values: Sequence[Pending], step: int | None, *, is_updated: bool) -> bool:
        """Add logged values to the open, the last or the next step, by the rule in `docs/steps.md`.

        `is_updated` is true if the open step may end with its update.

        Return whether this call has set the number of the open or of the next step.
        """
        is_first = self.pending is None and self.last_step is None
        if step is None and (is_updated or self.pending is None) and (is_first or self._early or self.logged):
            values = self._without_next(values, is_first=is_first)
        if self.pending is not None:
            self.pending.pending += values
            self.logged.update(map(_key, values))
            if step is not None:
                self.pending.step = step
        elif step is None or step == self.last_step:
            self.logged.update(map(_key, values))
            if values:
                self.hand_over(StepRecord.now(self.last_step, pending=list(values)))
            return False
        else:
            if step != self._next_step:
                self.publish_next()
            self._next_values += values
            self._next_step = step
        self.is_numbered |= step is not None
        return step is not None

    def _without_next(self, values: Sequence[Pending], *, is_first: bool) -> list[Pending]:
        """Keep the values that belong to the next step, and return the others."""
        waiting, others = set(map(_key, self._next_values)) if self.pending is None else set(), []
        for item in values:
            key = _key(item)
            if is_first:
                self._early.add(key)
            if key not in self._early and key not in self.logged:
                others.append(item)
                continue
            if key in waiting:  # no step begins
                self.publish_next()
                waiting.clear()
            self._next_values.append(item)
        return others

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
        """Publish the values of the next step, which does not begin: other values follow, or training ends."""
        if self._next_values:
            number = self.last_step if self._next_step is None else self._next_step
            self.hand_over(StepRecord.now(number, pending=self._next_values))
            self._next_values = []

    def note_learning_rates(self, monitored: MonitoredModel) -> None:
        """Store the learning rates and settings of all groups for the open step, without waiting for a device."""
        if self.pending is not None:
            rates: dict[str, Any] = {}
            owned: list[tuple[torch.optim.Optimizer, Mapping[str, Any]]] = []
            for optimizer in monitored.optimizers.present():
                for group in monitored.framework.groups_of(optimizer):
                    rates[str(len(rates))] = group.get("lr")
                    owned.append((optimizer, group))
            self.pending.learning_rates = take("learning_rate", rates)
            self.pending.is_loaded, self.is_loaded = self.is_loaded, False
            before = self.settings.latest
            settings = self.settings.read(monitored, owned, is_loaded=self.pending.is_loaded)
            self.pending.settings = settings
            if settings is not before:
                changes = settings.changes(before)
                self.pending.pending += [Pending(name, value, {"group": group}) for name, group, value in changes]

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
            (self._next_events if self.pending is None else self.pending.events).append(event)

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
