"""Stacks are out before anything else is asked for, and a device that does not answer holds up nobody twice."""

from __future__ import annotations

import threading

from rankscope_contract.events import Event
from rankscope_exporter import diagnosis
from rankscope_exporter.guard import Guard


def test_a_flight_record_that_never_comes_costs_one_thread_and_no_stacks(monkeypatch):
    never, asked = threading.Event(), []

    def hold(_reason):
        asked.append(threading.current_thread())
        never.wait(30)

    monkeypatch.setattr(diagnosis, "take_flight_record", hold)
    monkeypatch.setattr(diagnosis, "FLIGHT_SECONDS", 0.05)
    published = []
    taking = diagnosis.Diagnosis(3, published.append, lambda: 41, Guard())
    taken = [taking.take("hang", first=Event(type="hang")) for _ in range(3)]
    never.set()

    assert [None] * 3 == [each.flight for each in taken]
    assert ["hang", "stacks"] * 3 == [event.type for record in published for event in record.events]
    assert {41} == {record.step for record in published}
    assert 1 == len(asked)


def test_what_was_taken_a_moment_ago_is_given_again_and_recorded_once(monkeypatch):
    now = [100.0]
    published = []
    taking = diagnosis.Diagnosis(0, published.append, lambda: None, Guard(), clock=lambda: now[0])
    first = taking.take("request")
    now[0] += diagnosis.MIN_SECONDS / 2
    again = taking.take("call")
    now[0] += diagnosis.MIN_SECONDS
    later = taking.take("call")

    assert first is again
    assert first is not later
    assert 2 == len(published)
