"""Phases from marks, and the clock of a device, with a double of the device."""

from __future__ import annotations

import typing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import Monitor
from rankscope_exporter.adapters.base import FrameworkTraits
from rankscope_exporter.monitors.step_timing import (
    DeviceClock,
    HostClock,
    Kind,
    Mark,
    PhaseTotals,
    phases_of,
    sum_by_phase,
)

Traits = tuple[FrameworkTraits, bool]
"""Those of the framework, and whether the monitor knows an optimizer."""


def made(text: str, traits: Traits, *, is_first: bool = False) -> PhaseTotals:
    """Return the phases of marks written as "0 opens, 1 forward_begins, …"; "phase_begins:name" names a phase."""
    marks: list[Any] = []
    for part in text.split(","):
        at, what = part.split()
        kind, _, name = what.partition(":")
        marks.append((kind, float(at), name))
    return totals(marks, traits, is_first=is_first)


def totals(marks: list[Mark], traits: Traits, *, is_first: bool) -> PhaseTotals:
    _, times, _ = zip(*marks, strict=True)
    seconds = HostClock().seconds_between(times)
    assert seconds is not None
    return sum_by_phase(phases_of(marks, traits[0], has_optimizer=traits[1]), seconds, is_first=is_first)


PLAIN = (
    "0 opens, 0 step_begins, 0 forward_begins, 2 forward_ended, 3 backward_begins, 7 backward_ends, 8 backward_ended,"
    "9 update_begins, 12 updated, 20 closes:forward"
)
FIRST = PLAIN.replace("12 updated", "12 updated, 13 phase_begins:checkpoint, 15 phase_ended:checkpoint")
TWO_MICRO_BATCHES = (
    "0 opens, 0 step_begins, 0 forward_begins, 1 forward_ended, 1 backward_begins, 2 backward_ends, 2 backward_ended,"
    "5 forward_begins, 6 forward_ended, 6 backward_begins, 7 backward_ends, 9 backward_ended, 9 update_begins,"
    "10 updated, 10 closes:forward"
)
PIPELINE = (
    "0 opens, 0 forward_begins, 1 forward_ended, 2 forward_begins, 3 forward_ended, 4 backward_begins, 5 backward_ends,"
    "5 backward_ended, 7 forward_begins, 8 forward_ended, 8 backward_begins, 9 backward_ends, 9 backward_ended,"
    "9 update_begins, 9 updated, 11 closes:forward"
)
ANNOUNCED = (
    "0 opens, 0 forward_begins, 1 forward_ended, 1 backward_begins, 2 backward_ends, 2 backward_ended,"
    "2 update_begins, 3 updated, 4 phase_begins:evaluation, 5 evaluation_begins, 6 evaluation_ended,"
    "7 phase_begins:checkpoint, 9 phase_ended:checkpoint, 10 phase_ended:evaluation, 12 closes:forward"
)
EVALUATION = "0 opens, 0 update_begins, 1 updated, 2 evaluation_begins, 8 evaluation_ended, 9 closes:forward"
CLOSURE = (
    "0 opens, 0 step_begins, 0 update_begins, 1 forward_begins, 3 forward_ended, 3 backward_begins, 6 backward_ends,"
    "6 backward_ended, 8 updated, 9 closes:update"
)
READING = (
    "0 opens, 0 step_begins, 0 reading_begins, 1 reading_ended, 1 forward_begins, 2 forward_ended,"
    "2 backward_begins, 3 backward_ends, 3 reading_begins, 5 reading_ended, 6 backward_ended, 6 update_begins,"
    "7 updated, 7 reading_begins, 9 reading_ended, 10 closes:forward"
)
SCRIPT = "0 opens, 0 update_begins, 1 updated, 5 closes:script"
ALONE, DDP = (FrameworkTraits(), True), (FrameworkTraits(waits_for_reductions=True), True)
PIPE, UNKNOWN = (FrameworkTraits(interleaves_micro_batches=True), True), (FrameworkTraits(), False)


