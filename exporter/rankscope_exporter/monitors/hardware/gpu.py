"""Reads the state of this rank's GPU through NVML.

The GPU is found by its UUID, because CUDA_VISIBLE_DEVICES changes the device numbers. `nvidia-ml-py` is imported at run
time. Without this package or a driver, there are no GPU metrics; that is not an error.

Hardware metrics of one GPU from NVML are in base units.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.records.record import Scalar

_ALL_LINKS: Final = 0xFFFFFFFF
_KIB: Final = 1024

Reading = Callable[[Any, Any], Iterable[Scalar]]
"""Function of the module `pynvml` and NVML's handle of the GPU that reads a metric.

It raises the module's NVMLError if the board, its driver or a MIG slice does not support the metric.
"""

THROTTLE_REASONS: Final = {
    "sw_power_cap": "SwPowerCap",
    "sw_thermal": "SwThermalSlowdown",
    "hw_slowdown": "HwSlowdown",
    "hw_thermal": "HwThermalSlowdown",
    "hw_power_brake": "HwPowerBrakeSlowdown",
    "sync_boost": "SyncBoost",
    "applications_clocks": "ApplicationsClocksSetting",
    "display_clocks": "DisplayClockSetting",
    "idle": "GpuIdle",
}
"""Reasons for reduced GPU clocks.

The key is the value of the label `reason`, and the value is the suffix of NVML's constant
`nvmlClocksThrottleReason<suffix>`.
"""


def utilization(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the shares of the last sample period (1/6 to 1 s) in which a kernel ran, and with memory traffic."""
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    yield Scalar("gpu_utilization", rates.gpu / 100, "ratio")
    yield Scalar("gpu_memory_utilization", rates.memory / 100, "ratio")


