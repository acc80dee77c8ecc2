"""An expensive quantity is sampled less often automatically, and this is reported. Other settings keep their effect."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from tests.exporter import parts

from rankscope_exporter import quantities
from rankscope_exporter.quantities.base import Table
from rankscope_exporter.quantities.parameters import Parameters
from rankscope_exporter.reactions.overhead_window import PATIENCE

MOST_STEPS = 3000
STEP_SECONDS = 1.0


class Times:
    """A clock and a cost that the test sets, independent of the load of the machine."""

    def __init__(self) -> None:
        self.clock = self.cost = 0.0

    def spend(self, seconds: float) -> None:
        self.clock += seconds
        self.cost += seconds


class Costly(Parameters):
    """A quantity with a cost at every sampled step. Not a direct subclass of Quantity: those are always selectable."""

    name: ClassVar[str] = "test_costly"
    seconds: ClassVar[float] = 0.0
    busy_seconds: ClassVar[float] = 0.0
    times: ClassVar[Times] = Times()

    def on_step_begin(self, table: Table) -> None:
        super().on_step_begin(table)
        self.times.spend(self.seconds)
        until = time.thread_time() + self.busy_seconds
        while time.thread_time() < until:
            pass


@pytest.fixture(autouse=True)
def _offered(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {**quantities.quantity_classes(), Costly.name: Costly}
    monkeypatch.setattr(quantities, "quantity_classes", lambda: classes)
    monkeypatch.setattr(Costly, "times", Times())


class Training(parts.Training):
    """A training with the clock of the test. With `real`: with the clock of the machine and short windows."""

    def __init__(self, *, real: bool = False, **settings: Any) -> None:
        base = {"quantities": ["test_costly"], "max_overhead": "50 %", "hang_after_seconds": 0}
        super().__init__(**base | settings)
        self.controller = self.session.reactions.overhead_controller
        self.window = self.controller._window
        if not real:
            times = Costly.times
            self.controller._clock, self.controller._cost = lambda: times.clock, lambda: times.cost
        elif self.window is not None:
            self.window._least_seconds = 0.2

    def each_step(self, most: int = MOST_STEPS) -> Iterator[int]:
        """Yield the number of each step after it."""
        for step in range(1, most + 1):
            self.train()
            Costly.times.clock += STEP_SECONDS
            yield step

    def changes(self) -> list[dict[str, Any]]:
        events = [event for _, event in self.events("budget")]
        return [{**json.loads(e.details or ""), "severity": e.severity} for e in events]


def test_expensive_quantity_is_sampled_less_often_and_reported(monkeypatch, capfd, reader, eventually):
    """The cost is 30 s at each step of 1 s; half of the time is allowed."""
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = Training(console=True)
    enough = MOST_STEPS
    for step in training.each_step():
        share = training.window.share
        if enough == MOST_STEPS and share is not None and share <= 0.5:
            enough = step + 2 * training.controller.stretch
        if step >= enough:
            break
    stretch = training.controller.stretch
    page = eventually(lambda: reader(training.monitor).get("/metrics").decode())
    measuring = training.monitor.measuring
    training.monitor.detach()
    events, measured = training.changes(), training.measured()
    last = events[-1]

    assert (1, stretch) == (events[0]["was"], last["now"])
    assert all(event["share"] > 0.5 == event["max_overhead"] for event in events)
    assert all(event["now"] >= 2 * event["was"] for event in events)
    assert {"warning"} == {event["severity"] for event in events}
    late = [step for step in measured if step >= last["step"]]
    assert len(late) > 1
    assert {stretch} == {b - a for a, b in itertools.pairwise(late)}
    assert (stretch, 0.5) == (measuring["stretch"], measuring["max_overhead"])
    assert f" {stretch}.0" in next(line for line in page.splitlines() if line.startswith("rankscope_sampling_stretch{"))
    said = capfd.readouterr().err
    assert len(events) == said.count("of the configured steps is sampled: measuring")
    assert f"one in {stretch} of the configured steps is sampled" in said
    assert 0 == training.monitor.faults


def test_cpu_time_of_the_machine_counts_as_overhead(monkeypatch):
    """A busy loop of 20 ms per step exceeds 2 % also on a loaded machine."""
    monkeypatch.setattr(Costly, "busy_seconds", 0.02)
    training = Training(real=True, max_overhead="2 %")
    for _ in training.each_step():
        if training.controller.stretch >= 8:
            break
    training.monitor.detach()

    assert training.controller.stretch >= 8
    assert all(event["share"] > 0.02 for event in training.changes())


def test_configured_interval_returns_when_overhead_is_low(monkeypatch):
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = Training()
    for _ in training.each_step():
        if training.controller.stretch >= 4 and Costly.seconds:
            monkeypatch.setattr(Costly, "seconds", 0.0)
        if training.controller.stretch == 1 and not Costly.seconds:
            break
    training.monitor.detach()
    events = training.changes()
    tightened = [event for event in events if event["now"] < event["was"]]

    assert 1 == events[-1]["now"]
    assert all(event["was"] == 2 * event["now"] for event in tightened)
    assert {"info"} == {event["severity"] for event in tightened}
    assert all(later["step"] - earlier["step"] >= PATIENCE for earlier, later in itertools.pairwise(tightened))


def test_switch_resets_the_stretch(monkeypatch):
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = Training()
    at = 0
    for step in training.each_step():
        if not at and training.controller.stretch >= 4:
            monkeypatch.setattr(Costly, "seconds", 0.0)
            training.monitor.switch({"every": 3})
            at = step
        if at and step >= at + 10:
            break
    training.monitor.detach()

    assert 1 == training.controller.stretch
    assert [at + 1, at + 4, at + 7, at + 10] == [step for step in training.measured() if step > at][:4]


def test_every_times_and_start_step_keep_their_meaning_when_stretched():
    """Every second one of the steps 5, 8, 11, … is sampled."""
    training = Training(options={"test_costly": {"start_step": 5, "every": 3, "times": 4}})
    assert training.window is not None
    for step in training.each_step(40):
        if step == 1:
            training.controller._sources.request_reaction(
                {"stretch": 2, "share": 0.9, "max_overhead": 0.5, "rank": 0, "changes": 0}, "budget"
            )
    training.monitor.detach()

    assert [5, 11, 17, 23] == training.measured()


def test_without_max_overhead_sampling_is_never_stretched(monkeypatch):
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = Training(max_overhead=None)
    assert 40 == sum(1 for _ in training.each_step(40))
    training.monitor.detach()

    assert (list(range(1, 41)), []) == (training.measured(), training.changes())
