"""Observer that measures the time of each step by phase: forward, backward, optimizer, and announced phases.

The training thread stores marks, which are events of a step with their time. The publisher thread computes the phases
from them. Each interval between two marks gets a phase. Some intervals have a known phase, for example from the start
to the end of a forward pass. The phase of a gap follows from the marks on both sides: a gap before a forward pass,
after all work of the last step, is a wait for data.

A time is the host's clock in seconds, or a device event in the current stream of the device, if the host queues work
for the device. The device reaches this event long after the host has queued it. The publisher thread computes durations
only after the device event reports that it was reached, so no thread blocks in the driver.

For each phase, a counter contains the seconds that training has spent in this phase since the process called
`attach()`. The publisher thread reads a counter only when it publishes the counter: a value that was read earlier could
be published after a higher one, and a counter must not decrease.
"""

from __future__ import annotations

import operator
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal

import torch

from rankscope_contract.model.phases import (
    COMPUTING,
    LABEL,
    PHASE_SECONDS,
    PRE_COLLECTIVE_SECONDS,
    PRE_COLLECTIVE_TOTAL,
    STEP_PHASE_SECONDS,
    Phase,
)
from rankscope_exporter.adapters.base import FrameworkTraits
from rankscope_exporter.adapters.tracing import is_capturing
from rankscope_exporter.records.record import Cause, Pending, Scalar, StepObserver, StepRecord

TIMEOUT_SECONDS: Final = 30.0
"""Maximum seconds that the publisher thread waits until a slow device has reached an event of a step.

After this time, the step is published without phases, because the computed phases would be wrong.
"""

_FIRST_SLEEP_SECONDS: Final = 0.0005
_LONGEST_SLEEP_SECONDS: Final = 0.02


Time = Any
"""A time that a clock of this module returned: seconds of the host's clock, or an event in the stream of a device."""


class HostClock:
    """The monotonic clock of the host, for devices whose work runs on the host.

    Base class of `DeviceClock`. The training thread calls `now` and `at`, which return a time and do not block. The
    publisher thread calls `seconds_between`.
    """

    now: Callable[..., Time] = staticmethod(time.monotonic)
    """Function that returns the current time. It is a C function, because it runs at each event of each step."""

    at: Callable[..., Time] = staticmethod(float)
    """Function that returns the time for the moment, in the recent past, at which the host's clock was at `seconds`."""

    def seconds_between(self, times: Sequence[Time]) -> list[float] | None:
        """Return the seconds from each of `times` to the next; None if the device does not reach one of them in time.

        Release all times but the last, which is also the first of the next step, unless the result is None.
        """
        return list(map(operator.sub, times[1:], times[:-1]))

    def release(self, time: Time) -> None:
        """Release the device event `time`, which the caller no longer needs. The host clock has no device events."""


@dataclass(eq=False)
class DeviceClock(HostClock):
    """Clock whose times are events in the current stream of a device.

    Events are kept in a pool, because creating an event costs more than recording it.
    """

    make: Callable[[], Any]
    """Function that creates a device event with timing enabled."""
    record: Callable[[Any], None] = lambda event: event.record()
    """Function that queues an event in the current stream of the device."""
    is_capturing: Callable[[], bool] = lambda: False
    """Function that returns whether the current stream captures a CUDA graph."""
    sleep: Callable[[float], None] = time.sleep
    pool: deque[Any] = field(default_factory=deque, init=False)  # the publisher appends, the training thread pops

    def now(self) -> Time:
        """Queue an event in the current stream of the device, and return the event.

        Return None while a CUDA graph is captured, because the event would become part of the graph.
        """
        if self.is_capturing():
            return None
        try:
            event = self.pool.pop()
        except IndexError:
            event = self.make()
        self.record(event)
        return event

    def at(self, seconds: float) -> Time:  # noqa: ARG002 - no event can be queued in the past
        """Queue an event now and return the event, because no event can be queued for `seconds`, a time in the past."""
        return self.now()

    def seconds_between(self, times: Sequence[Time]) -> list[float] | None:
        events = list(dict.fromkeys(times))  # several marks can have the same event
        if not all(self.reached(event) for event in reversed(events)):
            return None
        seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(times)]
        for event in events[:-1]:
            self.release(event)
        return seconds

    def reached(self, time: Time) -> bool:
        """Return whether the device has reached `time`. Waits for a limited time."""
        if time is None:
            return False
        waited, pause = 0.0, _FIRST_SLEEP_SECONDS
        while not time.query():
            if waited >= TIMEOUT_SECONDS:
                return False
            self.sleep(pause)
            waited, pause = waited + pause, min(2 * pause, _LONGEST_SLEEP_SECONDS)
        return True

    def release(self, time: Time) -> None:
        if time is not None:
            self.pool.append(time)