@pytest.mark.parametrize(
    ("text", "traits", "phases", "pre_collective"),
    [
        # The loss belongs to the backward pass, clipping is "other", and the time after the update is the data wait.
        (PLAIN, ALONE, {"forward": 2, "backward": 6, "other": 1, "optimizer": 3, "data_wait": 8}, None),
        (PLAIN, DDP, {"forward": 2, "backward": 5, "collective": 1, "other": 1, "optimizer": 3, "data_wait": 8}, 7),
        # The computing before the last reduction has no data wait.
        (TWO_MICRO_BATCHES, DDP, {"forward": 2, "backward": 2, "data_wait": 3, "collective": 2, "optimizer": 1}, 4),
        (PIPELINE, PIPE, {"forward": 3, "backward": 3, "other": 3, "optimizer": 0, "data_wait": 2}, None),
        (
            *(ANNOUNCED, ALONE),
            {"forward": 1, "backward": 1, "optimizer": 1, "evaluation": 4, "checkpoint": 2, "data_wait": 3},
            None,
        ),
        (EVALUATION, ALONE, {"optimizer": 1, "evaluation": 7, "data_wait": 1}, None),  # with a data wait before it
        (CLOSURE, ALONE, {"optimizer": 3, "forward": 2, "backward": 3, "data_wait": 1}, None),
        (
            *(READING, DDP),
            {"monitor": 5, "forward": 1, "backward": 1, "collective": 1, "optimizer": 1, "data_wait": 1},
            2,
        ),
        (SCRIPT, ALONE, {"optimizer": 1, "other": 4}, None),  # the activity of the script is unknown
        ("0 opens, 4 backward_begins, 4 backward_ends, 4 backward_ended, 4 closes:script", ALONE, {"other": 4}, None),
        (
            *("0 opens, 0 backward_begins, 0 backward_ends, 0 backward_ended, 4 closes:forward",),
            *(UNKNOWN, {"other": 4}, None),
        ),
        ("0 opens, 4 gives_up, 8 closes:forward", ALONE, {"data_wait": 4, "other": 4}, None),
    ],
)
def test_phases_of_a_step(text, traits, phases, pre_collective):
    found = made(text, traits)

    assert phases == {phase: seconds for phase, seconds in found.phases.items() if seconds or phase in phases}
    assert pre_collective == found.pre_collective
    announced = {phase: found.phases[phase] - found.inferred[phase] for phase in found.phases}
    assert ({"evaluation": 4, "checkpoint": 2} if text is ANNOUNCED else {}) == {
        k: v for k, v in announced.items() if v
    }


def test_first_step_is_a_separate_phase():
    found = made(FIRST, DDP, is_first=True)

    assert {"first_step": 18, "checkpoint": 2, "monitor": 0} == found.phases
    assert found.pre_collective is None


KINDS = [kind for kind in typing.get_args(Kind) if kind not in ("opens", "closes")]


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=30),
    st.sampled_from(["forward", "backward", "update", "script"]),
    st.sampled_from([ALONE, DDP, PIPE, UNKNOWN]),
    st.booleans(),
)
def test_phases_sum_up_to_the_duration_for_any_marks(steps, cause, traits, is_first):
    """Events may come in any order, for example after an exception, in a nested pass, or after a detach."""
    marks, now = [("opens", 0, "")], 0
    for kind, later in steps:
        now += later
        marks.append((kind, now, "checkpoint" if kind.startswith("phase") else ""))
    marks.append(("closes", now, cause))
    found = totals(marks, traits, is_first=is_first)

    assert now == sum(found.phases.values())
    assert all(0 <= seconds for seconds in found.phases.values())
    assert all(0 <= seconds <= found.phases[phase] for phase, seconds in found.inferred.items())
    assert found.pre_collective is None or 0 <= found.pre_collective <= now


