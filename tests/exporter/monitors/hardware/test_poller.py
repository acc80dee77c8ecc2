"""The hardware thread and its metrics: of the machine and the process, and of GPUs that RecordedNvml simulates."""

import contextlib
import ctypes.util
import inspect
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pynvml
import pytest
import torch
from tests.exporter.monitors.hardware.recorded_nvml import RecordedNvml
from torch import nn

from rankscope_contract.metrics.catalogue import SCALARS_WITH_OWN_METRIC
from rankscope_exporter import Monitor
from rankscope_exporter.monitors import hardware
from rankscope_exporter.monitors.hardware import (
    _MEMBERS,
    READINGS,
    THROTTLE_REASONS,
    Gpu,
    GpuEvents,
    HardwarePoller,
    ResourceObserver,
    host_scalars,
    machine_state,
    uuid_of,
)
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.record import Scalar, StepRecord

BUSY = "GPU-bbbbbbbb-0000-1111-2222-333333333333"
OFTEN = {"every_seconds": 0.01}


@pytest.fixture
def nvml(monkeypatch) -> RecordedNvml:
    """Simulate a machine on which torch trains on the busy GPU of the recording."""
    double = RecordedNvml()
    monkeypatch.setattr(hardware, "uuid_of", lambda _device: BUSY.removeprefix("GPU-"))
    monkeypatch.setattr(hardware, "load_nvml", lambda: double)
    return double


def attached(settings):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"console": False, "exit_wait_seconds": 0, "statistics": "torch", "hardware": settings}
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


def fail(*_args: object) -> None:
    raise OSError("no such device")


@contextlib.contextmanager
def polling() -> Iterator[tuple[list[StepRecord], ErrorBoundary]]:
    readings: list[StepRecord] = []
    boundary = ErrorBoundary()
    watch = HardwarePoller(torch.device("cpu"), 0.01, readings.append, boundary)
    watch.start()
    try:
        yield readings, boundary
    finally:
        watch.stop()


def names_of(readings: list[StepRecord]) -> set[str]:
    return {scalar.name for reading in readings for later in reading.later for scalar in later()}


def test_nvml_error_is_a_fault_and_the_thread_continues(nvml, eventually):
    real, nvml._answer = nvml._answer, fail
    with polling() as (readings, boundary):
        eventually(lambda: boundary.count > 2)
        nvml._answer = real
        eventually(lambda: "gpu_power_watts" in names_of(readings))


@pytest.mark.parametrize(
    ("broken", "kept", "lost"),
    [
        ([hardware, "machine_state"], "gpu_power_watts", "process_threads"),
        ([Gpu, "read"], "process_threads", "gpu_power_watts"),
    ],
)
def test_machine_and_gpu_are_read_independently(broken, kept, lost, nvml, monkeypatch, eventually, caplog):
    monkeypatch.setattr(*broken, fail)
    with polling() as (readings, _):
        eventually(lambda: len(readings) > 2)

    assert kept in names_of(readings)
    assert lost not in names_of(readings)
    assert 1 == len([record for record in caplog.records if "no such device" in record.getMessage()])


def unexpected(where: str, error: BaseException) -> None:
    raise AssertionError(f"{where}: {error!r}")


def test_values_agree_with_psutil(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * 8_000_000)
    own, memory, machine = psutil.Process(), psutil.virtual_memory(), psutil.cpu_times()
    io, spent, found = own.io_counters(), own.cpu_times(), machine_state()

    assert (memory.total, own.num_threads()) == (found["host_memory_total_bytes"], found["process_threads"])
    tolerance = 0.2 * memory.total  # other processes run at the same time
    assert found["host_memory_available_bytes"] == pytest.approx(memory.available, abs=tolerance)
    assert found["host_swap_used_bytes"] == pytest.approx(psutil.swap_memory().used, abs=tolerance)
    assert found["process_read_bytes_total"] == pytest.approx(io.read_bytes, rel=0.02, abs=1e6)
    assert found["process_written_bytes_total"] == pytest.approx(io.write_bytes, rel=0.02, abs=1e6)
    assert found["process_cpu_seconds_total"] == pytest.approx(spent.user + spent.system, abs=0.3)
    # psutil: of the main thread
    assert found["process_involuntary_switches_total"] >= own.num_ctx_switches().involuntary - 100
    ticks, guests = os.sysconf("SC_CLK_TCK"), machine.guest + machine.guest_nice  # a part of the user time
    busy = sum(machine) - guests - machine.idle - machine.iowait
    assert found["all_ticks"] / ticks == pytest.approx(sum(machine) - guests, rel=0.01)
    assert found["busy_ticks"] / ticks == pytest.approx(busy, rel=0.01)