def clock_of(device: torch.device) -> HostClock:
    """Return the clock that measures work on `device`."""
    if device.type != "cuda":
        return HostClock()
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]  # untyped in torch
        record=lambda event: event.record(torch.cuda.current_stream(device)),  # not of the thread's current device
        is_capturing=is_capturing,
    )


Kind = Literal[
    "opens",  # start of a timeline
    "step_begins",
    "forward_begins",
    "forward_ended",
    "evaluation_begins",
    "evaluation_ended",
    "backward_begins",
    "backward_ends",
    "backward_ended",
    "update_begins",
    "updated",
    "reading_begins",
    "reading_ended",
    "phase_begins",
    "phase_ended",
    "gives_up",  # the time after it is not divided into phases
    "closes",
]

_STRUCTURE: Final = frozenset(
    {"opens", "step_begins", "forward_ended", "evaluation_ended", "backward_ended", "updated"}
)
"""Kinds of marks after which an interval without a known phase may begin."""

_COMING: Final = frozenset({"forward_begins", "evaluation_begins", "backward_begins", "update_begins", "closes"})
"""Kinds of marks that determine the phase of an interval before the mark."""

_ACTIVITIES: Final[tuple[tuple[Phase, Kind, Kind], ...]] = (
    (Phase.OTHER, "gives_up", "closes"),
    (Phase.MONITOR, "reading_begins", "reading_ended"),
    (Phase.EVALUATION, "evaluation_begins", "evaluation_ended"),
    (Phase.FORWARD, "forward_begins", "forward_ended"),
    (Phase.COLLECTIVE, "backward_ends", "backward_ended"),
    (Phase.BACKWARD, "backward_begins", "backward_ended"),
    (Phase.OPTIMIZER, "update_begins", "updated"),
)
"""The phase of each activity, and the kinds of the marks at which the activity begins and ends.

If several activities are in progress, the first of them determines the phase. The first two come before announced
phases.
"""

IntervalPhase = tuple[str, bool]
"""The phase of the interval between two marks, and whether the script has announced it."""


Mark = tuple[Kind, Time, str]
"""An event of a step, its time, and the name of an announced phase, or the reason why the step ended.

It is a plain tuple, because creating a named tuple would double the cost of a mark on the training thread.
"""


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """Seconds of one step by phase. `inferred` contains the seconds in `phases` that the script has not announced."""

    phases: Mapping[str, float]
    inferred: Mapping[str, float]
    pre_collective: float | None
    """Seconds of computation from the start of the step to its last wait for other ranks; None if they are unknown."""


def sum_by_phase(phases: Sequence[IntervalPhase], seconds: Sequence[float], *, is_first: bool = False) -> PhaseTotals:
    """Return the seconds by phase of one step, of which each interval has one of `phases` and of `seconds`.

    In the first step of a process, all time has the phase "first_step", except announced phases, evaluation and the
    time that the monitor takes.
    """
    total: dict[str, float] = defaultdict(float)
    inferred: dict[str, float] = defaultdict(float)
    computed, pre_collective = 0.0, None
    for (phase, is_announced), duration in zip(phases, seconds, strict=True):
        if phase == Phase.COLLECTIVE:
            pre_collective = computed
        elif phase in COMPUTING:
            computed += duration
        keeps_phase = is_announced or phase in (Phase.EVALUATION, Phase.MONITOR) or not is_first
        name = str(phase if keeps_phase else Phase.FIRST_STEP)
        total[name] += duration
        inferred[name] += 0.0 if is_announced else duration
    return PhaseTotals(total, inferred, None if is_first else pre_collective)


