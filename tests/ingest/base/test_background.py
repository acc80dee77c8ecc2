"""Periodic jobs, reported faults, the read budget, and the wait that can be ended early."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from rankscope_ingest.base.background import RECENT_SECONDS, BackgroundFaults, Job, ReadBudget, WakeUp, run_jobs


@contextlib.asynccontextmanager
async def running(*jobs: Job, faults: BackgroundFaults | None = None):
    task = asyncio.create_task(run_jobs(jobs, faults or BackgroundFaults(), WakeUp()))
    async with asyncio.timeout(10):
        yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_failing_job_is_called_again_and_each_fault_is_logged_once(caplog):
    errors = [ValueError("a"), ValueError("a"), KeyError("b"), ValueError("a")]
    done = asyncio.Event()

    async def work():
        if errors:
            raise errors.pop(0)
        done.set()

    async with running(Job("the work", 0.0, work)):
        await done.wait()

    assert [] == errors
    assert ["ValueError", "KeyError"] == [record.exc_info[0].__name__ for record in caplog.records]
    assert ["unexpected error in the work, retrying"] * 2 == [record.getMessage() for record in caplog.records]


async def test_running_coroutine_delays_no_other_job_and_ends_with_the_loop():
    started, calls, done, ended = [], [], asyncio.Event(), asyncio.Event()

    async def slow():
        started.append("slow")
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def fast():
        calls.append("fast")
        if len(calls) == 3:
            done.set()

    async with running(Job("slow", 0.0, slow, starts_immediately=True), Job("fast", 0.0, fast)):
        await done.wait()

    assert (["slow"], ["fast"] * 3) == (started, calls[:3])
    assert ended.is_set()


async def test_wake_up_makes_the_loop_evaluate_intervals_again():
    seconds, wake_up, done = [1e9], WakeUp(), asyncio.Event()
    job = Job("the work", lambda: seconds[0], done.set)
    task = asyncio.create_task(run_jobs([job], BackgroundFaults(), wake_up))
    await asyncio.sleep(0)
    assert not done.is_set()
    seconds[0] = 0.0
    wake_up.set()

    async with asyncio.timeout(10):
        await done.wait()
    task.cancel()


def test_fault_is_reported_for_half_a_minute():
    now = [0.0]
    faults = BackgroundFaults(clock=lambda: now[0])
    faults.report("updating runs", ValueError("no luck"))

    assert "background tasks failed, see the service's log: updating runs: ValueError('no luck')" == faults.recent()
    now[0] = RECENT_SECONDS
    assert faults.recent() is None


def test_failed_attempt_does_not_stop_the_next_one_and_is_logged_once(caplog):
    faults, done = BackgroundFaults(), []

    def fail():
        raise ValueError("no luck")

    for _ in range(3):
        faults.attempt("updating runs", fail)
        faults.attempt("checking for stalls", lambda: done.append("checked"))

    assert ["checked"] * 3 == done
    assert ["unexpected error in updating runs, retrying"] == [item.getMessage() for item in caplog.records]


def test_read_budget_limits_reads_to_two_percent_of_the_time():
    now = [0.0]
    budget = ReadBudget(30.0, clock=lambda: now[0], max_intervals=2)
    due = []
    assert budget.is_due
    with budget.reading():
        now[0] = 6.0
    for now[0] in (31.0, 299.0, 301.0):
        due.append(budget.is_due)

    assert [False, False, True] == due  # 6 s are 2 % of 300 s


def test_failed_read_is_retried_after_one_interval():
    now = [0.0]
    budget = ReadBudget(30.0, clock=lambda: now[0], max_intervals=2)
    for _ in range(3):
        with budget.reading():
            pass
    with pytest.raises(OSError), budget.reading():
        raise OSError

    now[0] = 30.0
    assert budget.is_due


async def test_wait_returns_false_on_timeout_and_ends_with_a_set():
    """A set before the wait ends one wait, unless it is cleared."""
    wake_up, began = WakeUp(), time.monotonic()
    waited = [await wake_up.wait(0.05), await wake_up.wait(-1.0)]
    took = time.monotonic() - began
    asyncio.get_running_loop().call_later(0.01, wake_up.set)
    waited.append(await wake_up.wait(60.0))
    wake_up.set()
    wake_up.set()
    waited += [await wake_up.wait(60.0), await wake_up.wait(0.0)]
    wake_up.set()
    wake_up.clear()
    waited.append(await wake_up.wait(0.01))

    assert [False, False, True, True, False, False] == waited
    assert took >= 0.05


async def test_cancelled_wait_leaves_no_timer_that_ends_the_next_one():
    wake_up = WakeUp()
    cancelled = asyncio.create_task(wake_up.wait(0.05))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    began = time.monotonic()
    await wake_up.wait(0.3)

    assert time.monotonic() - began >= 0.3
