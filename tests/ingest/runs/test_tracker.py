"""The state of a run follows from the reports of its ranks and from the duration of their silence."""

from __future__ import annotations

import pytest

from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.base.config import RunsSection
from rankscope_ingest.runs.models import Liveness
from rankscope_ingest.runs.tracker import RunTracker

KEY = ("r", 0)
LIMITS = RunsSection(
    refused_after_seconds=10,
    failed_after_seconds=25,
    stalled_after_seconds=300,
    stalled_in_phase_after_seconds=1800,
)


class World:
    """Two ranks of one attempt, and a manual clock."""

    def __init__(self, ranks=2, world_size=2):
        self.runs = RunTracker(LIMITS)
        self.now = 0.0
        self.liveness = {rank: Liveness(last_sign=0.0) for rank in range(ranks)}
        for rank in self.liveness:
            self.register(rank, world_size=world_size)

    def register(self, rank, *, world_size=2, phase=None, incarnation=None, config=None):
        registration = Registration(
            run="r",
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            host="h",
            pid=1,
            incarnation=incarnation or f"i{rank}",
            launch_id="l",
            url="http://127.0.0.1:1",
            phase=phase,
            config=config or {},
        )
        self.liveness[rank].note_sign(self.now)
        return self.runs.registered(registration, 0, self.liveness[rank], 5)

    def alive(self, seconds=0.0, *ranks, step=None):
        self.now += seconds
        for rank in ranks or self.liveness:
            self.liveness[rank].note_sign(self.now)
            self.runs.answered(KEY, rank)
            self.runs.stepped(KEY, rank, step, self.now)
        return self.tick()

    def tick(self, seconds=0.0):
        self.now += seconds
        return self.runs.tick(self.now, int(self.now * 1e6))

    @property
    def attempt(self):
        return self.runs.get(KEY)

    @property
    def state(self):
        return str(self.attempt.state)


def test_registered_ranks_wait_for_their_first_step():
    world = World()
    world.tick()
    before = world.state
    world.alive(1, step=1)

    assert ["pending", "running"] == [before, world.state]


def test_run_is_completed_when_every_rank_completed():
    world = World()
    world.alive(1, step=7)
    world.runs.exited(KEY, 0, "completed", None)
    world.tick()
    halfway = world.state
    world.runs.exited(KEY, 1, "completed", None)
    world.tick(1)

    assert ["running", "completed"] == [halfway, world.state]
    assert (7, 2_000_000, 0) == (world.attempt.last_step, world.attempt.ended_at, world.attempt.ranks_missing)


def test_exception_of_one_rank_fails_the_run_and_is_the_reason():
    world = World()
    world.alive(1, step=1)
    world.runs.exited(KEY, 1, "exception", "CUDA out of memory")
    world.runs.exited(KEY, 0, "signal", None)
    world.tick()

    assert ("failed", "rank 1: CUDA out of memory") == (world.state, world.attempt.reason)


@pytest.mark.parametrize(("refused", "seconds"), [(True, 10), (False, 25)])
def test_vanished_rank_fails_the_run_sooner_if_its_port_is_closed(refused, seconds):
    world = World()
    world.alive(1, step=1)
    if refused:
        world.liveness[1].note_refusal(world.now + 0.1)
    world.alive(seconds - 0.5, 0, step=2)
    before = world.state
    changes = world.alive(0.5, 0, step=3)

    assert ["running", "failed"] == [before, world.state]
    assert [1] == [rank.number for rank in changes.vanished]
    assert "rank 1 on h stopped responding without an exit report" == world.attempt.reason
    assert 1 == world.attempt.ranks_missing


def test_closed_port_is_ignored_while_heartbeats_arrive():
    world = World()
    world.alive(1, step=1)
    for _ in range(20):
        world.liveness[1].note_refusal(world.now)
        world.now += 5
        world.liveness[1].note_sign(world.now)
        world.alive(0, 0)

    assert "running" == world.state