def test_utilization_is_computed_between_two_readings():
    before, now = {"busy_ticks": 10, "all_ticks": 100}, {"busy_ticks": 16, "all_ticks": 108}

    assert [("host_cpu_utilization", 0.75, "ratio")] == [
        (scalar.name, scalar.value, scalar.unit) for scalar in host_scalars(before, now)
    ]
    assert [] == [*host_scalars(before, before), *host_scalars(before, {}), *host_scalars({}, now)]


def test_values_without_proc_are_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "_PROC", tmp_path)
    names = {scalar.name for scalar in host_scalars({}, machine_state())}
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
    record = StepRecord(step=1, ts=0, sampled=True, is_skipped=False)

    ResourceObserver(device, dict, int).on_publish(record)
    scalars = {scalar.name: scalar.value for later in record.later for scalar in later()}

    assert [device] == asked
    assert scalars.pop("sampling_stretch") == 0
    assert scalars.pop("resident_memory_bytes") == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert {
        "device_memory_allocated_bytes": 100,
        "device_memory_allocated_peak_bytes": 300,
        "device_memory_reserved_bytes": 400,
        "device_memory_reserved_peak_bytes": 500,
        "device_memory_alloc_retries_total": 2,
    } == scalars


def test_allocator_keys_match_the_documentation_of_torch():
    """The keys of the double are those of torch's documentation."""
    text = torch.accelerator.memory_stats.__doc__ or ""

    assert "allocated_bytes.{all," in text
    assert "reserved_bytes.{all," in text
    assert all(name in text for name in ("current,peak", "num_alloc_retries", "num_ooms"))


PLAIN = "GPU-cccccccc-0000-1111-2222-333333333333"
SLICE = "MIG-dddddddd-0000-1111-2222-333333333333"


def opened(nvml: RecordedNvml, uuid: str) -> Gpu:
    gpu = Gpu.open(nvml, uuid)
    assert gpu is not None
    return gpu


def values(gpu: Gpu) -> dict[tuple[str, ...], float]:
    """Return the values of a reading by name and labels, without the label of the GPU."""
    found = {}
    for scalar in gpu.read(unexpected):
        assert gpu.uuid == scalar.labels["gpu"]
        found[scalar.name, *(value for name, value in scalar.labels.items() if name != "gpu")] = scalar.value
    return found


def test_each_metric_has_its_base_unit_and_current_value():
    throttled = {("gpu_throttled", reason): float(reason == "sw_power_cap") for reason in THROTTLE_REASONS}
    gpu = opened(RecordedNvml(), BUSY)
    names = ["gpu_utilization", "gpu_memory_utilization", "gpu_memory_used_bytes", "gpu_memory_total_bytes"]
    names += ["gpu_power_watts", "gpu_power_limit_watts", "gpu_energy_joules_total", "gpu_pcie_replays_total"]
    amounts = [0.97, 0.41, 60 * 2.0**30, 80 * 2.0**30, 683.211, 700, 123456.789, 2]
    states = {"corrected": 1, "uncorrected": 0, "pending": 1, "failed": 0}

    assert {
        **{(name,): value for name, value in zip(names, amounts, strict=True)},
        ("gpu_temperature_celsius", "gpu"): 71,
        ("gpu_temperature_celsius", "memory"): 88,
        ("gpu_clock_hertz", "sm"): 1.755e9,
        ("gpu_clock_hertz", "memory"): 2.619e9,
        ("gpu_clock_limit_hertz", "sm"): 1.98e9,
        ("gpu_clock_limit_hertz", "memory"): 2.619e9,
        ("gpu_ecc_errors_total", "corrected"): 17,
        ("gpu_ecc_errors_total", "uncorrected"): 0,
        **{("gpu_remapped_rows", state): count for state, count in states.items()},
        ("gpu_pcie_bytes_per_second", "sent"): 2048 * 1024,
        ("gpu_pcie_bytes_per_second", "received"): 1024 * 1024,
        ("gpu_nvlink_bytes_total", "sent"): 5000 * 1024,
        ("gpu_nvlink_bytes_total", "received"): 6000 * 1024,
        ("gpu_xid_errors_total",): 0,
        **throttled,
    } == values(gpu)
    later = {name: value for name, value in values(gpu).items() if value}
    assert (0.12, 412, 1.2e9) == (later["gpu_utilization",], later["gpu_power_watts",], later["gpu_clock_hertz", "sm"])
    assert {"hw_slowdown", "hw_thermal"} == {name[1] for name in later if name[0] == "gpu_throttled"}
    assert 1 == later["gpu_ecc_errors_total", "uncorrected"]


