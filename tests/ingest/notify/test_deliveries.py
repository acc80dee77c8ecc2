"""Counters of deliveries, and the text about messages that were not delivered."""

from __future__ import annotations

import itertools
from collections import Counter

from rankscope_ingest.notify.deliveries import Deliveries


def at_times(*seconds):
    return Deliveries(clock=itertools.chain(seconds, itertools.repeat(seconds[-1])).__next__)


def test_waiting_messages_are_named_with_the_latest_reason():
    deliveries = at_times(100.0, 110.0, 140.0)
    deliveries.failed("json://a", "first", "timed out", is_last=False)
    deliveries.failed("json://a", "second", "403 Forbidden", is_last=False)

    assert "2 messages wait since 40 s: 403 Forbidden (json://a)" == deliveries.trouble()


def test_a_message_to_two_receivers_is_one_message():
    deliveries = at_times(0.0)
    deliveries.failed("json://a", "first", "timed out", is_last=False)
    deliveries.failed("json://b", "first", "403 Forbidden", is_last=False)

    assert "1 message waits since 0 s: 403 Forbidden (json://b)" == deliveries.trouble()


def test_a_second_failure_of_a_message_keeps_its_time():
    deliveries = at_times(0.0, 30.0)
    deliveries.failed("json://a", "first", "timed out", is_last=False)
    deliveries.failed("json://a", "first", "403 Forbidden", is_last=False)

    assert "1 message waits since 30 s: 403 Forbidden (json://a)" == deliveries.trouble()


def test_a_delivered_message_waits_no_more():
    deliveries = at_times(0.0)
    deliveries.failed("json://a", "first", "timed out", is_last=False)
    deliveries.delivered("json://a", "first")

    assert None is deliveries.trouble()


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
