"""POST /stacks: only with a token, only with the right one, and never by a GET."""

from __future__ import annotations

import json

import pytest

from rankscope_exporter.serving.routes import RankServerSources


@pytest.fixture
def guarded(new_rank):
    """Return a rank with a token, and the stacks it will give."""
    rank = new_rank(token="secret")
    rank.channel._sources = RankServerSources(
        take_stacks=lambda: {"rank": 0, "stacks": {"threads": []}, "loss": "ünïcode"}
    )
    return rank


def test_stacks_are_given_for_the_right_token(guarded):
    got = guarded.get("/stacks", "POST", b"{}", Authorization="Bearer secret")

    assert (200, "application/json", "no-store") == (
        got.status,
        got.headers["Content-Type"],
        got.headers["Cache-Control"],
    )
    assert "ünïcode" == json.loads(got.body)["loss"]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}])
def test_without_the_right_token_nothing_is_taken(guarded, headers):
    guarded.channel._sources = RankServerSources(take_stacks=lambda: pytest.fail("taken"))
    got = guarded.get("/stacks", "POST", **headers)

    assert 401 == got.status
    assert "RANKSCOPE_TOKEN" in got.text


def test_a_rank_without_a_token_gives_none_and_says_what_to_set(rank):
    rank.channel._sources = RankServerSources(take_stacks=lambda: pytest.fail("taken"))
    got = rank.get("/stacks", "POST", b"{}")

    assert 403 == got.status
    assert "set RANKSCOPE_TOKEN" in got.text


def test_a_get_is_told_to_post(guarded):
    got = guarded.get("/stacks", Authorization="Bearer secret")

    assert (405, "POST") == (got.status, got.headers["Allow"])


def test_a_rank_that_ends_says_so(guarded):
    guarded.channel._sources = RankServerSources(take_stacks=None)

    assert 503 == guarded.get("/stacks", "POST", Authorization="Bearer secret").status


def test_records_of_many_threads_all_get_a_seq_of_their_own(rank, record):
    """The watchdog and the server publish past the publisher."""
    import threading

    def publish(first: int) -> None:
        for step in range(first, first + 200):
            rank.channel.publish(record(step))

    threads = [threading.Thread(target=publish, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = [row["step"] for row in rank.records(-1).rows]

    assert sorted(1000 * i + n for i in range(4) for n in range(200)) == sorted(steps)
    for i in range(4):
        assert [step for step in steps if step // 1000 == i] == sorted(step for step in steps if step // 1000 == i)
