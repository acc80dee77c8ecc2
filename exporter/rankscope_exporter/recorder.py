"""Collects one step at a time on the training thread and hands it over: measured table, logged numbers, events.

Nothing here waits for a device, does I/O, or formats anything; that is the publisher's work, on its own thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rankscope_contract.events import Event, EventType, Severity
from rankscope_contract.records import Plan
from rankscope_exporter.logged import Pending, take
from rankscope_exporter.quantities import Quantity
from rankscope_exporter.quantities.base import Subject, Table
from rankscope_exporter.statistics import HostCopy, MeasureGroup, StatisticsTable, copy_entries
from rankscope_exporter.steps import Ended, Stage, StepTracker

MAX_BACKLOG: Final = 64
"""Measured steps that may wait for the publisher; one more is counted as dropped rather than waited for."""


@dataclass(slots=True)
class Draft:
    """One step (or a moment between steps) on its way from the training thread to the publisher."""

    step: int | None
    ts: int  # UTC microseconds
    sampled: bool = False
    copy: HostCopy | None = None
    pending: list[Pending] = field(default_factory=list)
    learning_rates: list[Pending] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    modules: list[Mapping[str, Any]] = field(default_factory=list)
    call_order: list[int] = field(default_factory=list)  # by parameter: when its gradient arrived, -1 for never
    skipped: bool = False


@dataclass(slots=True)
class _Timing:
    """A step that was handed over before its end was known: its duration follows with the next step."""

    step: int | None
    began: float
    amounts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Measurement:
    """How tensors are measured."""

    zero_below: float = 0.0
    compiled: bool = True  # use the compiled CPU kernel once it is ready


class _QuantityTable(Table):
    """One quantity's window on the table that all of them fill."""

    def __init__(self, table: StatisticsTable, first: int, settings: Measurement) -> None:
        self._table = table
        self._first = first
        self._settings = settings
        self._groups: dict[range, MeasureGroup] = {}

    def measure(self, tensors: Sequence[torch.Tensor | None], rows: range) -> None:
        group = self._groups.get(rows)
        if group is None:
            settings = self._settings
            group = MeasureGroup(self._shifted(rows), zero_below=settings.zero_below, compiled=settings.compiled)
            self._groups[rows] = group
        group.measure(tensors, self._table)

    def copy(self, source: range, target: range) -> None:
        copy_entries(self._table, self._shifted(source), self._shifted(target))

    def _shifted(self, rows: range) -> range:
        return range(self._first + rows.start, self._first + rows.stop)


