"""Changes of the sampling configuration that wait for their step. The training thread applies, other threads put.

Automatic changes (decimation, capture) adjust sampling without replacing the configured quantities.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.sampling.active_quantities import ActiveQuantities, Part, PreparedQuantities
from rankscope_exporter.sampling.sampling_config import SamplingConfig


class PlannedChange(Protocol):
    """Comes at a step, as a change of what is measured does."""

    step: int | None
    """From the first step at or behind this one on; None from the next one on."""

    def is_due(self, step: int) -> bool:
        """Return whether it holds from step number `step` on at the latest."""
        ...

    def ready(self, active_quantities: ActiveQuantities) -> None:
        """Register hooks, outside of the forward pass that would miss some of them. May be called again."""
        ...

    def take(self, active_quantities: ActiveQuantities, step: int) -> list[Event]:
        """Take place as step number `step` begins; return what is to be said."""
        ...

    def shown(self) -> dict[str, Any]:
        """Return it as /config shows what is to come."""
        ...


class ChangeListener(Protocol):
    """Goes along with the steps, on the training thread."""

    def step_begins(self, step: int) -> list[Event]:
        """Note that step number `step` is about to begin; return what is to be said."""
        ...

    def switched(self, step: int) -> list[Event]:
        """Note that something else is measured from step number `step` on, because somebody said so."""
        ...

    def shown(self) -> dict[str, Any]:
        """Return where it stands, as /config shows it."""
        ...


_KEEP: Final = 0.8
"""How much of the average time of a step is kept when another has passed."""


@dataclass(slots=True, kw_only=True)
class Change:
    """What is measured from the first step at or behind `step` on; without a number from the next one on."""

    measuring: SamplingConfig
    parts: list[Part]
    source: str
    step: int | None = None
    without: tuple[int, ...] = ()
    """Ranks that were not heard and may take the change over later."""
    prepared: PreparedQuantities | None = None

    def is_due(self, step: int) -> bool:
        """Return whether it holds from step number `step` on at the latest."""
        return self.step is None or self.step <= step

    def ready(self, active_quantities: ActiveQuantities) -> None:
        """Register the hooks it needs."""
        if self.prepared is None:
            self.prepared = active_quantities.prepare(self.parts)

    def shown(self) -> dict[str, Any]:
        """Return it as /config shows what is to come."""
        return self.measuring.shown()


class ChangeQueue:
    """Changes the members of a collection between two steps, and says so with an event of the first new step."""

    def __init__(
        self, active_quantities: ActiveQuantities, measuring: SamplingConfig, *, boundary: ErrorBoundary, first_step: int
    ) -> None:
        self.measuring = measuring
        self.ended = threading.Event()
        """Set when everything that was switched on has been measured as often as was asked for."""
        self.on_change: Callable[[], None] = lambda: None
        """Called on the training thread when a change has taken place."""
        self.resolve_pending: Callable[[int], None] = lambda _: None
        """Called on the training thread with the number of a step that begins, before what is due is looked at."""
        self.companions: list[ChangeListener] = []
        """Told of every step, and of every change but those beside what is measured."""
        self.changes = 0
        """How many took place, those beside what is measured included: the same on all ranks at the same step."""
        self._active_quantities = active_quantities
        self._boundary = boundary
        self._waiting: list[Change | PlannedChange] = []
        self._lock = threading.Lock()
        self._pace: tuple[int, float | None] = (first_step - 1, None)
        self._opened_at: float | None = None
        self._since: int | None = None
        self._by: str | None = None

    # From any thread.

    def put(self, change: Change | PlannedChange) -> None:
        """Have `change` take place at its step, behind those that wait already."""
        with self._lock:
            self._waiting.append(change)

    def pace(self) -> tuple[int, float | None]:
        """Return the number of the last step that began, and about how many seconds one takes."""
        return self._pace

    def state(self) -> dict[str, Any]:
        """Return what is measured, since when, and what is to come, as /config shows it."""
        with self._lock:
            waiting = [{"step": change.step, **change.shown()} for change in self._waiting]
        state = {**self.measuring.shown(), "since_step": self._since, "source": self._by, "to_come": waiting}
        for companion in self.companions:
            state |= companion.shown()
        return state

    # On the training thread.

    def ready(self) -> None:
        """Register the hooks of the next change, outside of the forward pass that would miss some of them."""
        coming = self._pace[0] + 1
        self.resolve_pending(coming)
        if not self._waiting:
            return
        with self._lock:
            due = [change for change in self._waiting if change.is_due(coming)] or self._waiting[:1]
        for index, change in enumerate(due):
            if not _is_replaced(change, due[index + 1 :]):
                change.ready(self._active_quantities)

    def before_step(self, step: int) -> list[Event]:
        """Note that step number `step` is about to begin, and do what is due. A few comparisons when nothing is."""
        self._note_pace(step)  # first: the thread that promises something looks at the pace behind its promise
        self.resolve_pending(step)
        events: list[Event] = []
        for companion in self.companions:
            events += self._boundary.call("switching", companion.step_begins, step) or ()
        while self._waiting and self._waiting[0].is_due(step):
            with self._lock:
                change = self._waiting.pop(0)
                due = [later for later in self._waiting if later.is_due(step)]
            self.changes += 1
            if isinstance(change, Change):
                events += self._take(change, step, is_replaced=_is_replaced(change, due))
            else:
                events += self._boundary.call("switching", change.take, self._active_quantities, step) or ()
        if not events and self._since is not None and self.measuring.on and self._active_quantities.is_over:
            events += [self._end(step), *self._notify_listeners(step)]
        return events

    def _take(self, change: Change, step: int, *, is_replaced: bool) -> list[Event]:
        """Have `change` hold from now on; one that another replaces at this very step is told, and touches no hooks."""
        before, self.measuring = self.measuring, change.measuring
        if is_replaced:  # the other's quantities go on with members that this one would have sent away
            self._boundary.call("switching", self._active_quantities.discard, change.prepared or [])
        else:
            prepared = self._active_quantities.prepare(change.parts) if change.prepared is None else change.prepared
            self._boundary.call("switching", self._active_quantities.replace, prepared)
        self.ended.clear()
        self._since, self._by = step, change.source
        self.on_change()
        return [_event(before, change, step), *self._notify_listeners(step)]

    def _notify_listeners(self, step: int) -> list[Event]:
        """Tell those that go along that something else is measured."""
        told = (self._boundary.call("switching", companion.switched, step) for companion in self.companions)
        return [event for events in told for event in events or ()]

    def _end(self, step: int) -> Event:
        self._active_quantities.replace([])
        before = self.measuring
        self.measuring = SamplingConfig(on=False, config=before.config)
        self.ended.set()
        change = Change(measuring=self.measuring, parts=[], source="times", step=step)
        return _event(before, change, step)

    def is_over(self) -> bool:
        """Return whether what was switched on has been measured as often as was asked for."""
        return self.ended.is_set() or (
            self._since is not None and self.measuring.on and self._active_quantities.is_over
        )

    def _note_pace(self, step: int) -> None:
        now = time.monotonic()
        seconds = self._pace[1]
        if self._opened_at is not None:
            took = now - self._opened_at
            seconds = took if seconds is None else _KEEP * seconds + (1 - _KEEP) * took
        self._opened_at = now
        self._pace = (step, seconds)


def _is_replaced(change: Change | PlannedChange, later: Sequence[Change | PlannedChange]) -> bool:
    """Return whether one of `later`, due at the same step, says anew what is measured."""
    return isinstance(change, Change) and any(isinstance(other, Change) for other in later)


def _event(before: SamplingConfig, change: Change, step: int) -> Event:
    after = change.measuring
    late = 0 if change.step is None else step - change.step
    details = {
        "step": step,
        "agreed_step": change.step,
        "source": change.source,
        "was": before.shown(),
        "now": after.shown(),
        "needs_restart": list(after.fixed),
        "ranks_not_heard": list(change.without),
    }
    text = f"from step {step} on {_words(after)}, as the {change.source} says"
    if change.source == "times":
        text = f"measured as often as was asked for: from step {step} on nothing is"
    if late:
        text += f"; agreed for step {change.step}, of which this rank heard too late"
    if change.without:
        text += f"; ranks {', '.join(map(str, change.without))} gave no answer"
    if after.fixed:
        text += f"; {', '.join(after.fixed)} cannot change before the next start"
    severity = Severity.WARNING if late or change.without or after.fixed else Severity.INFO
    return Event(type=EventType.SWITCH, severity=severity, message=text, details=json.dumps(details))


def _words(measuring: SamplingConfig) -> str:
    if not measuring.on or measuring.config.times == 0:
        return "nothing is measured"
    config = measuring.config
    every = "every step" if config.every == 1 else f"every {config.every} steps"
    times = "" if config.times is None else f", {config.times} times"
    return f"{', '.join(config.quantities)} {'are' if len(config.quantities) > 1 else 'is'} measured {every}{times}"
