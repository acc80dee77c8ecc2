"""States of runs over real HTTP, across restarts of the service and launches of one run."""

from __future__ import annotations

import json

import pytest

STALLING = {"runs.stalled_after_seconds": 2.0, "runs.stalled_in_phase_after_seconds": 30.0}


def exit_record(reason, error=None):
    return {"events": [{"type": "exit", "details": json.dumps({"reason": reason, "error": error})}]}


async def end(rank, service, eventually, reason="completed", error=None):
    """Send an exit report of `rank`, drain it and close its port."""
    rank.publish(**exit_record(reason, error))
    rank.state = "draining"
    await rank.deliver(service)
    await rank.die()


async def is_in(service, state, attempt=0):
    found = await service.run_state()
    return found["state"] == state and found["attempt"] == attempt and found


async def test_stalled_run_that_continues_is_running_again(start_service, fake_rank, eventually):
    async with start_service(**STALLING) as service, fake_rank() as rank:
        rank.publish_steps(1)
        await rank.register(service.url)
        found = await eventually(lambda: is_in(service, "stalled"))

        def make_step():
            rank.publish_steps(1)  # at each check: a pause of 2 s would stall the run again
            return is_in(service, "running")

        await eventually(make_step)
        await end(rank, service, eventually)
        await eventually(lambda: is_in(service, "completed"))
        await service.end()
        states = service.rows("SELECT state FROM runs_history ORDER BY ordinal")

    assert found["reason"].startswith("alive, but no step for ")
    assert ["pending", "running", "stalled", "running", "completed"] == [
        row["state"] for place, row in enumerate(states) if place == 0 or row["state"] != states[place - 1]["state"]
    ]


async def test_launch_with_fewer_ranks_is_the_next_attempt_of_its_run(start_service, fake_rank, eventually):
    async with start_service() as service:
        async with fake_rank(rank=0, world_size=2) as zero, fake_rank(rank=1, world_size=2) as one:
            for rank in (zero, one):
                rank.publish_steps(3)
                await rank.register(service.url)
            await eventually(lambda: is_in(service, "running"))
            await end(zero, service, eventually, "exception", "RuntimeError: Connection closed by peer")
            await end(one, service, eventually, "exception", "ValueError: no")
            failed = await eventually(lambda: is_in(service, "failed"))
        async with fake_rank(rank=0, world_size=1, launch_id="second", incarnation="later") as alone:
            alone.publish(step=2, scalars=[{"name": "loss", "value": 1.0}])
            await alone.register(service.url)
            running = await eventually(lambda: is_in(service, "running", attempt=1))
            await end(alone, service, eventually)
            await eventually(lambda: is_in(service, "completed", attempt=1))
        await service.end()
        rows = service.rows("SELECT attempt, state, world_size, last_step, reason FROM attempts ORDER BY attempt")

    assert (2, 0) == (failed["world_size"], failed["ranks_alive"])
    assert (1, 2, 1, 1) == tuple(running[key] for key in ("attempt", "step", "world_size", "ranks_alive"))
    assert [(0, "failed", 2), (1, "completed", 1)] == [
        (row["attempt"], row["state"], row["world_size"]) for row in rows
    ]
    assert "rank 1: ValueError: no" == rows[0]["reason"]


@pytest.mark.thorough
async def test_repeated_launch_id_after_the_end_starts_a_new_attempt(start_service, fake_rank, eventually):
    """Restarted ranks without a process group derive an equal id. This works across a restart of the service."""
    numbers = []
    for name in ("first", "second", "third"):
        async with start_service() as service:
            for again in ("", "-again") if name == "third" else ("",):
                async with fake_rank(incarnation=name + again, started_at=4_000_000_000_000_000) as rank:
                    rank.publish_steps(2)
                    await rank.register(service.url)
                    numbers.append(rank.attempt)
                    await eventually(lambda: is_in(service, "running", attempt=numbers[-1]))
                    await end(rank, service, eventually)
                    await eventually(lambda: is_in(service, "completed", attempt=numbers[-1]))
            await service.end()

    assert [0, 1, 2, 3] == numbers


async def test_rank_of_an_older_attempt_does_not_change_the_state_of_the_run(start_service, fake_rank, eventually):
    async with fake_rank(launch_id="old", incarnation="old") as old:
        async with start_service() as service:
            old.publish_steps(5)
            await old.register(service.url)
            await eventually(lambda: is_in(service, "running"))
            async with fake_rank(launch_id="new", incarnation="new") as new:
                new.publish_steps(1)
                await new.register(service.url)
                await eventually(lambda: is_in(service, "running", attempt=1))
                await end(new, service, eventually)
                ended = "FROM attempts WHERE attempt = 1 AND state = 'completed'"
                await eventually(lambda: service.rows(ended))
                await eventually(lambda: is_in(service, "running", attempt=0))  # which still trains
            await service.end()
        async with start_service() as service:
            await old.register(service.url)
            old.publish_steps(5)
            await end(old, service, eventually, "exception", "ValueError: late")
            await service.end()
        run = service.rows("SELECT attempt, state FROM runs")
        attempts = service.rows("SELECT attempt, state FROM attempts ORDER BY attempt")

    assert [{"attempt": 1, "state": "completed"}] == run
    assert [{"attempt": 0, "state": "failed"}, {"attempt": 1, "state": "completed"}] == attempts
