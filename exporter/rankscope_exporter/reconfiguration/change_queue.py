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
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.records.step_events import StepObserver
from rankscope_exporter.sampling.active_quantities import ActiveQuantities, PreparedQuantities
from rankscope_exporter.sampling.sampling_config import Part, SamplingConfig

TIMES: Final = "times"
"""The source of the change that the queue itself makes to end sampling.

The queue makes this change when all quantities were sampled as often as the setting `times` requires.
"""

_KEEP: Final = 0.8
"""Weight of the previous average in the moving average of the duration of a step."""


class StepPace(StepObserver):
    """The number of the step that began last, and the average duration of a step.

    The method `now`, which returns both, may be called on any thread.
    """

    def __init__(self, first_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: tuple[int, float | None] = (first_step - 1, None)
        self._began_at: float | None = None

    def now(self) -> tuple[int, float | None]:
        """Return the number of the step that began last, and the average seconds per step.

        The average is None before the second step.
        """
        return self._now

    def on_before_step(self, step: int) -> None:
        """Store the number of the step that begins, and update the average duration of a step."""
        now, seconds = self._clock(), self._now[1]
        if self._began_at is not None:
            took = now - self._began_at
            seconds = took if seconds is None else _KEEP * seconds + (1 - _KEEP) * took
        self._began_at = now
        self._now = (step, seconds)


@dataclass(slots=True, kw_only=True)
class PlannedChange:
    """A change of the sampling that takes effect when the step for which it is planned begins."""

    step: int | None = None
    """The change takes effect at the first step with at least this number; None means the next step."""

    def is_due(self, step: int) -> bool:
        """Return whether the change takes effect at step number `step` or at an earlier step."""
        return self.step is None or self.step <= step

    def prepare(self, active_quantities: ActiveQuantities) -> None:
        """Register the hooks that this change needs, before the first forward pass that calls them.

        May be called several times.
        """

    def apply(self, active_quantities: ActiveQuantities, step: int) -> list[Event]:
        """Apply the change when step number `step` begins; return events for the record of this step."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Return a description of the change, for the HTTP path /config."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class SamplingChange(PlannedChange):
    """A change that replaces the sampling configuration."""

    sampling: SamplingConfig
    parts: list[Part]
    source: str
    without: tuple[int, ...] = ()
    """Ranks that did not acknowledge the change and may apply it later."""
    prepared: PreparedQuantities | None = None

    def prepare(self, active_quantities: ActiveQuantities) -> None:
        """Register the hooks of the quantities in the new sampling configuration."""
        if self.prepared is None:
            self.prepared = active_quantities.prepare(self.parts)

    def apply(self, active_quantities: ActiveQuantities, step: int) -> list[Event]:  # noqa: ARG002 - of the base class
        """Measure the quantities of the new sampling configuration instead of the active ones.

        Return no event, because the change queue makes the event about this change.
        """
        self.prepare(active_quantities)
        active_quantities.replace(self.prepared or [])
        return []

    def document(self) -> dict[str, Any]:
        """Return the new sampling configuration, for the HTTP path /config."""
        return self.sampling.document()


class ChangeQueue(StepObserver):
    """Applies changes of the sampling between two steps, and adds events about them to the record of the next step.

    The function `changed` is called on the training thread after each change of the sampling configuration, with the
    change and its step. The function `record` adds an event to the record of the step that begins.
    """

    def __init__(
        self,
        active_quantities: ActiveQuantities,
        sampling: SamplingConfig,
        pace: StepPace,
        *,
        boundary: ErrorBoundary,
        changed: Callable[[SamplingChange, int], None],
        record: Callable[[Event], None],
    ) -> None:
        self.sampling = sampling
        """The sampling configuration that is in effect."""
        self.ended = threading.Event()
        """A `threading.Event` that is set when each quantity was sampled as often as its setting `times` requires."""
        self.changes = 0
        """Number of sampling changes that took effect on this rank, including automatic changes.

        At the same step it is equal on all ranks.
        """
        self._active_quantities = active_quantities
        self._pace = pace
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

    def state(self) -> dict[str, Any]:
        """Return the present sampling configuration, its first step, and the changes that wait for their step.

        Used for the HTTP path /config. Can be called on any thread.
        """
        with self._lock:
            waiting = [{"step": change.step, **change.document()} for change in self._waiting]
        return {**self.sampling.document(), "since_step": self._since, "source": self._source, "to_come": waiting}

    def is_over(self) -> bool:
        """Return whether all quantities were sampled as often as the setting `times` requires.

        Only steps since the last change of the sampling configuration count.
        """
        return self.ended.is_set() or (self._since is not None and self.sampling.on and self._active_quantities.is_over)

    def on_update_applied(self) -> None:
        """Register the hooks of changes that take effect at the next step.

        Called after an optimizer update, because some hooks must exist before the forward pass of the next step.
        """
        if not self._waiting:
            return
        coming = self._pace.now()[0] + 1
        with self._lock:
            due = [change for change in self._waiting if change.is_due(coming)] or self._waiting[:1]
        for index, change in enumerate(due):
            if not _is_replaced(change, due[index + 1 :]):
                change.prepare(self._active_quantities)

    def on_before_step(self, step: int) -> None:
        """Apply the changes that take effect at step number `step`.

        Without such changes, the call makes a few comparisons.
        """
        is_changed = False
        while self._waiting and self._waiting[0].is_due(step):
            with self._lock:
                change = self._waiting.pop(0)
                due = [later for later in self._waiting if later.is_due(step)]
            self.changes += 1
            is_changed |= self._apply(change, step, is_replaced=_is_replaced(change, due))
        if not is_changed and self._since is not None and self.sampling.on and self._active_quantities.is_over:
            self._end(step)

    def _apply(self, change: PlannedChange, step: int, *, is_replaced: bool) -> bool:
        """Apply `change` and record its events; return whether it has any events.

        If `is_replaced` is true, a later change replaces this one at the same step. The change is then recorded, but
        hooks are neither registered nor removed, because the later change may need the same quantities.
        """
        before = self.sampling
        if isinstance(change, SamplingChange):
            self.sampling = change.sampling
        if is_replaced and isinstance(change, SamplingChange):
            self._boundary.call("switching", self._active_quantities.discard, change.prepared or [])
            events: list[Event] = []
        else:
            events = self._boundary.call("switching", change.apply, self._active_quantities, step) or []
        if isinstance(change, SamplingChange):
            self.ended.clear()
            self._since, self._source = step, change.source
            self._boundary.call("switching", self._changed, change, step)
            events = [_event(before, change, step)]
        for event in events:
            self._record(event)
        return bool(events)

    def _end(self, step: int) -> None:
        self._active_quantities.replace([])
        before, self.sampling = self.sampling, SamplingConfig(on=False, config=self.sampling.config)
        self.ended.set()
        change = SamplingChange(sampling=self.sampling, parts=[], source=TIMES, step=step)
        self._record(_event(before, change, step))
        self._boundary.call("switching", self._changed, change, step)


def _is_replaced(change: PlannedChange, later: Sequence[PlannedChange]) -> bool:
    """Return whether `change` is a sampling configuration that a change in `later` replaces at the same step."""
    return isinstance(change, SamplingChange) and any(isinstance(other, SamplingChange) for other in later)


def _event(before: SamplingConfig, change: SamplingChange, step: int) -> Event:
    after = change.sampling
    late = 0 if change.step is None else step - change.step
    details = {
        "step": step,
        "agreed_step": change.step,
        "source": change.source,
        "was": before.document(),
        "now": after.document(),
        "needs_restart": list(after.fixed),
        "ranks_not_heard": list(change.without),
    }
    text = f"from step {step}: {_summary(after)} (source: {change.source})"
    if change.source == TIMES:
        text = f"from step {step}: nothing is measured, all quantities were sampled `times` times"
    if late:
        text += f"; agreed for step {change.step}, which this rank learned too late"
    if change.without:
        text += f"; ranks {', '.join(map(str, change.without))} did not acknowledge"
    if after.fixed:
        text += f"; {', '.join(after.fixed)} cannot change before the next start"
    severity = Severity.WARNING if late or change.without or after.fixed else Severity.INFO
    return Event(type=EventType.SWITCH, severity=severity, message=text, details=json.dumps(details))


def _summary(sampling: SamplingConfig) -> str:
    if not sampling.on or sampling.config.times == 0:
        return "nothing is measured"
    config = sampling.config
    every = "every step" if config.every == 1 else f"every {config.every} steps"
    times = "" if config.times is None else f", {config.times} times"
    return f"{', '.join(config.quantities)} {'are' if len(config.quantities) > 1 else 'is'} measured {every}{times}"
