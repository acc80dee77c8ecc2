"""Metrics from answers of NVML, simulated by RecordedNvml. None of these tests has run on a GPU."""

from __future__ import annotations

import ctypes.util
import inspect
import json
import logging
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch
from tests.exporter.monitors.hardware.recorded_nvml import RecordedNvml

from rankscope_contract.metrics.catalogue import SCALARS_WITH_OWN_METRIC
from rankscope_exporter.monitors.hardware import gpu as gpu_module
from rankscope_exporter.monitors.hardware.gpu import _MEMBERS, READINGS, THROTTLE_REASONS, Gpu, uuid_of

FIRST = "GPU-aaaaaaaa-0000-1111-2222-333333333333"
BUSY = "GPU-bbbbbbbb-0000-1111-2222-333333333333"
PLAIN = "GPU-cccccccc-0000-1111-2222-333333333333"
SLICE = "MIG-dddddddd-0000-1111-2222-333333333333"


def opened(nvml: RecordedNvml, uuid: str) -> Gpu:
    gpu = Gpu.open(nvml, uuid)
    assert gpu is not None
    return gpu


def unexpected(where: str, error: BaseException) -> None:
    raise AssertionError(f"{where}: {error!r}")


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
    nvml = RecordedNvml()
    gpu = opened(nvml, PLAIN)

    first, second = values(gpu), values(gpu)

    assert {"gpu_utilization", "gpu_memory_utilization", "gpu_memory_used_bytes", "gpu_memory_total_bytes"} == {
        name for name, *_ in first
    }
    assert {("gpu_power_watts",)} == second.keys() - first.keys()  # a temporary error is tried again
    assert 2 == nvml.calls.count("nvmlDeviceGetTotalEccErrors")  # a final error is not, for either kind
    assert 2 == len([record for record in caplog.records if record.getMessage().startswith("ecc (")])


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
    assert pynvml is gpu_module.load_nvml()
    if not ctypes.util.find_library("nvidia-ml"):
        assert Gpu.open(pynvml, BUSY) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert None is gpu_module.load_nvml()


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

    for reading in READINGS:
        with pytest.raises(pynvml.NVMLError):
            list(reading.read(Listening(), "handle"))

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


# Errors of single metrics.

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


def test_metrics_are_read_if_xids_cannot_be_read():
    nvml = RecordedNvml()
    nvml.nvmlEventSetCreate = Mock(side_effect=OLDER_MODULE)
    gpu = opened(nvml, BUSY)

    assert {("gpu_xid_errors_total",)} == values(opened(RecordedNvml(), BUSY)).keys() - values(gpu).keys()
    assert [] == gpu.xids(unexpected)


def test_error_after_an_xid_keeps_the_xid():
    nvml, reported = RecordedNvml(), []
    gpu = opened(nvml, BUSY)
    nvml.nvmlEventSetWait_v2 = Mock(side_effect=[nvml.nvmlEventSetWait_v2(gpu._events, 0), GONE])

    assert [31] == [event.value for event in gpu.xids(note(reported))]
    assert ["the driver is gone"] == reported
