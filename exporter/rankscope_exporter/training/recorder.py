"""Finds the boundaries of steps from the calls of hooks and of the script, and records one step at a time.

Hooks, observers and the script add data to the record of the open step. Finished records enter the publisher's queue.
Nothing in this module waits for a device, performs I/O or formats text.
"""

from __future__ import annotations

import functools
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_exporter.adapters.base import Framework, GradientSource
from rankscope_exporter.adapters.hook_context import IntraOpThreads
from rankscope_exporter.adapters.monitored_model import MonitoredModel, identities
from rankscope_exporter.adapters.pytree import returned
from rankscope_exporter.adapters.torch_private import current_pass
from rankscope_exporter.adapters.tracing import is_dynamo_compiling
from rankscope_exporter.measure.kernels.tensor_access import PLAIN_TYPES
from rankscope_exporter.measure.quantities.base import Quantity
from rankscope_exporter.measure.table import Table
from rankscope_exporter.monitors.step_timing import Kind
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.record import (
    Cause,
    Pending,
    StepEvents,
    StepRecord,
    monotonic_microseconds,
    now_microseconds,
    timing,
)
from rankscope_exporter.training.gradient_hooks import GradientHooks
from rankscope_exporter.training.sampling import ActiveQuantities
from rankscope_exporter.training.step_tracker import (
    CurrentStep,
    Ended,
    Signal,
    StepStage,
    StepTracker,
    UnseenUpdates,
    take,
)

LOGGING_SECONDS: Final = 10.0
"""Seconds after an update in which calls of `log` keep the step open; limited, as an evaluation may log for hours."""

_name_of: Final = operator.attrgetter("name")


