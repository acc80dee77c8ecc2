"""Collects one step at a time on the training thread and hands it over: measured table, logged numbers, events.

Nothing here waits for a device, does I/O, or formats anything; that is the publisher's work, on its own thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_contract.model.events import Event
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.quantities.base import ModelHookContext
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
from rankscope_exporter.records.step_record import Scalar
from rankscope_exporter.sampling.active_quantities import ActiveQuantities
from rankscope_exporter.statistics import Finished
from rankscope_exporter.training.step_tracker import Ended, StepStage, StepTracker, UnseenUpdates

LOGGING_SECONDS: Final = 10.0
"""How long a step waits behind its update for what is still logged: an evaluation may go on logging for hours."""


@dataclass(slots=True)
class _Timing:
    """A step that was handed over before its end was known: its duration follows with the next step."""

    step: int | None
    began: float
    amounts: dict[str, float]


class Recorder:
    """The training side of one attached model.

    Hooks and the script call it on the training thread, the publisher calls `flush_idle` and `published`; one lock
    keeps a step from being handed over while it is still being measured.
    """

    def __init__(
        self,
        monitored: MonitoredModel,
        active_quantities: ActiveQuantities,
        hand_over: Callable[[PendingStep], None],
        *,
        boundary: ErrorBoundary,
        tracker: StepTracker | None = None,
    ) -> None:
        self._monitored = monitored
        self._active_quantities = active_quantities
        self._hand_over = hand_over
        self._boundary = boundary
        self._lock = threading.RLock()
        self._tracker = tracker or StepTracker(has_optimizer=bool(monitored.optimizers))
        self._attempts = 0
        self._draft: PendingStep | None = None
        self._early: list[Pending] = []  # logged with its number before the step began
        self._numbered = False  # whether the script itself gave the number of the step under way
        self._last_step: int | None = None
        self._began = 0.0
        self._last_seen = 0.0
        self._updated_at = 0.0
        self._late: _Timing | None = None
        self._updated_by: set[int] = set()
        self._unseen = UnseenUpdates(monitored.optimizers)
        self._kept: tuple[object, ...] = ()  # model and optimizers of a sampled step with an update that no hook sees
        self._awaits_gradients = False
        self._witness: int | None = None  # position of the parameter that got a gradient last
        self._gradients_seen = 0
        self.step_events = StepEvents(boundary)
        """Tells parts beside this one what comes by."""
        self.micro_step = -1
        """Which training forward of the step, or of its chunk, was the last to begin, from 0 on."""
        self._forwards: dict[int, int] = {}  # the same, for each chunk
        self.on_open: Callable[[int], None] = lambda _attempt: None
        """Called with the number of steps begun so far whenever a sampled one begins."""
        self.on_rest: Callable[[], None] = lambda: None
        """Called whenever a step begins that is not sampled."""
        self.before_step: Callable[[int], list[Event]] = lambda _step: []
        """Called with the number of a step that is about to begin; may change what is measured, and says so."""
        self.after_update: Callable[[], None] = lambda: None
        """Called when an optimizer has stepped."""

    def install(self, hooking: ModelHookContext) -> None:
        """Let the quantities register hooks of their own."""
        self._active_quantities.install(hooking)

    # Reports of the hooks, in the order of a step.

    def forward_begins(self, chunk: int = 0) -> None:
        """A training forward of the whole model begins, or of one of its chunks on this rank."""
        with self._lock:
            self._notice_updates()
            self._after(self._tracker.forward_begins(self._gradients_cleared), "forward")
            self.micro_step = self._forwards.get(chunk, -1) + 1
            self._forwards[chunk] = self.micro_step
            self.step_events.tell("forward_begins")

    def evaluation_begins(self) -> None:
        """A forward of the whole model begins in evaluation mode or without gradients."""
        with self._lock:
            self._notice_updates()
            self.step_events.tell("evaluation_begins")

    def backward_begins(self) -> bool:
        """The first gradient of a backward pass has arrived; return whether a step begins with it."""
        with self._lock:
            self._notice_updates()
            before = self._attempts
            self._after(self._tracker.backward_begins(self._gradients_cleared), "backward")
            if self._unseen.are_expected:
                self._await_update()
            return self._attempts > before

    @property
    def sampling(self) -> bool:
        """Return whether the step under way is measured."""
        return self._draft is not None and self._draft.sampled

    def saw_gradient(self, index: int) -> None:
        """Parameter `index` is the first to get a gradient of a backward pass in a step that is not measured."""
        self._witness = index

    def gradient_ready(self, index: int, holder: GradientSource) -> None:
        """Parameter `index` has accumulated its gradient, which stands in `holder`."""
        self._witness = index
        pending_step = self._draft
        if pending_step is None or not pending_step.sampled:
            return
        if pending_step.call_order[index] < 0:
            pending_step.call_order[index] = self._gradients_seen
            self._gradients_seen += 1
        self._active_quantities.gradient_ready(index, holder)

    def backward_ends(self) -> None:
        """All gradients have accumulated; the framework has not yet written reduced ones back."""
        self._each("backward_ends")

    def backward_ended(self) -> None:
        """The framework has finished its part of the backward pass."""
        self._each("backward_ended")

    def update_begins(self, optimizer: torch.optim.Optimizer, *, computes_gradients: bool = False) -> None:
        """An optimizer is about to step; `gradients_computed` follows where it first calls a closure."""
        with self._lock:
            self._notice_updates()
            self._after(self._tracker.update_begins(repeated=id(optimizer) in self._updated_by), "update")
            self.step_events.tell("update_begins")
            first = not self._updated_by
            self._updated_by.add(id(optimizer))
            if first:  # later optimizers of the same step would see what the earlier ones changed
                self._boundary.call("the learning rate", self._note_learning_rates)
                self._awaits_gradients = computes_gradients
            if not computes_gradients and (first or self._monitored.framework.updates_in_parts):
                self._each("before_update")

    def gradients_computed(self) -> None:
        """The closure of an optimizer has returned; only the first call of a step comes before any change."""
        with self._lock:
            if self._awaits_gradients:
                self._awaits_gradients = False
                self._each("before_update")

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or was told by its gradient scaler not to."""
        with self._lock:
            self.step_events.tell("updated")
            self._each("after_update")
            self._boundary.call("switching", self.after_update)
            self._tracker.updated()
            self._unseen.look()
            self._last_seen = self._updated_at = time.monotonic()
            found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself, on the device
            if self._draft is not None and isinstance(found_inf, torch.Tensor):
                self._draft.found_inf += take("found_inf", found_inf)

    def update_compiles(self) -> None:
        """The step of an optimizer is compiled and runs next; no hook will run in it, now or later."""
        with self._lock:
            self._unseen.expect()
            self._await_update()

    # Calls of the training script.

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Attach numbers to the step under way, or to the last one when none is.

        `step` numbers the step under way. Given a second, different number it begins the next one, and without a step
        under way it numbers the one to come.
        """
        pending = [item for name, value in values.items() for item in self._taken(name, value)]
        with self._lock:
            self._notice_updates()
            now = time.monotonic()
            if now - self._updated_at < LOGGING_SECONDS:
                self._last_seen = now
            if step is not None and self._numbered and self._draft is not None and step != self._draft.step:
                self._after(self._tracker.end(), "script")
            if self._draft is not None:
                if step is not None:
                    self._tracker.step = self._draft.step = step
                    self._numbered = True
                self._draft.pending += pending
            elif step is None or step == self._last_step:
                self._hand_over(PendingStep(self._last_step, now_microseconds(), pending=pending))
            else:
                self._tracker.step = step
                self._numbered = True
                self._early += pending

    def _taken(self, name: str, value: Any) -> Sequence[Pending]:
        """Return what is logged under `name`; a value that is no number is reported, and the others are kept."""
        return self._boundary.call(f"log({name}=…)", lambda: list(take(name, value))) or ()

    def add(self, later: Callable[[], Iterable[Scalar]]) -> None:
        """Attach what is read on the publisher's thread to the step under way, once; without one hand it over now."""
        with self._lock:
            if self._draft is None:
                self._hand_over(PendingStep(self._last_step, now_microseconds(), later=[later]))
            elif later not in self._draft.later:
                self._draft.later.append(later)

    def event(self, event: Event) -> None:
        """Hand over an event of the step under way at once: people may be waiting for it."""
        with self._lock:
            step = self._draft.step if self._draft is not None else self._last_step
            self._hand_over(PendingStep(step, now_microseconds(), events=[event]))

    def end_step(self, *, skipped: bool | None) -> None:
        """End the step under way on request of the script."""
        with self._lock:
            self._notice_updates()
            self._after(self._tracker.end(skipped=skipped), "script")

    def finish(self) -> int | None:
        """Hand over what is left and return the number of the last step that got gradients; None without one."""
        with self._lock:
            self._notice_updates()
            before, begun_only = self._last_step, self._tracker.stage is StepStage.OPEN
            self.step_events.tell("training_ends")
            self._after(self._tracker.end(skipped=False), "script")
            self._time_late(time.monotonic(), "script")
            return before if begun_only else self._last_step

    def look(self) -> tuple[int, Sequence[PlanEntry], Finished] | None:
        """Return number, plan and statistics of the step under way, None without one; waits for the device."""
        with self._lock:
            if self._draft is None or self._draft.step is None or not self._draft.sampled:
                return None
            return self._draft.step, *self._active_quantities.peek()

    def between(self, function: Callable[[], None]) -> None:
        """Call `function` while no step begins or ends."""
        with self._lock:
            function()

    # Calls of the publisher.

    def flush_idle(self, after_seconds: float) -> None:
        """Hand over an updated step when training does something else for a while."""
        with self._lock:
            whole = self._tracker.stage is StepStage.UPDATED and len(self._updated_by) >= len(
                self._monitored.optimizers
            )
            if whole and self._draft is not None and time.monotonic() - self._last_seen > after_seconds:
                self._late = _Timing(self._draft.step, self._began, amounts_of(self._draft.pending))
                self._close(self._tracker.end())

    def published(self) -> None:
        """A measured step has been read from its copy."""
        with self._lock:
            self._active_quantities.backlog -= 1

    # The step's life.

    def _after(self, ended: Ended | None, cause: Cause) -> None:
        now = time.monotonic()
        if ended is not None and self._draft is not None:
            self._close(ended, (now - self._began, cause))
        if cause != "script" and self._draft is None:
            self._open(now, cause)
        self._last_seen = now

    def _open(self, now: float, cause: Cause) -> None:
        self._time_late(now, cause)
        switched = self._boundary.call("switching", self.before_step, self._tracker.step)
        sampled = self._active_quantities.begin(self._tracker.step)
        self._attempts += 1
        self._draft = PendingStep(self._tracker.step, now_microseconds(), sampled=sampled)
        self._draft.events += switched or ()
        self._draft.pending, self._early = self._early, []
        self._updated_by.clear()
        self._gradients_seen = 0
        self.micro_step = -1
        self._forwards.clear()
        self._began = now
        self.step_events.tell("step_begins", self._tracker.step)
        if sampled:
            self._boundary.call("looking at the parameters", self.on_open, self._attempts)
            self._draft.call_order = [-1] * len(self._monitored.parameters)
            self._each("step_begins")
        else:
            self._boundary.call("hooks of gradients", self.on_rest)

    def _time_late(self, now: float, cause: Cause) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            pending = timing(now - late.began, late.amounts)
            timed = PendingStep(late.step, now_microseconds(), pending=pending, ended_at=now)
            self.step_events.tell("step_timed", timed, cause)
            self._hand_over(timed)

    def _close(self, ended: Ended | None, timed: tuple[float, Cause] | None = None) -> None:
        """Hand the step over; `timed` is how long it took and what has ended it, None where neither is known yet."""
        pending_step, self._draft = self._draft, None
        self._numbered = False
        self._kept = ()
        assert pending_step is not None
        self._last_step = pending_step.step
        pending_step.ts = now_microseconds()
        if not any(item.name == "learning_rate" for item in pending_step.pending):
            pending_step.pending += pending_step.learning_rates
        if timed is not None:
            pending_step.pending += timing(timed[0], amounts_of(pending_step.pending))
            pending_step.ended_at = self._began + timed[0]
        self.step_events.tell("step_ends", pending_step)
        if timed is not None:
            self.step_events.tell("step_timed", pending_step, timed[1])
        if ended is not None and ended.skipped and not self._unseen.may_leave_no_trace:
            pending_step.events.append(skipped_event())
        if pending_step.sampled:
            self._boundary.call("copying statistics", self._active_quantities.end, pending_step)
        self._hand_over(pending_step)

    def _each(self, moment: str) -> None:
        if self.sampling:
            self.step_events.tell("reading_begins")
            self._active_quantities.notify(moment)
            self.step_events.tell("reading_ended")

    def _await_update(self) -> None:
        """Note what no hook will read when the optimizer steps, and keep the model until the update was read."""
        self._note_learning_rates()
        if self.sampling:
            self._kept = (self._monitored.framework.model, *self._monitored.optimizers)

    def _notice_updates(self) -> None:
        """Take in the updates that have run since the last look and in which no hook ran."""
        for optimizer in self._unseen.look():
            self._after(self._tracker.update_begins(repeated=id(optimizer) in self._updated_by), "update")
            if not self._updated_by and self._draft is not None and not self._draft.learning_rates:
                self._note_learning_rates()
            self._updated_by.add(id(optimizer))
            self._each("after_update")
            self._boundary.call("switching", self.after_update)
            self._tracker.updated()
            self._updated_at = time.monotonic()

    def _gradients_cleared(self) -> bool:
        if self._witness is None:
            return False
        witness = self._monitored.parameter(self._witness)
        return witness is None or not self._monitored.framework.holds_gradient(witness)

    def _note_learning_rates(self) -> None:
        if self._draft is None:
            return
        rates: dict[str, Any] = {}
        for optimizer in self._monitored.optimizers:
            for group in self._monitored.framework.groups_of(optimizer):
                rates[str(len(rates))] = group.get("lr")
        self._draft.learning_rates = list(take("learning_rate", rates))