def test_each_gpu_scalar_has_a_metric_with_its_labels():
    for scalar in opened(RecordedNvml(), BUSY).read(unexpected):
        spec = SCALARS_WITH_OWN_METRIC[scalar.name]
        assert (set(spec.labels), spec.type == "counter") == (set(scalar.labels), scalar.name.endswith("_total"))


def test_unsupported_metric_is_absent_and_logged_once(caplog):
    caplog.set_level(logging.DEBUG, "rankscope")
    gpu = opened(RecordedNvml(), PLAIN)

    first, second = values(gpu), values(gpu)

    assert {"gpu_utilization", "gpu_memory_utilization", "gpu_memory_used_bytes", "gpu_memory_total_bytes"} == {
        name for name, *_ in first
    }
    assert {("gpu_power_watts",)} == second.keys() - first.keys()  # after a temporary error
    assert 2 == len([record for record in caplog.records if record.getMessage().startswith("gpu_ecc_errors_total (")])


@pytest.mark.parametrize("uuid", [SLICE, SLICE.removeprefix("MIG-")])
def test_mig_slice_is_found_with_its_metrics(uuid):
    gpu = opened(RecordedNvml(), uuid)

    assert SLICE == gpu.uuid
    assert {("gpu_memory_used_bytes",): 30 * 2.0**30, ("gpu_memory_total_bytes",): 40 * 2.0**30} == values(gpu)
    assert [] == gpu.xids(unexpected)


def test_gpu_is_found_by_uuid_not_by_number(monkeypatch):
    """With CUDA_VISIBLE_DEVICES=1, the second GPU of the host is cuda:0 in torch."""
    visible = [BUSY.removeprefix("GPU-")]
    properties = lambda device: SimpleNamespace(uuid=visible[device.index])  # noqa: E731 - torch's signature
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    uuid = uuid_of(torch.device("cuda", 0))

    assert [None, None] == [uuid_of(torch.device(kind)) for kind in ("cpu", "meta")]
    assert uuid is not None
    assert 0.97 == values(opened(RecordedNvml(), uuid))["gpu_utilization",]


def test_xids_are_events_published_once_and_counted():
    gpu = opened(RecordedNvml(), BUSY)

    first = gpu.xids(unexpected)
    values(gpu)
    second = gpu.xids(unexpected)

    assert [(31, "critical"), (79, "critical")] == [(event.value, event.severity) for event in (*first, *second)]
    assert f"XID 79 on {BUSY}: the GPU has fallen off the bus" == second[0].message
    assert {"xid": 79, "gpu": BUSY} == json.loads(second[0].details or "")
    assert [] == gpu.xids(unexpected)
    assert 2 == values(gpu)["gpu_xid_errors_total",]


def test_unknown_and_closed_gpus_release_nvml():
    nvml = RecordedNvml()
    opened(nvml, BUSY).close()

    assert Gpu.open(nvml, "GPU-00000000") is None
    nvml.is_there = False  # no driver
    assert Gpu.open(nvml, BUSY) is None
    assert nvml.open_sessions == 0


# The double against the real module, which needs no GPU to be imported.


def test_real_module_without_driver_is_not_an_error(monkeypatch):
    assert pynvml is hardware.load_nvml()
    if not ctypes.util.find_library("nvidia-ml"):
        assert Gpu.open(pynvml, BUSY) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert None is hardware.load_nvml()


def test_real_module_has_all_called_functions():
    asked: dict[str, tuple] = {}

    class Listening:
        def __getattr__(self, name):
            real = getattr(pynvml, name)
            if not inspect.isfunction(real):
                return real

            def note(*args):
                asked[name] = args
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

            return note

    for read in READINGS.values():
        with pytest.raises(pynvml.NVMLError):
            list(read(Listening(), "handle"))

    assert len(asked) > 10
    for name, args in asked.items():
        inspect.signature(getattr(pynvml, name)).bind(*args)
    for name in ("nvmlInit", "nvmlShutdown", "nvmlEventSetCreate", "nvmlEventSetFree", "nvmlEventSetWait_v2"):
        assert inspect.isfunction(getattr(pynvml, name))


