"""The events of a step: the observers that are called, their order, and the effect of a failing observer."""

from __future__ import annotations

import logging

import pytest

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.quantities.base import Quantity
from rankscope_exporter.records.pending_step import StepEvents, StepObserver


class Noting(StepObserver):
    """Notes the events of a step begin in a list that it may share with other observers."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def on_before_step(self, step: int) -> None:
        self.calls.append(f"{self.name} before {step}")

    def on_step_begin(self, step: int) -> None:
        self.calls.append(f"{self.name} begin {step}")


class Failing(StepObserver):
    def on_step_begin(self, step: int) -> None:
        raise RuntimeError(f"step {step}")


def events_of(owner: type) -> set[str]:
    return {name for name in vars(owner) if name.startswith("on_")}


def test_observers_are_called_in_the_given_order() -> None:
    calls: list[str] = []
    events = StepEvents(ErrorBoundary(), [Noting("first", calls), Noting("second", calls)])
    events.on_before_step(3)
    events.on_step_begin(3)

    assert ["first before 3", "second before 3", "first begin 3", "second begin 3"] == calls


def test_failing_observer_is_counted_and_logged_and_the_next_is_called(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    boundary = ErrorBoundary()
    events = StepEvents(boundary, [Failing(), Noting("next", calls)])
    with caplog.at_level(logging.ERROR, "rankscope"):
        events.on_step_begin(1)
        events.on_step_begin(2)

    assert (["next begin 1", "next begin 2"], 2) == (calls, boundary.count)
    assert ["Failing.on_step_begin failed, training continues: RuntimeError('step 1')"] == [
        record.getMessage() for record in caplog.records
    ]


def test_every_event_of_an_observer_can_be_emitted() -> None:
    assert events_of(StepObserver) == {name for name in vars(StepEvents(ErrorBoundary())) if name.startswith("on_")}


def test_quantities_have_the_event_names_of_observers() -> None:
    assert {"on_gradient_ready"} == events_of(Quantity) - events_of(StepObserver)
