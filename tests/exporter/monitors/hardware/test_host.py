"""Metrics of the machine and the process: psutil and /proc agree with each other and with the test's own load."""

from __future__ import annotations

from dataclasses import fields

import psutil
import pytest
import torch

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.hardware import poller
from rankscope_exporter.monitors.hardware.poller import Host, HostState, from_proc, from_psutil, host_scalars
from rankscope_exporter.observers.resources import MemoryObserver
from rankscope_exporter.records.pending_step import PendingStep


def unexpected(where: str, error: BaseException) -> None:
    raise AssertionError(f"{where}: {error!r}")


def test_psutil_and_proc_agree(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * 8_000_000)
    by_psutil, by_kernel = from_psutil(psutil, psutil.Process(), lambda _name, ask: ask()), from_proc()

    assert None not in [getattr(by_kernel, item.name) for item in fields(HostState)]
    for name in ("host_memory_total_bytes", "process_threads", "process_major_faults_total"):
        assert getattr(by_psutil, name) == getattr(by_kernel, name)
    for name in ("host_memory_available_bytes", "host_swap_used_bytes"):
        tolerance = 0.2 * by_kernel.host_memory_total_bytes  # other processes run at the same time
        assert getattr(by_kernel, name) == pytest.approx(getattr(by_psutil, name), abs=tolerance)
    for name in ("process_read_bytes_total", "process_written_bytes_total"):
        assert getattr(by_kernel, name) == pytest.approx(getattr(by_psutil, name), rel=0.02, abs=1e6)
    assert by_kernel.process_cpu_seconds_total == pytest.approx(by_psutil.process_cpu_seconds_total, abs=0.3)
    ticks = 100
    assert by_kernel.all_seconds / ticks == pytest.approx(by_psutil.all_seconds, rel=0.01)
    assert by_kernel.busy_seconds / ticks == pytest.approx(by_psutil.busy_seconds, rel=0.01)


def test_utilization_is_computed_between_two_readings():
    before, now = HostState(busy_seconds=10, all_seconds=100), HostState(busy_seconds=16, all_seconds=108)
    unknown = HostState()

    assert [("host_cpu_utilization", 0.75, "ratio")] == [
        (scalar.name, scalar.value, scalar.unit) for scalar in host_scalars(before, now)
    ]
    assert [] == [*host_scalars(before, before), *host_scalars(before, unknown), *host_scalars(unknown, now)]


@pytest.mark.parametrize("error", [ModuleNotFoundError(), OSError("libpsutil.so: undefined symbol")])
def test_proc_is_read_without_psutil(error, monkeypatch):
    def missing(_name):
        raise error

    monkeypatch.setattr(poller.importlib, "import_module", missing)

    assert Host(unexpected).state().process_threads > 0


def test_values_without_proc_are_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(poller, "_PROC", tmp_path)
    names = {scalar.name for scalar in host_scalars(HostState(), from_proc())}
    of_the_system = {"cpu_seconds_total", "major_faults_total", "involuntary_switches_total"}

    assert {f"process_{name}" for name in of_the_system} == names


# The memory that torch's allocator holds.

STATS = {
    "allocated_bytes.all.current": 100,
    "allocated_bytes.all.peak": 300,
    "reserved_bytes.all.current": 400,
    "reserved_bytes.all.peak": 500,
    "num_alloc_retries": 2,
    "num_device_alloc": 7,
}


def test_memory_of_an_accelerator_is_read_from_its_allocator(monkeypatch):
    """No accelerator is needed: a double of `torch.accelerator` lacks one statistic and has an unknown one."""
    asked = []
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: asked.append(device) or STATS)
    device = torch.device("xpu", 1)
    pending_step = PendingStep(1, 0, sampled=True)

    MemoryObserver(device).on_step_end(pending_step)
    scalars = {scalar.name: scalar.value for later in pending_step.later for scalar in later()}

    assert [device] == asked
    assert scalars.pop("resident_memory_bytes") == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert {
        "device_memory_allocated_bytes": 100,
        "device_memory_allocated_peak_bytes": 300,
        "device_memory_reserved_bytes": 400,
        "device_memory_reserved_peak_bytes": 500,
        "device_memory_alloc_retries_total": 2,
    } == scalars


def test_unsampled_step_reads_no_memory():
    pending_step = PendingStep(1, 0)
    MemoryObserver(torch.device("cpu")).on_step_end(pending_step)

    assert [] == pending_step.later


def test_allocator_keys_match_the_documentation_of_torch():
    """The keys of the double are those of torch's documentation."""
    text = torch.accelerator.memory_stats.__doc__ or ""

    assert "allocated_bytes.{all," in text
    assert "reserved_bytes.{all," in text
    assert all(name in text for name in ("current,peak", "num_alloc_retries", "num_ooms"))


# Errors of single sources.

OF_PSUTIL = {
    "cpu_times": {"process_cpu_seconds_total"},
    "num_threads": {"process_threads"},
    "num_ctx_switches": {"process_involuntary_switches_total"},
    "io_counters": {"process_read_bytes_total", "process_written_bytes_total"},
    "virtual_memory": {"host_memory_available_bytes", "host_memory_total_bytes"},
    "swap_memory": {"host_swap_used_bytes"},
}
NAMES = {item.name for item in fields(HostState)} - {"busy_seconds", "all_seconds"}


class Hiding:
    """A double of psutil or its process, in a container that hides the data of one function."""

    def __init__(self, real, name):
        self._real, self._name = real, name

    def __getattr__(self, name):
        if name == self._name:
            return self._refuse
        found = getattr(self._real, name)
        return (lambda: Hiding(found(), self._name)) if name == "Process" else found

    def _refuse(self):
        raise psutil.AccessDenied


@pytest.mark.parametrize(("hidden", "missing"), OF_PSUTIL.items())
def test_failed_psutil_function_is_reported_once(hidden, missing):
    reported = []
    host = Host(lambda where, error: reported.append((where, type(error))), Hiding(psutil, hidden))
    states = [host.state() for _ in range(3)]

    assert missing == {name for name in NAMES if getattr(states[-1], name) is None}
    assert (f"psutil.{hidden}()", psutil.AccessDenied) in reported
    assert len(set(reported)) == len(reported)


def test_process_unknown_to_psutil_is_read_from_proc():
    reported = []
    host = Host(lambda where, _error: reported.append(where), Hiding(psutil, "Process"))

    assert host.state().process_threads > 0
    assert ["psutil.Process()"] == reported


def test_failed_allocator_leaves_the_memory_of_the_process(monkeypatch):
    def broken(_device):
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.accelerator, "memory_stats", broken)
    pending_step, boundary = PendingStep(1, 0, sampled=True), ErrorBoundary()
    MemoryObserver(torch.device("xpu", 1)).on_step_end(pending_step)
    names = [scalar.name for later in pending_step.later for scalar in boundary.call("memory", later) or ()]

    assert (["resident_memory_bytes"], 1) == (names, boundary.count)
