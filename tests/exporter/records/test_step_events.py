"""The events of a step: the observers that are called, their order, and the effect of a failing observer."""

from __future__ import annotations

import logging

import pytest

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.quantities.base import Quantity
from rankscope_exporter.records.pending_step import StepEvents, StepObserver


class Noting(StepObserver):
    """Adds the events of a step to a list that it may share with other observers."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def on_before_step(self, step: int) -> None:
        self.calls.append(f"{self.name} before {step}")

    def on_step_begin(self, step: int) -> None:
        self.calls.append(f"{self.name} begin {step}")


class Failing(StepObserver):
    def on_step_begin(self, step: int) -> None:
        raise RuntimeError(f"step {step}")


def test_observers_are_called_in_order_and_a_failing_one_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    boundary = ErrorBoundary()
    events = StepEvents(boundary, [Noting("first", calls), Failing(), Noting("next", calls)])
    with caplog.at_level(logging.ERROR, "rankscope"):
        events.on_before_step(1)
        events.on_step_begin(1)
        events.on_step_begin(2)

    steps = [("before", 1), ("begin", 1), ("begin", 2)]
    assert ([f"{name} {what} {n}" for what, n in steps for name in ("first", "next")], 2) == (calls, boundary.count)
    assert ["Failing.on_step_begin failed, training continues: RuntimeError('step 1')"] == caplog.messages


def events_of(owner: object) -> set[str]:
    return {name for name in vars(owner) if name.startswith("on_")}


def test_every_event_of_observers_and_quantities_can_be_emitted() -> None:
    assert events_of(StepObserver) == events_of(StepEvents(ErrorBoundary()))
    assert {"on_gradient_ready"} == events_of(Quantity) - events_of(StepObserver)