def test_rank_that_registers_again_makes_the_run_active():
    world = World()
    world.alive(1, step=1)
    world.alive(30, 0)
    failed = world.state
    world.register(1)
    world.alive(1)

    assert ["failed", "running"] == [failed, world.state]
    assert (None, None) == (world.attempt.reason, world.attempt.ended_at)


def test_attempt_is_arriving_until_each_rank_answered_or_6_s_passed():
    fresh, unreadable = World(), World()
    before = fresh.attempt.is_arriving(1.0)
    for rank in (0, 1):
        fresh.runs.answered(KEY, rank)

    assert [True, False] == [before, fresh.attempt.is_arriving(1.0)]
    assert [True, False] == [unreadable.attempt.is_arriving(now) for now in (5.9, 6.0)]


def test_signal_or_end_without_exit_report_stops_a_run():
    by_signal, silent = World(), World()
    for rank in (0, 1):
        by_signal.runs.exited(KEY, rank, "signal", "SIGTERM")
        silent.runs.closed(KEY, rank)
    by_signal.tick()
    silent.tick()

    assert ("stopped", "ranks 0-1: SIGTERM") == (by_signal.state, by_signal.attempt.reason)
    assert ("stopped", "ended without reporting success") == (silent.state, silent.attempt.reason)


def test_run_is_not_completed_if_one_rank_ended_without_a_report():
    world = World()
    world.runs.exited(KEY, 0, "completed", None)
    world.runs.closed(KEY, 1)
    world.tick()

    assert ("stopped", "ended without reporting success") == (world.state, world.attempt.reason)


def test_run_without_steps_is_stalled_unless_a_phase_is_reported():
    idle, evaluating = World(), World()
    for world, phase in ((idle, None), (evaluating, "evaluation")):
        world.alive(1, step=1)
        world.register(0, phase=phase)
        world.alive(300)
    recovered = World()
    recovered.alive(1, step=1)
    recovered.alive(300)
    recovered.alive(1, step=2)

    assert ["stalled", "running", "running"] == [idle.state, evaluating.state, recovered.state]
    assert "alive, but no step for 300 s" == idle.attempt.reason
    evaluating.alive(1500)
    assert "stalled" == evaluating.state


def test_unregistered_ranks_are_missing_but_do_not_fail_the_run():
    world = World(ranks=1, world_size=8)
    world.alive(1, step=1)
    world.runs.exited(KEY, 0, "completed", None)
    missing = world.attempt.ranks_missing
    world.tick()

    assert (8, "completed", 0) == (missing, world.state, world.attempt.ranks_missing)


def test_new_process_replaces_a_dead_one_of_its_launch():
    world = World()
    world.alive(1, step=1)
    world.alive(30, 0)
    world.liveness[1] = Liveness(last_sign=world.now)
    world.register(1, incarnation="second process")
    world.tick()

    assert "running" == world.state


def test_each_change_is_returned_once():
    world = World()
    states = [[str(attempt.state) for attempt in world.alive(1, step=step).changed] for step in (None, 1, 2, 3)]

    assert [[], ["running"], [], []] == states


def test_latest_attempt_is_the_state_of_the_run():
    world = World()
    registration = Registration(
        run="r",
        rank=0,
        world_size=1,
        local_rank=0,
        host="h",
        pid=1,
        incarnation="n",
        launch_id="l2",
        url="http://127.0.0.1:1",
    )
    world.runs.registered(registration, 1, Liveness(last_sign=0.0), 5)

    assert 1 == world.runs.latest()["r"].number


def test_configuration_of_a_rank_is_kept_without_secrets():
    """Ranks mask secrets before they send them, but ranks of another release may not."""
    config = {"argv": ["train.py", "--hf-token", "correct-horse"], "serve": {"password": "correct-horse"}, "every": 3}
    world = World(ranks=0)
    world.liveness[0] = Liveness(last_sign=0.0)
    world.register(0, config=config)

    assert {"argv": ["train.py", "--hf-token", "***"], "serve": {"password": "***"}, "every": 3} == world.attempt.config
