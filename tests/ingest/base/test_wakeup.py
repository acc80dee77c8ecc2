"""An alarm that rings by itself, for whoever rings it, and for whoever rang before anybody waited."""

from __future__ import annotations

import asyncio
import time

from rankscope_ingest.base.background import WakeUp


async def test_it_ends_by_itself_and_says_that_nobody_rang():
    alarm = WakeUp()
    began = time.monotonic()

    assert [False, False] == [await alarm.wait(0.05), await alarm.wait(-1.0)]
    assert time.monotonic() - began >= 0.05


async def test_who_waits_hears_at_once():
    alarm = WakeUp()
    asyncio.get_running_loop().call_later(0.01, alarm.set)

    assert await alarm.wait(60.0)


async def test_a_ring_before_the_wait_is_heard_once():
    alarm = WakeUp()
    alarm.set()
    alarm.set()

    assert [True, False] == [await alarm.wait(60.0), await alarm.wait(0.0)]


async def test_a_ring_that_was_taken_back_is_not_heard():
    alarm = WakeUp()
    alarm.set()
    alarm.clear()

    assert not await alarm.wait(0.01)


async def test_a_wait_that_is_given_up_leaves_no_timer_that_ends_the_next_one():
    alarm = WakeUp()
    given_up = asyncio.create_task(alarm.wait(0.05))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    began = time.monotonic()
    await alarm.wait(0.3)

    assert time.monotonic() - began >= 0.3
