"""The clock of a device, with a double of the device: its events complete only when the device reaches them."""

from __future__ import annotations

import pytest
import torch
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import Monitor
from rankscope_exporter.observers.step_timing import clock as clocks
from rankscope_exporter.observers.step_timing.clock import DeviceClock, HostClock, clock_of


class DeviceDouble:
    """A double of a device and its stream: `run` processes queued work and events in order."""

    def __init__(self) -> None:
        self.queue: list[EventDouble | float] = []
        self.now = 0.0
        self.made = 0

    def work(self, seconds: float) -> None:
        self.queue.append(seconds)

    def event(self) -> EventDouble:
        self.made += 1
        return EventDouble(self)

    def run(self, items: int | None = None) -> None:
        for _ in range(len(self.queue) if items is None else items):
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


@pytest.fixture
def device() -> DeviceDouble:
    return DeviceDouble()


def test_publisher_sleeps_until_the_device_reaches_an_event_or_times_out(device, monkeypatch):
    naps: list[float] = []
    clock = DeviceClock(device.event, sleep=lambda seconds: (naps.append(seconds), device.run(1)))
    device.work(1.0)

    assert clock.reached(clock.now())
    assert 2 == len(naps)
    monkeypatch.setattr(clocks, "TIMEOUT_SECONDS", 0.1)
    stuck = DeviceClock(device.event, sleep=lambda _seconds: None)
    assert not stuck.reached(stuck.now())


def test_events_are_reused_and_none_is_queued_during_a_graph_capture(device):
    clock, capturing = DeviceClock(device.event), DeviceClock(device.event, is_capturing=lambda: True)
    for _ in range(5):
        clock.release(clock.now())
    queued = [*device.queue]

    assert 1 == device.made
    assert capturing.now() is None
    assert not capturing.reached(None)
    assert queued == device.queue


def test_only_a_cuda_device_has_a_device_clock():
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    assert isinstance(clock_of(torch.device("meta")), HostClock)
    assert isinstance(clock_of(torch.device("cuda")), DeviceClock)


class Queueing(nn.Module):
    """A module that queues work on the device double and returns immediately."""

    def __init__(self, device: DeviceDouble) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.device.work(0.5)
        return self.linear(x)


def test_steps_are_timed_by_the_device_while_the_host_is_ahead(device, quiet, monkeypatch, eventually):
    """Three steps are queued before the device starts; each step gets its device time without a blocking wait."""
    monkeypatch.setattr(
        "rankscope_exporter.observers.step_timing.observer.clock_of", lambda _device: DeviceClock(device.event)
    )
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
