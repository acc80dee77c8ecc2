"""The long-run overhead remains below the limit, and sampling does not oscillate. The test sets clock and costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_exporter import ConfigError, MonitorConfig
from rankscope_exporter.base.validation import share_of
from rankscope_exporter.reactions.overhead_window import LEAST_SECONDS, MOST_STRETCH, PATIENCE, OverheadWindow, Verdict


class Training:
    """A training with a given time per step. Every k-th step is sampled and costs more. Applies results immediately."""

    def __init__(self, allowed: float, *, step: float, sampled: float, idle: float, every: int = 1) -> None:
        self.window = OverheadWindow(allowed)
        self.step, self.sampled, self.idle, self.every = step, sampled, idle, every
        self.now = self.cost = 0.0
        self.seen = 0
        self.changes: list[tuple[float, int, int]] = []  # time, previous and new factor
        self.looks: list[tuple[float, float, float]] = []  # time, cost, share

    def train(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self._begins()
            spent = self.idle + (self.sampled if self.seen % (self.every * self.window.stretch) == 0 else 0.0)
            self.seen += 1
            self.cost += spent
            self.now += self.step + spent

    def _begins(self) -> None:
        if self.window.may_end(self.every * self.window.stretch):
            result = self.window.evaluate(self.now, self.cost)
            if result is not None:
                self.looks.append((self.now, self.cost, result.share))
                if result.verdict is not Verdict.KEEPS:
                    self.changes.append((self.now, self.window.stretch, result.stretch))
                    self.window.restart(result.stretch)


@pytest.mark.parametrize(
    ("given_as", "expected"),
    [(0.01, 0.01), ("1 %", 0.01), ("1%", 0.01), (" 0.5 % ", 0.005), (".5%", 0.005), (None, None)],
)
def test_share_accepts_percent_and_fraction(given_as, expected):
    assert expected == share_of(given_as)


@pytest.mark.parametrize("wrong", [0, 1, 1.0, -0.1, "1", "one percent", True, float("nan"), "0 %", "100 %", [0.01]])
def test_invalid_share_raises_with_an_example(wrong):
    with pytest.raises(ConfigError, match=r"such as 0.01 or \"1 %\""):
        MonitorConfig(max_overhead=wrong)


def test_overhead_below_the_limit_changes_nothing():
    training = Training(0.01, step=0.1, sampled=0.0005, idle=0.0)
    training.train(600)

    assert [] == training.changes


def test_interval_is_halved_after_consecutive_low_windows():
    """A sampled step costs 10 ms more than the 100 ms of a step; one in 16 costs 0.6 %.

    Then steps become 16 times as long, as with a larger batch: the share falls below 0.04 %.
    """
    training = Training(0.01, step=0.1, sampled=0.01, idle=0.0)
    training.train(600)
    ((stretched_at, *_),) = training.changes
    training.step = 1.6
    training.train(8000)

    assert [(1, 16), (16, 8), (8, 4), (4, 2), (2, 1)] == [(before, after) for _, before, after in training.changes]
    gaps = [later[0] - earlier[0] for earlier, later in zip(training.changes[1:], training.changes[2:], strict=False)]
    assert stretched_at == pytest.approx(LEAST_SECONDS, rel=0.2)
    assert min(gaps) >= PATIENCE * LEAST_SECONDS


def test_overhead_not_from_sampling_ends_at_the_largest_stretch():
    training = Training(0.01, step=0.01, sampled=0.0001, idle=0.001)
    training.train(600)

    assert MOST_STRETCH == training.window.stretch
    assert MOST_STRETCH == training.changes[-1][2]


@settings(deadline=None, max_examples=examples(40))
@given(
    allowed=st.sampled_from([0.001, 0.01, 0.1]),
    step=st.floats(0.005, 2.0),
    times=st.floats(0.01, 100.0),
    idle_share=st.floats(0.0, 0.3),
    every=st.integers(1, 5),
)
def test_long_run_overhead_is_below_the_limit_and_sampling_settles(allowed, step, times, idle_share, every):
    """A sampled step costs `times` the limit, each step `idle_share` of the limit: a finite factor is sufficient."""
    training = Training(
        allowed, step=step, sampled=allowed * step * times, idle=allowed * step * idle_share, every=every
    )
    training.train(40 * LEAST_SECONDS + 4000 * step)
    began, cost = training.now, training.cost
    changes = len(training.changes)
    training.train(40 * LEAST_SECONDS + 4000 * step)

    assert training.cost - cost <= allowed * (training.now - began) + training.sampled
    assert changes == len(training.changes)


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(st.tuples(st.floats(0.0001, 0.05), st.floats(30.0, 300.0)), min_size=1, max_size=6))
def test_interval_is_halved_no_faster_than_patience(costs):
    training = Training(0.01, step=0.05, sampled=0.0, idle=0.0)
    for sampled, seconds in costs:
        training.sampled = sampled
        training.train(seconds)

    tightened = [(when, before, after) for when, before, after in training.changes if after < before]
    assert all(before == 2 * after for _, before, after in tightened)
    everything = [0.0, *(when for when, _, _ in training.changes)]
    for when, _, _ in tightened:
        assert when - max(moment for moment in everything if moment < when) >= PATIENCE * LEAST_SECONDS