def memory(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the used and the total memory of the GPU in bytes, over all processes."""
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    yield Scalar("gpu_memory_used_bytes", float(info.used), "bytes")
    yield Scalar("gpu_memory_total_bytes", float(info.total), "bytes")


def throttling(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield 1 for each reason that currently reduces the GPU clocks, and 0 for each other reason."""
    mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    for name, constant in THROTTLE_REASONS.items():
        bit = getattr(nvml, f"nvmlClocksThrottleReason{constant}")
        yield Scalar("gpu_throttled", float(bool(mask & bit)), None, {"reason": name})


def remapped_rows(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the number of remapped memory rows, and whether a remapping has failed or waits for a GPU reset."""
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    states = {"corrected": corrected, "uncorrected": uncorrected, "pending": pending, "failed": failed}
    for name, count in states.items():
        yield Scalar("gpu_remapped_rows", float(count), None, {"state": name})


_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal")
"""Names of the members of NVML's union for values, indexed by the type number of a value."""


def _field(nvml: Any, handle: Any, number: Any) -> float:
    found = nvml.nvmlDeviceGetFieldValues(handle, [number])[0]
    if found.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(found.nvmlReturn)
    return float(getattr(found.value, _MEMBERS[found.valueType]))


def _clock(nvml: Any, handle: Any, domain: Any) -> float:
    return float(nvml.nvmlDeviceGetClockInfo(handle, domain) * 1e6)


def _highest_clock(nvml: Any, handle: Any, domain: Any) -> float:
    return float(nvml.nvmlDeviceGetMaxClockInfo(handle, domain) * 1e6)


def _ecc_errors(nvml: Any, handle: Any, kind: Any) -> float:
    return float(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))  # since the driver was loaded


def _pcie_rate(nvml: Any, handle: Any, direction: Any) -> float:
    return float(nvml.nvmlDeviceGetPcieThroughput(handle, direction) * _KIB)  # NVML measures for 20 ms


def _nvlink_bytes(nvml: Any, handle: Any, direction: Any) -> float:
    return _field(nvml, handle, (direction, _ALL_LINKS)) * _KIB


def _one(scalar: str, unit: str, read: Callable[[Any, Any], float]) -> dict[str, Reading]:
    """Return the function that reads a metric without labels, by name."""
    return {scalar: lambda nvml, handle: [Scalar(scalar, float(read(nvml, handle)), unit)]}


def _each(
    scalar: str, unit: str, label: str, constants: Mapping[str, str], read: Callable[..., float]
) -> dict[str, Reading]:
    """Return the functions that read a metric by name, one for each value of `label`.

    `constants` contains the name of NVML's constant for each value. `read` receives the constant as third argument.
    """

    def of(value: str, constant: str) -> Reading:
        labels = {label: value}
        return lambda nvml, handle: [Scalar(scalar, read(nvml, handle, getattr(nvml, constant)), unit, labels)]

    return {f"{scalar} ({value})": of(value, constant) for value, constant in constants.items()}


_CELSIUS: Final = ("gpu_temperature_celsius", "celsius", "sensor")
_CLOCKS: Final = {"sm": "NVML_CLOCK_SM", "memory": "NVML_CLOCK_MEM"}
_ECC: Final = {"corrected": "NVML_MEMORY_ERROR_TYPE_CORRECTED", "uncorrected": "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"}
_PCIE: Final = {"sent": "NVML_PCIE_UTIL_TX_BYTES", "received": "NVML_PCIE_UTIL_RX_BYTES"}
_NVLINK: Final = {"sent": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "received": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"}

READINGS: Final[Mapping[str, Reading]] = {
    "gpu_utilization": utilization,
    "gpu_memory": memory,
    **_one("gpu_power_watts", "watts", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
    **_one("gpu_power_limit_watts", "watts", lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3),
    **_one("gpu_energy_joules_total", "joules", lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3),
    **_each(*_CELSIUS, {"gpu": "NVML_TEMPERATURE_GPU"}, lambda nvml, *of: float(nvml.nvmlDeviceGetTemperature(*of))),
    **_each(*_CELSIUS, {"memory": "NVML_FI_DEV_MEMORY_TEMP"}, _field),
    **_each("gpu_clock_hertz", "hertz", "clock", _CLOCKS, _clock),
    **_each("gpu_clock_limit_hertz", "hertz", "clock", _CLOCKS, _highest_clock),
    "gpu_throttled": throttling,
    **_each("gpu_ecc_errors_total", "errors", "type", _ECC, _ecc_errors),
    "gpu_remapped_rows": remapped_rows,
    **_each("gpu_pcie_bytes_per_second", "bytes per second", "direction", _PCIE, _pcie_rate),
    **_one("gpu_pcie_replays_total", "packets", lambda nvml, gpu: nvml.nvmlDeviceGetPcieReplayCounter(gpu)),
    **_each("gpu_nvlink_bytes_total", "bytes", "direction", _NVLINK, _nvlink_bytes),
}
"""The functions that read the metrics of a GPU, by name. There are several, because a GPU may support only some."""

log = logging.getLogger("rankscope")

Report = Callable[[str, BaseException], None]
"""Function that reports a failed operation and its error, for example `ErrorBoundary.report`."""

_MEANINGS: Final = {
    13: "graphics engine exception, mostly of the application",
    31: "memory page fault, mostly of the application",
    43: "the GPU stopped processing",
    45: "preemptive cleanup after an earlier error",
    48: "double bit ECC error",
    61: "internal micro-controller halt",
    62: "internal micro-controller halt",
    63: "a row of the memory is to be remapped",
    64: "a row of the memory could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
}
"""Meanings of the XID error codes that occur during training, from NVIDIA's list."""

# Errors of the driver that will not change later: the metric is not read again.
_FINAL: Final = ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "INVALID_ARGUMENT")


def uuid_of(device: torch.device) -> str | None:
    """Return the UUID of a CUDA device, without NVML's prefix `GPU-` or `MIG-`; None for any other device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def load_nvml() -> Any:
    """Return the module `pynvml` of nvidia-ml-py; None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        log.debug("nvidia-ml-py is not installed: no GPU metrics; run pip install nvidia-ml-py")
        return None


class Gpu:
    """An open handle of one GPU or MIG slice. Only one thread may use it."""

    def __init__(self, nvml: Any, handle: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = handle
        self.uuid = uuid
        self._readings = dict(READINGS)
        self._failed: set[str] = set()
        self._xids = 0
        self._events = self._event_set()

    @classmethod
    def open(cls, nvml: Any, uuid: str) -> Gpu | None:
        """Return the GPU with the UUID `uuid`; None if NVML cannot be initialized or does not find the GPU."""
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            log.debug("no GPU metrics: NVML failed to initialize: %s", error)
            return None
        # The prefix differs for a MIG slice. A UUID that already has a prefix is not changed.
        for name in (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}"):
            try:
                return cls(nvml, nvml.nvmlDeviceGetHandleByUUID(name), name)
            except nvml.NVMLError as error:
                log.debug("NVML has no device %s: %s", name, error)
        _quietly(nvml, nvml.nvmlShutdown)
        return None

    def read(self, report: Report) -> list[Scalar]:
        """Return all metrics that the GPU supports, each read independently; report errors other than NVMLError."""
        found = [scalar for name in list(self._readings) for scalar in self._read(name, report)]
        if self._events is not None:
            found.append(Scalar("gpu_xid_errors_total", float(self._xids), "errors"))
        return [Scalar(item.name, item.value, item.unit, {**item.labels, "gpu": self.uuid}) for item in found]

    def xids(self, report: Report) -> list[Event]:
        """Return one event for each critical GPU error (XID) that the driver has reported since the last call."""
        found: list[Event] = []
        while self._events is not None:
            try:
                data = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_TIMEOUT:  # timeout: there are no more events
                    self._log_once("XID events", error)
                return found
            except Exception as error:  # noqa: BLE001 - the events that were found are returned
                report("reading XIDs", error)
                return found
            self._xids += 1
            found.append(_event(int(data.eventData), self.uuid))
        return found

    def close(self) -> None:
        """Release NVML, which other users in the process keep initialized until the last one releases it."""
        if self._events is not None:
            _quietly(self._nvml, self._nvml.nvmlEventSetFree, self._events)
        _quietly(self._nvml, self._nvml.nvmlShutdown)

    def _read(self, name: str, report: Report) -> Iterable[Scalar]:
        try:
            return list(self._readings[name](self._nvml, self._handle))
        except (self._nvml.NVMLError, AttributeError) as error:
            self._log_once(name, error)
            # An older nvidia-ml-py does not have the function, and raises AttributeError.
            if getattr(error, "value", None) in {None, *(getattr(self._nvml, f"NVML_ERROR_{it}") for it in _FINAL)}:
                del self._readings[name]
        except Exception as error:  # noqa: BLE001 - the other metrics are read after an error of one
            report(f"reading {name} of the GPU", error)
        return ()

    def _log_once(self, metric: str, error: Exception) -> None:
        if metric not in self._failed:
            self._failed.add(metric)
            log.debug("%s of the GPU %s is not available: NVML error: %s", metric, self.uuid, error)

    def _event_set(self) -> Any:
        """Return the NVML event set that receives XID errors.

        Return None for MIG slices, and if the process has no permission.
        """
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            try:
                nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:
                _quietly(nvml, nvml.nvmlEventSetFree, events)
                raise
        except (nvml.NVMLError, AttributeError) as error:
            self._log_once("XID events", error)
            return None
        return events


def _event(xid: int, uuid: str) -> Event:
    meaning = _MEANINGS.get(xid)
    return Event(
        type=EventType.XID,
        severity=Severity.CRITICAL,
        value=float(xid),
        message=f"XID {xid} on {uuid}" + (f": {meaning}" if meaning else ""),
        details=json.dumps({"xid": xid, "gpu": uuid}),
    )


def _quietly(nvml: Any, function: Any, *args: Any) -> None:
    try:
        function(*args)
    except nvml.NVMLError as error:
        log.debug("releasing NVML or its events failed: NVML error: %s", error)
