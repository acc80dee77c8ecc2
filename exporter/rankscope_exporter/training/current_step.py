"""The record of the step that is open now, to which hooks, observers and the script add data.

Finished records go to the publisher's queue. Nothing here waits for a device or performs I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from rankscope_contract.model.events import Event
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.records.pending_step import Pending, PendingStep, now_microseconds, take
from rankscope_exporter.records.step_record import Scalar


class CurrentStep:
    """The open step of one attached model, or the position between two steps.

    `lock` serializes the training thread, the publisher thread and callers of other threads. It must be held by callers
    of `open`, `close` and `log`.
    """

    def __init__(self, hand_over: Callable[[PendingStep], None]) -> None:
        self.lock = threading.RLock()
        self.hand_over = hand_over
        """Passes a record to the publisher; never blocks."""
        self.pending: PendingStep | None = None
        """The record of the open step; None between two steps."""
        self.is_sampled = False
        """True if a step is open and sampled. A field, because gradient hooks read it at each call."""
        self.is_numbered = False
        """True if the script has set the number of the open step, or of the next one."""
        self.last_step: int | None = None
        """Number of the step that was closed last."""
        self._next_values: list[Pending] = []
        self._next_events: list[Event] = []

    def open(self, step: int, *, sampled: bool) -> PendingStep:
        """Open the record of step number `step`, with the values and events that were added for it before."""
        self.is_sampled = sampled
        self.pending = pending = PendingStep(step, now_microseconds(), sampled=sampled)
        pending.pending, self._next_values = self._next_values, []
        pending.events, self._next_events = self._next_events, []
        return pending

    def close(self) -> PendingStep:
        """Return the record of the open step, which is then no longer open."""
        pending, self.pending = self.pending, None
        assert pending is not None
        self.is_sampled = self.is_numbered = False
        self.last_step = pending.step
        return pending

    def log(self, values: Sequence[Pending], step: int | None) -> bool:
        """Add values to the open step, or to the last one if none is open; return whether `step` numbers a step.

        A `step` numbers the open step. If no step is open and it is not the number of the last step, it is the number
        of the next step, which gets the values.
        """
        if self.pending is not None:
            self.pending.pending += values
            if step is not None:
                self.pending.step = step
        elif step is None or step == self.last_step:
            self.hand_over(PendingStep(self.last_step, now_microseconds(), pending=list(values)))
            return False
        else:
            self._next_values += values
        self.is_numbered |= step is not None
        return step is not None

    def note_learning_rates(self, monitored: MonitoredModel) -> None:
        """Keep the learning rates of all parameter groups for the open step. Does not wait for a device."""
        if self.pending is not None:
            groups = (group for item in monitored.optimizers for group in monitored.framework.groups_of(item))
            rates = {str(position): group.get("lr") for position, group in enumerate(groups)}
            self.pending.learning_rates = list(take("learning_rate", rates))

    def add(self, later: Callable[[], Iterable[Scalar]]) -> None:
        """Add scalars that `later` returns on the publisher thread to the open step, or publish them immediately.

        The same function is called only once for each step.
        """
        with self.lock:
            if self.pending is None:
                self.hand_over(PendingStep(self.last_step, now_microseconds(), later=[later]))
            elif later not in self.pending.later:
                self.pending.later.append(later)

    def add_event(self, event: Event) -> None:
        """Add an event to the record of the open step, or of the next one if none is open."""
        with self.lock:
            (self._next_events if self.pending is None else self.pending.events).append(event)

    def publish_event(self, event: Event) -> None:
        """Publish an event immediately, in a record of its own with the number of the open step or the last one."""
        with self.lock:
            step = self.pending.step if self.pending is not None else self.last_step
            self.hand_over(PendingStep(step, now_microseconds(), events=[event]))
