"""The step tracker: the events that end a step, and the steps that count as skipped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.training.step_tracker import Ended, StepTracker


def ended(tracker: StepTracker, *events: str) -> list[tuple[int, bool]]:
    """Return the steps that the events end, each with whether it was skipped.

    A pass with a "!" finds that the gradients of the last backward pass were deleted.
    """
    calls: dict[str, Any] = {
        "forward": lambda: tracker.forward_begins(lambda: False),
        "forward!": lambda: tracker.forward_begins(lambda: True),
        "backward": lambda: tracker.backward_begins(lambda: False),
        "backward!": lambda: tracker.backward_begins(lambda: True),
        "update": lambda: tracker.update_begins(repeated=False),
        "same optimizer": lambda: tracker.update_begins(repeated=True),
        "updated": tracker.updated,
        "end": tracker.end,
        "end, not skipped": lambda: tracker.end(skipped=False),
    }
    found = [calls[event]() for event in events]
    return [(item.step, item.skipped) for item in found if isinstance(item, Ended)]


PASSES = ("forward", "backward")
UPDATE = ("update", "updated")
CLEARED = ("forward!", "backward!")


@pytest.mark.parametrize(
    ("settings", "events", "expected"),
    [
        ({}, (*PASSES, *UPDATE, "forward", "end"), [(1, False), (2, False)]),
        ({}, (*PASSES * 4, *UPDATE, "end"), [(1, False)]),  # micro-batches
        ({}, (*PASSES, "forward!"), [(1, True)]),
        ({}, ("backward", "backward!"), [(1, True)]),  # no forward pass is seen
        ({}, ("backward", *UPDATE * 2, "forward"), [(1, False)]),  # two optimizers
        ({}, ("update", "backward", "updated", "same optimizer"), [(1, False)]),  # with a closure
        ({}, ("update", *CLEARED * 4, "updated", "same optimizer", *CLEARED * 4, "updated"), [(1, False)]),
        ({"first_step": 7}, ("backward", "end, not skipped", "end"), [(7, False)]),
        ({"has_optimizer": False}, ("backward", "forward!"), [(1, False)]),
        ({"explicit": True}, (*(*CLEARED, "same optimizer", "updated") * 3, "end"), [(1, False)]),
    ],
)
def test_step_ends_at_the_event_that_begins_the_next(settings, events, expected):
    assert expected == ended(StepTracker(**settings), *events)


@given(st.lists(st.booleans(), min_size=1, max_size=50), st.integers(1, 3))
def test_every_attempt_is_one_step_skipped_or_not(skips: list[bool], micro_batches: int) -> None:
    """For all patterns of skipped steps with accumulation, step numbers and skips are correct."""
    events: list[str] = []
    for skip in skips:
        events += ["forward!", "backward", *PASSES * (micro_batches - 1), *(() if skip else UPDATE)]

    assert list(enumerate(skips, start=1)) == ended(StepTracker(), *events, "forward!")
