"""Where a run stands follows from what its ranks said, and from how long they have been silent."""

from __future__ import annotations

import pytest

from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.runs.models import Liveness, Patience
from rankscope_ingest.runs.tracker import RunTracker, Timing

KEY = ("r", 0)
TIMING = Timing(
    patience=Patience(refused_after_seconds=10, failed_after_seconds=25),
    stalled_after_seconds=300,
    stalled_in_phase_after_seconds=1800,
)


class World:
    """Two ranks of one attempt, and a clock that only moves when told."""

    def __init__(self, ranks=2, world_size=2):
        self.book = RunTracker(TIMING)
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
        self.liveness[rank].heard(self.now)
        return self.book.registered(registration, 0, self.liveness[rank], 5)

    def alive(self, seconds=0.0, *ranks, step=None):
        self.now += seconds
        for rank in ranks or self.liveness:
            self.liveness[rank].heard(self.now)
            self.book.heard(KEY, rank)
            self.book.stepped(KEY, rank, step, self.now)
        return self.tick()

    def tick(self, seconds=0.0):
        self.now += seconds
        return self.book.tick(self.now, int(self.now * 1e6))

    @property
    def attempt(self):
        return self.book.get(KEY)

    @property
    def state(self):
        return str(self.attempt.state)


def test_registered_ranks_wait_for_their_first_step():
    world = World()
    world.tick()
    before = world.state
    world.alive(1, step=1)

    assert ["pending", "running"] == [before, world.state]


def test_run_is_completed_when_every_rank_said_so():
    world = World()
    world.alive(1, step=7)
    world.book.exited(KEY, 0, "completed", None)
    world.tick()
    halfway = world.state
    world.book.exited(KEY, 1, "completed", None)
    world.tick(1)

    assert ["running", "completed"] == [halfway, world.state]
    assert (7, 2_000_000, 0) == (world.attempt.last_step, world.attempt.ended_at, world.attempt.ranks_missing)


def test_exception_of_one_rank_fails_the_run_at_once_and_is_quoted():
    world = World()
    world.alive(1, step=1)
    world.book.exited(KEY, 1, "exception", "CUDA out of memory")
    world.book.exited(KEY, 0, "signal", None)
    world.tick()

    assert ("failed", "rank 1: CUDA out of memory") == (world.state, world.attempt.reason)


@pytest.mark.parametrize(("refused", "seconds"), [(True, 10), (False, 25)])
def test_rank_that_vanishes_fails_the_run_sooner_when_its_port_is_closed(refused, seconds):
    world = World()
    world.alive(1, step=1)
    if refused:
        world.liveness[1].refused(world.now + 0.1)
    world.alive(seconds - 0.5, 0, step=2)
    before = world.state
    verdict = world.alive(0.5, 0, step=3)

    assert ["running", "failed"] == [before, world.state]
    assert [1] == [rank.number for _, rank in verdict.vanished]
    assert "rank 1 on h vanished without a word" == world.attempt.reason
    assert 1 == world.attempt.ranks_missing


def test_closed_port_means_nothing_while_heartbeats_come():
    world = World()
    world.alive(1, step=1)
    for _ in range(20):
        world.liveness[1].refused(world.now)
        world.now += 5
        world.liveness[1].heard(world.now)
        world.alive(0, 0)

    assert "running" == world.state


def test_rank_that_speaks_again_was_not_dead():
    world = World()
    world.alive(1, step=1)
    world.alive(30, 0)
    failed = world.state
    world.register(1)
    world.alive(1)

    assert ["failed", "running"] == [failed, world.state]
    assert (None, None) == (world.attempt.reason, world.attempt.ended_at)


def test_attempt_is_arriving_until_each_rank_was_read_but_not_for_long():
    fresh, unreadable = World(), World()
    before = fresh.attempt.is_arriving(1.0)
    for rank in (0, 1):
        fresh.book.heard(KEY, rank)

    assert [True, False] == [before, fresh.attempt.is_arriving(1.0)]
    assert [True, False] == [unreadable.attempt.is_arriving(now) for now in (5.9, 6.0)]


def test_signal_stops_a_run_and_so_does_an_end_without_a_word_of_success():
    by_signal, silent = World(), World()
    for rank in (0, 1):
        by_signal.book.exited(KEY, rank, "signal", "SIGTERM")
        silent.book.closed(KEY, rank)
    by_signal.tick()
    silent.tick()

    assert ("stopped", "ranks 0-1: SIGTERM") == (by_signal.state, by_signal.attempt.reason)
    assert ("stopped", "ended without saying that it was done") == (silent.state, silent.attempt.reason)


def test_one_rank_that_completed_does_not_complete_the_run_of_another_that_did_not():
    world = World()
    world.book.exited(KEY, 0, "completed", None)
    world.book.closed(KEY, 1)
    world.tick()

    assert ("stopped", "ended without saying that it was done") == (world.state, world.attempt.reason)


def test_run_without_steps_for_long_is_stalled_unless_a_phase_is_announced():
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


def test_ranks_that_never_registered_are_missing_but_fail_nothing():
    world = World(ranks=1, world_size=8)
    world.alive(1, step=1)
    world.book.exited(KEY, 0, "completed", None)
    missing = world.attempt.ranks_missing
    world.tick()

    assert (8, "completed", 0) == (missing, world.state, world.attempt.ranks_missing)


def test_new_process_takes_the_place_of_a_dead_one_in_its_launch():
    world = World()
    world.alive(1, step=1)
    world.alive(30, 0)
    world.liveness[1] = Liveness(last_sign=world.now)
    world.register(1, incarnation="second life")
    world.tick()

    assert "running" == world.state


def test_each_change_is_told_once():
    world = World()
    states = [[str(attempt.state) for attempt in world.alive(1, step=step).changed] for step in (None, 1, 2, 3)]

    assert [[], ["running"], [], []] == states


def test_latest_attempt_speaks_for_the_run():
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
    world.book.registered(registration, 1, Liveness(last_sign=0.0), 5)

    assert 1 == world.book.latest()["r"].number


def test_the_configuration_of_a_rank_is_kept_without_secrets():
    """The rank masks what it sends; one of another release, or not of ours at all, may not."""
    config = {"argv": ["train.py", "--hf-token", "correct-horse"], "serve": {"password": "correct-horse"}, "every": 3}
    world = World(ranks=0)
    world.liveness[0] = Liveness(last_sign=0.0)
    world.register(0, config=config)

    assert {"argv": ["train.py", "--hf-token", "***"], "serve": {"password": "***"}, "every": 3} == world.attempt.config
