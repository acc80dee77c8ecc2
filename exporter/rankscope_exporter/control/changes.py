"""Changes of the sampling: the log that all ranks share, and the queue of changes that wait for their step on one rank.

The log is in the key-value store of the process group. Each change is the value of a key with the number of the change,
and names the step from which it is valid. A rank adds a change with the next number by compare-and-set. If another rank
has used this number, the rank reads that change, and takes the number after it. All ranks poll the log, and apply each
change at the first step with at least the number in the change. A rank that reads a change later applies it at its next
step. No rank waits for another one.

Other threads add changes to the queue, and the training thread applies them. Automatic changes adjust the sampling
without replacing the configured quantities. Examples are a longer sampling interval and a capture.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.identity import Identity
from rankscope_exporter.adapters.process_group import default_group
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.record import StepObserver
from rankscope_exporter.training.sampling import ActiveQuantities
from rankscope_exporter.training.sampling_config import Part, SamplingConfig

log = logging.getLogger("rankscope")

LEAST_STEPS: Final = 4
MOST_STEPS: Final = 1_000_000
_POLLS_PER_MARGIN: Final = 6
"""Number of poll intervals from the writing of a change to the step from which it is valid."""

_sessions = itertools.count(1)
"""Counter that numbers the monitors which a process attaches one after the other.

