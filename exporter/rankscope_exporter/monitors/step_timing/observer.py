"""Observer that measures the phases of each step of one model.

The training thread stores the times of the events of a step. The publisher thread computes the phases from these times.

For each phase, a counter contains the seconds that training has spent in this phase since the process called
`attach()`. The publisher thread reads a counter only when it publishes the counter: a value that was read earlier could
be published after a higher one, and a counter must not decrease.

Computes the phases of a step from marks, which are events with a time. Each interval between two marks gets a phase.

Marks and clock are arguments; the functions have no side effects. Some intervals have a known phase, for example from
the start to the end of a forward pass. The phase of a gap follows from the marks on both sides: a gap before a forward
pass, after all work of the last step, is a wait for data.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple

from rankscope_contract.model.phases import (
    COMPUTING,
    LABEL,
    PHASE_SECONDS,
    PRE_COLLECTIVE_SECONDS,
    PRE_COLLECTIVE_TOTAL,
    STEP_PHASE_SECONDS,
    Phase,
)
from rankscope_exporter.monitors.step_timing.clock import HostClock, Time
from rankscope_exporter.records.record import Cause, Pending, Scalar, StepObserver, StepRecord

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
"""Kinds of marks (events of a step with a time) after which an interval without a known phase may begin."""

_COMING: Final = frozenset({"forward_begins", "evaluation_begins", "backward_begins", "update_begins", "closes"})
"""Kinds of marks (events of a step with a time) that determine the phase of an interval before the mark."""


class Mark(NamedTuple):
    """An event of a training step and its time.

    `name` is the name of an announced phase, or the reason why the step ended.
    """

    kind: Kind
    at: Time
    name: str = ""


RawMark = tuple[Kind, Time, str]
"""A mark, that is, an event with a time, as a plain tuple.

The training thread stores it in this form, because creating a named tuple would double the cost of a mark.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTraits:
    """Properties of the training loop that determine how the phases of its steps are computed."""

    shows_reductions: bool = False
    """True if the framework waits for reductions of gradients after the backward pass has computed all gradients.

    The wait is the time between the marks "backward_ends" and "backward_ended".
    """
    interleaves: bool = False
    """True if micro-batches overlap, as in a pipeline: the time between two micro-batches is not a wait for data."""
    has_optimizer: bool = True


@dataclass(frozen=True, slots=True)
class PhaseInterval:
    """The interval between two consecutive events of a step, and the phase of this interval."""

    phase: str
    begin: Time
    end: Time
    is_announced: bool


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """Seconds of one step by phase. `announced` contains the seconds in `phases` that belong to announced phases."""

    phases: Mapping[str, float]
    announced: Mapping[str, float]
    pre_collective: float | None
    """Seconds of computation from the start of the step to its last wait for other ranks; None if they are unknown."""


def sum_by_phase(
    intervals: Sequence[PhaseInterval], seconds: Callable[[Time, Time], float], *, is_first: bool = False
) -> PhaseTotals:
    """Return the seconds by phase of the intervals of one step.

    In the first step of a process, all time has the phase "first_step", except announced phases, evaluation and the
    time that the monitor takes.
    """
    phases: dict[str, float] = defaultdict(float)
    announced: dict[str, float] = defaultdict(float)
    computed, pre_collective = 0.0, None
    for interval in intervals:
        duration = seconds(interval.begin, interval.end)
        if interval.phase == Phase.COLLECTIVE:
            pre_collective = computed
        elif interval.phase in COMPUTING:
            computed += duration
        keeps_phase = interval.is_announced or interval.phase in (Phase.EVALUATION, Phase.MONITOR) or not is_first
        phases[str(interval.phase if keeps_phase else Phase.FIRST_STEP)] += duration
        if interval.is_announced:
            announced[interval.phase] += duration
    return PhaseTotals(phases, announced, None if is_first else pre_collective)


_BEGINNING_A_STEP: Final = frozenset({"step_begins", "reading_begins", "reading_ended"})


def corrected(marks: list[Mark]) -> list[Mark]:
    """Return `marks` with a training forward pass for each evaluation that a backward pass follows.

    The model was trained in evaluation mode.
    """
    for position, mark in enumerate(marks):
        if mark.kind == "backward_begins" or (mark.kind, mark.name) == ("closes", "backward"):
            last = position - 1
            while marks[last].kind in _BEGINNING_A_STEP:
                last -= 1
            if marks[last].kind == "evaluation_ended" and marks[last - 1].kind == "evaluation_begins":
                marks[last - 1] = marks[last - 1]._replace(kind="forward_begins")
                marks[last] = marks[last]._replace(kind="forward_ended")
    return marks