def _visit(number: int, visits: set[tuple[int, int]], _gradients: object) -> None:
    if not is_dynamo_compiling():
        visits.add((number, current_pass()))


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
        self._updated_by: Counter[int] = Counter()  # by identity of an optimizer: its updates in the open step
        self._additional: set[int] = set()  # optimizers that `attach` did not get, next to those that it got
        self._unseen = UnseenUpdates(self.monitored.optimizers)
        self._kept: tuple[object, ...] = ()  # model and optimizers of a sampled step with a compiled update
        self._awaiting: tuple[torch.optim.Optimizer, bool] | None = None  # arguments of `_measure_update`, see there
        self.updates_copies = False
        """True if an optimizer has copies of parameters: the script copies their values to the model."""
        self._measures_late = False  # the values after this update are read when the step ends
        self._is_transformed = False  # a forward pass under a transform begins the step, or the next one
        self.forwards_are_transformed = False
        """True if the forward passes of the latest update ran under transforms of `torch.func`, and no others did."""
        self.micro_step = -1
        """Number of the latest training forward pass within the step, from 0 on. Each model chunk has its own count."""
        self._forwards: dict[int, int] = {}  # the same, for each chunk
        self._chunk = 0  # of the latest one
        self._results: set[int] = set()  # numbers of forward passes of the step whose results need gradients
        self._visits: set[tuple[int, int]] = set()  # such a number, and a pass of autograd that has reached its result
        self._passes: set[int] = set()  # backward passes of the step: those that add gradients to parameters

    # Calls of the hooks, in the order of a step.

    def forward_begins(self, chunk: int = 0) -> None:
        """Handle the beginning of a training forward pass of the whole model, or of one of its chunks on this rank."""
        with self._lock:
            if self._unseen.are_expected:
                self._notice_updates()
            self._is_transformed = False
            self._after(self.tracker.move(Signal.FORWARD, self.gradients.are_cleared), "forward")
            self.micro_step = self._forwards.get(chunk, -1) + 1
            self._forwards[chunk], self._chunk = self.micro_step, chunk
            self.current.logged.clear()  # a name that a later micro-batch logs again belongs to the same step
            if self.current.is_sampled:
                table = self.active_quantities.table
                table.deferred_before = len(table.deferred)
            self.note("forward_begins")
            self.events.on_forward_begin()

    def forward_ended(self, output: Any) -> None:
        """Store whether a backward pass reaches a forward pass of a sampled step: the script may leave it out."""
        tensors = (output,) if isinstance(output, torch.Tensor) else [slot.tensor for slot in returned(output).slots]
        for tensor in tensors:
            node = tensor.grad_fn if type(tensor) in PLAIN_TYPES else None
            if node is not None:
                self._results.add(self.micro_step)
                node.register_prehook(functools.partial(_visit, self.micro_step, self._visits))

    def forward_failed(self) -> None:
        """Handle the end of the latest training forward pass, which raised an error: it is no micro-batch."""
        with self._lock:
            chunk = self._chunk
            if chunk in self._forwards:  # else the step has ended
                if self.current.is_sampled:
                    self.active_quantities.forward_failed()
                self._forwards[chunk] -= 1
                self.micro_step = self._forwards[chunk]

    def transformed_forward(self) -> None:
        """Handle a training forward pass under a transform of `torch.func`. No operation of torch may run now.

        It begins a step, outside of the transform, if the training has no other forward passes.
        """
        is_between = self.tracker.stage in (StepStage.IDLE, StepStage.UPDATED)
        if (is_between or not self._forwards) and torch.is_grad_enabled() and self.monitored.framework.is_training():
            self._is_transformed = True

    def _begin_transformed(self) -> None:
        is_first = self.current.pending is None and self.current.last_step is None
        if is_first or self.forwards_are_transformed:
            self._after(self.tracker.move(Signal.FORWARD, self.gradients.are_cleared), "forward")

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
            self._after(self.tracker.move(Signal.BACKWARD, self.gradients.are_cleared), "backward")
            self._passes.add(current_pass())
            if self._unseen.are_expected:
                self._await_update()
            self.current.backward_begins()
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
            is_repeated = id(optimizer) in self._updated_by.keys() - self._additional
            ended = self.tracker.move(Signal.UPDATE, repeated=is_repeated, computes_gradients=computes_gradients)
            self._after(ended, "update")
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
            self._after(self.tracker.move(Signal.UPDATE, repeated=False), "update")
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
            if self.current.is_sampled and update.has_others and self._has_copies(optimizer):
                self.note("updated")
                self._measures_late = self.updates_copies = True
                self._kept = (self.monitored.framework.model,)
            else:
                self.measure(Quantity.on_optimizer_step_end, "updated")
            self.events.on_update_applied()
            self.tracker.move(Signal.UPDATED)
            if self._unseen.are_expected:
                self._unseen.look()
            self._last_seen = self._updated_at = time.monotonic()
            found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step on the device
            if self.current.pending is not None and isinstance(found_inf, torch.Tensor):
                self.current.pending.found_inf += take("found_inf", found_inf)

    def _has_copies(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether `optimizer` has copies of parameters of the model, which the script itself copies back."""
        monitored, framework = self.monitored, self.monitored.framework
        knows_copies = type(framework).updated_tensors is not Framework.updated_tensors
        if optimizer is None or framework.traits.optimizer_takes_copies or knows_copies:
            return False
        known = {id(named.current()) for named in monitored.parameters}
        own = [item for group in optimizer.param_groups for item in group["params"]]
        others = Counter(tuple(item.shape) for item in own if id(item) not in known | monitored.places().keys())
        updated = {key for item in monitored.optimizers.present() for key in identities(item)}
        trained = [item for item in monitored.tensors() if item is not None and item.requires_grad]
        left = Counter(tuple(item.shape) for item in trained if id(item) not in updated)
        are_all = known.isdisjoint(map(id, own))  # copies of all parameters may have other shapes, as one flat tensor
        return bool(others and left) and (are_all or others <= left)

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
                is_updated = self.tracker.stage is StepStage.UPDATED and not self.tracker.explicit
                if current.log(pending, step, is_updated=is_updated) and step is not None:
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
            is_whole = (
                is_updated and len(self._updated_by) >= len(self.monitored.optimizers) and not self._measures_late
            )
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
        self.current.open(step, sampled=sampled)
        self._updated_by.clear()
        self.monitored.update.stepped.clear()
        self._awaiting = None
        self.micro_step = -1
        self._forwards.clear()
        # The graphs of earlier passes have the old sets.
        self._results, self._visits, self._passes = set(), set(), set()
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
            updates = tuple(map(self._updated_by.__getitem__, self.current.settings.owners))
            if updates.count(1) < len(updates) and not self.monitored.framework.traits.updates_in_parts:
                pending.updates = updates
            pending.arrived = list(self.monitored.update.arrived)
            try:
                reached, passes = set(), set()
                for number, task in self._visits:
                    if task in self._passes:
                        reached.add(number)
                        passes.add(task)
                # A pass that has reached no result has a loss of other tensors of the forward passes.
                left_out = self._results - reached if passes and passes == self._passes else set()
                self.active_quantities.end(pending, left_out)
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
        self._updated_by[id(optimizer)] += 1
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
            self._after(self.tracker.move(Signal.UPDATE, repeated=id(optimizer) in self._updated_by), "update")
            if not self._updated_by and self.current.pending is not None and not self.current.pending.learning_rates:
                self.current.note_learning_rates(self.monitored)
            self._updated_by[id(optimizer)] += 1
            self.measure(Quantity.on_optimizer_step_end)
            self.events.on_update_applied()
            self.tracker.move(Signal.UPDATED)
            self._updated_at = time.monotonic()