_BEGINNING_A_STEP: Final = frozenset({"step_begins", "reading_begins", "reading_ended"})


def corrected(marks: list[Mark]) -> list[Mark]:
    """Return `marks` with a training forward pass for each evaluation that a backward pass follows.

    The model was trained in evaluation mode.
    """
    for position, (kind, _, name) in enumerate(marks):
        if kind == "backward_begins" or (kind, name) == ("closes", "backward"):
            last = position - 1
            while marks[last][0] in _BEGINNING_A_STEP:
                last -= 1
            if marks[last][0] == "evaluation_ended" and marks[last - 1][0] == "evaluation_begins":
                marks[last - 1] = ("forward_begins", *marks[last - 1][1:])
                marks[last] = ("forward_ended", *marks[last][1:])
    return marks


def phases_of(marks: Sequence[Mark], traits: FrameworkTraits, *, has_optimizer: bool) -> list[IntervalPhase]:
    """Return the phase of the interval from each of `marks` to the next one.

    The wait for reductions is the time between the marks "backward_ends" and "backward_ended". If micro-batches
    overlap, as in a pipeline, the time between two of them is not a wait for data.
    """
    may_wait = has_optimizer and not traits.interleaves_micro_batches
    found: list[IntervalPhase] = []
    announced: list[str] = []
    in_progress: set[Phase] = set()
    since = "opens"
    for (kind, _, name), (coming, cause) in zip(marks[:-1], _coming(marks)[1:], strict=True):
        if kind == "phase_begins":
            announced.append(name)
        elif kind == "phase_ended":
            announced = announced[:-1]
        active: Phase | None = None
        for activity, begin, end in _ACTIVITIES:
            if kind == begin:
                in_progress.add(activity)
            elif kind == end:
                in_progress.discard(activity)
            if active is None and activity in in_progress:
                active = activity
        if kind in _STRUCTURE:
            since = kind
        if active == Phase.COLLECTIVE and not traits.waits_for_reductions:
            active = Phase.BACKWARD
        is_announced = bool(announced) and active not in (Phase.OTHER, Phase.MONITOR)
        phase = announced[-1] if is_announced else active or _gap(since, coming, cause, may_wait=may_wait)
        found.append((phase, is_announced))
    return found


def _coming(marks: Sequence[Mark]) -> list[tuple[str, str]]:
    """Return, for each mark, the kind and name of the mark that determines the phase of a gap directly before it.

    The gap ends at the given mark. The determining mark is the given mark itself or a later mark of the step.
    """
    found: list[tuple[str, str]] = []
    after = outside = ("closes", "")
    for kind, _, name in reversed(marks):
        if kind == "phase_begins":
            after = outside  # an evaluation inside an announced phase does not explain a gap before the phase
        elif kind in _COMING:
            after = (kind, name)
            outside = outside if kind == "evaluation_begins" else after
        found.append(after)
    return found[::-1]


def _gap(since: str, coming: str, cause: str, *, may_wait: bool) -> Phase:
    """Return the phase of an interval in which no activity with a known phase was in progress.

    `since` is the kind of the last mark before the interval after which a gap may begin. `coming` is the kind of the
    mark, at the end of the interval or later, that determines the phase. If `coming` is "closes", the end of the step,
    `cause` is the reason why the step ended. If `may_wait` is false, time after a backward pass is no wait for data.
    """
    if coming == "evaluation_begins":
        return Phase.EVALUATION
    if since == "step_begins":  # still in the hook that started the step
        return Phase.MONITOR
    if coming == "backward_begins" or cause == "backward":
        return Phase.BACKWARD if since in ("forward_ended", "evaluation_ended") else Phase.OTHER  # the loss
    is_wait = coming == "forward_begins" or (coming == "closes" and cause in ("forward", "update"))
    if not is_wait or since == "forward_ended":
        return Phase.OTHER
    if since == "backward_ended" and not may_wait:
        return Phase.OTHER
    return Phase.DATA_WAIT


