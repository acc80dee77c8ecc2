"""The record of the open step. Hooks, observers and the script add data to it.

Finished records go to the publisher's queue. Nothing in this module waits for a device or performs I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rankscope_contract.model.events import Event
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.measure.transfers import take
from rankscope_exporter.records.pending_step import Pending, Scalar
from rankscope_exporter.records.step_record import StepRecord


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
        self.last_step: int | None = None
        """Number of the step that was closed last; None before the first step was closed."""
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
            self.next_values += values
        self.is_numbered |= step is not None
        return step is not None

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
