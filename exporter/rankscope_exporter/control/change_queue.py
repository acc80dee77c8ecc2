"""The queue of sampling changes that wait for their step.

Other threads add changes, and the training thread applies them.

Automatic changes adjust the sampling without replacing the configured quantities. Examples are a longer sampling
interval and a capture.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.record import StepObserver
from rankscope_exporter.training.sampling import ActiveQuantities
from rankscope_exporter.training.sampling_config import Part, SamplingConfig

TIMES: Final = "times"
"""The source of the change that the queue itself makes to end sampling.

The queue makes this change when all quantities were sampled as often as the setting `times` requires.
"""

_KEEP: Final = 0.8
"""Weight of the previous average in the moving average of the duration of a step."""


@dataclass(slots=True, kw_only=True)
class PlannedChange:
    """A change of the sampling that waits for its step."""

    step: int | None
    """The change applies at the first step with at least this number; None means the next step."""
    description: dict[str, Any]
    """A description of the change, for the HTTP path /config."""
    apply: Callable[[PlannedChange, int], list[Event]]
    """Function that applies this change when the step with the given number begins; returns events for its record."""
    parts: Sequence[Part] | None = None
    """The quantities of a change that replaces the sampling configuration."""
    late_steps: int = 0
    """The number of steps by which the change was late when it was applied."""

    def is_due(self, step: int) -> bool:
        """Return whether the change applies at step number `step` or at an earlier step."""
        return self.step is None or self.step <= step

    def late_text(self) -> str:
        """Return the end of a message about the applied change; empty if the change was not late."""
        steps = "1 step" if self.late_steps == 1 else f"{self.late_steps} steps"
        return f"; this rank is late by {steps}: the change is valid from step {self.step}" if self.late_steps else ""


class ChangeQueue(StepObserver):
    """Applies changes of the sampling between two steps, and adds events about them to the record of the next step.

    It also measures the pace of the training, from which `ChangeLog` computes the steps of changes.

    The function `changed` is called on the training thread after each change of the sampling configuration, with the
    source of the change and its step. The function `record` adds an event to the record of the step that begins.
    """

    def __init__(
        self,
        active_quantities: ActiveQuantities,
        sampling: SamplingConfig,
        first_step: int,
        *,
        boundary: ErrorBoundary,
        changed: Callable[[str, int], None],
        record: Callable[[Event], None],
    ) -> None:
        self.pace: tuple[int, float | None] = (first_step - 1, None)
        """The number of the step that began last, and the average seconds per step, None before the second step.

        Any thread may read it.
        """
        self.sampling = sampling
        """The sampling configuration that is in effect."""
        self.ended = threading.Event()
        """A `threading.Event` that is set when each quantity was sampled as often as its setting `times` requires."""
        self.changes = 0
        """Number of sampling changes that took effect on this rank, including automatic changes.

        At the same step it is equal on all ranks that are not late.
        """
        self._active_quantities = active_quantities
        self._began_at: float | None = None  # the last step
        self._boundary = boundary
        self._changed = changed
        self._record = record
        self._waiting: list[PlannedChange] = []
        self._lock = threading.Lock()
        self._since: int | None = None
        self._source: str | None = None

    def put(self, change: PlannedChange) -> None:
        """Add `change` at the end of the queue. Can be called on any thread."""
        with self._lock:
            self._waiting.append(change)

    def put_sampling(self, step: int | None, source: str, sampling: SamplingConfig, parts: Sequence[Part]) -> None:
        """Add the change to `sampling`, whose quantities are `parts`, from step number `step` on."""
        apply = partial(self._replace, sampling, source)
        self.put(PlannedChange(step=step, description=sampling.document(), apply=apply, parts=parts))

    def state(self) -> dict[str, Any]:
        """Return the present sampling configuration, its first step, and the changes that wait for their step.

        Used for the HTTP path /config. Can be called on any thread.
        """
        with self._lock:
            waiting = [{"step": change.step, **change.description} for change in self._waiting]
        return {**self.sampling.document(), "since_step": self._since, "source": self._source, "to_come": waiting}

    def is_over(self) -> bool:
        """Return whether all quantities were sampled as often as the setting `times` requires.

        Only steps since the last change of the sampling configuration count.
        """
        return self.ended.is_set() or (self._since is not None and self.sampling.on and self._active_quantities.is_over)

    def on_update_applied(self) -> None:
        if not self._waiting:
            return
        # Some hooks must exist before the forward pass of the next step.
        coming = self.pace[0] + 1
        with self._lock:
            due = [change for change in self._waiting if change.is_due(coming)] or self._waiting[:1]
        parts = next((change.parts for change in reversed(due) if change.parts is not None), ())
        self._active_quantities.prepare(parts)

    def on_before_step(self, step: int) -> None:
        now, (previous, seconds) = time.monotonic(), self.pace
        if self._began_at is not None:
            took = now - self._began_at
            seconds = took if seconds is None else _KEEP * seconds + (1 - _KEEP) * took
        self._began_at, self.pace = now, (step, seconds)
        is_changed = False
        while self._waiting and self._waiting[0].is_due(step):
            with self._lock:
                change = self._waiting.pop(0)
            self.changes += 1
            if change.step is not None and change.step <= previous:
                change.late_steps = step - change.step
            events = self._boundary.call("switching", change.apply, change, step) or []
            for event in events:
                self._record(event)
            is_changed |= bool(events)
        if not is_changed and self._since is not None and self.sampling.on and self._active_quantities.is_over:
            self._end(step)

    def _replace(self, sampling: SamplingConfig, source: str, change: PlannedChange, step: int) -> list[Event]:
        """Measure the quantities of `change` instead of the active ones, and return the event about it.

        If `change` is not the last one at this step, hooks are neither registered nor removed, because the later change
        may need the same quantities.
        """
        before, self.sampling = self.sampling, sampling
        with self._lock:
            is_last = not any(later.parts is not None and later.is_due(step) for later in self._waiting)
        if is_last:
            self._boundary.call("switching", self._active_quantities.replace, change.parts)
        self.ended.clear()
        self._since, self._source = step, source
        self._boundary.call("switching", self._changed, source, step)
        return [_event(before, sampling, source, step, change)]

    def _end(self, step: int) -> None:
        self._active_quantities.replace([])
        before, self.sampling = self.sampling, SamplingConfig(on=False, config=self.sampling.config)
        self.ended.set()
        self._record(_event(before, self.sampling, TIMES, step))
        self._boundary.call("switching", self._changed, TIMES, step)


def _event(
    before: SamplingConfig, after: SamplingConfig, source: str, step: int, change: PlannedChange | None = None
) -> Event:
    late_steps = change.late_steps if change else 0
    details = {
        "step": step,
        "agreed_step": change.step if change else step,
        "late_steps": late_steps,
        "source": source,
        "was": before.document(),
        "now": after.document(),
        "needs_restart": list(after.fixed),
    }
    text = f"from step {step}: {_summary(after)} (source: {source})"
    if source == TIMES:
        text = f"from step {step}: nothing is measured, all quantities were sampled `times` times"
    if change:
        text += change.late_text()
    if after.fixed:
        text += f"; {', '.join(after.fixed)} cannot change before the next start"
    severity = Severity.WARNING if late_steps or after.fixed else Severity.INFO
    return Event(type=EventType.SWITCH, severity=severity, message=text, details=json.dumps(details))


def _summary(sampling: SamplingConfig) -> str:
    if not sampling.on or sampling.config.times == 0:
        return "nothing is measured"
    config = sampling.config
    every = "every step" if config.every == 1 else f"every {config.every} steps"
    times = "" if config.times is None else f", {config.times} times"
    return f"{', '.join(config.quantities)} {'are' if len(config.quantities) > 1 else 'is'} measured {every}{times}"
