"""However many ranks have however much to say, no more is asked for than there is room for."""

from __future__ import annotations

import asyncio

import pytest

from rankscope_ingest.record_channel.admission import PollBudget

MEGABYTE = 1 << 20


class Store:
    """Rows that arrived and wait for the store, and the most that ever did."""

    def __init__(self, rows=1000):
        self.rows, self.pending, self.most, self.answers = rows, 0, 0, 0
        self.room = PollBudget(lambda: self.rows - self.pending, max_rows=rows, max_bytes=MEGABYTE)

    async def ask(self, behind, arrive, *, size_of_row=10):
        """Ask a rank once that was `behind`; `arrive` rows are in its answer, or one for all the bytes asked for."""
        async with self.room.taken(behind) as max_bytes:
            if max_bytes:
                await asyncio.sleep(0)
                rows = arrive if arrive is not None else max(1, max_bytes // size_of_row)
                self.answers += 1
                self.pending += rows
                self.most = max(self.most, self.pending)
                self.room.learn(records=behind if arrive else rows, rows=rows, size=size_of_row * rows)
            return bool(max_bytes)


async def test_a_thousand_full_rings_bring_no_more_than_there_is_room_for():
    """Also before anybody knows how large a record is: sixteen are asked first."""
    store = Store(rows=1000)
    asked = await asyncio.gather(*(store.ask(behind=5, arrive=50) for _ in range(1000)))

    assert (20, 1000, 1000) == (store.answers, store.pending, store.most)
    assert 980 == asked.count(False)


async def test_all_get_their_turn_where_the_store_keeps_up():
    store = Store(rows=100)

    async def asked():
        assert await store.ask(behind=1, arrive=10)
        store.pending -= 10

    await asyncio.gather(*(asked() for _ in range(200)))

    assert 200 == store.answers
    assert store.most <= 100


async def test_ranks_that_have_more_to_say_than_was_known_bring_no_more_than_there_is_room_for():
    """A starved service hears late how far they are: each was known to have one record, and has a ring full of them."""
    store = Store(rows=100_000)
    store.room.learn(records=1000, rows=1000, size=10_000)
    await asyncio.gather(*(store.ask(behind=1, arrive=None) for _ in range(1000)))

    assert 50_000 < store.most <= 100_000, "half the room is for what they were known to have"


async def test_a_rank_that_is_asked_alone_may_bring_a_whole_answer():
    store = Store(rows=16 * MEGABYTE)
    store.room.learn(records=1, rows=1000, size=10_000)
    async with store.room.taken(0) as max_bytes:
        assert max_bytes == pytest.approx(MEGABYTE, rel=1e-4)


async def test_one_that_is_larger_than_all_room_goes_alone():
    store = Store(rows=100)
    store.room.learn(records=1, rows=50, size=500)

    assert await asyncio.wait_for(store.ask(behind=10, arrive=500), 5)


async def test_an_answer_is_never_expected_to_be_larger_than_what_is_asked_for():
    """Of a ring of 256 records of half a megabyte, two come at once."""
    store = Store(rows=100)
    store.room.learn(records=1, rows=30, size=MEGABYTE // 2)
    async with store.room.taken(256):
        assert await asyncio.wait_for(store.ask(behind=1, arrive=30), 5)


async def test_ranks_that_hang_leave_room_for_those_that_answer():
    """400 that did not answer the last time are asked again, and keep what they were given until time is over."""
    store = Store(rows=1000)
    store.room.learn(records=1, rows=10, size=100)
    asked, over = [], asyncio.Event()

    async def hang():
        async with store.room.taken(5, is_doubtful=True) as max_bytes:
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
async def test_whoever_gives_up_waiting_holds_nobody_up(late):
    store = Store(rows=100)
    store.room.learn(records=1, rows=60, size=600)
    holding = store.room.taken(1)
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
