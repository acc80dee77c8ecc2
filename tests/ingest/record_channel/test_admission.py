"""Admission control: for any number of ranks and any backlog, requested rows do not exceed the capacity."""

from __future__ import annotations

import asyncio

import pytest

from rankscope_ingest.record_channel.admission import PollBudget

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


async def test_all_ranks_are_polled_if_the_store_keeps_up():
    store = Store(rows=100)

    async def asked():
        assert await store.ask(behind=1, arrive=10)
        store.pending -= 10

    await asyncio.gather(*(asked() for _ in range(200)))

    assert 200 == store.answers
    assert store.most <= 100


async def test_ranks_with_a_larger_backlog_than_known_do_not_exceed_the_capacity():
    """Each rank is known to have one record, but has a full ring, because the service was short of CPU time."""
    store = Store(rows=100_000)
    store.budget.learn(records=1000, rows=1000, size=10_000)
    await asyncio.gather(*(store.ask(behind=1, arrive=None) for _ in range(1000)))

    assert 50_000 < store.most <= 100_000, "half the room is for what they were known to have"


async def test_single_poll_may_request_a_full_response():
    store = Store(rows=16 * MEGABYTE)
    store.budget.learn(records=1, rows=1000, size=10_000)
    async with store.budget.reserved(0) as max_bytes:
        assert max_bytes == pytest.approx(MEGABYTE, rel=1e-4)


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
