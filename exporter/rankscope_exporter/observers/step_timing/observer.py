"""Observer that measures the phases of each step of one model.

The training thread stores the times of the events of a step. The publisher thread computes the phases from these times.

For each phase, a counter contains the seconds that training has spent in this phase since the process called
`attach()`. The publisher thread reads a counter only when it publishes the counter: a value that was read earlier could
be published after a higher one, and a counter must not decrease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from rankscope_contract.model.phases import (
    LABEL,
    PHASE_SECONDS,
    PRE_COLLECTIVE_SECONDS,
    PRE_COLLECTIVE_TOTAL,
    STEP_PHASE_SECONDS,
)
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.observers.step_timing.clock import HostClock, Time, clock_of
from rankscope_exporter.observers.step_timing.timeline import Kind, LoopTraits, Mark, RawMark, segments, sum_by_phase
from rankscope_exporter.records.pending_step import PendingStep, now_microseconds
from rankscope_exporter.records.step_events import Cause, StepObserver
from rankscope_exporter.records.step_record import Scalar

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
        """Add the seconds of each phase in `phases` to the counter of this phase.

        `pre_collective`, the seconds of computation in one step before the last wait for other ranks, is added to a
        separate counter.
        """
        with self._lock:
            for phase, seconds in phases.items():
                self._seconds[phase] = self._seconds.get(phase, 0.0) + max(0.0, seconds)
                self._changed.add(phase)
            self._pre_collective += pre_collective or 0.0

    def of(self, phase: str) -> list[Scalar]:
        """Return the counter of one phase as a list with one scalar.

        The list is empty if no seconds were added to this counter.
        """
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

_BEGINNING_A_STEP: Final = frozenset({"step_begins", "reading_begins", "reading_ended"})


@dataclass(slots=True)
class _Announced:
    name: str
    began: float
    within: float = 0.0  # seconds of nested phases


def _marking(kind: Kind, *, limited: bool = False) -> Callable[[StepTimingObserver], None]:
    """Return a method of `StepTimingObserver` that stores the time of an event of the kind `kind`.

    If `limited` is true, the method also stops storing times after MOST_MARKS (10,000) events of one step.
    """

    def note(self: StepTimingObserver) -> None:
        self._note((kind, self._now(), ""))

    def note_and_limit(self: StepTimingObserver) -> None:
        self._note((kind, self._now(), ""))
        self._limit_marks()

    return note_and_limit if limited else note


class StepTimingObserver(StepObserver):
    """Measures the phases of steps.

    The training thread stores the time of each event, as clock time or as a queued device event.
    """

    def __init__(
        self,
        clock: HostClock,
        traits: LoopTraits,
        hand_over: Callable[[PendingStep], None],
        *,
        times_steps: bool = True,
    ) -> None:
        self._clock = clock
        self._now = clock.now if times_steps else time.monotonic
        self._traits = traits
        self._hand_over = hand_over
        self._times_steps = times_steps
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
        self._open(self._now())

    @classmethod
    def of(
        cls,
        monitored: MonitoredModel,
        device: torch.device,
        hand_over: Callable[[PendingStep], None],
        *,
        times_steps: bool,
    ) -> StepTimingObserver:
        """Return the observer that measures the steps of a model on `device`."""
        traits = LoopTraits(
            shows_reductions=monitored.framework.traits.waits_for_reductions,
            interleaves=monitored.framework.traits.interleaves_micro_batches,
            has_optimizer=bool(monitored.optimizers),
        )
        return cls(clock_of(device), traits, hand_over, times_steps=times_steps)

    # Events of a step.

    on_forward_begin = _marking("forward_begins")
    on_forward_end = _marking("forward_ended", limited=True)
    on_evaluation_end = _marking("evaluation_ended")
    on_gradients_ready = _marking("backward_ends")
    on_backward_end = _marking("backward_ended", limited=True)
    on_optimizer_step_end = _marking("updated")
    on_measurement_begin = _marking("reading_begins")
    on_measurement_end = _marking("reading_ended")

    def on_step_begin(self, step: int) -> None:  # noqa: ARG002 - the number may still change
        """Store the time at which a step begins."""
        self._has_step = True
        self._note(("step_begins", self._now(), ""))

    def on_evaluation_begin(self) -> None:
        """Store the time at which an evaluation forward pass begins. Consecutive evaluation passes count as one."""
        if self._marks[-1][0] == "evaluation_ended":
            self._clock.release(self._marks.pop()[1])
        else:
            self._note(("evaluation_begins", self._now(), ""))

    def on_backward_begin(self) -> None:
        """Store the time at which a backward pass begins. The forward pass before it was a training forward pass."""
        self._correct_evaluation()
        self._note(("backward_begins", self._now(), ""))

    def on_optimizer_step_begin(self) -> None:
        """Store the time at which an optimizer update begins, and the id of the training thread.

        The id distinguishes phases of the step from phases that another thread announces, such as a checkpoint.
        """
        self._thread = threading.get_ident()  # not set in a forward or backward pass, which may run on a torch thread
        self._note(("update_begins", self._now(), ""))

    # Phases that the script announces.

    def on_phase_begin(self, name: str) -> None:
        """Store the time at which the announced phase `name` begins.

        Phases that another thread announces are ignored.
        """
        if self._is_training_thread():
            self._announced.append(_Announced(name, time.monotonic()))
            self._note(("phase_begins", self._now(), name))

    def on_phase_end(self, name: str) -> None:
        """Add the duration of the announced phase `name`, without its nested phases, to the counter of this phase."""
        if not self._is_training_thread() or not self._announced or self._announced[-1].name != name:
            return
        ended = self._announced.pop()
        duration = time.monotonic() - ended.began
        if self._announced:
            self._announced[-1].within += duration
        self._counters.add({name: duration - ended.within})
        self._note(("phase_ended", self._now(), name))
        self._limit_marks()

    def total(self, name: str) -> Callable[[], list[Scalar]]:
        """Return a function that reads the counter of the phase `name`. Repeated calls return the same function."""
        return self._counter_readers.setdefault(name, partial(self._counters.of, name))

    # End of a step.

    def on_step_timed(self, pending_step: PendingStep, cause: Cause) -> None:
        """Schedule the computation of the phases of a step on the publisher thread."""
        if cause == "backward":
            self._correct_evaluation()
        if self._times_steps:
            self._close(pending_step, cause)
            self._is_first = False

    def on_training_end(self) -> None:
        """Publish the counters with the last step. Time after the last step belongs to no step."""
        self._is_last = True
        if self._times_steps and not self._has_step:
            pending_step = PendingStep(None, now_microseconds())
            self._close(pending_step, "end")
            self._hand_over(pending_step)

    def _close(self, pending_step: PendingStep, cause: Cause) -> None:
        now = self._now() if pending_step.ended_at is None else self._clock.at(pending_step.ended_at)
        self._note(("closes", now, cause))
        marks = self._marks
        self._open(now)
        has_step, self._has_step = self._has_step, False
        pending_step.later.append(partial(self._read, marks, is_first=self._is_first, of_step=has_step))

    def _open(self, now: Time) -> None:
        """Start to store the times of the next step. Phases that the script has announced and not ended continue."""
        self._marks: list[RawMark] = [("opens", now, "")]
        self._marks += [("phase_begins", now, item.name) for item in self._announced]
        self._note = self._marks.append if self._times_steps else lambda _mark: None

    def _read(self, raw: Sequence[RawMark], *, is_first: bool, of_step: bool) -> list[Scalar]:
        """Return the seconds by phase of one step as scalars. Runs on the publisher thread."""
        marks = [Mark(*mark) for mark in raw]
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

    def _limit_marks(self) -> None:
        """Stop storing times of events until the step has ended, if MOST_MARKS (10,000) times are stored."""
        if len(self._marks) > MOST_MARKS:
            self._note(("gives_up", self._now(), ""))
            self._note = lambda mark: self._marks.append(mark) if mark[0] == "closes" else None

    def _correct_evaluation(self) -> None:
        """Treat the last evaluation forward pass as a training forward pass.

        A backward pass follows, so the model was trained in eval mode.
        """
        position = len(self._marks) - 1
        while self._marks[position][0] in _BEGINNING_A_STEP:
            position -= 1
        if self._marks[position][0] == "evaluation_ended" and self._marks[position - 1][0] == "evaluation_begins":
            self._marks[position - 1] = ("forward_begins", *self._marks[position - 1][1:])
            self._marks[position] = ("forward_ended", *self._marks[position][1:])

    def _is_training_thread(self) -> bool:
        return self._thread in (None, threading.get_ident())
