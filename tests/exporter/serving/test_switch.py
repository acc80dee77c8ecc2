"""PUT /config changes the sampling: only with a token, only with the right one, and only for valid documents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.serving.rank_state import RankServerSources

RIGHT = {"Authorization": "Bearer secret"}


def change(document: dict[str, Any]) -> dict[str, Any]:
    if "quantities" not in document:
        raise ConfigError("unknown setting. Did you mean quantities?")
    return {"to_come": [document]}


def must_not_change(_document: dict[str, Any]) -> dict[str, Any]:
    pytest.fail("the sampling was changed")


@pytest.fixture
def guarded(new_rank):
    """Return a rank with a token, whose sampling can be changed."""
    sources = RankServerSources(change_sampling=change, sampling_state=lambda: {"since_step": 7})
    return new_rank(token="secret", sources=sources)


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_valid_document_changes_the_sampling(guarded, method):
    got = guarded.get("/config", method, b'{"quantities": ["gradients"]}', **RIGHT)

    assert 202 == got.status
    assert {"to_come": [{"quantities": ["gradients"]}]} == json.loads(got.body)
    assert {"since_step": 7} == json.loads(guarded.get("/config", **RIGHT).body)["measuring"]


def test_request_without_the_right_token_changes_nothing(new_rank):
    sources = RankServerSources(change_sampling=must_not_change)
    guarded, rank = new_rank(token="secret", sources=sources), new_rank(sources=sources)
    got = rank.get("/config", "PUT", b"{}")

    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert 401 == guarded.get("/config", "PUT", b"{}", **headers).status
    assert (403, True) == (got.status, "set RANKSCOPE_TOKEN" in got.text)


INVALID = {
    b"{": "not a JSON document",
    b"[" * 5000: "not a JSON document",
    b"\xff": "not a JSON document",
    b"[]": "a JSON object of settings",
    b'{"quantitis": []}': "Did you mean quantities",
    b" " * 70_000: "longer than 64 KiB",
}


def test_invalid_document_is_refused_with_the_reason(guarded):
    for body, reason in INVALID.items():
        got = guarded.get("/config", "PUT", body, **RIGHT)
        assert (400, True) == (got.status, reason in got.text), reason


def test_rank_without_a_session_answers_503(new_rank):
    rank = new_rank(token="secret")

    assert 503 == rank.get("/config", "PUT", b'{"quantities": []}', **RIGHT).status
    assert 503 == rank.get("/stacks", "POST", **RIGHT).status
