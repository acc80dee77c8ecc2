"""Silence of training becomes one hang and one end, later within phases and before the first step."""

from __future__ import annotations

import pytest

from rankscope_exporter.monitors.hangs.watchdog import Hang, HangDetector, HangLimits, Resumed, Sign

LIMITS = HangLimits(training=10, in_phase=60)


def sign(heard_at: float, *, has_stepped: bool = True, is_done: bool = False, phase: str | None = None) -> Sign:
    return Sign(heard_at=heard_at, has_stepped=has_stepped, is_done=is_done, phase=phase)


def test_a_hang_is_told_once_and_its_end_once():
    watch = HangDetector(LIMITS)
    looks = [watch.look(sign(100), now) for now in (100, 109.9, 110, 111, 500)]

    assert [None, None, Hang(10), None, None] == looks
    assert Resumed(405) == watch.look(sign(505), 506)
    assert None is watch.look(sign(505), 514)
    assert Hang(10) == watch.look(sign(505), 515)


def test_an_announced_phase_has_a_limit_of_its_own():
    watch = HangDetector(LIMITS)

    assert None is watch.look(sign(0, phase="evaluation"), 59)
    assert Hang(60) == watch.look(sign(0, phase="evaluation"), 60)


def test_before_the_first_step_the_longer_limit_holds():
    watch = HangDetector(LIMITS)

    assert None is watch.look(sign(0, has_stepped=False), 59)
    assert Hang(60) == watch.look(sign(0, has_stepped=False), 60)


def test_a_phase_is_never_shorter_than_training():
    watch = HangDetector(HangLimits(training=10, in_phase=1))

    assert None is watch.look(sign(0, phase="evaluation"), 9)


def test_a_run_that_made_all_its_steps_hangs_no_more():
    assert None is HangDetector(LIMITS).look(sign(0, is_done=True), 1e6)


@pytest.mark.parametrize("phase", [None, "evaluation"])
def test_nothing_is_watched_with_0(phase):
    watch = HangDetector(HangLimits(training=0, in_phase=60))

    assert None is watch.look(sign(0, phase=phase), 1e9)
