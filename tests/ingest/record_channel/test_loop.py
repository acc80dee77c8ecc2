"""Poll intervals, and admission control: requested rows do not exceed the capacity."""

import asyncio
import itertools
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ingest import builders

from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.record_channel.bodies import PlanCache
from rankscope_ingest.record_channel.client import NothingNew, RingStatus
from rankscope_ingest.record_channel.loop import Pace, PollBudget, TargetLoop
from rankscope_ingest.runs.models import Health
from rankscope_ingest.service.polling import Pollers

PACE = Pace(poll_seconds=2.0, max_backoff_seconds=30.0, targets=lambda: 1000)


def target(incarnation="i", **changes):
    return builders.target(builders.registration(incarnation=incarnation), **changes)


@pytest.mark.parametrize(("targets", "groups"), [(0, 1), (1, 1), (32, 1), (33, 2), (80, 3), (1000, 32)])
def test_targets_are_polled_in_groups_spread_over_the_interval(targets, groups):
    pace = Pace(poll_seconds=2.0, max_backoff_seconds=30.0, targets=lambda: targets)
    offsets = [[pace.offset(f"{n:x}", 2.0) for n in range(20_000)] for _ in range(2)]
    sizes = Counter(offsets[0])

    assert offsets[0] == offsets[1]
    assert sorted(sizes) == pytest.approx([2.0 * group / groups for group in range(groups)])
    assert max(sizes.values()) < 1.3 * 20_000 / groups


@given(st.floats(0, 1e6))
def test_every_poll_is_at_the_offset_of_its_target(now):
    one = target()
    at = now + PACE.after_answer(one, now)

    assert 0 < at - now <= 2.0
    assert min((at - PACE.offset("i", 2.0)) % 2.0, -(at - PACE.offset("i", 2.0)) % 2.0) == pytest.approx(0, abs=1e-6)


def test_filling_ring_and_draining_rank_are_polled_sooner():
    """A draining rank that waits for a commit is not: the commit causes the next poll, of 1,000 ranks at a time."""
    waiting = target(health=Health.DRAINING, cursor=7, committed=6)

    assert 0.5 == PACE.after_answer(target(ring_fill=0.51), 0.0)
    assert 0.2 == PACE.after_answer(target(health=Health.DRAINING), 0.0)
    assert 0.2 < PACE.after_answer(waiting, 0.0) <= 2.0


@pytest.mark.parametrize(
    ("flush_after", "ring_fill", "interval"),
    [(10.0, 0.1, 5.0), (60.0, 0.1, 5.0), (10.0, 0.26, 2.0), (5.0, 0.1, 2.5), (1.0, 0.1, 2.0)],
)
def test_nearly_empty_ring_is_polled_less_often_but_twice_per_flush(flush_after, ring_fill, interval):
    pace = Pace(poll_seconds=2.0, max_backoff_seconds=30.0, flush_after_seconds=flush_after)
    one, took = target(health=Health.UP, cursor=7, ring_fill=ring_fill), 0.001
    first = pace.after_answer(one, 100.0)

    assert interval == pytest.approx(took + pace.after_answer(one, 100.0 + first + took))


def test_rank_without_received_records_is_polled_at_the_normal_interval():
    pace = Pace(poll_seconds=2.0, max_backoff_seconds=30.0, flush_after_seconds=10.0)

    assert 2.0 >= max(pace.after_answer(target(health=Health.UP), now / 10) for now in range(50))


def test_failures_back_off_with_jitter_up_to_the_cap():
    """A rank that limits requests is polled after the time that it asks for."""
    assert [1, 2, 4, 8, 15, 15] == [PACE.after_failure(n, 0.0, None) for n in range(1, 7)]
    assert [2, 4, 8, 16, 30, 30, 30] == [PACE.after_failure(n, 1.0, None) for n in (*range(1, 7), 10_000)]
    assert 60 == PACE.after_failure(1, 0.5, 60)


class Rank:
    """A rank that misses the polls for which `answers` is false. It is the source, and the sink of its loop."""

    def __init__(self, answers):
        self.asked, self.times, self._answers = [], [], itertools.cycle(answers)
        self.poll_budget = PollBudget(lambda: 100_000, max_rows=100_000, max_bytes=1 << 20)
        self.poll_budget.learn(records=1, rows=10, size=100)

    async def records(self, _, *, max_bytes, **__):
        self.asked.append(max_bytes)
        self.times.append(time.monotonic())
        if not next(self._answers):
            raise FetchError("timeout", "timed out")
        return NothingNew(RingStatus(head=40))

    def on_answer(self, _):
        pass

    def on_failure(self, _, __):
        pass


async def test_rank_that_missed_its_last_poll_is_asked_for_one_record():
    """A rank that hangs holds its reservation until the timeout."""
    rank = Rank([True, False, False, True, True])
    loop = TargetLoop(target(), rank, PlanCache(), rank, PACE, clock=lambda: 0.0)
    for _ in range(5):
        await loop.poll_once()

    of_one_record = 100
    assert [False, False, True, True, False] == [size == of_one_record for size in rank.asked]


