"""The lag: time that published records wait for their commit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.runs.models import Liveness, Target
from rankscope_ingest.status_page.collect import MAX_OBSERVATIONS, LagClock


def target(head=-1, committed=-1):
    who = Registration(
        run="r", rank=0, world_size=1, local_rank=0, host="h", pid=1, incarnation="i", launch_id="l", url="http://h:1"
    )
    return Target(
        registration=who, attempt=0, lease="l", liveness=Liveness(last_sign=0.0), head=head, committed=committed
    )


def test_lag_is_the_age_of_the_oldest_waiting_record():
    rank, clock = target(head=9), LagClock()
    clock.look([rank], 1.0)
    rank.head = 19
    clock.look([rank], 2.0)

    assert 4.0 == clock.seconds(rank, 5.0)
    rank.committed = 9
    assert 3.0 == clock.seconds(rank, 5.0)
    rank.committed = 19
    assert 0.0 == clock.seconds(rank, 5.0)


def test_lag_is_zero_without_waiting_records():
    clock = LagClock()

    assert 0.0 == clock.seconds(target(head=5), 9.0)
    clock.look([target()], 9.0)
    assert 0.0 == clock.seconds(target(), 99.0)


def test_removed_target_is_forgotten():
    rank, clock = target(head=3), LagClock()
    clock.look([rank], 1.0)
    clock.look([], 2.0)

    assert 0.0 == clock.seconds(rank, 9.0)


def test_observations_are_bounded_and_keep_the_oldest_one():
    rank, clock = target(), LagClock()
    for second in range(20_000):
        rank.head = second
        clock.look([rank], float(second))

    assert 20_000.0 == clock.seconds(rank, 20_000.0)
    assert len(clock._observations["i"]) <= MAX_OBSERVATIONS


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