class Recorder:
    """The training side of one attached model. All methods are called on the training thread, except `flush_idle`."""

    def __init__(
        self,
        subject: Subject,
        quantities: Iterable[type[Quantity]],
        hand_over: Callable[[Draft], None],
        *,
        device: torch.device,
        every: int = 1,
        first_step: int = 1,
        measurement: Measurement | None = None,
    ) -> None:
        self._subject = subject
        self._hand_over = hand_over
        self._every = every
        self._lock = threading.RLock()
        self._tracker = StepTracker(first_step)
        self._attempts = 0  # decides which steps are sampled; the training's own number may jump
        self._draft: Draft | None = None
        self._began = 0.0
        self._last_seen = 0.0
        self._late: _Timing | None = None
        self._updated_by: set[int] = set()
        self._witness: torch.nn.Parameter | None = None
        self._backlog = 0
        self._amounts: dict[str, float] = {}
        self.unsampled = 0  # steps not measured because the publisher was behind
        self.backward_passes = 0

        measured = [quantity_class(subject) for quantity_class in quantities]
        parts = [quantity.entries() for quantity in measured]
        self.plan = Plan(tuple(entry for part in parts for entry in part))
        self._table = StatisticsTable(len(self.plan.entries), device)
        self._quantities: list[tuple[Quantity, _QuantityTable]] = []
        first = 0
        for quantity, part in zip(measured, parts, strict=True):
            self._quantities.append((quantity, _QuantityTable(self._table, first, measurement or Measurement())))
            first += len(part)
        self._per_gradient = [
            pair for pair in self._quantities if type(pair[0]).gradient_ready is not Quantity.gradient_ready
        ]

    # What the hooks report, in the order of a step.

    def forward_begins(self) -> None:
        """A training forward of the whole model begins."""
        with self._lock:
            self._after(self._tracker.forward_begins(self._gradients_cleared))

    def backward_begins(self) -> None:
        """The first gradient of a backward pass has arrived."""
        with self._lock:
            self._after(self._tracker.backward_begins(self._gradients_cleared))
            self.backward_passes += 1

    @property
    def sampling(self) -> bool:
        """Return whether the step under way is measured."""
        return self._draft is not None and self._draft.sampled

    def gradient_ready(self, index: int, order: int) -> None:
        """Parameter `index` has accumulated its gradient, as the `order`-th of this backward pass."""
        self._witness = self._subject.parameters[index].parameter
        draft = self._draft
        if draft is None or not draft.sampled:
            return
        draft.call_order[index] = order
        for quantity, window in self._per_gradient:
            quantity.gradient_ready(index, window)

    def backward_ends(self) -> None:
        """All gradients have accumulated; the framework has not yet written reduced ones back."""
        self._each("backward_ends")

    def backward_ended(self) -> None:
        """The framework has finished its part of the backward pass."""
        self._each("backward_ended")

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        with self._lock:
            self._after(self._tracker.update_begins(repeated=id(optimizer) in self._updated_by))
            first = not self._updated_by
            self._updated_by.add(id(optimizer))
        if first:  # later optimizers of the same step would see what the earlier ones changed
            self._note_learning_rates()
            self._each("before_update")

    def updated(self) -> None:
        """An optimizer has stepped."""
        self._each("after_update")
        with self._lock:
            self._tracker.updated()
            self._last_seen = time.monotonic()

    # What the training script says.

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Attach numbers to the step under way, or to the last one when none is."""
        pending = [item for name, value in values.items() for item in take(name, value)]
        with self._lock:
            draft = self._draft
            if draft is None:
                last = self._tracker.step - 1 if self._attempts else None
                self._hand_over(Draft(step if step is not None else last, _now(), pending=pending))
                return
            if step is not None:
                self._tracker.step = draft.step = step
            draft.pending += pending
            for item in pending:
                if item.name in ("tokens", "samples") and not isinstance(item.value, torch.Tensor):
                    self._amounts[item.name] = self._amounts.get(item.name, 0.0) + item.value
            self._last_seen = time.monotonic()

    def event(self, event: Event) -> None:
        """Attach an event to the step under way and hand it over at once: people may be waiting for it."""
        with self._lock:
            step = self._draft.step if self._draft is not None else (self._tracker.step - 1 if self._attempts else None)
            self._hand_over(Draft(step, _now(), events=[event]))

    def end_step(self, *, skipped: bool | None) -> None:
        """End the step under way because the script says so."""
        with self._lock:
            self._after(self._tracker.end(skipped=skipped), reopen=False)

    def finish(self) -> int | None:
        """Hand over what is left and return the last step's number; None when there was none."""
        with self._lock:
            ended = self._tracker.end(skipped=False)
            self._after(ended, reopen=False)
            return self._tracker.step - 1 if self._attempts else None

    def flush_idle(self, after_seconds: float) -> None:
        """Hand over an updated step when training does something else for a while. Called by the publisher."""
        with self._lock:
            idle = self._tracker.stage is Stage.UPDATED and time.monotonic() - self._last_seen > after_seconds
            if idle and self._draft is not None:
                self._late = _Timing(self._draft.step, self._began, self._amounts)
                self._amounts = {}
                self._close(self._tracker.end(), duration=None)

    def published(self) -> None:
        """A measured step has been read from its copy. Called by the publisher."""
        with self._lock:
            self._backlog -= 1

    # The step's life.

    def _after(self, ended: Ended | None, *, reopen: bool = True) -> None:
        now = time.monotonic()
        if ended is not None and self._draft is not None:
            self._close(ended, duration=now - self._began)
        if reopen and self._draft is None:
            self._open(now)
        self._last_seen = now

    def _open(self, now: float) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            seconds = now - late.began
            self._hand_over(Draft(late.step, _now(), pending=_timing(seconds, late.amounts)))
        sampled = self._attempts % self._every == 0
        self._attempts += 1
        if sampled and self._backlog >= MAX_BACKLOG:
            self.unsampled += 1
            sampled = False
        self._draft = Draft(self._tracker.step, _now(), sampled=sampled)
        if sampled:
            self._draft.call_order = [-1] * len(self._subject.parameters)
        self._updated_by.clear()
        self._amounts = {}
        self.backward_passes = 0
        self._began = now

    def _close(self, ended: Ended | None, *, duration: float | None) -> None:
        draft, self._draft = self._draft, None
        assert draft is not None
        draft.ts = _now()
        if not any(item.name == "learning_rate" for item in draft.pending):
            draft.pending += draft.learning_rates
        if duration is not None:
            draft.pending += _timing(duration, self._amounts)
        if ended is not None and ended.skipped:
            draft.skipped = True
            draft.events.append(
                Event(
                    type=EventType.STEP_SKIPPED,
                    severity=Severity.INFO,
                    message="gradients were computed, the optimizer was not run",
                )
            )
        if draft.sampled:
            draft.copy = HostCopy(self._table)
            self._backlog += 1
        self._hand_over(draft)

    def _each(self, moment: str) -> None:
        if self.sampling:
            with torch.no_grad():
                for quantity, window in self._quantities:
                    getattr(quantity, moment)(window)

    def _gradients_cleared(self) -> bool:
        return self._witness is not None and self._witness.grad is None

    def _note_learning_rates(self) -> None:
        if self._draft is None:
            return
        rates: dict[str, Any] = {}
        for optimizer in self._subject.optimizers:
            for group in optimizer.param_groups:
                rates[str(len(rates))] = group.get("lr")
        self._draft.learning_rates += take("learning_rate", rates)


def _timing(seconds: float, amounts: Mapping[str, float]) -> list[Pending]:
    rates = [Pending(f"{name}_per_second", amount / seconds) for name, amount in amounts.items() if seconds > 0]
    return [Pending("step_seconds", seconds), *rates]


def _now() -> int:
    return time.time_ns() // 1000
