"""Metrics of the machine and the process: psutil and /proc agree with each other and with the test's own load."""

from __future__ import annotations

import threading
import time
from dataclasses import fields
from types import SimpleNamespace

import psutil
import pytest
import torch

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.hardware import poller
from rankscope_exporter.monitors.hardware.poller import Host, HostState, from_proc, from_psutil, host_scalars
from rankscope_exporter.observers.resources import MemoryObserver, allocator_scalars
from rankscope_exporter.records.pending_step import PendingStep

READERS = {"psutil": lambda: from_psutil(psutil, psutil.Process(), lambda _name, ask: ask()), "proc": from_proc}


def unexpected(where: str, error: BaseException) -> None:
    raise AssertionError(f"{where}: {error!r}")


def test_psutil_and_proc_agree():
    by_psutil, by_kernel = READERS["psutil"](), READERS["proc"]()

    assert [item.name for item in fields(HostState)] == [
        item.name for item in fields(HostState) if getattr(by_kernel, item.name) is not None
    ]
    assert by_psutil.host_memory_total_bytes == by_kernel.host_memory_total_bytes
    assert by_psutil.process_threads == by_kernel.process_threads
    assert by_psutil.process_major_faults_total == by_kernel.process_major_faults_total
    for name in ("host_memory_available_bytes", "host_swap_used_bytes"):
        tolerance = 0.2 * by_kernel.host_memory_total_bytes  # other processes run at the same time
        assert getattr(by_kernel, name) == pytest.approx(getattr(by_psutil, name), abs=tolerance)
    assert by_kernel.process_cpu_seconds_total == pytest.approx(by_psutil.process_cpu_seconds_total, abs=1)
    ticks = 100
    assert by_kernel.all_seconds / ticks == pytest.approx(by_psutil.all_seconds, rel=0.01)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_cpu_time_of_the_process_is_counted(read):
    before, began = read(), time.process_time()
    while time.process_time() - began < 0.3:
        pass
    spent = time.process_time() - began

    passed = read().process_cpu_seconds_total - before.process_cpu_seconds_total

    assert spent == pytest.approx(passed, rel=0.3, abs=0.05)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_threads_are_counted(read):
    before, stop = read().process_threads, threading.Event()
    more = [threading.Thread(target=stop.wait) for _ in range(3)]
    for thread in more:
        thread.start()
    try:
        assert before + 3 == read().process_threads
    finally:
        stop.set()
        for thread in more:
            thread.join()


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_written_bytes_of_the_process_are_counted(read, tmp_path):
    before = read().process_written_bytes_total
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * 1_000_000)

    assert read().process_written_bytes_total - before in (0, pytest.approx(1_000_000, abs=600_000))  # 0 on a tmpfs


def test_utilization_is_computed_between_two_readings():
    before, now = HostState(busy_seconds=10, all_seconds=100), HostState(busy_seconds=16, all_seconds=108)

    assert [("host_cpu_utilization", 0.75, "ratio")] == [
        (scalar.name, scalar.value, scalar.unit) for scalar in host_scalars(before, now)
    ]
    assert [] == list(host_scalars(before, before))


def test_proc_is_read_without_psutil(monkeypatch):
    def missing(_name):
        raise ModuleNotFoundError

    monkeypatch.setattr(poller.importlib, "import_module", missing)

    host = Host(unexpected)

    assert host.state().process_threads == threading.active_count() or host.state().process_threads > 0


def test_values_without_proc_are_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(poller, "_PROC", tmp_path)

    names = {scalar.name for scalar in host_scalars(HostState(), from_proc())}

    assert {
        "process_cpu_seconds_total",
        "process_major_faults_total",
        "process_involuntary_switches_total",
    } == names


# The memory that torch's allocator holds.

STATS = {
    "allocated_bytes.all.current": 100,
    "allocated_bytes.all.peak": 300,
    "reserved_bytes.all.current": 400,
    "reserved_bytes.all.peak": 500,
    "num_alloc_retries": 2,
    "num_ooms": 1,
    "num_device_alloc": 7,
}


def test_memory_of_an_accelerator_is_read_from_its_allocator(monkeypatch):
    """No accelerator is needed: `torch.accelerator` is replaced by a double."""
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
        "device_memory_ooms_total": 1,
    } == scalars


def test_missing_allocator_statistic_is_absent():
    assert ["device_memory_allocated_bytes"] == [
        scalar.name for scalar in allocator_scalars({"allocated_bytes.all.current": 5})
    ]


def test_unsampled_step_reads_no_memory():
    pending_step = SimpleNamespace(sampled=False, later=[])

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


def test_failed_psutil_import_is_replaced_by_proc(monkeypatch):
    def broken(_name):
        raise OSError("libpsutil.so: undefined symbol")

    monkeypatch.setattr(poller.importlib, "import_module", broken)

    assert Host(unexpected).state().process_threads > 0


def test_utilization_is_absent_without_both_readings():
    before, unknown, now = HostState(busy_seconds=10, all_seconds=100), HostState(), HostState(all_seconds=108)

    assert [] == [*host_scalars(before, unknown), *host_scalars(unknown, now)]


def test_failed_allocator_leaves_the_memory_of_the_process(monkeypatch):
    def broken(_device):
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.accelerator, "memory_stats", broken)
    pending_step, boundary = PendingStep(1, 0, sampled=True), ErrorBoundary()
    MemoryObserver(torch.device("xpu", 1)).on_step_end(pending_step)
    names = [scalar.name for later in pending_step.later for scalar in boundary.call("memory", later) or ()]

    assert (["resident_memory_bytes"], 1) == (names, boundary.count)