async def test_pokes_cause_at_most_four_polls_per_second():
    """Also while polls fail, and are otherwise repeated after a long pause."""
    rank, pace = Rank([True, False]), Pace(poll_seconds=3600.0, max_backoff_seconds=3600.0)
    loop = TargetLoop(target(), rank, PlanCache(), rank, pace, clock=time.monotonic)
    polling = asyncio.create_task(loop.run())
    while len(rank.times) < 4:
        loop.poke()
        await asyncio.sleep(0.01)
    polling.cancel()

    assert rank.times[3] - rank.times[0] > 3 * 0.25 - 0.05


async def test_process_that_returns_is_polled_after_its_last_received_record():
    """Its rows that wait for a commit are not polled again, and are not reported to it as committed."""

    async def watermark(_):
        return 3

    found = []
    for one in (target(), target(cursor=5, committed=2)):
        await Pollers(lambda _: None, watermark).loop_of(one)
        found.append((one.cursor, one.committed))

    assert [(3, 3), (5, 3)] == found


# Admission control, for any number of ranks and any backlog.

MEGABYTE = 1 << 20


class Store:
    """Received rows that wait for the store, and their maximum."""

    def __init__(self, rows=1000):
        self.rows, self.pending, self.most, self.answers = rows, 0, 0, 0
        self.budget = PollBudget(lambda: self.rows - self.pending, max_rows=rows, max_bytes=MEGABYTE)

    async def ask(self, behind, arrive, *, size_of_row=10):
        """Poll a rank with a backlog of `behind` records. Its response has `arrive` rows, or all requested bytes."""
        async with self.budget.reserved(behind) as max_bytes:
            if max_bytes:
                await asyncio.sleep(0)
                rows = arrive if arrive is not None else max(1, max_bytes // size_of_row)
                self.answers += 1
                self.pending += rows
                self.most = max(self.most, self.pending)
                self.budget.learn(records=behind if arrive else rows, rows=rows, size=size_of_row * rows)
            return bool(max_bytes)


async def test_full_rings_of_1000_ranks_do_not_exceed_the_capacity():
    """The same holds before the size of a record is known: 16 ranks are polled first."""
    store = Store(rows=1000)
    asked = await asyncio.gather(*(store.ask(behind=5, arrive=50) for _ in range(1000)))

    assert (20, 1000, 1000) == (store.answers, store.pending, store.most)
    assert 980 == asked.count(False)


async def test_ranks_with_a_larger_backlog_than_known_do_not_exceed_the_capacity():
    """Each rank is known to have one record, but has a full ring, because the service was short of CPU time."""
    store = Store(rows=100_000)
    store.budget.learn(records=1000, rows=1000, size=10_000)
    await asyncio.gather(*(store.ask(behind=1, arrive=None) for _ in range(1000)))

    assert 50_000 < store.most <= 100_000, "half the room is for what they were known to have"


async def test_record_larger_than_the_capacity_is_requested_alone():
    store = Store(rows=100)
    store.budget.learn(records=1, rows=50, size=500)

    assert await asyncio.wait_for(store.ask(behind=10, arrive=500), 5)


async def test_expected_response_is_limited_to_max_bytes():
    """A response contains two records of a ring with 256 records of 0.5 MB."""
    store = Store(rows=100)
    store.budget.learn(records=1, rows=30, size=MEGABYTE // 2)
    async with store.budget.reserved(256):
        assert await asyncio.wait_for(store.ask(behind=1, arrive=30), 5)


async def test_hanging_ranks_leave_capacity_for_healthy_ones():
    """400 ranks that missed their last poll are polled again, and hold their reservations until the timeout."""
    store = Store(rows=1000)
    store.budget.learn(records=1, rows=10, size=100)
    asked, over = [], asyncio.Event()

    async def hang():
        async with store.budget.reserved(5, is_failing=True) as max_bytes:
            asked.append(max_bytes)
            await over.wait()

    hanging = [asyncio.create_task(hang()) for _ in range(400)]
    await asyncio.sleep(0)
    for _ in range(100):
        assert await asyncio.wait_for(store.ask(behind=5, arrive=50), 5)
        store.pending = 0

    assert [100] * 25 == asked, "each is asked for one record, and together they have a quarter of the room"
    over.set()
    await asyncio.gather(*hanging)
    assert 400 == len(asked), "each has its turn"


@pytest.mark.parametrize("late", [False, True])
async def test_cancelled_poll_does_not_block_waiting_polls(late):
    store = Store(rows=100)
    store.budget.learn(records=1, rows=60, size=600)
    holding = store.budget.reserved(1)
    await holding.__aenter__()
    gives_up, next_one = (asyncio.create_task(store.ask(behind=1, arrive=1)) for _ in range(2))
    await asyncio.sleep(0)
    if late:
        await holding.__aexit__(None, None, None)
    gives_up.cancel()
    if not late:
        await asyncio.sleep(0)
        await holding.__aexit__(None, None, None)

    assert await asyncio.wait_for(next_one, 5)