def segments(marks: Sequence[Mark], traits: LoopTraits) -> Iterator[PhaseInterval]:
    """Yield the interval between each mark (an event of the step with its time) and the next mark, with its phase."""
    coming = _coming(marks)
    state = _State(traits)
    for position, (mark, following) in enumerate(itertools.pairwise(marks)):
        state.apply(mark)
        phase = state.phase() or state.gap(*coming[position + 1])
        yield PhaseInterval(phase, mark.at, following.at, state.is_announced)


def _coming(marks: Sequence[Mark]) -> list[tuple[str, str]]:
    """Return, for each mark, the kind and name of the mark that determines the phase of a gap directly before it.

    A mark is an event of the step with its time. The gap ends at the given mark. The determining mark is the given mark
    itself or a later mark of the step.
    """
    found: list[tuple[str, str]] = []
    after = outside = ("closes", "")
    for mark in reversed(marks):
        if mark.kind == "phase_begins":
            after = outside  # an evaluation inside an announced phase does not explain a gap before the phase
        elif mark.kind in _COMING:
            after = (mark.kind, mark.name)
            outside = outside if mark.kind == "evaluation_begins" else after
        found.append(after)
    return found[::-1]


class _State:
    """The activities that are in progress after an event of a step, such as a forward pass or an announced phase."""

    def __init__(self, traits: LoopTraits) -> None:
        self._traits = traits
        self._announced: list[str] = []
        self._open: set[str] = set()
        self._since = "opens"
        self._has_given_up = False

    @property
    def is_announced(self) -> bool:
        """Return whether the script has announced the current phase."""
        return bool(self._announced) and "reading" not in self._open and not self._has_given_up

    def apply(self, mark: Mark) -> None:
        """Update the activities in progress: `mark`, the next event of the step, may begin or end an activity."""
        if mark.kind == "phase_begins":
            self._announced.append(mark.name)
        elif mark.kind == "phase_ended":
            self._announced = self._announced[:-1]
        elif mark.kind == "backward_ends":
            self._open.add("reduction")
        elif mark.kind == "backward_ended":
            self._open -= {"backward", "reduction"}
        elif mark.kind == "updated":
            self._open.discard("update")
        elif mark.kind == "gives_up":
            self._has_given_up = True
        else:
            activity, _, event = mark.kind.rpartition("_")
            if event == "begins":
                self._open.add(activity)
            elif event == "ended":
                self._open.discard(activity)
        if mark.kind in _STRUCTURE:
            self._since = mark.kind

    def phase(self) -> str | None:
        """Return the phase of the activity in progress; None if no activity is in progress."""
        if self._has_given_up:
            return Phase.OTHER
        if "reading" in self._open:
            return Phase.MONITOR
        if self._announced:
            return self._announced[-1]
        for activity, phase in _PHASE_OF_ACTIVITY:
            if activity in self._open:
                return phase if activity != "reduction" or self._traits.shows_reductions else Phase.BACKWARD
        return None

    def gap(self, coming: str, cause: str) -> Phase:
        """Return the phase of an interval in which no activity with a known phase was in progress.

        `coming` is the kind of the event, at the end of the interval or later, that determines the phase. If `coming`
        is "closes", the end of the step, `cause` is the reason why the step ended.
        """
        if coming == "evaluation_begins":
            return Phase.EVALUATION
        if self._since == "step_begins":  # still in the hook that started the step
            return Phase.MONITOR
        if coming == "backward_begins" or cause == "backward":
            is_loss = self._since in ("forward_ended", "evaluation_ended")
            return Phase.BACKWARD if is_loss else Phase.OTHER
        is_wait = coming == "forward_begins" or (coming == "closes" and cause in ("forward", "update"))
        if not is_wait or self._since == "forward_ended":
            return Phase.OTHER
        if self._since == "backward_ended" and (self._traits.interleaves or not self._traits.has_optimizer):
            return Phase.OTHER
        return Phase.DATA_WAIT


_PHASE_OF_ACTIVITY: Final = (
    ("evaluation", Phase.EVALUATION),
    ("forward", Phase.FORWARD),
    ("reduction", Phase.COLLECTIVE),
    ("backward", Phase.BACKWARD),
    ("update", Phase.OPTIMIZER),
)


