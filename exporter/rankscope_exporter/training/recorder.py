"""Finds the boundaries of steps from the calls of hooks and of the script, and records one step at a time.

Hooks, observers and the script add data to the record of the open step. Finished records enter the publisher's queue.
Nothing in this module waits for a device, performs I/O or formats text.
"""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.redaction import MAX_LABEL, redacted_name
from rankscope_contract.model.scalar_names import logged_name
from rankscope_exporter.adapters.base import Framework, GradientSource
from rankscope_exporter.adapters.hook_context import IntraOpThreads
from rankscope_exporter.adapters.monitored_model import MonitoredModel, identities
from rankscope_exporter.adapters.tracing import untransformed
from rankscope_exporter.measure.kernels.statistics_table import copied_to_host
from rankscope_exporter.measure.quantities.base import Quantity
from rankscope_exporter.measure.table import Table
from rankscope_exporter.monitors.step_timing import Kind
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.record import (
    LABEL_OF_GROUP,
    Cause,
    Pending,
    Scalar,
    StepEvents,
    StepRecord,
    Transfer,
    monotonic_microseconds,
    now_microseconds,
    timing,
)
from rankscope_exporter.training.gradient_hooks import GradientHooks
from rankscope_exporter.training.sampling import ActiveQuantities
from rankscope_exporter.training.step_tracker import Ended, StepStage, StepTracker, UnseenUpdates

LOGGING_SECONDS: Final = 10.0
"""Seconds after an update in which calls of `log` keep the step open; limited, as an evaluation may log for hours."""

_name_of: Final = operator.attrgetter("name")


