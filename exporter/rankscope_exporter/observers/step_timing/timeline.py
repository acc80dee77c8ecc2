"""Computes the phases of a step from marks, which are events with a time. Each interval between two marks gets a phase.

Marks and clock are arguments; the functions have no side effects. Some intervals have a known phase, for example from
the start to the end of a forward pass. The phase of a gap follows from the marks on both sides: a gap before a forward
pass, after all work of the last step, is a wait for data.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from rankscope_contract.model.phases import COMPUTING, Phase
from rankscope_exporter.observers.step_timing.clock import Time

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
