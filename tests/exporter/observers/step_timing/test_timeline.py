"""Phases from marks: intervals with a known phase, gaps by the marks on both sides, and no time lost or added."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.observers.step_timing.observer import (
    Kind,
    LoopTraits,
    Mark,
    PhaseTotals,
    segments,
    sum_by_phase,
)


def made(text: str, traits: LoopTraits, *, is_first: bool = False) -> PhaseTotals:
    """Return the phases of marks written as "0 opens, 1 forward_begins, …"; "phase_begins:name" names a phase."""
    marks = []
    for part in text.split(","):
        at, what = part.split()
        kind, _, name = what.partition(":")
        marks.append(Mark(kind, float(at), name))  # type: ignore[arg-type]  # a typo fails the test
    stretches = list(segments(marks, traits))
    return sum_by_phase(stretches, lambda begin, end: end - begin, is_first=is_first)


PLAIN = (
    "0 opens, 0 step_begins, 0 forward_begins, 2 forward_ended, 3 backward_begins, 7 backward_ends, 8 backward_ended,"
    "9 update_begins, 12 updated, 20 closes:forward"
)
FIRST = PLAIN.replace("12 updated", "12 updated, 13 phase_begins:checkpoint, 15 phase_ended:checkpoint")
TWO_MICRO_BATCHES = (
    "0 opens, 0 step_begins, 0 forward_begins, 1 forward_ended, 1 backward_begins, 2 backward_ends, 2 backward_ended,"
    "5 forward_begins, 6 forward_ended, 6 backward_begins, 7 backward_ends, 9 backward_ended, 9 update_begins,"
    "10 updated, 10 closes:forward"
)
PIPELINE = (
    "0 opens, 0 forward_begins, 1 forward_ended, 2 forward_begins, 3 forward_ended, 4 backward_begins, 5 backward_ends,"
    "5 backward_ended, 7 forward_begins, 8 forward_ended, 8 backward_begins, 9 backward_ends, 9 backward_ended,"
    "9 update_begins, 9 updated, 11 closes:forward"
)
ANNOUNCED = (
    "0 opens, 0 forward_begins, 1 forward_ended, 1 backward_begins, 2 backward_ends, 2 backward_ended,"
    "2 update_begins, 3 updated, 4 phase_begins:evaluation, 5 evaluation_begins, 6 evaluation_ended,"
    "7 phase_begins:checkpoint, 9 phase_ended:checkpoint, 10 phase_ended:evaluation, 12 closes:forward"
)
EVALUATION = "0 opens, 0 update_begins, 1 updated, 2 evaluation_begins, 8 evaluation_ended, 9 closes:forward"
CLOSURE = (
    "0 opens, 0 step_begins, 0 update_begins, 1 forward_begins, 3 forward_ended, 3 backward_begins, 6 backward_ends,"
    "6 backward_ended, 8 updated, 9 closes:update"
)
READING = (
    "0 opens, 0 step_begins, 0 reading_begins, 1 reading_ended, 1 forward_begins, 2 forward_ended,"
    "2 backward_begins, 3 backward_ends, 3 reading_begins, 5 reading_ended, 6 backward_ended, 6 update_begins,"
    "7 updated, 7 reading_begins, 9 reading_ended, 10 closes:forward"
)
SCRIPT = "0 opens, 0 update_begins, 1 updated, 5 closes:script"
ALONE, DDP, PIPE = LoopTraits(), LoopTraits(shows_reductions=True), LoopTraits(interleaves=True)


@pytest.mark.parametrize(
    ("text", "traits", "phases", "pre_collective"),
    [
        # The loss belongs to the backward pass, clipping is "other", and the time after the update is the data wait.
        (PLAIN, ALONE, {"forward": 2, "backward": 6, "other": 1, "optimizer": 3, "data_wait": 8}, None),
        (PLAIN, DDP, {"forward": 2, "backward": 5, "collective": 1, "other": 1, "optimizer": 3, "data_wait": 8}, 7),
        # The computing before the last reduction has no data wait.
        (TWO_MICRO_BATCHES, DDP, {"forward": 2, "backward": 2, "data_wait": 3, "collective": 2, "optimizer": 1}, 4),
        (PIPELINE, PIPE, {"forward": 3, "backward": 3, "other": 3, "optimizer": 0, "data_wait": 2}, None),
        (
            *(ANNOUNCED, ALONE),
            {"forward": 1, "backward": 1, "optimizer": 1, "evaluation": 4, "checkpoint": 2, "data_wait": 3},
            None,
        ),
        (EVALUATION, ALONE, {"optimizer": 1, "evaluation": 7, "data_wait": 1}, None),  # with a data wait before it
        (CLOSURE, ALONE, {"optimizer": 3, "forward": 2, "backward": 3, "data_wait": 1}, None),
        (
            *(READING, DDP),
            {"monitor": 5, "forward": 1, "backward": 1, "collective": 1, "optimizer": 1, "data_wait": 1},
            2,
        ),
        (SCRIPT, ALONE, {"optimizer": 1, "other": 4}, None),  # the activity of the script is unknown
        ("0 opens, 4 backward_begins, 4 backward_ends, 4 backward_ended, 4 closes:script", ALONE, {"other": 4}, None),
        (
            *("0 opens, 0 backward_begins, 0 backward_ends, 0 backward_ended, 4 closes:forward",),
            *(LoopTraits(has_optimizer=False), {"other": 4}, None),
        ),
        ("0 opens, 4 gives_up, 8 closes:forward", ALONE, {"data_wait": 4, "other": 4}, None),
    ],
)
def test_phases_of_a_step(text, traits, phases, pre_collective):
    found = made(text, traits)

    assert phases == {phase: seconds for phase, seconds in found.phases.items() if seconds or phase in phases}
    assert pre_collective == found.pre_collective
    assert ({"evaluation": 4, "checkpoint": 2} if text is ANNOUNCED else {}) == found.announced


def test_first_step_is_a_separate_phase():
    found = made(FIRST, DDP, is_first=True)

    assert {"first_step": 18, "checkpoint": 2, "monitor": 0} == found.phases
    assert found.pre_collective is None


KINDS = [kind for kind in typing.get_args(Kind) if kind not in ("opens", "closes")]


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=30),
    st.sampled_from(["forward", "backward", "update", "script"]),
    st.builds(LoopTraits, shows_reductions=st.booleans(), interleaves=st.booleans(), has_optimizer=st.booleans()),
    st.booleans(),
)
def test_phases_sum_up_to_the_duration_for_any_marks(steps, cause, traits, is_first):
    """Events may come in any order, for example after an exception, in a nested pass, or after a detach."""
    marks, now = [Mark("opens", 0)], 0
    for kind, later in steps:
        now += later
        marks.append(Mark(kind, now, "checkpoint" if kind.startswith("phase") else ""))
    marks.append(Mark("closes", now, cause))
    found = sum_by_phase(list(segments(marks, traits)), lambda a, b: b - a, is_first=is_first)

    assert now == sum(found.phases.values())
    assert all(0 <= seconds for seconds in found.phases.values())
    assert all(seconds <= found.phases[phase] for phase, seconds in found.announced.items())
    assert found.pre_collective is None or 0 <= found.pre_collective <= now
