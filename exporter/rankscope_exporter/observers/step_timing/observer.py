"""Observer of the steps of one model: it notes the time of each event; the publisher thread computes the phases.

Seconds by phase are counted since the process attached. Every number is read on the publisher thread at the moment it
is published: a counter must never seem to fall.
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
from rankscope_exporter.observers.step_timing.clock import Clock, Time, clock_of
from rankscope_exporter.observers.step_timing.timeline import LoopTraits, Mark, RawMark, segments, sum_by_phase
from rankscope_exporter.records.pending_step import PendingStep, now_microseconds
from rankscope_exporter.records.step_events import Cause, StepObserver
from rankscope_exporter.records.step_record import Scalar

EVERY_SECONDS: Final = 1.0
"""Totals are for those who look every few seconds; what single steps were made of has rows of its own."""

UNIT: Final = "seconds"


class PhaseCounters:
    """Grows on the training and on the publisher's thread, and is read on the latter."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._pre_collective = 0.0
        self._changed: set[str] = set()
        self._told_at = float("-inf")

    def add(self, phases: Mapping[str, float], pre_collective: float | None = None) -> None:
        """Add seconds to phases, and to what is computed before ranks meet."""
        with self._lock:
            for phase, seconds in phases.items():
                self._seconds[phase] = self._seconds.get(phase, 0.0) + max(0.0, seconds)
                self._changed.add(phase)
            self._pre_collective += pre_collective or 0.0

    def of(self, phase: str) -> list[Scalar]:
        """Return the total of one phase."""
        with self._lock:
            self._changed.discard(phase)
            return [self._scalar(phase)] if phase in self._seconds else []

    def due(self, *, is_last: bool = False) -> list[Scalar]:
        """Return all totals that have grown, if they were not told a moment ago."""
        now = self._clock()
        with self._lock:
            if now - self._told_at < EVERY_SECONDS and not is_last:
                return []
            self._told_at = now
            changed, self._changed = sorted(self._changed), set()
            told = [self._scalar(phase) for phase in changed]
            if self._pre_collective:
                told.append(Scalar(PRE_COLLECTIVE_TOTAL, self._pre_collective, UNIT))
            return told

    def _scalar(self, phase: str) -> Scalar:
        return Scalar(PHASE_SECONDS, self._seconds[phase], UNIT, {LABEL: phase})


MOST_MARKS: Final = 10_000
"""Of one step. What a step of thousands of micro-batches does behind them is "other"."""

_REDUCES_AT_THE_END: Final = frozenset({"ddp"})
"""Frameworks that wait for all reductions when the backward pass has ended. Others meet anywhere within the passes."""

_BEGINNING_A_STEP: Final = frozenset({"step_begins", "reading_begins", "reading_ended"})


@dataclass(slots=True)
class _Announced:
    name: str
    began: float
    within: float = 0.0  # seconds of phases inside of it