class DeviceDouble:
    """A double of a device and its stream: `run` processes queued work and events in order."""

    def __init__(self) -> None:
        self.queue: list[EventDouble | float] = []
        self.now = 0.0

    def work(self, seconds: float) -> None:
        self.queue.append(seconds)

    def event(self) -> EventDouble:
        return EventDouble(self)

    def run(self) -> None:
        while self.queue:
            item = self.queue.pop(0)
            if isinstance(item, EventDouble):
                item.passed_at = self.now
            else:
                self.now += item


class EventDouble:
    """A double of torch.cuda.Event(enable_timing=True); a blocking wait is an error."""

    def __init__(self, device: DeviceDouble) -> None:
        self._device = device
        self.passed_at: float | None = None

    def record(self) -> None:
        self.passed_at = None
        self._device.queue.append(self)

    def query(self) -> bool:
        return self.passed_at is not None

    def elapsed_time(self, end: EventDouble) -> float:
        assert self.passed_at is not None, "torch raises: not all events have completed"
        assert end.passed_at is not None, "torch raises: not all events have completed"
        return 1e3 * (end.passed_at - self.passed_at)

    def synchronize(self) -> None:
        raise AssertionError("training or publisher waited for the device")


def test_publisher_does_not_wait_for_a_device_for_ever(monkeypatch):
    naps: list[float] = []
    device = DeviceDouble()
    clock = DeviceClock(device.event, sleep=lambda seconds: (naps.append(seconds), len(naps) > 1 and device.run()))

    assert clock.reached(clock.now())
    assert 2 == len(naps)
    monkeypatch.setattr("rankscope_exporter.monitors.step_timing.TIMEOUT_SECONDS", 0.1)
    stuck = DeviceClock(device.event, sleep=lambda _seconds: None)
    assert not stuck.reached(stuck.now())


def test_events_are_reused_and_none_is_queued_during_a_graph_capture():
    device = DeviceDouble()
    clock, capturing = DeviceClock(device.event), DeviceClock(device.event, is_capturing=lambda: True)
    for _ in range(5):
        clock.release(clock.now())

    assert 1 == len({*device.queue})
    assert capturing.now() is None
    assert not capturing.reached(None)
    assert 5 == len(device.queue)


class Queueing(nn.Module):
    """A module that queues work on the device double and returns immediately."""

    def __init__(self, device: DeviceDouble) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.device.work(0.5)
        return self.linear(x)


def test_steps_are_timed_by_the_device_while_the_host_is_ahead(quiet, monkeypatch, eventually):
    """Three steps are queued before the device starts; each step gets its device time without a blocking wait."""
    device = DeviceDouble()
    clock_of = "rankscope_exporter.api.session.clock_of"
    monkeypatch.setattr(clock_of, lambda _device: DeviceClock(device.event))
    monkeypatch.setattr("rankscope_exporter.api.session.PUBLISH_SECONDS", 0.1)  # the device never reaches the end
    net = Queueing(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    published: list = []
    with Monitor(quiet).attach(net, optimizer) as monitor:
        session_of(monitor).publisher.publish = published.append
        for _ in range(4):
            net(torch.ones(3, 2)).sum().backward()
            device.work(0.125)  # as an optimizer does
            optimizer.step()
            device.work(2.0)  # a copy of the next batch
        monitor.end_step()
        assert not published  # the publisher waits for the device; the training did not
        device.run()
        eventually(lambda: len(published) >= 4)
        assert 0 == monitor.faults

    steps = {
        record.step: {scalar.labels["phase"]: scalar.value for scalar in record.scalars if "step_phase" in scalar.name}
        for record in published
    }
    assert pytest.approx(2.625) == steps[1]["first_step"]
    assert pytest.approx((0.5, 0.125, 2.0)) == (steps[2]["forward"], steps[2]["other"], steps[2]["data_wait"])
    assert pytest.approx(2.625) == sum(steps[3].values())
