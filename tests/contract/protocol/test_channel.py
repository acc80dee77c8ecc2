"""Tests of the JSON form of messages between rank and service, also with unknown keys of newer releases."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.protocol.channel import Registration, RegistrationReply

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
count = st.integers(0, 1 << 40)
registrations = st.builds(
    Registration,
    run=text,
    rank=count,
    world_size=count,
    local_rank=count,
    host=text,
    pid=count,
    incarnation=text,
    launch_id=text,
    url=text,
    step=st.none() | count,
    phase=st.none() | text,
    planned_steps=st.none() | count,
    config=st.dictionaries(text, text | count | st.none(), max_size=3),
    versions=st.dictionaries(text, text, max_size=3),
)
replies = st.builds(
    RegistrationReply, lease=text, attempt=count, heartbeat_seconds=st.floats(0.1, 600), committed=st.integers(-1, 9)
)


@given(registrations | replies)
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
