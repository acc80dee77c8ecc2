"""An expensive quantity is sampled less often automatically, and this is reported. Other settings keep their effect."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import Monitor, quantities
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


class Training:
    """A training with the clock of the test. With `real`: with the clock of the machine and short windows."""

    def __init__(self, *, real: bool = False, **settings: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        base = {"quantities": ["test_costly"], "max_overhead": "50 %", "exit_wait_seconds": 0, "hang_after_seconds": 0}
        self.monitor = Monitor({**base, **settings}).attach(self.net, self.optimizer)
        session = session_of(self.monitor)
        self.ring, self.overhead_controller = session.channel.ring, session.reactions.overhead_controller
        self.window = self.overhead_controller._window
        if not real:
            self.overhead_controller._clock, self.overhead_controller._cost = (
                lambda: Costly.times.clock,
                lambda: Costly.times.cost,
            )
        elif self.window is not None:
            self.window._least_seconds = 0.2

    def steps(self) -> Iterator[int]:
        """Yield the number of each step after it."""
        for step in range(1, MOST_STEPS):
            self.net(torch.ones(2, 3)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            Costly.times.clock += STEP_SECONDS
            yield step

    def events(self) -> list[dict[str, Any]]:
        events = [e for r in self.ring.after(-1, 1 << 30).records for e in r.events if e.type == "budget"]
        return [{**json.loads(e.details or ""), "message": e.message, "severity": e.severity} for e in events]

    def measured(self) -> list[int]:
        return [r.step for r in self.ring.after(-1, 1 << 30).records if r.statistics is not None and r.step is not None]


def test_expensive_quantity_is_sampled_less_often_and_reported(monkeypatch, capfd, reader, eventually):
    """The cost is 30 s at each step of 1 s; half of the time is allowed."""
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = Training()
    enough = MOST_STEPS
    for step in training.steps():
        share = training.window.share
        if enough == MOST_STEPS and share is not None and share <= 0.5:
            enough = step + 2 * training.overhead_controller.stretch
        if step >= enough:
            break
    stretch = training.overhead_controller.stretch
    page = eventually(lambda: reader(training.monitor).get("/metrics").decode())
    measuring = training.monitor.measuring
    training.monitor.detach()
    events, measured = training.events(), training.measured()
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
    training = Training(real=True, console=False, max_overhead="2 %")
    for _ in training.steps():
        if training.overhead_controller.stretch >= 8:
            break
    training.monitor.detach()

    assert training.overhead_controller.stretch >= 8
    assert all(event["share"] > 0.02 for event in training.events())


def test_configured_interval_returns_when_overhead_is_low(monkeypatch):
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = Training(console=False)
    for _ in training.steps():
        if training.overhead_controller.stretch >= 4 and Costly.seconds:
            monkeypatch.setattr(Costly, "seconds", 0.0)
        if training.overhead_controller.stretch == 1 and not Costly.seconds:
            break
    training.monitor.detach()
    events = training.events()
    tightened = [event for event in events if event["now"] < event["was"]]

    assert 1 == events[-1]["now"]
    assert all(event["was"] == 2 * event["now"] for event in tightened)
    assert {"info"} == {event["severity"] for event in tightened}
    assert all(later["step"] - earlier["step"] >= PATIENCE for earlier, later in itertools.pairwise(tightened))


def test_switch_resets_the_stretch(monkeypatch):
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = Training(console=False)
    at = 0
    for step in training.steps():
        if not at and training.overhead_controller.stretch >= 4:
            monkeypatch.setattr(Costly, "seconds", 0.0)
            training.monitor.switch({"every": 3})
            at = step
        if at and step >= at + 10:
            break
    training.monitor.detach()

    assert 1 == training.overhead_controller.stretch
    assert [at + 1, at + 4, at + 7, at + 10] == [step for step in training.measured() if step > at][:4]


def test_every_times_and_start_step_keep_their_meaning_when_stretched():
    """Every second one of the steps 5, 8, 11, … is sampled."""
    training = Training(console=False, options={"test_costly": {"start_step": 5, "every": 3, "times": 4}})
    assert training.window is not None
    for step in training.steps():
        if step == 1:
            training.overhead_controller._sources.request_reaction(
                {"stretch": 2, "share": 0.9, "max_overhead": 0.5, "rank": 0, "changes": 0}, "budget"
            )
        if step == 40:
            break
    training.monitor.detach()

    assert [5, 11, 17, 23] == training.measured()


def test_without_max_overhead_sampling_is_never_stretched(monkeypatch):
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = Training(console=False, max_overhead=None)
    for step in training.steps():
        if step == 40:
            break
    training.monitor.detach()

    assert (list(range(1, 41)), []) == (training.measured(), training.events())


@pytest.mark.thorough
def test_cost_is_read_only_where_a_window_may_end():
    """Adding the CPU time of all threads costs microseconds. Steps take 10 ms and windows 10 s."""
    training = Training(max_overhead="1 %")
    asked: list[float] = []

    def cost() -> float:
        asked.append(Costly.times.clock)
        return 0.0

    training.overhead_controller._cost = cost
    for step in training.steps():
        Costly.times.clock -= 0.99 * STEP_SECONDS
        if step == 1500:
            break
    training.monitor.detach()

    assert 2 == len(asked), asked
