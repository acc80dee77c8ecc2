"""The lag: time that published records wait for their commit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest import builders
from tests.properties import examples

from rankscope_ingest.status_page.collect import MAX_OBSERVATIONS, LagClock


def target(head=-1, committed=-1):
    return builders.target(head=head, committed=committed)


def test_lag_is_zero_without_waiting_records_and_of_a_removed_target():
    rank, clock = target(head=3), LagClock()

    assert 0.0 == clock.seconds(target(head=5), 9.0)
    clock.look([target()], 9.0)
    assert 0.0 == clock.seconds(target(), 99.0)
    clock.look([rank], 100.0)
    clock.look([], 101.0)
    assert 0.0 == clock.seconds(rank, 109.0)


def test_observations_are_bounded_and_keep_the_oldest_one():
    rank, clock = target(), LagClock()
    for second in range(20_000):
        rank.head = second
        clock.look([rank], float(second))

    assert 20_000.0 == clock.seconds(rank, 20_000.0)
    assert len(clock._observations["i0"]) <= MAX_OBSERVATIONS


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=100))
def test_lag_differs_from_the_exact_one_only_by_dropped_observations(moves):
    """Compared with a list of all observations."""
    rank, clock, seen = target(), LagClock(), []
    for now, (published, stored) in enumerate(moves):
        rank.head += published
        clock.look([rank], float(now))
        seen.append((rank.head, float(now)))
        rank.committed = min(rank.head, rank.committed + stored)
        waiting = [at for head, at in seen if head > rank.committed]
        assert clock.seconds(rank, now + 1.0) == (now + 1.0 - waiting[0] if waiting else 0.0)