EVERY_SECONDS: Final = 1.0
"""Minimum seconds between two publications of the counters of seconds by phase.

The seconds by phase of each single step are published separately, with the record of the step.
"""

UNIT: Final = "seconds"


class PhaseCounters:
    """Counters of the seconds that training has spent in each phase since the process called `attach()`.

    The training thread and the publisher thread add seconds; the publisher thread reads the counters.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._pre_collective = 0.0
        self._changed: set[str] = set()
        self._published_at = float("-inf")

    def add(self, phases: Mapping[str, float], pre_collective: float | None = None) -> None:
        """Add seconds by phase; `pre_collective`, of computation before the last wait for ranks, counts separately."""
        with self._lock:
            for phase, seconds in phases.items():
                self._seconds[phase] = self._seconds.get(phase, 0.0) + max(0.0, seconds)
                self._changed.add(phase)
            self._pre_collective += pre_collective or 0.0

    def of(self, phase: str) -> list[Scalar]:
        """Return the counter of one phase as a list with one scalar; empty if no seconds were added to it."""
        with self._lock:
            self._changed.discard(phase)
            return [self._scalar(phase)] if phase in self._seconds else []

    def due(self, *, is_last: bool = False) -> list[Scalar]:
        """Return the counters that have changed since the last publication.

        The list is empty if the last publication was less than EVERY_SECONDS (1 s) ago. If `is_last` is true, the time
        of the last publication has no effect.
        """
        now = time.monotonic()
        with self._lock:
            if now - self._published_at < EVERY_SECONDS and not is_last:
                return []
            self._published_at = now
            changed, self._changed = sorted(self._changed), set()
            scalars = [self._scalar(phase) for phase in changed]
            if self._pre_collective:
                scalars.append(Scalar(PRE_COLLECTIVE_TOTAL, self._pre_collective, UNIT))
            return scalars

    def _scalar(self, phase: str) -> Scalar:
        return Scalar(PHASE_SECONDS, self._seconds[phase], UNIT, {LABEL: phase})


MOST_MARKS: Final = 10_000
"""Maximum number of events of one step for which the time is stored.

