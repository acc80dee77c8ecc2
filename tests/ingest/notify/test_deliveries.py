"""Counters of deliveries, and the text about messages that were not delivered."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from rankscope_ingest.notify.deliveries import Deliveries


def at_times(*seconds):
    return Deliveries(clock=itertools.chain(seconds, itertools.repeat(seconds[-1])).__next__)


@pytest.mark.parametrize(
    ("failures", "seconds", "expected"),
    [
        (
            [("a", "first"), ("a", "second")],
            (100.0, 110.0, 140.0),
            "2 messages wait since 40 s: 403 Forbidden (json://a)",
        ),
        ([("a", "first"), ("b", "first")], (0.0,), "1 message waits since 0 s: 403 Forbidden (json://b)"),
        ([("a", "first"), ("a", "first")], (0.0, 30.0), "1 message waits since 30 s: 403 Forbidden (json://a)"),
    ],
    ids=["two messages", "two receivers", "two failures"],
)
def test_waiting_messages_are_named_with_the_latest_reason_until_delivery(failures, seconds, expected):
    deliveries = at_times(*seconds)
    for (receiver, key), reason in zip(failures, ("timed out", "403 Forbidden"), strict=True):
        deliveries.failed(f"json://{receiver}", key, reason, is_last=False)
    waiting = deliveries.trouble()
    for receiver, key in failures:
        deliveries.delivered(f"json://{receiver}", key)

    assert (expected, None) == (waiting, deliveries.trouble())


def test_lost_messages_are_named_until_their_receiver_gets_one():
    deliveries = at_times(0.0, 90.0)
    for key in ("first", "second"):
        deliveries.failed("json://a", key, "403 Forbidden", is_last=False)
        deliveries.failed("json://a", key, "403 Forbidden", is_last=True)
    lost = deliveries.trouble()
    deliveries.delivered("json://b", "third")
    still_lost = deliveries.trouble()
    deliveries.delivered("json://a", "third")

    assert "2 messages were not delivered, the first 90 s ago: 403 Forbidden (json://a)" == lost == still_lost
    assert None is deliveries.trouble()


def test_each_attempt_is_counted():
    counted: Counter[tuple[str, str]] = Counter()
    deliveries = Deliveries(lambda spec, outcome: counted.update([(spec.name, outcome)]))
    deliveries.failed("json://a", "first", "timed out", is_last=False)
    deliveries.failed("json://a", "first", "timed out", is_last=False)
    deliveries.delivered("json://a", "first")

    attempts = "rankscope_ingest_notification_attempts_total"
    assert {(attempts, "failed"): 2, (attempts, "sent"): 1} == counted
