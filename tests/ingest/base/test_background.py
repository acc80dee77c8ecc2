"""A work of the service that fails begins anew, and says why once."""

from __future__ import annotations

import asyncio

import pytest

from rankscope_ingest.base.background import LATELY_SECONDS, BackgroundFaults, run_forever


async def test_work_that_fails_begins_anew_and_each_fault_is_told_once(caplog):
    faults = [ValueError("a"), ValueError("a"), KeyError("b"), ValueError("a")]

    async def work():
        if faults:
            raise faults.pop(0)

    async with asyncio.timeout(10):
        await run_forever("the work", work, again_seconds=0)

    assert [] == faults
    assert ["ValueError", "KeyError"] == [record.exc_info[0].__name__ for record in caplog.records]
    assert all("the work failed" in record.getMessage() for record in caplog.records)


async def test_work_ends_when_it_is_cancelled():
    task = asyncio.create_task(run_forever("the work", asyncio.Event().wait))
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_work_that_fails_is_told_for_half_a_minute():
    """So that one that fails whenever it begins anew shows in the service's health, and one bad moment passes."""
    now = [0.0]
    faults = BackgroundFaults(clock=lambda: now[0])
    tries = iter([ValueError("no luck")])

    async def work():
        for fault in tries:
            raise fault

    await run_forever("judging", work, faults, again_seconds=0.0)

    assert "works of the service fail, see its log: judging: ValueError('no luck')" == faults.recent()
    now[0] = LATELY_SECONDS
    assert faults.recent() is None


def test_a_work_that_fails_leaves_those_after_it_and_is_logged_once(caplog):
    faults, done = BackgroundFaults(), []

    def fail():
        raise ValueError("no luck")

    for _ in range(3):
        faults.attempt("judging runs", fail)
        faults.attempt("looking for stalls", lambda: done.append("looked"))

    assert ["looked"] * 3 == done
    assert ["unexpected error in judging runs; it is tried again"] == [item.getMessage() for item in caplog.records]
    assert "works of the service fail, see its log: judging runs: ValueError('no luck')" == faults.recent()