def test_answers_of_the_double_have_the_real_fields():
    nvml = RecordedNvml()
    pairs = [
        (nvml.nvmlDeviceGetUtilizationRates(BUSY), pynvml.c_nvmlUtilization_t),
        (nvml.nvmlDeviceGetMemoryInfo(BUSY), pynvml.c_nvmlMemory_t),
        (nvml.nvmlDeviceGetFieldValues(BUSY, [82])[0], pynvml.c_nvmlFieldValue_t),
        (nvml.nvmlEventSetWait_v2([{"xid": 1, "after": 0}], 0), pynvml.c_nvmlEventData_t),
    ]
    kinds = ("DOUBLE", "UNSIGNED_INT", "UNSIGNED_LONG", "UNSIGNED_LONG_LONG", "SIGNED_LONG_LONG", "SIGNED_INT")

    for answer, structure in pairs:
        assert set(vars(answer)) <= {name for name, *_ in structure._fields_}
    assert list(range(6)) == [getattr(pynvml, f"NVML_VALUE_TYPE_{kind}") for kind in kinds]
    assert set(_MEMBERS) <= {name for name, _ in pynvml.c_nvmlValue_t._fields_}


NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
OLDER_MODULE = AttributeError("module 'pynvml' has no such function")
GONE = OSError("the driver is gone")


def note(reported):
    return lambda _where, error: reported.append(str(error))


@pytest.mark.parametrize(
    ("call", "error", "missing"),
    [
        ("nvmlDeviceGetClockInfo/2", NOT_SUPPORTED, ("gpu_clock_hertz", "memory")),
        ("nvmlDeviceGetMaxClockInfo/1", OLDER_MODULE, ("gpu_clock_limit_hertz", "sm")),
        ("nvmlDeviceGetTotalEccErrors/0/0", GONE, ("gpu_ecc_errors_total", "corrected")),
        ("nvmlDeviceGetPcieThroughput/0", NOT_SUPPORTED, ("gpu_pcie_bytes_per_second", "sent")),
        ("nvmlDeviceGetFieldValues/[(139, 4294967295)]", OLDER_MODULE, ("gpu_nvlink_bytes_total", "received")),
        ("nvmlDeviceGetPowerUsage", GONE, ("gpu_power_watts",)),
    ],
)
def test_failed_metric_does_not_affect_the_others(call, error, missing):
    reported = []
    scalars = opened(RecordedNvml(changes={BUSY: {call: [error]}}), BUSY).read(note(reported))
    found = {(scalar.name, *(scalar.labels[name] for name in scalar.labels if name != "gpu")) for scalar in scalars}

    assert {missing} == values(opened(RecordedNvml(), BUSY)).keys() - found
    assert ["the driver is gone"] * (error is GONE) == reported


def test_failed_xids_lose_neither_the_metrics_nor_earlier_xids():
    older, nvml, reported = RecordedNvml(), RecordedNvml(), []
    older.nvmlEventSetCreate = Mock(side_effect=OLDER_MODULE)
    without, gpu = opened(older, BUSY), opened(nvml, BUSY)
    nvml.nvmlEventSetWait_v2 = Mock(side_effect=[nvml.nvmlEventSetWait_v2(gpu._events, 0), GONE])

    assert {("gpu_xid_errors_total",)} == values(opened(RecordedNvml(), BUSY)).keys() - values(without).keys()
    assert ([], [31]) == (without.xids(unexpected), [event.value for event in gpu.xids(note(reported))])
    assert ["the driver is gone"] == reported


def seconds_of_events(name, key, readings):
    """Return the seconds and values of the events about readings of one label, every 10 s, by rule."""
    made, found = GpuEvents(), []
    for number, (label, value) in enumerate(readings):
        labels = {key: label, "gpu": "GPU-1"}
        found += [
            (event.rule, 10 * number, event.value)
            for event in made.of([Scalar(name, value, None, labels)], 10.0 * number)
        ]
    return found


HOT, BUSY_LIMIT, COOL = ("hw_thermal", 1.0), ("sw_power_cap", 1.0), ("hw_thermal", 0.0)
ECC, THROTTLED = ("gpu_ecc_errors_total", "type"), ("gpu_throttled", "reason")


@pytest.mark.parametrize(
    ("metric", "readings", "expected"),
    [
        (ECC, [("uncorrected", 7.0), ("uncorrected", 7.0), ("uncorrected", 9.0)], [("GpuEccUncorrected", 20, 2.0)]),
        (ECC, [("corrected", 7.0), ("corrected", 9.0)], []),
        (THROTTLED, [HOT] * 38, [("GpuThrottled", 300, 300.0), ("GpuThrottled", 360, 360.0)]),
        (THROTTLED, [*[HOT] * 20, COOL, *[HOT] * 20], []),
        (THROTTLED, [BUSY_LIMIT] * 40, []),
    ],
)
def test_memory_errors_and_lasting_throttling_are_events_with_a_rule(metric, readings, expected):
    assert expected == seconds_of_events(*metric, readings)
