"""Finds the boundaries of steps in the calls of hooks and script, and records one step at a time.

Nothing here waits for a device, performs I/O or formats text. The publisher does so on its own thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.quantities.base import Quantity, Table
from rankscope_exporter.records.pending_step import (
    Pending,
    PendingStep,
    amounts_of,
    now_microseconds,
    skipped_event,
    take,
    timing,
)
from rankscope_exporter.records.step_events import Cause, StepEvents
from rankscope_exporter.sampling.active_quantities import ActiveQuantities
from rankscope_exporter.training.current_step import CurrentStep
from rankscope_exporter.training.gradient_hooks import GradientHooks
from rankscope_exporter.training.step_tracker import Ended, StepStage, StepTracker, UnseenUpdates

LOGGING_SECONDS: Final = 10.0
"""Time after its update in which logging keeps a step open: an evaluation may continue to log for hours."""


@dataclass(frozen=True, slots=True)
class _Timing:
    """A step that was published before its end was known. Its duration follows with the next step."""

    step: int | None
    began: float
    amounts: dict[str, float]


class Recorder:
    """Opens and closes the steps of one attached model, and calls the observers and quantities of each step.

    Hooks and the script call it on the training thread, the publisher thread calls `flush_idle`. The lock of
    `current` prevents that a step is published while it is being measured.
    """

    def __init__(
        self,
        monitored: MonitoredModel,
        active_quantities: ActiveQuantities,
        current: CurrentStep,
        *,
        events: StepEvents,
        tracker: StepTracker,
        gradients: GradientHooks,
        boundary: ErrorBoundary,
    ) -> None:
        self._monitored = monitored
        self._active_quantities = active_quantities
        self._current = current
        self._lock = current.lock
        self._events = events
        self._tracker = tracker
        self._gradients = gradients
        self._boundary = boundary
        self._began = self._last_seen = self._updated_at = 0.0
        self._late: _Timing | None = None
        self._updated_by: set[int] = set()  # optimizers that have stepped in the open step, by identity
        self._unseen = UnseenUpdates(monitored.optimizers)
        self._kept: tuple[object, ...] = ()  # model and optimizers of a sampled step with a compiled update
        self._awaits_gradients = False
        self._gradients_seen = 0
        self.micro_step = -1
        """Number of the latest training forward pass of the step and its model chunk, from 0 on."""
        self._forwards: dict[int, int] = {}  # the same, for each chunk

    # Calls of the hooks, in the order of a step.

    def forward_begins(self, chunk: int = 0) -> None:
        """A training forward pass of the whole model begins, or of one of its chunks on this rank."""
        with self._lock:
            self._notice_updates()
            self._after(self._tracker.forward_begins(self._gradients.are_cleared), "forward")
            self.micro_step = self._forwards.get(chunk, -1) + 1
            self._forwards[chunk] = self.micro_step
            self._events.on_forward_begin()

    def evaluation_begins(self) -> None:
        """A forward pass of the whole model begins in evaluation mode or without gradients."""
        with self._lock:
            self._notice_updates()
            self._events.on_evaluation_begin()

    def backward_begins(self) -> bool:
        """The first gradient of a backward pass has arrived; return whether a step begins with it."""
        with self._lock:
            self._notice_updates()
            before = self._current.pending
            self._after(self._tracker.backward_begins(self._gradients.are_cleared), "backward")
            if self._unseen.are_expected:
                self._await_update()
            return self._current.pending is not before

    def gradient_ready(self, index: int, holder: GradientSource) -> None:
        """Parameter `index` has accumulated its gradient in `holder`. Called at sampled steps only."""
        pending = self._current.pending
        if pending is None or not pending.sampled:
            return
        if pending.call_order[index] < 0:
            pending.call_order[index] = self._gradients_seen
            self._gradients_seen += 1
        self._active_quantities.gradient_ready(index, holder)

    def measure(self, event: Callable[[Quantity, Table], None]) -> None:
        """Call `event` of the quantities if the step is sampled; the observers are notified before and after it."""
        if self._current.is_sampled:
            self._events.on_measurement_begin()
            self._active_quantities.notify(event)
            self._events.on_measurement_end()

    def update_begins(self, optimizer: torch.optim.Optimizer, *, computes_gradients: bool = False) -> None:
        """An optimizer is about to step. With `computes_gradients`, `gradients_computed` follows from its closure."""
        with self._lock:
            self._notice_updates()
            self._after(self._tracker.update_begins(repeated=id(optimizer) in self._updated_by), "update")
            self._events.on_optimizer_step_begin()
            is_first = not self._updated_by
            self._updated_by.add(id(optimizer))
            if is_first:  # later optimizers of the same step would see the changes of the earlier ones
                self._boundary.call("the learning rate", self._current.note_learning_rates, self._monitored)
                self._awaits_gradients = computes_gradients
            if not computes_gradients and (is_first or self._monitored.framework.traits.updates_in_parts):
                self.measure(Quantity.on_optimizer_step_begin)

    def gradients_computed(self) -> None:
        """The closure of an optimizer has returned. Only the first call of a step comes before any update."""
        with self._lock:
            if self._awaits_gradients:
                self._awaits_gradients = False
                self.measure(Quantity.on_optimizer_step_begin)

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or its gradient scaler has skipped the step."""
        with self._lock:
            self._events.on_optimizer_step_end()
            self.measure(Quantity.on_optimizer_step_end)
            self._events.on_update_applied()
            self._tracker.updated()
            self._unseen.look()
            self._last_seen = self._updated_at = time.monotonic()
            found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step on the device
            if self._current.pending is not None and isinstance(found_inf, torch.Tensor):
                self._current.pending.found_inf += take("found_inf", found_inf)

    def update_compiles(self) -> None:
        """The step of an optimizer is being compiled and runs next. No hook runs in compiled steps."""
        with self._lock:
            self._unseen.expect()
            self._await_update()

    # Calls of the script and of the publisher.

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Add logged numbers to the open step, or to the last one if none is open.

        `step` numbers the open step. A second, different number for the open step begins the next step. If no step is
        open, the number belongs to the next step. A value that is not a number is reported; the others are logged.
        """
        pending: list[Pending] = []
        for name, value in values.items():
            pending += self._boundary.call(f"log({name}=…)", list, take(name, value)) or ()
        with self._lock:
            self._notice_updates()
            now, current = time.monotonic(), self._current
            if now - self._updated_at < LOGGING_SECONDS:
                self._last_seen = now
            if (
                step is not None
                and current.is_numbered
                and current.pending is not None
                and step != current.pending.step
            ):
                self._after(self._tracker.end(), "script")
            if current.log(pending, step) and step is not None:
                self._tracker.step = step

    def end_step(self, *, skipped: bool | None) -> None:
        """End the open step at the request of the script."""
        with self._lock:
            self._notice_updates()
            self._after(self._tracker.end(skipped=skipped), "script")

    def finish(self) -> int | None:
        """Publish the remaining records and return the number of the last step with gradients; None without one."""
        with self._lock:
            self._notice_updates()
            before, begun_only = self._current.last_step, self._tracker.stage is StepStage.OPEN
            self._events.on_training_end()
            self._after(self._tracker.end(skipped=False), "script")
            self._time_late(time.monotonic(), "script")
            return before if begun_only else self._current.last_step

    def flush_idle(self, after_seconds: float) -> None:
        """Publish an updated step if the training has made no call for `after_seconds`."""
        with self._lock:
            pending = self._current.pending
            is_updated = self._tracker.stage is StepStage.UPDATED
            is_whole = is_updated and len(self._updated_by) >= len(self._monitored.optimizers)
            if is_whole and pending is not None and time.monotonic() - self._last_seen > after_seconds:
                self._late = _Timing(pending.step, self._began, amounts_of(pending.pending))
                self._close(self._tracker.end())

    # Boundaries of steps.

    def _after(self, ended: Ended | None, cause: Cause) -> None:
        now = time.monotonic()
        if ended is not None and self._current.pending is not None:
            self._close(ended, (now - self._began, cause))
        if cause != "script" and self._current.pending is None:
            self._open(now, cause)
        self._last_seen = now

    def _open(self, now: float, cause: Cause) -> None:
        self._time_late(now, cause)
        step = self._tracker.step
        self._events.on_before_step(step)
        sampled = self._active_quantities.begin(step)
        pending = self._current.open(step, sampled=sampled)
        self._updated_by.clear()
        self._gradients_seen = 0
        self.micro_step = -1
        self._forwards.clear()
        self._began = now
        self._events.on_step_begin(step)
        self._events.on_sampling_decided(sampled)
        if sampled:
            pending.call_order = [-1] * len(self._monitored.parameters)
            self.measure(Quantity.on_step_begin)

    def _close(self, ended: Ended | None, timed: tuple[float, Cause] | None = None) -> None:
        """Publish the open step. `timed` has its duration and the cause of its end; None if they are not known yet."""
        pending = self._current.close()
        self._kept = ()
        pending.ts = now_microseconds()
        if not any(item.name == "learning_rate" for item in pending.pending):
            pending.pending += pending.learning_rates
        if timed is not None:
            pending.pending += timing(timed[0], amounts_of(pending.pending))
            pending.ended_at = self._began + timed[0]
        self._events.on_step_end(pending)
        if timed is not None:
            self._events.on_step_timed(pending, timed[1])
        if ended is not None and ended.skipped and not self._unseen.may_leave_no_trace:
            pending.events.append(skipped_event())
        if pending.sampled:
            self._boundary.call("copying statistics", self._active_quantities.end, pending)
        self._current.hand_over(pending)

    def _time_late(self, now: float, cause: Cause) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            pending = timing(now - late.began, late.amounts)
            timed = PendingStep(late.step, now_microseconds(), pending=pending, ended_at=now)
            self._events.on_step_timed(timed, cause)
            self._current.hand_over(timed)

    # Updates.

    def _await_update(self) -> None:
        """Note the data that no hook can read during a compiled update, and keep the model until it was read."""
        self._current.note_learning_rates(self._monitored)
        if self._current.is_sampled:
            self._kept = (self._monitored.framework.model, *self._monitored.optimizers)

    def _notice_updates(self) -> None:
        """Record the updates that have run since the last call and in which no hook ran."""
        for optimizer in self._unseen.look():
            self._after(self._tracker.update_begins(repeated=id(optimizer) in self._updated_by), "update")
            if not self._updated_by and self._current.pending is not None and not self._current.pending.learning_rates:
                self._current.note_learning_rates(self._monitored)
            self._updated_by.add(id(optimizer))
            self.measure(Quantity.on_optimizer_step_end)
            self._events.on_update_applied()
            self._tracker.updated()
            self._updated_at = time.monotonic()
