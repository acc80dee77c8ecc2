"""Phases from marks: intervals with a known phase, gaps by the marks on both sides, and no time lost or added."""

from __future__ import annotations

import operator
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

ALONE = LoopTraits()
DDP = LoopTraits(shows_reductions=True)


def made(text: str, traits: LoopTraits = ALONE, *, is_first: bool = False) -> PhaseTotals:
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


def test_phases_of_a_plain_step():
    """The loss belongs to the backward pass, clipping is "other", and the time after the update is the data wait."""
    found = made(PLAIN)

    assert {"forward": 2, "backward": 6, "other": 1, "optimizer": 3, "data_wait": 8, "monitor": 0} == found.phases
    assert found.pre_collective is None


def test_wait_for_reductions_is_separated_from_computing():
    found = made(PLAIN, DDP)

    assert (5, 1) == (found.phases["backward"], found.phases["collective"])
    assert 7 == found.pre_collective


def test_data_wait_between_micro_batches_is_counted():
    found = made(
        "0 opens, 0 step_begins, 0 forward_begins, 1 forward_ended, 1 backward_begins, 2 backward_ends,"
        "2 backward_ended, 5 forward_begins, 6 forward_ended, 6 backward_begins, 7 backward_ends, 9 backward_ended,"
        "9 update_begins, 10 updated, 10 closes:forward",
        DDP,
    )

    assert (2, 2, 3, 2) == operator.itemgetter("forward", "backward", "data_wait", "collective")(found.phases)
    assert 4 == found.pre_collective  # without the data wait, up to the last reduction


def test_gap_between_pipeline_micro_batches_is_not_data_wait():
    text = (
        "0 opens, 0 forward_begins, 1 forward_ended, 2 forward_begins, 3 forward_ended, 4 backward_begins,"
        "5 backward_ends, 5 backward_ended, 7 forward_begins, 8 forward_ended, 8 backward_begins, 9 backward_ends,"
        "9 backward_ended, 9 update_begins, 9 updated, 11 closes:forward"
    )

    assert 2 == made(text, LoopTraits(interleaves=True)).phases["data_wait"]
    assert 3 == made(text, LoopTraits(interleaves=True)).phases["other"]


def test_announced_phases_are_counted_once_and_are_not_data_wait():
    found = made(
        "0 opens, 0 forward_begins, 1 forward_ended, 1 backward_begins, 2 backward_ends, 2 backward_ended,"
        "2 update_begins, 3 updated, 4 phase_begins:evaluation, 5 evaluation_begins, 6 evaluation_ended,"
        "7 phase_begins:checkpoint, 9 phase_ended:checkpoint, 10 phase_ended:evaluation, 12 closes:forward"
    )

    assert (4, 2, 3) == operator.itemgetter("evaluation", "checkpoint", "data_wait")(found.phases)
    assert {"evaluation": 4, "checkpoint": 2} == found.announced


def test_unannounced_evaluation_is_detected_by_its_forwards():
    found = made("0 opens, 0 update_begins, 1 updated, 2 evaluation_begins, 8 evaluation_ended, 9 closes:forward")

    assert (7, 1) == (found.phases["evaluation"], found.phases["data_wait"])  # with a data wait before it


def test_passes_of_a_closure_are_inside_the_update():
    found = made(
        "0 opens, 0 step_begins, 0 update_begins, 1 forward_begins, 3 forward_ended, 3 backward_begins,"
        "6 backward_ends, 6 backward_ended, 8 updated, 9 closes:update"
    )

    assert (2, 3, 3, 1) == operator.itemgetter("forward", "backward", "optimizer", "data_wait")(found.phases)


@pytest.mark.parametrize(
    ("text", "traits"),
    [
        ("0 opens, 0 update_begins, 1 updated, 5 closes:script", ALONE),  # the activity of the script is unknown there
        (
            "0 opens, 4 backward_begins, 4 backward_ends, 4 backward_ended, 4 closes:script",
            ALONE,
        ),  # forward pass not observed
        (
            "0 opens, 0 backward_begins, 0 backward_ends, 0 backward_ended, 4 closes:forward",
            LoopTraits(has_optimizer=False),
        ),
        ("0 opens, 4 gives_up, 8 closes:forward", ALONE),
    ],
)
def test_unknown_time_is_other(text, traits):
    found = made(text, traits)

    assert 4 <= found.phases["other"]
    assert "data_wait" not in found.phases or found.phases["data_wait"] == 4
    assert "forward" not in found.phases


def test_reading_time_belongs_to_the_monitor():
    found = made(
        "0 opens, 0 step_begins, 0 reading_begins, 1 reading_ended, 1 forward_begins, 2 forward_ended,"
        "2 backward_begins, 3 backward_ends, 3 reading_begins, 5 reading_ended, 6 backward_ended, 6 update_begins,"
        "7 updated, 7 reading_begins, 9 reading_ended, 10 closes:forward",
        DDP,
    )

    assert (5, 1, 1) == operator.itemgetter("monitor", "collective", "data_wait")(found.phases)
    assert 2 == found.pre_collective


def test_first_step_is_a_separate_phase():
    found = made(PLAIN.replace("12 updated", "12 updated, 13 phase_begins:checkpoint, 15 phase_ended:checkpoint"),
                 DDP, is_first=True)  # fmt: skip

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