@dataclass(eq=False, kw_only=True)
class Recorder:
    """Opens and closes the steps of one attached model, and calls the observers and quantities of each step.

    Hooks and the script call the recorder on the training thread. The publisher thread calls only `flush_idle`. The
    lock of the open step, `current`, ensures that a step is not published while it is being measured.

    The class has many methods, because each call of a hook or of the script has its own, and all change one open step.
    """

    monitored: MonitoredModel
    active_quantities: ActiveQuantities
    current: CurrentStep
    events: StepEvents
    note: Callable[..., None]
    """Function that stores the time of events of the step, and raises nothing."""
    team: IntraOpThreads
    tracker: StepTracker
    gradients: GradientHooks
    boundary: ErrorBoundary

    def __post_init__(self) -> None:
        self._lock = self.current.lock
        notify = self.active_quantities.notify
        self._notify = functools.partial(self.team.call, notify) if self.team.clocks else notify
        self._began = self._last_seen = self._updated_at = 0.0
        self._late: Callable[[float, Cause], None] | None = None  # publishes the duration of an idle step
        self._updated_by: set[int] = set()  # optimizers that have stepped in the open step, by identity
        self._additional: set[int] = set()  # optimizers that `attach` did not get, next to those that it got
        self._unseen = UnseenUpdates(self.monitored.optimizers)
        self._kept: tuple[object, ...] = ()  # model and optimizers of a sampled step with a compiled update
        self._awaiting: tuple[torch.optim.Optimizer, bool] | None = None  # arguments of `_measure_update`, see there
        self.updates_copies = False
        """True if the optimizer has no parameter of the model: the script copies its values to the model."""
        self._measures_late = False  # the values after this update are read when the step ends
        self._is_transformed = False  # a forward pass under a transform begins the step, or the next one
        self.forwards_are_transformed = False
        """True if the forward passes of the latest update ran under transforms of `torch.func`, and no others did."""
        self.micro_step = -1
        """Number of the latest training forward pass within the step, from 0 on. Each model chunk has its own count."""
        self._forwards: dict[int, int] = {}  # the same, for each chunk

    # Calls of the hooks, in the order of a step.

    def forward_begins(self, chunk: int = 0) -> None:
        """Handle the beginning of a training forward pass of the whole model, or of one of its chunks on this rank."""
        with self._lock:
            if self._unseen.are_expected:
                self._notice_updates()
            self._is_transformed = False
            self._after(self.tracker.forward_begins(self.gradients.are_cleared), "forward")
            self.micro_step = self._forwards.get(chunk, -1) + 1
            self._forwards[chunk] = self.micro_step
            if self.current.is_sampled:
                table = self.active_quantities.table
                table.deferred_before = len(table.deferred)
            self.note("forward_begins")
            self.events.on_forward_begin()

    def forward_failed(self, chunk: int) -> None:
        """Handle the end of a training forward pass that raised an error. The micro-batch does not count."""
        with self._lock:
            if self.current.is_sampled:
                self.active_quantities.forward_failed()
            self._forwards[chunk] -= 1
            self.micro_step = self._forwards[chunk]

    def transformed_forward(self) -> None:
        """Handle a training forward pass under a transform of `torch.func`. No operation of torch may run now.

        It begins a step, outside of the transform, if the training has no other forward passes.
        """
        is_between = self.tracker.stage in (StepStage.IDLE, StepStage.UPDATED)
        if (is_between or not self._forwards) and torch.is_grad_enabled() and self.monitored.framework.module.training:
            self._is_transformed = True

    def _begin_transformed(self) -> None:
        is_first = self.current.pending is None and self.current.last_step is None
        if is_first or self.forwards_are_transformed:
            self._after(self.tracker.forward_begins(self.gradients.are_cleared), "forward")

    def evaluation_begins(self) -> None:
        """Handle the beginning of a forward pass of the whole model in evaluation mode or without gradients."""
        with self._lock:
            if self._unseen.are_expected:
                self._notice_updates()
            self.note("evaluation_begins")
            self.events.on_evaluation_begin()

    def backward_begins(self) -> bool:
        """Handle the first gradient of a backward pass; return whether a step begins with this gradient."""
        with self._lock:
            if self._unseen.are_expected:
                self._notice_updates()
            before = self.current.pending
            self._after(self.tracker.backward_begins(self.gradients.are_cleared), "backward")
            if self._unseen.are_expected:
                self._await_update()
            self.note("backward_begins")
            self.events.on_backward_begin()
            return self.current.pending is not before

    def gradient_ready(self, index: int, holder: GradientSource) -> None:
        """Handle a gradient that a framework requires to be read in its hook. `holder` provides it."""
        if self.current.is_sampled:
            self.team.call(self.active_quantities.gradient_ready, index, holder)

    def measure(self, event: Callable[[Quantity, Table], None], *kinds: Kind) -> None:
        """Store the time of events of the step, the `kinds`. At a sampled step, then measure.

        The method of each measured quantity that has the name of the function `event` is called. The current parameters
        of the model are read once during the call.
        """
        if not self.current.is_sampled:
            self.note(*kinds)
            return
        self.note(*kinds, "reading_begins")
        self.monitored.update.found = {}
        try:
            self._notify(event)
        finally:
            self.monitored.update.found = None
            self.note("reading_ended")

    def update_begins(self, optimizer: torch.optim.Optimizer, *, computes_gradients: bool = False) -> None:
        """Handle the beginning of an optimizer step.

        If `computes_gradients` is true, the optimizer has a closure that computes the gradients. `gradients_computed`
        is then called after the closure.
        """
        with self._lock:
            if self._unseen.are_expected:
                self._notice_updates()
            if self._is_transformed:
                self._begin_transformed()
            if self._is_transformed or self._forwards:
                self.forwards_are_transformed = self._is_transformed and not self._forwards
                self._is_transformed = False
            is_repeated = id(optimizer) in self._updated_by - self._additional
            self._after(self.tracker.update_begins(repeated=is_repeated), "update")
            self.note("update_begins")
            update = optimizer, self._note_update(optimizer)
            if self.current.is_sampled:
                if computes_gradients:
                    self._awaiting = update
                else:
                    self._measure_update(*update)

    def update_in_backward(self, optimizer: torch.optim.Optimizer, *, has_stepped: bool) -> None:
        """Handle a step of `optimizer` inside a backward pass, which begins or, if `has_stepped` is true, has ended.

        The update of the training step ends, with a call of `updated`, when the backward pass ends.
        """
        with self._lock:
            is_first = self._note_update(optimizer)
            if self.current.is_sampled:
                update = self.monitored.update
                update.is_inside_backward = True
                try:
                    if is_first and not has_stepped:
                        self.measure(Quantity.on_optimizer_step_begin)
                    for index in update.positions_of(optimizer):
                        parameter = self.monitored.parameter(index)
                        if parameter is not None and index not in self.monitored.retired:
                            self.active_quantities.gradient_ready(index, parameter)
                finally:
                    update.is_inside_backward = False

    def new_optimizer(self, optimizer: torch.optim.Optimizer, *, replaces: bool) -> None:
        """Handle the first step of an optimizer that `attach` did not get. The step has just ended.

        If it does not replace an observed optimizer, a repeated step of it does not end the training step.
        """
        with self._lock:
            if not replaces and len(self.monitored.optimizers) > 1:
                self._additional.add(id(optimizer))
            self._after(self.tracker.update_begins(repeated=False), "update")
            self._note_update(optimizer)

    def gradients_computed(self) -> None:
        """Handle the return of an optimizer's closure, after which the gradients are complete.

        Only the first call in an update has an effect: the optimizer may update parameters between two calls.
        """
        with self._lock:
            update, self._awaiting = self._awaiting, None
            if update is not None and self.current.is_sampled:
                self._measure_update(*update)

    def updated(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Handle the end of an optimizer step. The gradient scaler may have skipped the step.

        `optimizer` is None for the updates inside a backward pass, which ends now.
        """
        with self._lock:
            update = self.monitored.update
            if self.current.is_sampled and not update.stepped and self._has_copies(optimizer):
                self.note("updated")
                self._measures_late = self.updates_copies = True
                self._kept = (self.monitored.framework.model,)
            else:
                self.measure(Quantity.on_optimizer_step_end, "updated")
            self.events.on_update_applied()
            self.tracker.updated()
            if self._unseen.are_expected:
                self._unseen.look()
            self._last_seen = self._updated_at = time.monotonic()
            found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step on the device
            if self.current.pending is not None and isinstance(found_inf, torch.Tensor):
                self.current.pending.found_inf += take("found_inf", found_inf)

    def _has_copies(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether `optimizer` has copies of the model's parameters, which the script itself copies back."""
        framework = self.monitored.framework
        is_done_by_framework = framework.traits.optimizer_takes_copies
        if (
            optimizer is None
            or is_done_by_framework
            or type(framework).updated_tensors is not Framework.updated_tensors
        ):
            return False
        return self.monitored.in_model().isdisjoint(identities(optimizer))

    def update_compiles(self) -> None:
        """Handle the compilation of an optimizer step, which runs afterwards and calls no hooks."""
        with self._lock:
            self._unseen.expect()
            self._await_update()

    # Calls of the script and of the publisher.

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Add logged numbers to the open step; if none is open, to the last or the next one (see `CurrentStep.log`).

        `step` is the number of the step to which the numbers belong. If an earlier call has given the open step a
        different number, the open step ends first. A value that is not a number is reported; the other values are
        logged.
        """
        pending: list[Pending] = []
        for name, value in values.items():
            try:
                pending += take(name, value)  # all numbers of a mapping, or none
            except Exception as error:  # noqa: BLE001 - a value that is not a number; the others are logged
                self.boundary.report(f"log({name}=…)", error)
        with self._lock:
            if self._unseen.are_expected:
                self._notice_updates()
            if self._is_transformed:
                self._begin_transformed()
            now, current = time.monotonic(), self.current
            if now - self._updated_at < LOGGING_SECONDS:
                self._last_seen = now
            if step is None or not current.is_over(step):
                is_other = current.pending is not None and step != current.pending.step
                if step is not None and current.is_numbered and is_other:
                    self._after(self.tracker.end(), "script")
                if current.log(pending, step) and step is not None:
                    self.tracker.step = step
            else:
                current.log_apart(pending, step)

    def end_step(self, skipped: bool | None) -> None:  # noqa: FBT001 - hooks have positional arguments
        """End the open step at the request of the script."""
        with self._lock:
            if self._unseen.are_expected:
                self._notice_updates()
            self._after(self.tracker.end(skipped=skipped), "script")
            if self._late is not None:
                self._late(time.monotonic(), "script")

    def finish(self, *, is_cut: bool) -> int | None:
        """Publish the remaining records; return the number of the last completed step, None if there was none.

        With `is_cut`, an exception or a signal ends training, and a step without an update is not completed.
        """
        with self._lock:
            if self._unseen.are_expected:
                self._notice_updates()
            before, stage = self.current.last_step, self.tracker.stage
            self.events.on_training_end()
            self._after(self.tracker.end(skipped=False), "end")
            if self._late is not None:
                self._late(time.monotonic(), "end")
            self.current.publish_next()
            is_partial = stage is StepStage.OPEN or (is_cut and stage is StepStage.GRADIENTS)
            return before if is_partial else self.current.last_step

    @property
    def holds_an_update(self) -> bool:
        """Return whether the open step has been trained: an optimizer has stepped in it. Takes no lock."""
        return self.current.pending is not None and self.tracker.stage is StepStage.UPDATED

    def flush_idle(self, after_seconds: float) -> None:
        """Publish the open step if all optimizers have stepped and the step was idle for `after_seconds`.

        The time counts from the last hook call that began or ended a part of the step, or from a later call of `log`.
        """
        with self._lock:
            pending = self.current.pending
            is_updated = self.tracker.stage is StepStage.UPDATED
            is_whole = is_updated and len(self._updated_by) >= len(self.monitored.optimizers)
            if is_whole and pending is not None and time.monotonic() - self._last_seen > after_seconds:
                self._late = functools.partial(self._time_late, pending.step, self._began, pending.pending)
                self._close(self.tracker.end())

    # Boundaries of steps.

    def _after(self, ended: Ended | None, cause: Cause) -> None:
        now = time.monotonic()
        if ended is not None and self.current.pending is not None:
            self._close(ended, (now - self._began, cause))
        if cause not in {"script", "end"} and self.current.pending is None:
            self._open(now, cause)
        self._last_seen = now

    def _open(self, now: float, cause: Cause) -> None:
        if self._late is not None:
            self._late(now, cause)
        step = self.tracker.step
        self.events.on_before_step(step)
        sampled = self.active_quantities.decide_sampling(step)
        current = self.current
        current.pending = StepRecord(  # its times are set when it closes
            ts=0, step=step, sampled=sampled, pending=current.next_values, events=current.next_events
        )
        current.is_sampled, current.next_values, current.next_events = sampled, [], []
        self._updated_by.clear()
        self.monitored.update.stepped.clear()
        self._awaiting = None
        self.micro_step = -1
        self._forwards.clear()
        self._began = now
        self.note("step_begins")
        self.events.on_sampling_decided(sampled)
        if sampled:
            self.active_quantities.notify(Quantity.on_step_begin)

    def _close(self, ended: Ended | None, timed: tuple[float, Cause] | None = None) -> None:
        """Publish the open step.

        `timed` is the duration of the step in seconds and the cause of its end; None if the end is not known yet.
        """
        if self._measures_late:
            self._measures_late = False
            self.measure(Quantity.on_optimizer_step_end)
        pending, self.current.pending = self.current.pending, None
        assert pending is not None
        self.current.last_is_numbered = self.current.is_numbered
        self.current.is_sampled = self.current.is_numbered = False
        self.current.last_step = pending.step
        self._kept = ()
        self._awaiting = None
        pending.ts, pending.monotonic = now_microseconds(), monotonic_microseconds()
        if "learning_rate" not in map(_name_of, pending.pending):
            pending.pending += pending.learning_rates
        if timed is not None:
            pending.pending += timing(timed[0], pending.pending, timed[1])
            pending.ended_at = self._began + timed[0]
        self.events.on_step_end(pending)
        if timed is not None:
            self.events.on_step_timed(pending, timed[1], pending.pending)
        pending.is_skipped = ended is not None and ended.skipped and not self._unseen.may_leave_no_trace
        pending.skip_is_certain = ended is not None and ended.is_certain
        if pending.sampled:
            pending.arrived = list(self.monitored.update.arrived)
            try:
                self.active_quantities.end(pending)
            except Exception as error:  # noqa: BLE001 - as the error boundary does, without another call
                self.boundary.report("copying statistics", error)
        self.current.hand_over(pending)

    def _time_late(self, step: int | None, began: float, logged: list[Pending], now: float, cause: Cause) -> None:
        """Publish the duration of a step whose end was not known when it was published."""
        self._late = None
        timed = StepRecord.now(step, pending=timing(now - began, logged, cause), ended_at=now)
        self.events.on_step_timed(timed, cause, logged)
        self.current.hand_over(timed)

    # Updates.

    def _note_update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Store that `optimizer` steps, and return whether it is the first optimizer step of the training step."""
        is_first = not self._updated_by
        if is_first:
            try:
                self.current.note_learning_rates(self.monitored)
            except Exception as error:  # noqa: BLE001 - see above
                self.boundary.report("the learning rate", error)
        self._updated_by.add(id(optimizer))
        self.monitored.update.latest = id(optimizer)
        return is_first

    def _measure_update(self, optimizer: torch.optim.Optimizer, is_first: bool) -> None:  # noqa: FBT001 - private
        """Measure the parameters that `optimizer` is about to update. Each of several optimizers has its own.

        `is_first` is true for the first optimizer step of the training step.
        """
        update = self.monitored.update
        own = update.begin(optimizer, self.monitored.optimizers.present(), is_first=is_first)
        try:
            if own or is_first or self.monitored.framework.traits.updates_in_parts:
                self.measure(Quantity.on_optimizer_step_begin)
        finally:
            update.positions = None
            update.stepped |= own

    def _await_update(self) -> None:
        """Store what no hook can read in a compiled step; the model is kept until its new values are read."""
        self.current.note_learning_rates(self.monitored)
        if self.current.is_sampled:
            self._kept = (self.monitored.framework.model, *self.monitored.optimizers.present())

    def _notice_updates(self) -> None:
        """Record the optimizer steps without hook calls that have run since the last call of this method."""
        for optimizer in self._unseen.look():
            self._after(self.tracker.update_begins(repeated=id(optimizer) in self._updated_by), "update")
            if not self._updated_by and self.current.pending is not None and not self.current.pending.learning_rates:
                self.current.note_learning_rates(self.monitored)
            self._updated_by.add(id(optimizer))
            self.measure(Quantity.on_optimizer_step_end)
            self.events.on_update_applied()
            self.tracker.updated()
            self._updated_at = time.monotonic()


class CurrentStep:
    """The open step of one attached model, or the state between two steps.

    `lock` serializes the training thread, the publisher thread and other threads of the script. A caller of `log`
    must hold the lock.
    """

    def __init__(self, hand_over: Callable[[StepRecord], None]) -> None:
        self.lock = threading.RLock()
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
