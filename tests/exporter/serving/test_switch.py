"""PUT /config: only with a token, only with the right one, only what can be meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.serving.routes import RankServerSources

RIGHT = {"Authorization": "Bearer secret"}


@pytest.fixture
def guarded(new_rank):
    """Return a rank with a token, whose measuring can be changed."""
    rank = new_rank(token="secret")
    rank.channel._sources = RankServerSources(change_sampling=take)
    return rank


def take(document: dict[str, Any]) -> dict[str, Any]:
    if "quantities" not in document:
        raise ConfigError("unknown setting. Did you mean quantities?")
    return {"to_come": [document]}


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_what_is_measured_is_taken_over(guarded, method):
    got = guarded.get("/config", method, b'{"quantities": ["gradients"]}', **RIGHT)

    assert 202 == got.status
    assert {"to_come": [{"quantities": ["gradients"]}]} == json.loads(got.body)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_without_the_right_token_nothing_changes(guarded, headers):
    guarded.channel._sources = RankServerSources(change_sampling=lambda _: pytest.fail("changed"))

    assert 401 == guarded.get("/config", "PUT", b"{}", **headers).status


def test_a_rank_without_a_token_changes_nothing_and_says_what_to_set(rank):
    rank.channel._sources = RankServerSources(change_sampling=lambda _: pytest.fail("changed"))
    got = rank.get("/config", "PUT", b"{}")

    assert 403 == got.status
    assert "set RANKSCOPE_TOKEN" in got.text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "no JSON document"),
        (b"[" * 5000, "no JSON document"),
        (b"[]", "a JSON object of settings"),
        (b'{"quantitis": []}', "Did you mean quantities"),
        (b" " * 70_000, "longer than 64 KiB"),
        (b"\xff", "no JSON document"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(guarded, body, why):
    got = guarded.get("/config", "PUT", body, **RIGHT)

    assert 400 == got.status
    assert why in got.text


def test_a_rank_that_ends_says_so(guarded):
    guarded.channel._sources = RankServerSources(change_sampling=None)

    assert 503 == guarded.get("/config", "PUT", b'{"quantities": []}', **RIGHT).status


def test_the_configuration_page_shows_what_is_measured_now(guarded):
    guarded.channel._sources = RankServerSources(sampling_state=lambda: {"since_step": 7})

    assert {"since_step": 7} == json.loads(guarded.get("/config", **RIGHT).body)["measuring"]
