"""From marks to phases: what the time between two marks was spent on. Pure: marks are given, and so is the clock.

Some stretches say by themselves what they are, as between the begin and the end of a forward. The gaps between them are
told by what lies on both sides: before a forward, with nothing of the last step left to do, training waits for data.
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
    "opens",  # of a timeline: what went before is another one's
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
    "gives_up",  # of telling apart what follows
    "closes",
]

_STRUCTURE: Final = frozenset(
    {"opens", "step_begins", "forward_ended", "evaluation_ended", "backward_ended", "updated"}
)
"""Marks behind which a gap may begin."""

_COMING: Final = frozenset({"forward_begins", "evaluation_begins", "backward_begins", "update_begins", "closes"})
"""Marks that say what a gap before them was."""


class Mark(NamedTuple):
    """Something happened at a moment. `name` is that of a phase, or the cause by which a timeline closes."""

    kind: Kind
    at: Time
    name: str = ""


RawMark = tuple[Kind, Time, str]
"""A mark as it is taken: made for each of them, the tuple with names would cost as much as all the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTraits:
    """What is known of the training, without which its marks would say less."""

    shows_reductions: bool = False
    """Between "backward_ends" and "backward_ended" the framework waits for its reductions and does little else."""
    interleaves: bool = False
    """Micro-batches overlap as in a pipeline: a gap between two of them is no wait for data."""
    has_optimizer: bool = True


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one stretch of time was spent on."""

    phase: str
    begin: Time
    end: Time
    is_announced: bool


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """What a timeline is made of, in seconds. `announced` is the part of `phases` that the script itself named."""

    phases: Mapping[str, float]
    announced: Mapping[str, float]
    pre_collective: float | None
    """Computing from the begin of the step until it last met the other ranks; None where that cannot be told."""


def sum_by_phase(
    stretches: Sequence[Stretch], seconds: Callable[[Time, Time], float], *, is_first: bool = False
) -> PhaseTotals:
    """Add the stretches up; of a process's first step only what was announced, evaluated or ours is told apart."""
    phases: dict[str, float] = defaultdict(float)
    announced: dict[str, float] = defaultdict(float)
    computed, met = 0.0, None
    for stretch in stretches:
        took = seconds(stretch.begin, stretch.end)
        if stretch.phase == Phase.COLLECTIVE:
            met = computed
        elif stretch.phase in COMPUTING:
            computed += took
        is_apart = stretch.is_announced or stretch.phase in (Phase.EVALUATION, Phase.MONITOR) or not is_first
        phases[str(stretch.phase if is_apart else Phase.FIRST_STEP)] += took
        if stretch.is_announced:
            announced[stretch.phase] += took
    return PhaseTotals(phases, announced, None if is_first else met)


def segments(marks: Sequence[Mark], traits: LoopTraits) -> Iterator[Stretch]:
    """Yield what lies between each mark and the next."""
    coming = _coming(marks)
    state = _State(traits)
    for position, (mark, following) in enumerate(itertools.pairwise(marks)):
        state.take(mark)
        phase = state.phase() or state.gap(*coming[position + 1])
        yield Stretch(phase, mark.at, following.at, state.is_announced)


def _coming(marks: Sequence[Mark]) -> list[tuple[str, str]]:
    """Return for each mark the next one from there on that explains a gap, with its name."""
    found: list[tuple[str, str]] = []
    after = outside = ("closes", "")
    for mark in reversed(marks):
        if mark.kind == "phase_begins":
            after = outside  # the evaluation in an announced phase explains no gap before the phase
        elif mark.kind in _COMING:
            after = (mark.kind, mark.name)
            outside = outside if mark.kind == "evaluation_begins" else after
        found.append(after)
    return found[::-1]


class _State:
    """What is under way behind a mark."""

    def __init__(self, traits: LoopTraits) -> None:
        self._traits = traits
        self._announced: list[str] = []
        self._open: set[str] = set()
        self._since = "opens"
        self._has_given_up = False

    @property
    def is_announced(self) -> bool:
        """Return whether the script said what is under way."""
        return bool(self._announced) and "reading" not in self._open and not self._has_given_up

    def take(self, mark: Mark) -> None:
        """Go past a mark."""
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
            what, _, how = mark.kind.rpartition("_")
            if how == "begins":
                self._open.add(what)
            elif how == "ended":
                self._open.discard(what)
        if mark.kind in _STRUCTURE:
            self._since = mark.kind

    def phase(self) -> str | None:
        """Return what is under way by its own word, None in a gap."""
        if self._has_given_up:
            return Phase.OTHER
        if "reading" in self._open:
            return Phase.MONITOR
        if self._announced:
            return self._announced[-1]
        for what, phase in _OWN_WORD:
            if what in self._open:
                return phase if what != "reduction" or self._traits.shows_reductions else Phase.BACKWARD
        return None

    def gap(self, coming: str, cause: str) -> Phase:
        """Return what a gap before `coming` is; `cause` is what closes the timeline, if that is what comes."""
        if coming == "evaluation_begins":
            return Phase.EVALUATION
        if self._since == "step_begins":  # the hook that begins a step is the one that comes next
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


_OWN_WORD: Final = (
    ("evaluation", Phase.EVALUATION),
    ("forward", Phase.FORWARD),
    ("reduction", Phase.COLLECTIVE),
    ("backward", Phase.BACKWARD),
    ("update", Phase.OPTIMIZER),
)