EVERY_SECONDS: Final = 1.0
"""Minimum seconds between two publications of the counters of seconds by phase.

The seconds by phase of each single step are published separately, with the record of the step.
"""

UNIT: Final = "seconds"


class PhaseCounters:
    """Counters of the seconds that training has spent in each phase since the process called `attach()`.

    The training thread and the publisher thread add seconds; the publisher thread reads the counters.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
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
        now = self._clock()
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


class StepTimingObserver(StepObserver):
    """Measures the phases of steps.

    The training thread stores the time of each event, as clock time or as a queued device event.
    """

    def __init__(
        self,
        clock: HostClock,
        traits: LoopTraits,
        hand_over: Callable[[StepRecord], None],
        *,
        report: Callable[[str, BaseException], None],
        times_steps: bool = True,
    ) -> None:
        self._clock = clock
        self._report = report
        self._now = clock.now if times_steps else time.monotonic
        self._traits = traits
        self._hand_over = hand_over
        self._times_steps = self._is_noting = times_steps
        self._counters = PhaseCounters()
        self._counter_readers: dict[str, Callable[[], list[Scalar]]] = {}
        self._announced: list[_Announced] = []
        self._thread: int | None = None
        self._is_first = True
        self._has_step = False
        self._is_last = False
        self._published: Mapping[str, float] = {}  # phases of the last step; used only by the publisher thread
        self.step_seconds: dict[str, float] = {}
        """Seconds of all published steps after the first, by phase. The publisher thread writes them."""
        self.left_out = 0
        """Number of steps for which no phases are published.

        In these steps, the device did not reach an event within the time limit.
        """
        self._marks: list[RawMark] = [("opens", self._now(), "")]

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
            self._clock.release(marks.pop()[1])
            return
        try:
            now = self._now()
        except Exception as error:  # noqa: BLE001 - the step itself goes on
            self._report("timing a step", error)
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
        if self._times_steps:
            self._close(record, cause)
            self._is_first = False

    def on_training_end(self) -> None:
        self._is_last = True  # time after the last step belongs to no step
        if self._times_steps and not self._has_step:
            record = StepRecord.now()
            self._close(record, "end")
            self._hand_over(record)

    def _close(self, record: StepRecord, cause: Cause) -> None:
        now = self._now() if record.ended_at is None else self._clock.at(record.ended_at)
        marks, self._marks = self._marks, [("opens", now, "")]
        marks.append(("closes", now, cause))
        for phase in self._announced:  # they continue
            self._marks.append(("phase_begins", now, phase.name))
        self._is_noting = True
        has_step, self._has_step = self._has_step and cause != "end", False
        record.later.append(partial(self._read, marks, is_first=self._is_first, of_step=has_step))

    def _read(self, raw: Sequence[RawMark], *, is_first: bool, of_step: bool) -> list[Scalar]:
        """Return the seconds by phase of one step as scalars. Runs on the publisher thread."""
        marks = corrected([Mark(*mark) for mark in raw])
        times = list(dict.fromkeys(mark.at for mark in marks))
        if not all(self._clock.reached(time) for time in reversed(times)):
            self.left_out += 1
            return []
        found = sum_by_phase(list(segments(marks, self._traits)), self._clock.seconds, is_first=is_first)
        for passed in times[:-1]:  # the last time is also the first one of the next timeline
            self._clock.release(passed)
        own = {phase: seconds - found.announced.get(phase, 0.0) for phase, seconds in found.phases.items()}
        self._counters.add(own, found.pre_collective)
        counters = self._counters.due(is_last=self._is_last)
        if not of_step:
            return counters
        # A phase of the last step that this step does not have is published as 0, so that the page does not keep it.
        phases = {**dict.fromkeys(self._published, 0.0), **found.phases}
        self._published = found.phases
        for phase, seconds in () if is_first else found.phases.items():
            self.step_seconds[phase] = self.step_seconds.get(phase, 0.0) + seconds
        steps = [Scalar(STEP_PHASE_SECONDS, seconds, UNIT, {LABEL: phase}) for phase, seconds in phases.items()]
        if found.pre_collective is not None:
            steps.append(Scalar(PRE_COLLECTIVE_SECONDS, found.pre_collective, UNIT))
        return [*steps, *counters]

    def _is_training_thread(self) -> bool:
        return self._thread in (None, threading.get_ident())
