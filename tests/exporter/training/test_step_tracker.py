"""The step tracker: the events that end a step, and the steps that count as skipped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.training.step_tracker import Ended, StepStage, StepTracker


def gone() -> bool:
    return True


def kept() -> bool:
    return False


def never() -> bool:
    raise AssertionError("asked although the answer cannot matter")


def test_step_ends_when_the_next_forward_pass_begins() -> None:
    tracker = StepTracker()
    tracker.forward_begins(never)
    tracker.backward_begins(never)
    tracker.update_begins(repeated=False)
    tracker.updated()

    assert Ended(1, skipped=False) == tracker.forward_begins(never)
    assert 2 == tracker.step


def test_micro_batches_belong_to_one_step() -> None:
    tracker = StepTracker()
    for _ in range(4):
        assert tracker.forward_begins(kept) is None
        assert tracker.backward_begins(kept) is None
    tracker.update_begins(repeated=False)
    tracker.updated()

    assert Ended(1, skipped=False) == tracker.end()


def test_gradients_dropped_without_an_update_are_a_skipped_step() -> None:
    tracker = StepTracker()
    tracker.forward_begins(never)
    tracker.backward_begins(never)

    assert Ended(1, skipped=True) == tracker.forward_begins(gone)
    assert StepStage.OPEN is tracker.stage


def test_skipped_step_is_detected_at_a_backward_pass_without_forward() -> None:
    tracker = StepTracker()
    tracker.backward_begins(never)

    assert Ended(1, skipped=True) == tracker.backward_begins(gone)
    assert StepStage.GRADIENTS is tracker.stage


def test_two_optimizers_step_in_one_step() -> None:
    tracker = StepTracker()
    tracker.backward_begins(never)
    for _ in range(2):
        assert tracker.update_begins(repeated=False) is None
        tracker.updated()

    assert Ended(1, skipped=False) == tracker.forward_begins(never)


def test_optimizer_with_closure_ends_the_step_when_it_steps_again() -> None:
    tracker = StepTracker()
    tracker.update_begins(repeated=False)
    tracker.backward_begins(kept)
    tracker.updated()

    assert Ended(1, skipped=False) == tracker.update_begins(repeated=True)


def test_explicit_end_states_whether_the_step_was_skipped() -> None:
    tracker = StepTracker(first_step=7)
    tracker.backward_begins(never)

    assert Ended(7, skipped=False) == tracker.end(skipped=False)
    assert tracker.end() is None


def test_without_an_optimizer_no_step_counts_as_skipped() -> None:
    tracker = StepTracker(has_optimizer=False)
    tracker.backward_begins(never)

    assert Ended(1, skipped=False) == tracker.forward_begins(gone)


def test_all_passes_inside_a_closure_are_one_step() -> None:
    tracker = StepTracker()
    ended = []
    for _ in range(2):
        ended.append(tracker.update_begins(repeated=bool(ended)))
        for _ in range(4):
            ended += [tracker.forward_begins(gone), tracker.backward_begins(gone)]
        tracker.updated()

    assert [Ended(1, skipped=False)] == [item for item in ended if item is not None]


def test_explicit_steps_end_only_on_request() -> None:
    tracker = StepTracker(explicit=True)
    for _ in range(3):
        tracker.forward_begins(gone)
        tracker.backward_begins(gone)
        tracker.update_begins(repeated=True)
        tracker.updated()

    assert Ended(1, skipped=False) == tracker.end()


@given(st.lists(st.booleans(), min_size=1, max_size=50), st.integers(1, 3))
def test_every_attempt_is_one_step_skipped_or_not(skips: list[bool], micro_batches: int) -> None:
    """For all patterns of skipped steps with accumulation, step numbers and skips are correct."""
    tracker = StepTracker()
    ended: list[Ended | None] = []
    dropped = True
    for skip in skips:
        for _ in range(micro_batches):
            ended.append(tracker.forward_begins(lambda dropped=dropped: dropped))
            dropped = False
            ended.append(tracker.backward_begins(lambda: False))
        if not skip:
            ended.append(tracker.update_begins(repeated=False))
            tracker.updated()
        dropped = True
    ended.append(tracker.forward_begins(lambda dropped=dropped: dropped))

    expected = [Ended(number, skipped=skip) for number, skip in enumerate(skips, start=1)]
    assert expected == [item for item in ended if item is not None]
