"""The hardware thread: separate records between steps, end at detach, and nothing in a forked child."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from tests.exporter.monitors.hardware.recorded_nvml import RecordedNvml
from torch import nn

from rankscope_exporter import ConfigError, Monitor
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.hardware import poller as watch_module
from rankscope_exporter.monitors.hardware.gpu import Gpu
from rankscope_exporter.monitors.hardware.poller import HardwarePoller, Host
from rankscope_exporter.records.pending_step import PendingStep

BUSY = "GPU-bbbbbbbb-0000-1111-2222-333333333333"
OFTEN = {"every_seconds": 0.01}


@pytest.fixture
def nvml(monkeypatch) -> RecordedNvml:
    """Simulate a machine on which torch trains on the busy GPU of the recording."""
    double = RecordedNvml()
    monkeypatch.setattr(watch_module, "uuid_of", lambda _device: BUSY.removeprefix("GPU-"))
    monkeypatch.setattr(HardwarePoller.__init__, "__kwdefaults__", {"nvml": lambda: double})
    return double


def attached(hardware):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"console": False, "exit_wait_seconds": 0, "statistics": "torch", "hardware": hardware}
    return Monitor(config).attach(model, optimizer), model, optimizer


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rankscope-hardware"]


def test_readings_are_separate_records_in_store_and_page(nvml, reader, eventually):
    """Only the hardware thread calls NVML."""
    callers = set()
    real = nvml._answer
    nvml._answer = lambda *args: callers.add(threading.current_thread().name) or real(*args)
    monitor, model, optimizer = attached(OFTEN)
    with monitor:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        seen = reader(monitor)
        eventually(lambda: len(seen.scalars("gpu_power_watts")) >= 2)
        records = [record for record in seen.records() if record["step"] is None and record["scalars"]]
        page = seen.get("/metrics").decode()
        events = eventually(lambda: [event for event in seen.events() if event["type"] == "xid"][1:])
        assert 0 == monitor.faults

    looks = [{scalar["name"]: scalar for scalar in record["scalars"]} for record in records]
    assert [683.211, 412.0] == [look["gpu_power_watts"]["value"] for look in looks[:2]]
    assert [{"gpu": BUSY}] * 2 == [json.loads(look["gpu_power_watts"]["labels"]) for look in looks[:2]]
    assert looks[0]["process_threads"]["value"] > 0
    times = [record["ts"] for record in records]
    assert sorted(set(times)) == times
    shown = [line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith("rankscope_gpu_power_watts{")]
    assert ["412.0"] == shown
    assert (79, {"rankscope-hardware"}) == (events[0]["value"], callers)
    assert "rankscope_gpu_throttled{" in page
    assert "rankscope_host_memory_total_bytes{" in page


def test_detach_ends_the_thread_and_a_forked_child_has_none(nvml, eventually):
    monitor, *_ = attached(OFTEN)
    with monitor:
        eventually(lambda: nvml.calls)
        assert ["rankscope-hardware"] == threads()
        pid = os.fork()
        if pid == 0:
            nvml.calls.clear()
            monitor.detach()
            os._exit(0 if threads() == [] and nvml.calls == [] and nvml.open_sessions == 1 else 1)
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert [] == threads()
    assert nvml.open_sessions == 0


def test_interval_of_zero_reads_nothing():
    monitor, *_ = attached({"every_seconds": 0})
    with monitor:
        assert [] == threads()


def test_process_and_machine_are_read_without_a_gpu(reader, eventually):
    monitor, *_ = attached(OFTEN)
    with monitor:
        seen = reader(monitor)
        eventually(lambda: seen.scalars("host_cpu_utilization"))
        names = {scalar["name"] for record in seen.records() for scalar in record["scalars"] or ()}

    assert not [name for name in names if name.startswith("gpu_")]


@pytest.mark.parametrize("value", [-1, "5", True, float("inf")])
def test_invalid_interval_is_refused(value):
    with pytest.raises(ConfigError, match="every_seconds must be a number of seconds"):
        Monitor({"hardware": {"every_seconds": value}})


def fail(*_args: object) -> None:
    raise OSError("no such device")


@contextlib.contextmanager
def polling() -> Iterator[tuple[list[PendingStep], ErrorBoundary]]:
    """Yield the readings of a thread, and its errors."""
    readings: list[PendingStep] = []
    boundary = ErrorBoundary()
    watch = HardwarePoller(torch.device("cpu"), 0.01, readings.append, boundary)
    watch.start()
    try:
        yield readings, boundary
    finally:
        watch.stop()


def names_of(readings: list[PendingStep]) -> set[str]:
    return {scalar.name for reading in readings for later in reading.later for scalar in later()}


def test_nvml_error_is_a_fault_and_the_thread_continues(nvml, eventually):
    real, nvml._answer = nvml._answer, fail
    with polling() as (readings, boundary):
        eventually(lambda: boundary.count > 2)
        nvml._answer = real
        eventually(lambda: "gpu_power_watts" in names_of(readings))


@pytest.mark.parametrize(
    ("broken", "kept", "lost"),
    [([Host, "state"], "gpu_power_watts", "process_threads"), ([Gpu, "read"], "process_threads", "gpu_power_watts")],
)
def test_machine_and_gpu_are_read_independently(broken, kept, lost, nvml, monkeypatch, eventually, caplog):
    monkeypatch.setattr(*broken, fail)
    with polling() as (readings, _):
        eventually(lambda: len(readings) > 2)

    assert kept in names_of(readings)
    assert lost not in names_of(readings)
    assert 1 == len([record for record in caplog.records if "no such device" in record.getMessage()])


def test_xids_are_published_if_no_metric_can_be_read(nvml, monkeypatch, eventually):
    monkeypatch.setattr(Host, "state", fail)
    monkeypatch.setattr(Gpu, "read", fail)
    with polling() as (readings, _):
        eventually(lambda: [event for reading in readings for event in reading.events])
