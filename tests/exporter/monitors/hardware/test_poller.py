"""The hardware thread: separate records between steps, end at detach, and nothing in a forked child."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch
from tests.exporter.monitors.hardware.recorded_nvml import RecordedNvml
from torch import nn

from rankscope_exporter import ConfigError, Monitor
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.hardware import poller as watch_module
from rankscope_exporter.monitors.hardware.poller import HardwarePoller

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
    monitor, model, optimizer = attached(OFTEN)
    with monitor:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        seen = reader(monitor)
        eventually(lambda: len(seen.scalars("gpu_power_watts")) >= 2)
        records = [record for record in seen.records() if record["step"] is None and record["scalars"]]
        page = seen.get("/metrics").decode()
        assert 0 == monitor.faults

    looks = [{scalar["name"]: scalar for scalar in record["scalars"]} for record in records]
    assert [683.211, 412.0] == [look["gpu_power_watts"]["value"] for look in looks[:2]]
    assert [{"gpu": BUSY}] * 2 == [json.loads(look["gpu_power_watts"]["labels"]) for look in looks[:2]]
    assert looks[0]["process_threads"]["value"] > 0
    times = [record["ts"] for record in records]
    assert sorted(set(times)) == times
    shown = [line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith("rankscope_gpu_power_watts{")]
    assert ["412.0"] == shown
    assert "rankscope_gpu_throttled{" in page
    assert "rankscope_host_memory_total_bytes{" in page


def test_xid_is_an_event_of_the_run(nvml, reader, eventually):
    monitor, *_ = attached(OFTEN)
    with monitor:
        events = eventually(lambda: [event for event in reader(monitor).events() if event["type"] == "xid"][1:])

    assert 79 == events[0]["value"]


def test_training_thread_does_not_call_nvml(nvml, eventually):
    callers = set()
    real = nvml._answer
    nvml._answer = lambda *args: callers.add(threading.current_thread().name) or real(*args)
    monitor, model, optimizer = attached(OFTEN)
    with monitor:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        eventually(lambda: callers)

    assert {"rankscope-hardware"} == callers


def test_detach_ends_the_thread_and_releases_nvml(nvml, eventually):
    monitor, *_ = attached(OFTEN)
    eventually(lambda: nvml.calls)
    assert ["rankscope-hardware"] == threads()

    monitor.detach()

    assert [] == threads()
    assert nvml.open_sessions == 0


def test_forked_child_reads_nothing(nvml, eventually):
    monitor, *_ = attached(OFTEN)
    with monitor:
        eventually(lambda: nvml.calls)
        pid = os.fork()
        if pid == 0:
            nvml.calls.clear()
            monitor.detach()
            os._exit(0 if threads() == [] and nvml.calls == [] and nvml.open_sessions == 1 else 1)
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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


def test_nvml_error_is_a_fault_and_the_thread_continues(nvml, eventually):
    def broken(*_args):
        raise OSError("what nobody expects")

    boundary, pending_steps = ErrorBoundary(), []
    watch = HardwarePoller(torch.device("cpu"), 0.01, pending_steps.append, boundary)
    nvml._answer = broken
    watch.start()
    try:
        eventually(lambda: boundary.count > 2)
        nvml._answer = lambda handle, name: RecordedNvml._answer(nvml, handle, name)
        eventually(lambda: pending_steps)
    finally:
        watch.stop()


@pytest.mark.parametrize("value", [-1, "5", True, float("inf")])
def test_invalid_interval_is_refused(value):
    with pytest.raises(ConfigError, match="every_seconds must be a number of seconds"):
        Monitor({"hardware": {"every_seconds": value}})


@pytest.mark.parametrize(
    ("broken", "kept", "lost"),
    [("state", "gpu_power_watts", "process_threads"), ("read", "process_threads", "gpu_power_watts")],
)
def test_machine_and_gpu_are_read_independently(broken, kept, lost, nvml, monkeypatch, eventually, caplog):
    def fail(*_args):
        raise OSError("no such device")

    boundary, pending_steps = ErrorBoundary(), []
    watch = HardwarePoller(torch.device("cpu"), 0.01, pending_steps.append, boundary)
    monkeypatch.setattr(watch_module.Host if broken == "state" else watch_module.Gpu, broken, fail)
    watch.start()
    try:
        eventually(lambda: len(pending_steps) > 2)
    finally:
        watch.stop()
    names = {scalar.name for pending_step in pending_steps for later in pending_step.later for scalar in later()}

    assert kept in names
    assert lost not in names
    assert 1 == len([record for record in caplog.records if "no such device" in record.getMessage()])


def test_xids_are_published_if_no_metric_can_be_read(nvml, monkeypatch, eventually):
    def fail(*_args):
        raise OSError("no such device")

    boundary, pending_steps = ErrorBoundary(), []
    watch = HardwarePoller(torch.device("cpu"), 0.01, pending_steps.append, boundary)
    monkeypatch.setattr(watch_module.Host, "state", fail)
    monkeypatch.setattr(watch_module.Gpu, "read", fail)
    watch.start()
    try:
        eventually(lambda: [event for pending_step in pending_steps for event in pending_step.events])
    finally:
        watch.stop()
