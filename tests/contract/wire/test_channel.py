"""Tests of the JSON form of messages between rank and service, also with unknown keys of newer releases."""

import json

import pytest

from rankscope_contract.wire.channel import Registration, RegistrationReply

WHO = {"run": "学习", "rank": 3, "world_size": 1 << 40, "local_rank": 1, "host": "node-1", "pid": 7}
WHO |= {"incarnation": "feedc0de", "launch_id": "a/b", "url": "http://node-1:9400"}
STATE = {"step": 5, "phase": "evaluation", "planned_steps": 9, "config": {"a": 1, "b": None}, "versions": {"x": "1"}}


@pytest.mark.parametrize(
    "message",
    [
        Registration(**WHO),
        Registration(**WHO, **STATE),
        RegistrationReply(lease="ü", attempt=1 << 40, heartbeat_seconds=0.1, committed=-1),
    ],
)
def test_message_is_unchanged_after_a_json_round_trip(message):
    assert message == type(message).from_json(message.to_json())
    assert message == type(message).from_json(message.to_json().encode())


def test_unknown_keys_of_a_newer_message_are_ignored():
    newer = {"lease": "a", "attempt": 1, "heartbeat_seconds": 2.0, "weather": "fine"}

    assert RegistrationReply(lease="a", attempt=1, heartbeat_seconds=2.0) == RegistrationReply.from_json(
        json.dumps(newer)
    )


@pytest.mark.parametrize("body", ["", "null", "[]", '"x"', "{", '{"run": "a"}', b"\xff"])
def test_malformed_message_raises_value_error(body):
    with pytest.raises(ValueError):
        Registration.from_json(body)
