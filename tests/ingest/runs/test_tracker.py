"""Facts about an attempt other than its states, which `test_life_cycle.py` has in a table."""

from __future__ import annotations

from tests.ingest.builders import registration
from tests.ingest.runs.life_steps import KEY, START, Life

from rankscope_ingest.runs.models import Liveness


def test_ended_attempt_has_its_last_step_and_time_and_misses_no_rank():
    life = Life().do("step 0", "done 0", "wait 1", "done 1")
    ended = life.attempt

    assert ("completed", 1, START + 1_000_000, 0) == (life.state, ended.last_step, ended.ended_at, ended.ranks_missing)


def test_vanished_rank_is_missing_until_it_registers_again():
    life = Life().do("step 0", "refuse 1", "wait 9")
    before = life.state
    life.now += 1.0
    changes = life.tracker.tick(life.now, life.wall)
    missing = life.attempt.ranks_missing
    life.do("back 1")

    assert ["running", "running"] == [before, life.state]
    assert ([1], 1, 0) == ([rank.number for rank in changes.vanished], missing, life.attempt.ranks_missing)
    assert (None, None) == (life.attempt.reason, life.attempt.ended_at)


def test_closed_port_is_ignored_while_heartbeats_arrive():
    life = Life().do("step 0")
    for _ in range(20):
        life.liveness[1].note_refusal(life.now)
        life.now += 5
        life.do("wait 0.1")

    assert "running" == life.state


def test_attempt_is_arriving_until_each_rank_answered_or_6_s_passed():
    fresh, unreadable = Life(ranks=0), Life(ranks=0)
    for life in (fresh, unreadable):
        for rank in (0, 1):
            life.register(rank, world_size=2)
    before = fresh.attempt.is_arriving(1.0)
    for rank in (0, 1):
        fresh.tracker.answered(KEY, rank)

    assert [True, False] == [before, fresh.attempt.is_arriving(1.0)]
    assert [True, False] == [unreadable.attempt.is_arriving(now) for now in (5.9, 6.0)]


def test_unregistered_ranks_are_missing_but_do_not_fail_the_run():
    life = Life(ranks=1, world_size=8).do("step 0")
    missing = life.attempt.ranks_missing
    life.do("done 0")

    assert (8 - 1, "completed", 0) == (missing, life.state, life.attempt.ranks_missing)


def test_latest_attempt_is_the_state_of_the_run():
    life = Life()
    life.tracker.registered(registration(launch_id="l2", incarnation="n"), 1, Liveness(last_sign=0.0), 5)

    assert 1 == life.tracker.latest()["r"].number


def test_configuration_of_a_rank_is_kept_without_secrets():
    """Ranks mask secrets before they send them, but ranks of another release may not."""
    life = Life(ranks=0)
    config = {"argv": ["train.py", "--hf-token", "correct-horse"], "serve": {"password": "correct-horse"}, "every": 3}
    life.register(0, config=config)

    assert {"argv": ["train.py", "--hf-token", "***"], "serve": {"password": "***"}, "every": 3} == life.attempt.config
