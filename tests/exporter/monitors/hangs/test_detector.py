"""Inactivity of the training becomes one hang and one end; limits are longer in phases and before the first step."""

from __future__ import annotations

import pytest

from rankscope_exporter.monitors.hangs.watchdog import Hang, HangDetector, HangLimits, Resumed, TrainingState

LIMITS = HangLimits(training=10, in_phase=60)


def sign(
    active_at: float, *, has_stepped: bool = True, is_done: bool = False, phase: str | None = None
) -> TrainingState:
    return TrainingState(active_at=active_at, has_stepped=has_stepped, is_done=is_done, phase=phase)


def test_hang_and_its_end_are_reported_once():
    watch = HangDetector(LIMITS)
    looks = [watch.check(sign(100), now) for now in (100, 109.9, 110, 111, 500)]

    assert [None, None, Hang(10), None, None] == looks
    assert Resumed(405) == watch.check(sign(505), 506)
    assert None is watch.check(sign(505), 514)
    assert Hang(10) == watch.check(sign(505), 515)


def test_announced_phase_has_a_separate_limit():
    watch = HangDetector(LIMITS)

    assert None is watch.check(sign(0, phase="evaluation"), 59)
    assert Hang(60) == watch.check(sign(0, phase="evaluation"), 60)


def test_longer_limit_applies_before_the_first_step():
    watch = HangDetector(LIMITS)

    assert None is watch.check(sign(0, has_stepped=False), 59)
    assert Hang(60) == watch.check(sign(0, has_stepped=False), 60)


def test_phase_limit_is_never_below_the_training_limit():
    watch = HangDetector(HangLimits(training=10, in_phase=1))

    assert None is watch.check(sign(0, phase="evaluation"), 9)


def test_completed_run_does_not_hang():
    assert None is HangDetector(LIMITS).check(sign(0, is_done=True), 1e6)


@pytest.mark.parametrize("phase", [None, "evaluation"])
def test_limit_of_zero_disables_the_detection(phase):
    watch = HangDetector(HangLimits(training=0, in_phase=60))

    assert None is watch.check(sign(0, phase=phase), 1e9)