If a step has more events, for example because of thousands of micro-batches, the time after the last stored event is
counted as the phase "other".
"""


@dataclass(slots=True)
class _Announced:
    name: str
    began: float
    within: float = 0.0  # seconds of nested phases


@dataclass(eq=False)
class StepTimingObserver(StepObserver):
    """Measures the phases of steps.

    The training thread stores the time of each event, as clock time or as a queued device event.
    """

    clock: HostClock
    traits: FrameworkTraits
    hand_over: Callable[[StepRecord], None]
    _: KW_ONLY
    has_optimizer: bool
    report: Callable[[str, BaseException], None]
    times_steps: bool = True
    step_seconds: dict[str, float] = field(default_factory=dict, init=False)
    """Seconds of all published steps after the first, by phase. The publisher thread writes them."""
    left_out: int = field(default=0, init=False)
    """Number of steps for which no phases are published.

    In these steps, the device did not reach an event within the time limit.
    """

    def __post_init__(self) -> None:
        self._now = self.clock.now if self.times_steps else time.monotonic
        self._is_noting = self.times_steps
        self._counters = PhaseCounters()
        self._counter_readers: dict[str, Callable[[], list[Scalar]]] = {}
        self._announced: list[_Announced] = []
        self._thread: int | None = None
        self._is_first = True
        self._has_step = False
        self._is_last = False
        self._published: Mapping[str, float] = {}  # phases of the last step; used only by the publisher thread
        self._marks: list[Mark] = [("opens", self._now(), "")]

    def note(self, *kinds: Kind, name: str = "") -> None:
        """Store the time of events of the step that happen now. Consecutive evaluation passes count as one.

        An error of the device is reported, and raises nothing into the caller.
        """
        if "step_begins" in kinds:
            self._has_step = True
        elif "update_begins" in kinds:  # not a forward or backward pass, which may run on a thread of torch
            self._thread = threading.get_ident()
        marks = self._marks
        if not self._is_noting or not kinds:
            return
        if kinds[0] == "evaluation_begins" and marks[-1][0] == "evaluation_ended":
            self.clock.release(marks.pop()[1])
            return
        try:
            now = self._now()
        except Exception as error:  # noqa: BLE001 - the step itself goes on
            self.report("timing a step", error)
            return
        for kind in kinds:
            marks.append((kind, now, name))
        if len(marks) > MOST_MARKS:
            marks.append(("gives_up", now, ""))
            self._is_noting = False

    # Phases that the script announces. Those of other threads, such as a checkpoint, are ignored.

    def phase_begins(self, name: str) -> None:
        """Store the time at which the announced phase `name` begins."""
        if self._is_training_thread():
            self._announced.append(_Announced(name, time.monotonic()))
            self.note("phase_begins", name=name)

    def phase_ended(self, name: str) -> None:
        """Add the duration of the announced phase `name`, without its nested phases, to the counter of this phase."""
        if not self._is_training_thread() or not self._announced or self._announced[-1].name != name:
            return
        ended = self._announced.pop()
        duration = time.monotonic() - ended.began
        if self._announced:
            self._announced[-1].within += duration
        self._counters.add({name: duration - ended.within})
        self.note("phase_ended", name=name)

    def total(self, name: str) -> Callable[[], list[Scalar]]:
        """Return a function that reads the counter of the phase `name`. Repeated calls return the same function."""
        return self._counter_readers.setdefault(name, partial(self._counters.of, name))

    # End of a step.

    def on_step_timed(self, record: StepRecord, cause: Cause, logged: Sequence[Pending]) -> None:  # noqa: ARG002
        if self.times_steps:
            self._close(record, cause)
            self._is_first = False

    def on_training_end(self) -> None:
        self._is_last = True  # time after the last step belongs to no step
        if self.times_steps and not self._has_step:
            record = StepRecord.now()
            self._close(record, "end")
            self.hand_over(record)

    def _close(self, record: StepRecord, cause: Cause) -> None:
        now = self._now() if record.ended_at is None else self.clock.at(record.ended_at)
        marks, self._marks = self._marks, [("opens", now, "")]
        marks.append(("closes", now, cause))
        for phase in self._announced:  # they continue
            self._marks.append(("phase_begins", now, phase.name))
        self._is_noting = True
        has_step, self._has_step = self._has_step and cause != "end", False
        record.later.append(partial(self._read, marks, is_first=self._is_first, of_step=has_step))

    def _read(self, raw: list[Mark], *, is_first: bool, of_step: bool) -> list[Scalar]:
        """Return the seconds by phase of one step as scalars. Runs on the publisher thread."""
        marks = corrected(raw)
        _, times, _ = zip(*marks, strict=True)
        seconds = self.clock.seconds_between(times)
        if seconds is None:
            self.left_out += 1
            return []
        intervals = phases_of(marks, self.traits, has_optimizer=self.has_optimizer)
        found = sum_by_phase(intervals, seconds, is_first=is_first)
        self._counters.add(found.inferred, found.pre_collective)
        counters = self._counters.due(is_last=self._is_last)
        if not of_step:
            return counters
        # A phase of the last step that this step does not have is published as 0, so that the page does not keep it.
        phases = {**dict.fromkeys(self._published, 0.0), **found.phases}
        self._published = found.phases
        scalars = []
        for phase, duration in phases.items():
            scalars.append(Scalar(STEP_PHASE_SECONDS, duration, UNIT, {LABEL: phase}))
            if not is_first and phase in found.phases:
                self.step_seconds[phase] = self.step_seconds.get(phase, 0.0) + duration
        if found.pre_collective is not None:
            scalars.append(Scalar(PRE_COLLECTIVE_SECONDS, found.pre_collective, UNIT))
        return scalars + counters

    def _is_training_thread(self) -> bool:
        return self._thread in (None, threading.get_ident())