The same monitor has the same number on all ranks.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the sampling: a JSON document with its settings, and the step from which they are valid."""

    document: str
    source: str
    step: int | None = None
    """The change applies at the first step with at least this number; None means the next step."""
    stamp: int | None = None
    """A number that orders the changes of one source, such as the time of an edit of the switch file.

    A change is not added to the log if the log has one of the same source with this stamp or a higher one. Several
    ranks that read the same edit therefore add one change.
    """


@dataclass(eq=False)
class ChangeLog:
    """The log of changes, as one rank reads and writes it. Only one thread uses it at a time.

    The methods of torch's `store` wait for no rank. The function `pace` returns the number of the last step that began
    on this rank, and the seconds per step. A change is valid from `margin_seconds` after it was written, and at least
    `LEAST_STEPS` steps.
    """

    store: Any
    name: str
    pace: Callable[[], tuple[int, float | None]]
    margin_seconds: float

    def __post_init__(self) -> None:
        self.unread: deque[Change] = deque()
        """The changes in the order of the log that were read from the store, and that the caller has not removed."""
        self._length = 0
        self._step = 0  # of the last change
        self._stamps: dict[str, int] = {}  # by source, the highest stamp in the log

    def begin(self, first: Change) -> Change:
        """Return the change with which all ranks start: `first` of the rank that calls this method first."""
        self._add(first)
        return self.unread.pop()

    def write(self, change: Change, until: int | None = None) -> bool:
        """Add `change` to the log, valid from a later step. Return True.

        If `until` is given, later changes of the same source with stamps of at most `until` are not added.
        """
        while True:
            self.poll()
            if change.stamp is not None and change.stamp <= self._stamps.get(change.source, -1):
                return True
            step = max(self._step, self._next_step())
            added = replace(change, step=step, stamp=change.stamp if until is None else until)
            if self._add(added) == added:
                return True

    def poll(self) -> None:
        """Read the changes that other ranks have added."""
        while self.store.check([self._key]):
            self._append(self.store.get(self._key))

    def count(self, name: str, amount: int) -> int:
        """Add `amount` to the counter `name`, which all ranks share, and return its new value."""
        return int(self.store.add(f"{self.name}/count/{name}", amount))

    @property
    def _key(self) -> str:
        return f"{self.name}/{self._length}"

    def _add(self, change: Change) -> Change:
        """Add `change` if no rank has added one with the next number; return the change that has this number."""
        text = json.dumps(asdict(change), sort_keys=True)
        return self._append(self.store.compare_set(self._key, "", text))  # "": the key does not exist yet

    def _append(self, text: bytes) -> Change:
        change = Change(**json.loads(text))
        self._length += 1
        self._step = max(self._step, change.step or 0)
        if change.stamp is not None:
            self._stamps[change.source] = max(change.stamp, self._stamps.get(change.source, -1))
        self.unread.append(change)
        return change

    def _next_step(self) -> int:
        """Return a step that no rank should have reached when it reads a change that is written now."""
        step, seconds = self.pace()
        steps = 0 if seconds is None else min(MOST_STEPS, math.ceil(self.margin_seconds / max(seconds, 1e-6)))
        return step + max(LEAST_STEPS, steps)


def change_log_of(
    identity: Identity, pace: Callable[[], tuple[int, float | None]], poll_seconds: float
) -> ChangeLog | None:
    """Return the log of changes of the process group; None if there is only one rank, or if the group has no store."""
    group = default_group() if identity.world_size > 1 else None
    if group is None:
        return None
    store = group.store()
    name = f"rankscope/switch/{identity.launch_id}/{next(_sessions)}"
    try:
        store = store.clone()  # a separate connection: callers that wait on the other one do not block it
    except (AttributeError, NotImplementedError, RuntimeError):  # not supported by all stores
        log.debug("the store of the process group does not support a second connection: the existing one is used")
    return ChangeLog(store, name, pace, margin_seconds=_POLLS_PER_MARGIN * poll_seconds)


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


@dataclass(eq=False, kw_only=True)
class ChangeQueue(StepObserver):
    """Applies changes of the sampling between two steps, and adds events about them to the record of the next step.

    It also measures the pace of the training, from which `ChangeLog` computes the steps of changes.

    The function `changed` is called on the training thread after each change of the sampling configuration, with the
    source of the change and its step. The function `record` adds an event to the record of the step that begins.
    """

    active_quantities: ActiveQuantities
    sampling: SamplingConfig
    """The sampling configuration that is in effect."""
    first_step: int
    boundary: ErrorBoundary
    changed: Callable[[str, int], None]
    record: Callable[[Event], None]

    def __post_init__(self) -> None:
        self.pace: tuple[int, float | None] = (self.first_step - 1, None)
        """The number of the step that began last, and the average seconds per step, None before the second step.

        Any thread may read it.
        """
        self.ended = threading.Event()
        """A `threading.Event` that is set when each quantity was sampled as often as its setting `times` requires."""
        self.changes = 0
        """Number of sampling changes that took effect on this rank, including automatic changes.

        At the same step it is equal on all ranks that are not late.
        """
        self._began_at: float | None = None  # the last step
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
        return self.ended.is_set() or (self._since is not None and self.sampling.on and self.active_quantities.is_over)

    def on_update_applied(self) -> None:
        if not self._waiting:
            return
        # Some hooks must exist before the forward pass of the next step.
        coming = self.pace[0] + 1
        with self._lock:
            due = [change for change in self._waiting if change.is_due(coming)] or self._waiting[:1]
        parts = next((change.parts for change in reversed(due) if change.parts is not None), ())
        self.active_quantities.prepare(parts)

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
            events = self.boundary.call("switching", change.apply, change, step) or []
            for event in events:
                self.record(event)
            is_changed |= bool(events)
        if not is_changed and self._since is not None and self.sampling.on and self.active_quantities.is_over:
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
            self.boundary.call("switching", self.active_quantities.replace, change.parts)
        self.ended.clear()
        self._since, self._source = step, source
        self.boundary.call("switching", self.changed, source, step)
        return [_event(before, sampling, source, step, change)]

    def _end(self, step: int) -> None:
        self.active_quantities.replace([])
        before, self.sampling = self.sampling, SamplingConfig(on=False, config=self.sampling.config)
        self.ended.set()
        self.record(_event(before, self.sampling, TIMES, step))
        self.boundary.call("switching", self.changed, TIMES, step)


def _event(
    before: SamplingConfig, after: SamplingConfig, source: str, step: int, change: PlannedChange | None = None
) -> Event:
    late_steps = change.late_steps if change else 0
    agreed_step = change.step if change else step
    details: dict[str, Any] = {"step": step, "agreed_step": agreed_step, "late_steps": late_steps, "source": source}
    details |= {"was": before.document(), "now": after.document(), "needs_restart": list(after.fixed)}
    text = f"from step {step}: {_summary(after)} (source: {source})"
    if source == TIMES:
        text = f"from step {step}: nothing is measured, all quantities were sampled `times` times"
    if change:
        text += change.late_text()
    if after.fixed:
        text += f"; {', '.join(after.fixed)} cannot change before the next start"
    severity = Severity.WARNING if late_steps or after.fixed else Severity.INFO
    return Event(type=EventType.SWITCH, severity=severity, message=text, details=details)


def _summary(sampling: SamplingConfig) -> str:
    if not sampling.on or sampling.config.times == 0:
        return "nothing is measured"
    config = sampling.config
    every = "every step" if config.every == 1 else f"every {config.every} steps"
    times = "" if config.times is None else f", {config.times} times"
    return f"{', '.join(config.quantities)} {'are' if len(config.quantities) > 1 else 'is'} measured {every}{times}"