class StepTimingObserver(StepObserver):
    """Notes moments on the training thread: a clock is read, or an event queued, and a tuple kept."""

    def __init__(
        self, clock: Clock, traits: LoopTraits, hand_over: Callable[[PendingStep], None], *, times_steps: bool = True
    ) -> None:
        self._clock = clock
        self._now = clock.now if times_steps else time.monotonic
        self._traits = traits
        self._hand_over = hand_over
        self._times_steps = times_steps
        self._totals = PhaseCounters()
        self._of_phase: dict[str, Callable[[], list[Scalar]]] = {}
        self._announced: list[_Announced] = []
        self._thread: int | None = None
        self._is_first = True
        self._has_step = False
        self._is_last = False
        self._shown: Mapping[str, float] = {}  # of the last step; used by the publisher's thread only
        self.left_out = 0
        """Steps whose marks the device never passed."""
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
        """Return what follows the steps of a model on `device`."""
        traits = LoopTraits(
            shows_reductions=monitored.framework.name in _REDUCES_AT_THE_END,
            interleaves=monitored.framework.interleaves_micro_batches,
            has_optimizer=bool(monitored.optimizers),
        )
        return cls(clock_of(device), traits, hand_over, times_steps=times_steps)

    # What happens in a step.

    def on_step_begin(self, step: int) -> None:  # noqa: ARG002 - it is known in the end
        """Note it."""
        self._has_step = True
        self._note(("step_begins", self._now(), ""))

    def on_forward_begin(self) -> None:
        """Note it."""
        self._note(("forward_begins", self._now(), ""))

    def on_forward_end(self) -> None:
        """Note it."""
        self._note(("forward_ended", self._now(), ""))
        self._keep_short()

    def on_evaluation_begin(self) -> None:
        """Note it; of many forwards in a row the first begins the evaluation and the last ends it."""
        if self._marks[-1][0] == "evaluation_ended":
            self._clock.give_back(self._marks.pop()[1])
        else:
            self._note(("evaluation_begins", self._now(), ""))

    def on_evaluation_end(self) -> None:
        """Note it."""
        self._note(("evaluation_ended", self._now(), ""))

    def on_backward_begin(self) -> None:
        """Note it."""
        self._it_was_training()
        self._note(("backward_begins", self._now(), ""))

    def on_gradients_ready(self) -> None:
        """Note it."""
        self._note(("backward_ends", self._now(), ""))

    def on_backward_end(self) -> None:
        """Note it."""
        self._note(("backward_ended", self._now(), ""))
        self._keep_short()

    def on_optimizer_step_begin(self) -> None:
        """Note it, and whose thread is that of the training: a checkpoint may be written on another one."""
        self._thread = threading.get_ident()  # not of a forward or backward pass, which torch may run on its own
        self._note(("update_begins", self._now(), ""))

    def on_optimizer_step_end(self) -> None:
        """Note it."""
        self._note(("updated", self._now(), ""))

    def on_measurement_begin(self) -> None:
        """Note it."""
        self._note(("reading_begins", self._now(), ""))

    def on_measurement_end(self) -> None:
        """Note it."""
        self._note(("reading_ended", self._now(), ""))

    # What the script says.

    def on_phase_begin(self, name: str) -> None:
        """Note it, unless another thread than that of the training says so."""
        if self._is_training():
            self._announced.append(_Announced(name, time.monotonic()))
            self._note(("phase_begins", self._now(), name))

    def on_phase_end(self, name: str) -> None:
        """Add to the total of the phase what no inner phase has taken."""
        if not self._is_training() or not self._announced or self._announced[-1].name != name:
            return
        ended = self._announced.pop()
        took = time.monotonic() - ended.began
        if self._announced:
            self._announced[-1].within += took
        self._totals.add({name: took - ended.within})
        self._note(("phase_ended", self._now(), name))
        self._keep_short()

    def total(self, name: str) -> Callable[[], list[Scalar]]:
        """Return what tells, on another thread, how long the phase `name` has lasted in all; each time the same."""
        return self._of_phase.setdefault(name, partial(self._totals.of, name))

    # What becomes of it.

    def on_step_timed(self, pending_step: PendingStep, cause: Cause) -> None:
        """Let the publisher find out what the step was made of."""
        if cause == "backward":
            self._it_was_training()
        if self._times_steps:
            self._close(pending_step, cause)
            self._is_first = False

    def on_training_end(self) -> None:
        """Tell the totals with the last step; what came after it is of none."""
        self._is_last = True
        if self._times_steps and not self._has_step:
            pending_step = PendingStep(None, now_microseconds())
            self._close(pending_step, "script")
            self._hand_over(pending_step)

    def _close(self, pending_step: PendingStep, cause: Cause) -> None:
        now = self._now() if pending_step.ended_at is None else self._clock.at(pending_step.ended_at)
        self._note(("closes", now, cause))
        marks = self._marks
        self._open(now)
        has_step, self._has_step = self._has_step, False
        pending_step.later.append(partial(self._read, marks, is_first=self._is_first, of_step=has_step))

    def _open(self, now: Time) -> None:
        """Begin a timeline, in what is announced at this moment."""
        self._marks: list[RawMark] = [("opens", now, "")]
        self._marks += [("phase_begins", now, item.name) for item in self._announced]
        self._note = self._marks.append if self._times_steps else lambda _mark: None

    def _read(self, raw: Sequence[RawMark], *, is_first: bool, of_step: bool) -> list[Scalar]:
        """Return the phases of a timeline as they are published; on the publisher's thread."""
        marks = [Mark(*mark) for mark in raw]
        times = list(dict.fromkeys(mark.at for mark in marks))
        if not all(self._clock.reached(time) for time in reversed(times)):
            self.left_out += 1
            return []
        made = sum_by_phase(list(segments(marks, self._traits)), self._clock.seconds, is_first=is_first)
        for passed in times[:-1]:  # the last one is the first of the next timeline
            self._clock.give_back(passed)
        own = {phase: seconds - made.announced.get(phase, 0.0) for phase, seconds in made.phases.items()}
        self._totals.add(own, made.pre_collective)
        told = self._totals.due(is_last=self._is_last)
        if not of_step:
            return told
        # What the last step had and this one has not took no time, and must not stay on the page.
        shown = {**dict.fromkeys(self._shown, 0.0), **made.phases}
        self._shown = made.phases
        steps = [Scalar(STEP_PHASE_SECONDS, seconds, UNIT, {LABEL: phase}) for phase, seconds in shown.items()]
        if made.pre_collective is not None:
            steps.append(Scalar(PRE_COLLECTIVE_SECONDS, made.pre_collective, UNIT))
        return [*steps, *told]

    def _keep_short(self) -> None:
        """Beyond so many marks tell nothing apart any more until the step has ended."""
        if len(self._marks) > MOST_MARKS:
            self._note(("gives_up", self._now(), ""))
            self._note = lambda mark: self._marks.append(mark) if mark[0] == "closes" else None

    def _it_was_training(self) -> None:
        """A backward pass follows: what looked like an evaluation was a training forward in evaluation mode."""
        position = len(self._marks) - 1
        while self._marks[position][0] in _BEGINNING_A_STEP:
            position -= 1
        if self._marks[position][0] == "evaluation_ended" and self._marks[position - 1][0] == "evaluation_begins":
            self._marks[position - 1] = ("forward_begins", *self._marks[position - 1][1:])
            self._marks[position] = ("forward_ended", *self._marks[position][1:])

    def _is_training(self) -> bool:
        return self._thread in (None, threading.get_ident())
