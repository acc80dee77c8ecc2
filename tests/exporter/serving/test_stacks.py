"""POST /stacks: on loopback, and elsewhere only with the right token."""

from __future__ import annotations

import json
import threading

import pytest

from rankscope_exporter.serving.rank_state import RankServerSources


def must_not_take() -> dict[str, object]:
    pytest.fail("stacks were taken")


def test_stacks_are_sent_for_the_right_token(new_rank):
    stacks = {"rank": 0, "stacks": {"threads": []}, "loss": "ünïcode"}
    rank = new_rank(token="secret", sources=RankServerSources(take_stacks=lambda: stacks))
    got = rank.get("/stacks", "POST", b"{}", Authorization="Bearer secret")

    assert (200, "application/json", "no-store") == (
        got.status,
        got.headers["Content-Type"],
        got.headers["Cache-Control"],
    )
    assert "ünïcode" == json.loads(got.body)["loss"]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}])
def test_request_without_the_right_token_takes_no_stacks(new_rank, headers):
    rank = new_rank(token="secret", sources=RankServerSources(take_stacks=must_not_take))
    got = rank.get("/stacks", "POST", **headers)

    assert 401 == got.status
    assert "RANKSCOPE_TOKEN" in got.text


def test_rank_on_loopback_sends_stacks_without_a_token(new_rank):
    rank = new_rank(sources=RankServerSources(take_stacks=lambda: {"rank": 0}))

    assert {"rank": 0} == json.loads(rank.get("/stacks", "POST", b"{}").body)


def test_rank_that_all_machines_reach_without_token_sends_no_stacks(new_rank):
    sources = RankServerSources(take_stacks=must_not_take)
    rank = new_rank(sources=sources, listen="0.0.0.0:0", insecure=True)
    got = rank.get("/stacks", "POST", b"{}")

    assert 403 == got.status
    assert "set RANKSCOPE_TOKEN" in got.text


def test_rank_without_a_session_answers_503(new_rank):
    rank = new_rank(token="secret")

    assert 503 == rank.get("/stacks", "POST", Authorization="Bearer secret").status


def test_records_of_several_threads_get_distinct_sequence_numbers(rank, record):
    """The watchdog and the HTTP server publish in parallel with the publisher."""

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
