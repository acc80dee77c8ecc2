"""POST /stacks: on loopback, and elsewhere only with the right token."""

from __future__ import annotations

import json

import pytest

from rankscope_exporter.serving.rank_state import RankServerSources


def must_not_take() -> dict[str, object]:
    pytest.fail("stacks were taken")


def test_stacks_are_sent_for_the_right_token(new_rank):
    stacks = {"rank": 0, "stacks": {"threads": []}, "loss": "ünïcode"}
    rank = new_rank(token="secret", sources=RankServerSources(take_stacks=lambda: stacks))
    got = rank.get("/stacks", "POST", b"{}", Authorization="Bearer secret")

    shown = (got.status, got.headers["Content-Type"], got.headers["Cache-Control"])
    assert (200, "application/json", "no-store") == shown
    assert "ünïcode" == json.loads(got.body)["loss"]


def test_request_without_the_right_token_takes_no_stacks(new_rank):
    rank = new_rank(token="secret", sources=RankServerSources(take_stacks=must_not_take))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        got = rank.get("/stacks", "POST", **headers)
        assert (401, True) == (got.status, "RANKSCOPE_TOKEN" in got.text)


def test_rank_sends_stacks_without_a_token_only_on_loopback(new_rank):
    rank = new_rank(sources=RankServerSources(take_stacks=lambda: {"rank": 0}))
    other = new_rank(sources=RankServerSources(take_stacks=must_not_take), listen="0.0.0.0:0", insecure=True)
    refused = other.get("/stacks", "POST", b"{}")

    assert {"rank": 0} == json.loads(rank.get("/stacks", "POST", b"{}").body)
    assert (403, True) == (refused.status, "set RANKSCOPE_TOKEN" in refused.text)
