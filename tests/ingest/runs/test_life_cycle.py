"""The life cycle of an attempt as a table: actions of its ranks and the states that follow; other facts about it."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.ingest.runs.life_steps import START, Life
from tests.properties import examples

from rankscope_contract.model.events import RunState

LOST = "rank {} on h stopped responding without an exit report"
PEER = "rank 0: RuntimeError: Connection closed by peer [127.0.0.1]:4; which rank failed first is unknown"
LOST_BOTH = "ranks 0-1 on h stopped responding without an exit report; which rank failed first is unknown"
OPEN = "; which rank failed first is unknown"
UNSEEN = "ranks 0-1 on h did not respond after the service restarted (ended or killed while it was down)" + OPEN

# (title, actions, states in order, last reason)
TABLE = [
    ("registered, no step", "", "", None),
    ("a first step", "step 0", "running", None),
    ("no first step for long", "wait 1800", "stalled", "alive, but no first step for 1800 s"),
    ("a first step after all", "wait 1800;step 0", "stalled running", None),
    ("no step for long", "step 0;wait 300", "running stalled", "alive, but no step for 300 s"),
    ("stalled, then another step", "step 0;wait 300;step 1", "running stalled running", None),
    ("a long phase is no stall", "step 0;phase 0;wait 1799", "running", None),
    ("a phase too long is one", "step 0;phase 0;wait 1800", "running stalled", "alive, but no step for 1800 s"),
    ("after a phase the time starts again", "step 0;phase 0;wait 1000;leave 0;wait 299", "running", None),
    ("all ranks completed", "step 0;step 1;done *", "running completed", "ended at step 2 of 100 planned"),
    ("one completed, the other still trains", "step 0;done 0;wait 60", "running", None),
    ("one completed, the other exits silently", "step 0;done 0;mute 1", "running stopped", "ended without reporting success"),  # noqa: E501
    ("one completed, the other drained without an exit report", "step 0;done 0;close 1", "running stopped", "ended without reporting success"),  # noqa: E501
    ("sys.exit(0) before the planned steps", "step 0;exit0 *", "running stopped", "ranks 0-1: sys.exit(0) at step 4 of 100 planned"),  # noqa: E501
    ("all terminated by SIGTERM", "step 0;term *", "running stopped", "ranks 0-1: SIGTERM"),
    ("one terminated, the other loses its peer", "step 0;term 1;peer 0", "running stopped", "rank 1: SIGTERM"),
    ("one terminated, the other still trains", "step 0;term 1;wait 60", "running", None),
    ("one terminated, the other killed later", "step 0;term 1;wait 30;refuse 0;wait 11", "running stopped", "rank 1: SIGTERM"),  # noqa: E501
    ("one terminated, the other raises an exception", "step 0;term 1;wait 5;raise 0", "running failed", "rank 0: ValueError: no"),  # noqa: E501
    ("Ctrl-C", "step 0;int *", "running stopped", "ranks 0-1: KeyboardInterrupt"),
    ("an exception", "step 0;raise 1", "running failed", "rank 1: ValueError: no"),
    ("before any step", "raise 1", "failed", "rank 1: ValueError: no"),
    ("an exception, and the launcher ends the other", "step 0;raise 1;term 0", "running failed", "rank 1: ValueError: no"),  # noqa: E501
    ("all raise the same", "step 0;raise *", "running failed", "ranks 0-1: ValueError: no" + OPEN),
    ("one lost an unknown peer", "step 0;peer 0;wait 60", "running failed", PEER),
    ("the lost peer is reported first", "step 0;peer 0;raise 1", "running failed failed", "rank 1: ValueError: no"),
    ("the other is killed without a report", "step 0;raise 1;vanish 0;wait 60", "running failed", "rank 1: ValueError: no"),  # noqa: E501
    ("killed: the port is closed", "step 0;refuse 1;wait 10", "running failed", LOST.format(1)),
    ("killed, and its peer reports first", "step 0;refuse 1;peer 0;wait 11", "running failed failed", LOST.format(1)),
    ("killed, and the launcher ends its peer", "step 0;refuse 1;term 0;wait 11", "running failed", LOST.format(1)),
    ("killed, and its peer fails much later", "step 0;refuse 1;wait 20;raise 0", "running failed", LOST.format(1)),
    ("killed, but not yet for long", "step 0;refuse 1;wait 9", "running", None),
    ("both drained without an exit report", "step 0;close *", "running stopped", "ended without reporting success"),
    ("silent: a host is down", "step 0;vanish 1;wait 25", "running failed", LOST.format(1)),
    ("silent, but not yet for long", "step 0;vanish 1;wait 24", "running", None),
    ("silent, then back", "step 0;vanish 1;wait 30;back 1", "running failed running", None),
    ("all silent", "step 0;vanish *;wait 30", "running failed", LOST_BOTH),
    ("all silent, one back", "step 0;vanish *;wait 30;back 1", "running failed failed", LOST.format(0)),
    ("silent, but it had completed", "step 0;vanish 1;done 0;wait 30;done 1", "running failed completed", "ended at step 1 of 100 planned"),  # noqa: E501
    ("replaced by another process", "step 0;vanish 1;wait 30;replace 1", "running failed running", None),
    ("failed remains failed", "step 0;raise 1;back 0;step 0;wait 60", "running failed", "rank 1: ValueError: no"),
    ("completed remains completed", "step *;done *;back 0;wait 60", "running completed", "ended at step 2 of 100 planned"),  # noqa: E501
    ("a rank that comes late was not counted", "step 0;done *;register 2;step 2", "running completed running", None),
    ("the service was stopped for long", "step 0;stop-service 600;wait 20", "running", None),
    ("killed while the service was stopped", "step 0;refuse 1;stop-service 600;wait 11", "running failed", LOST.format(1)),  # noqa: E501
    ("the service is restarted", "step 0;restart;wait 60", "running", None),
    ("stalled, and the service is restarted", "step 0;wait 300;restart;wait 20", "running stalled", "alive, but no step for 300 s"),  # noqa: E501
    ("stalled under the new one", "step 0;restart;wait 300", "running stalled", "alive, but no step for 300 s"),
    ("ended while the service was down", "step 0;vanish *;restart;wait 25", "running failed", UNSEEN),
    ("the exit report came before the service stopped", "step 0;done 0;restart;done 1", "running completed", "ended at step 1 of 100 planned"),  # noqa: E501
    ("drains while the service stops", "step 0;done *;restart;back 0;close 0;wait 60", "running completed", "ended at step 1 of 100 planned"),  # noqa: E501
    ("failed, and the service is restarted", "step 0;raise 1;restart;back 0;wait 5", "running failed", "rank 1: ValueError: no"),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("title", "script", "states", "reason"), TABLE, ids=[row[0] for row in TABLE])
def test_life_of_an_attempt(title: str, script: str, states: str, reason: str | None) -> None:
    life = Life().do(*filter(None, script.split(";")))

    assert states.split() == life.states, title
    assert reason == life.attempt.reason


def test_stall_reason_contains_the_number_of_missing_ranks() -> None:
    life = Life(ranks=1, world_size=4).do("wait 1800")

    assert "alive, but no first step for 1800 s; 3 of 4 ranks never registered" == life.attempt.reason


@pytest.mark.parametrize(
    ("script", "ended_after"),
    [
        *(("step 0;wait 50;done 0;wait 5;done 1", 55), ("step 0;wait 50;raise 1;wait 5;term 0", 50)),
        *(("step 0;wait 50;refuse 1;wait 20", 50), ("step 0;wait 50;term *;wait 60", 50)),
    ],
)
def test_end_of_an_attempt_is_the_end_of_its_rank(script: str, ended_after: int) -> None:
    life = Life().do(*script.split(";"))

    assert ended_after == (life.attempt.ended_at - life.attempt.started_at) / 1e6


def test_every_state_is_in_the_table_and_in_the_docs() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "runs.md").read_text()
    reached = {"pending"} | {state for row in TABLE for state in row[2].split()}

    assert set(RunState) == reached
    assert [] == [state for state in RunState if f"**{state}**" not in docs]


# Properties that hold for all actions.

ACTIONS = st.sampled_from(
    [f"{verb} {rank}" for verb in ("step", "phase", "leave", "vanish", "refuse", "back") for rank in (0, 1)]
    + ["wait 5", "wait 30", "wait 310", "restart"]
)
EXITS = st.sampled_from(["done", "raise", "peer", "term", "int", "exit0", "mute"])


def endings(verbs: list[str]) -> list[str]:
    return [f"{verb} {rank}" for rank, verb in enumerate(verbs)]


@settings(max_examples=examples(150), deadline=None)
@given(actions=st.lists(ACTIONS, max_size=15), last=st.lists(EXITS, min_size=2, max_size=2))
def test_exit_reports_of_all_ranks_end_an_attempt(actions: list[str], last: list[str]) -> None:
    life = Life().do(*actions, "back *", *endings(last))
    states = list(life.states)
    life.do("wait 400")

    assert life.attempt.has_ended
    assert states == life.states, "the state changed without an action"
    assert states[-1] == life.state
    assert life.attempt.started_at <= life.attempt.ended_at <= life.wall
    assert (life.state == "completed") == (last == ["done", "done"])


@settings(max_examples=examples(150), deadline=None)
@given(actions=st.lists(ACTIONS, max_size=8), last=st.lists(EXITS, min_size=2, max_size=2), data=st.data())
def test_restart_of_the_service_changes_no_final_state(actions: list[str], last: list[str], data) -> None:
    script = [*actions, "back *", "wait 5", *endings(last), "wait 60"]
    cut = data.draw(st.integers(0, len(script)))
    plain, restarted = Life().do(*script), Life().do(*script[:cut], "restart", *script[cut:])

    assert (plain.state, plain.attempt.reason) == (restarted.state, restarted.attempt.reason)


@settings(max_examples=examples(150), deadline=None)
@given(actions=st.lists(st.one_of(ACTIONS, st.sampled_from(["done 0", "term 1", "raise 0", "mute 1"])), max_size=20))
def test_failed_run_remains_failed_and_live_run_has_not_ended(actions: list[str]) -> None:
    life = Life()
    exit_of_0 = None
    for action in actions:
        life.do(action)
        if action in {"done 0", "raise 0"}:
            exit_of_0 = exit_of_0 or action
        if exit_of_0 == "raise 0":
            assert "failed" == life.state
        if not life.attempt.has_ended:
            assert life.attempt.live_ranks
            assert life.attempt.ended_at is None


# Facts about an attempt other than its states.


def test_ended_attempt_has_its_last_step_and_time_and_misses_no_rank():
    life = Life().do("step 0", "done 0", "wait 1", "done 1")
    ended = life.attempt

    assert ("completed", 1, START + 1_000_000, 0) == (life.state, ended.last_step, ended.ended_at, ended.ranks_missing)


def test_vanished_rank_is_missing_until_it_registers_again():
    life = Life().do("step 0", "refuse 1", "wait 9")
    before = life.state
    life.now += 1.0
    _, vanished = life.tracker.tick(life.now, life.wall)
    missing = life.attempt.ranks_missing
    life.do("back 1")

    assert ["running", "running"] == [before, life.state]
    assert ([1], 1, 0) == ([rank.number for rank in vanished], missing, life.attempt.ranks_missing)
    assert (None, None) == (life.attempt.reason, life.attempt.ended_at)


def test_closed_port_is_ignored_while_heartbeats_arrive():
    life = Life().do("step 0")
    for _ in range(20):
        life.liveness[1].note_refusal(life.now)
        life.now += 5
        life.do("wait 0.1")

    assert "running" == life.state


def test_unregistered_ranks_are_missing_but_do_not_fail_the_run():
    life = Life(ranks=1, world_size=8).do("step 0")
    missing = life.attempt.ranks_missing
    life.do("done 0")

    assert (8 - 1, "completed", 0) == (missing, life.state, life.attempt.ranks_missing)


def test_configuration_of_a_rank_is_kept_without_secrets():
    """Ranks mask secrets before they send them, but ranks of another release may not."""
    life = Life(ranks=0)
    config = {"argv": ["train.py", "--hf-token", "correct-horse"], "serve": {"password": "correct-horse"}, "every": 3}
    life.register(0, config=config)

    assert {"argv": ["train.py", "--hf-token", "***"], "serve": {"password": "***"}, "every": 3} == life.attempt.config
