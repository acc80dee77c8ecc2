"""Stacks are published before the flight record is read, and a hanging device blocks only one thread."""

from __future__ import annotations

import threading

import pytest

from rankscope_contract.diagnostics.stacks import Collective, FlightRecord
from rankscope_contract.model.events import Event
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.hangs import diagnosis


def test_hanging_flight_record_blocks_one_thread(monkeypatch):
    never, asked = threading.Event(), []

    def hold(_reason, _report):
        asked.append(threading.current_thread())
        never.wait(30)

    monkeypatch.setattr(diagnosis, "take_flight_record", hold)
    monkeypatch.setattr(diagnosis, "FLIGHT_SECONDS", 0.05)
    published = []
    taking = diagnosis.Diagnosis(3, published.append, lambda: 41, ErrorBoundary())
    taken = [taking.take("hang", first=Event(type="hang")) for _ in range(3)]
    never.set()

    assert [None] * 3 == [each.flight for each in taken]
    assert ["hang", "stacks"] * 3 == [event.type for record in published for event in record.events]
    assert {41} == {record.step for record in published}
    assert 1 == len(asked)


def test_recent_result_is_returned_and_published_once(monkeypatch):
    now = [100.0]
    published = []
    taking = diagnosis.Diagnosis(0, published.append, lambda: None, ErrorBoundary(), clock=lambda: now[0])
    first = taking.take("request")
    now[0] += diagnosis.MIN_SECONDS / 2
    again = taking.take("call")
    now[0] += diagnosis.MIN_SECONDS
    later = taking.take("call")

    assert first is again
    assert first is not later
    assert 2 == len(published)


def test_signal_handler_gets_stacks_during_a_publication():
    """Two consecutive signals: the second handler interrupts the first one on the training thread."""
    published, asked = [], []

    def publish(record):
        published.append(record)
        asked.append(taking.take("call"))

    def interrupted():
        asked.append(taking.take("call"))

    taking = diagnosis.Diagnosis(0, publish, lambda: 7, ErrorBoundary())
    training = threading.Thread(target=interrupted, daemon=True)
    training.start()
    training.join(30)

    assert (2, 1) == (len(asked), len(published))
    stands = [frame.function for thread in asked[0].stacks.threads for frame in thread.frames]
    assert "interrupted" in stands


def test_caller_does_not_wait_for_a_blocked_thread(monkeypatch):
    monkeypatch.setattr(diagnosis, "LOCK_SECONDS", 0.05)
    held, freed = threading.Event(), threading.Event()

    def publish(_record):
        held.set()
        freed.wait(30)

    taking = diagnosis.Diagnosis(0, publish, lambda: 7, ErrorBoundary())
    watchdog = threading.Thread(target=taking.publish, args=(Event(type="hang"),), daemon=True)
    watchdog.start()
    held.wait(30)
    taken = taking.take("call")
    freed.set()
    watchdog.join(30)

    assert 7 == taken.step
    assert taken.stacks.threads


# Stacks, flight record and publishing do not depend on each other.

RECORD = FlightRecord(
    reason="hang",
    collectives=(Collective(op="all_reduce", backend="gloo", group="dp", seq=5, is_pending=True, age_seconds=9.0),),
    recorded=1,
)


def failing(*_args):
    raise OSError("no such device")


@pytest.fixture
def recorded(monkeypatch):
    """Simulate a process with a readable flight record."""
    monkeypatch.setattr(diagnosis, "take_flight_record", lambda _reason, _report: RECORD)


def event_types(published):
    return [event.type for record in published for event in record.events]


def test_flight_record_is_published_if_stacks_fail(recorded, monkeypatch):
    monkeypatch.setattr(diagnosis, "take_stacks", failing)
    published, boundary = [], ErrorBoundary()
    taken = diagnosis.Diagnosis(0, published.append, lambda: 7, boundary).take("hang", first=Event(type="hang"))

    assert (RECORD, (), 1) == (taken.flight, taken.stacks.threads, boundary.count)
    assert ["hang", "flight_record"] == event_types(published)


@pytest.mark.parametrize("refused", ["hang", "stacks", "flight_record"])
def test_failed_event_does_not_stop_the_others(refused, recorded):
    published, boundary = [], ErrorBoundary()

    def publish(record):
        if record.events[0].type == refused:
            failing()
        published.append(record)

    taken = diagnosis.Diagnosis(0, publish, lambda: 7, boundary).take("hang", first=Event(type="hang"))

    assert [kind for kind in ("hang", "stacks", "flight_record") if kind != refused] == event_types(published)
    assert (RECORD, 1) == (taken.flight, boundary.count)


def test_failed_recorder_is_reported_after_the_reading(monkeypatch):
    """A report takes locks that a hanging training thread may hold."""
    held, published, boundary = threading.Event(), [], ErrorBoundary()

    def take(_reason, report):
        report("reading the flight record of nccl", TimeoutError("no answer within 1.5 s"))
        return RECORD

    monkeypatch.setattr(diagnosis, "take_flight_record", take)
    boundary.on_first = lambda *_: held.wait(60)
    taken = diagnosis.Diagnosis(0, published.append, lambda: 7, boundary).take("hang")
    held.set()

    assert RECORD == taken.flight
    assert ["stacks", "flight_record"] == event_types(published)
