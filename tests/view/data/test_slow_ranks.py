"""Ranks that make the others wait, in generated steps: slow input and computation, pauses, and only noise."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope_view.data import slow_ranks

PHASES = ("data_wait", "forward", "backward", "collective", "optimizer", "checkpoint")
STEPS = 200


def steps(ranks: int = 4, *, late=None, has_waits: bool = True, seed: int = 0) -> np.ndarray:
    """Return seconds of healthy ranks; `late` maps (rank, phase) to further seconds of each step."""
    random = np.random.default_rng(seed)
    seconds = np.array([0.01, 0.1, 0.2, 0.0, 0.02, 0.0]) * random.lognormal(0, 0.1, (ranks, STEPS, len(PHASES)))
    for (rank, phase), more in (late or {}).items():
        seconds[rank, :, PHASES.index(phase)] += more
    own = seconds.sum(axis=2)
    waits = own.max(axis=0) - own
    seconds[:, :, PHASES.index("collective" if has_waits else "forward")] += waits
    return seconds


def found_in(seconds: np.ndarray, first: int = 0):
    return slow_ranks.find_slow_ranks(seconds, PHASES, range(first, first + seconds.shape[1]))


def every(interval: int, seconds: float) -> np.ndarray:
    return np.where(np.arange(STEPS) % interval == interval - 1, seconds, 0.0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("phase", ["data_wait", "forward", "backward", "optimizer"])
def test_slow_rank_has_its_share_and_phase(ranks, phase):
    (found,) = found_in(steps(ranks, late={(1, phase): 0.33}))

    assert (1, phase, 0) == (found.row, found.phase, found.pauses)
    assert (0.5, 0.33) == (pytest.approx(found.share, abs=0.03), pytest.approx(found.seconds, abs=0.03))


@pytest.mark.parametrize(("phase", "interval"), [("checkpoint", 10), ("data_wait", 30), ("forward", 50)])
def test_rank_that_pauses_is_slow_until_its_pauses_stop(phase, interval):
    pauses = every(interval, 0.1 * interval)
    (found,) = found_in(steps(2, late={(0, phase): pauses}))

    assert (0, phase, STEPS // interval) == (found.row, found.phase, found.pauses)
    assert [] == found_in(steps(2, late={(0, phase): np.where(np.arange(STEPS) < 80, pauses, 0)}))


@pytest.mark.parametrize("first", [80, 150])
@pytest.mark.parametrize("count", [*range(1, 30, 2), 100])
def test_slowness_that_begins_late_is_no_pause(first, count):
    """A loader that takes 0.6 s of 0.9 s from a step on is called slow from the 16th step on, since the first one."""
    seconds = steps(2, late={(1, "data_wait"): np.where(np.arange(STEPS) < first, 0.0, 0.6)})[:, : first + count]
    found = found_in(seconds, 1000)

    assert bool(found) == (count >= 16) or count == 15  # a step of noise before it may be slow
    assert {(1, 0, 1000 + first)} >= {(one.row, one.pauses, one.since) for one in found}


def test_rank_is_slow_since_its_first_slow_step_despite_evaluations():
    """At steps 60 and 79, both ranks wait for an evaluation, so that the ratio of their times is usual."""
    seconds = np.full((2, 80, 1), 0.1)
    seconds[1, 20:] = 0.2
    seconds[:, [60, 79]] += 3.0
    (found,) = slow_ranks.find_slow_ranks(seconds, ["data_wait"], range(80))

    assert "since step 20" in found.words


def test_past_slowness_and_pauses_of_all_ranks_make_no_rank_slow():
    late = np.where((np.arange(STEPS) >= 80) & (np.arange(STEPS) < 120), 0.6, every(25, 0.6))

    assert [] == found_in(steps(2, late={(1, "data_wait"): late}))
    assert [] == found_in(steps(late={(rank, "checkpoint"): every(10, 2.0) for rank in range(4)}))


@pytest.mark.parametrize("ranks", [2, 4])
def test_slow_input_is_found_where_the_forward_pass_contains_waits(ranks):
    """The broadcast of buffers of DDP, and the shards of FSDP: the others wait in their forward passes."""
    seconds = steps(ranks, late={(1, "data_wait"): 0.33}, has_waits=False)
    (found,) = found_in(seconds)
    assert (1, "data_wait") == (found.row, found.phase)
    assert [] == found_in(steps(late={(1, "forward"): 0.33}, has_waits=False)), "looks like a wait"

    seconds[:, :, PHASES.index("collective")] += steps(ranks, seed=1)[:, :, PHASES.index("collective")]
    (found,) = found_in(seconds)
    assert (1, "data_wait", 0) == (found.row, found.phase, found.pauses)
    assert 0.33 == pytest.approx(found.seconds, abs=0.05)


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_healthy_ranks_are_not_slow(ranks):
    assert [] == [one for seed in range(40) for one in found_in(steps(ranks, seed=seed))]


def test_missing_steps_of_a_rank_are_not_compared():
    seconds = steps(late={(1, "forward"): 0.33})
    seconds[0, :150], seconds[3, 190:] = np.nan, np.nan
    (found,) = found_in(seconds)

    assert (1, "forward") == (found.row, found.phase)
