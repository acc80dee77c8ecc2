"""Senders of remote write that get only refusals: when they are logged and listed, and when no longer."""

from __future__ import annotations

import pytest

from rankscope_ingest.remote_write.senders import FORGIVEN_SECONDS, MIXED_SECONDS, SHOWN_SECONDS, Senders


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def names(senders):
    return [one.name for one in senders.listed()]


def test_single_refusals_of_a_sender_that_is_accepted_are_not_listed(caplog):
    clock = Clock()
    senders = Senders(clock)
    for _ in range(10):
        senders.accepted("10.0.0.1", "")
        clock.now += FORGIVEN_SECONDS - 1
        senders.refused("10.0.0.1", "", "malformed: x")
        senders.accepted("10.0.0.1", "")
        clock.now += MIXED_SECONDS

    assert ([], []) == (names(senders), caplog.records)


def test_sender_that_was_accepted_earlier_is_listed_and_later_recovers(caplog):
    caplog.set_level("INFO")
    clock = Clock()
    senders = Senders(clock)
    senders.accepted("10.0.0.1", "p/3")
    for _ in range(5):
        clock.now += FORGIVEN_SECONDS / 2
        senders.refused("10.0.0.1", "p/3", "malformed: x")
    listed = names(senders)
    senders.accepted("10.0.0.1", "p/3")

    assert (["10.0.0.1 (p/3)"], []) == (listed, names(senders))
    assert ["are refused", "are accepted now"] == [
        text for one in caplog.records for text in ("are refused", "are accepted now") if text in one.getMessage()
    ]


@pytest.mark.parametrize(
    ("accepted_seconds", "share", "lines"),
    [
        (5, "120 of 240 requests", ["3 of 6"]),
        (120, "72 of 75 requests", [*("all requests of", "requests of 10.0.0.1") * 2, "1 of 2"]),
    ],
)
def test_accepted_requests_do_not_hide_a_refused_sender_with_the_same_name(caplog, accepted_seconds, share, lines):
    """Two programs behind one proxy, of which one sends every 5 s and gets only refusals."""
    caplog.set_level("INFO")
    clock = Clock()
    senders = Senders(clock)
    for moment in range(0, 600, 5):
        clock.now += 5
        if moment % accepted_seconds == 0:
            senders.accepted("10.0.0.1", "p/3")
        senders.refused("10.0.0.1", "p/3", "malformed: x")
    (listed,) = senders.listed()

    assert share == listed.share
    assert lines == [" ".join(one.getMessage().split()[2:5]) for one in caplog.records]

    clock.now += MIXED_SECONDS
    assert [] == senders.listed()
    senders.accepted("10.0.0.1", "p/3")
    assert "accepted now" in caplog.messages[-1]


def test_refusals_before_the_first_accepted_request_are_forgotten():
    """Some senders try another format first, with several requests at the same time."""
    senders = Senders(Clock())
    for _ in range(8):
        senders.refused("10.0.0.1", "p/3", "unsupported: x")
    senders.accepted("10.0.0.1", "p/3")

    assert [] == senders.listed()


def test_senders_and_log_lines_are_bounded(caplog):
    """A program may send any number of values of User-Agent, of any length."""
    clock = Clock()
    senders = Senders(clock)
    for number in range(1000):
        clock.now += 0.01
        senders.refused("10.0.0.1", f"{number}" + "x" * 10_000, "y" * 10_000)

    assert 256 == len(senders.listed())
    assert 1000 > max(len(one.name) + len(one.reason) for one in senders.listed())
    assert 10 >= sum(record.name == "rankscope_ingest.remote_write.senders" for record in caplog.records)
    clock.now += SHOWN_SECONDS
    assert [] == senders.listed()
