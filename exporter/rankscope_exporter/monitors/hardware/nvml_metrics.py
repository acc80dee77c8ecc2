"""Hardware metrics of one GPU from NVML, in base units.

Each metric is read by a function of two arguments: the module `pynvml` and NVML's handle of the GPU. A function raises
the module's NVMLError if the board, its driver or a MIG slice does not support the metric.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from rankscope_exporter.records.step_record import Scalar

_KIB: Final = 1024
_ALL_LINKS: Final = 0xFFFFFFFF

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
    """Yield the GPU utilization and the memory utilization.

    These are the shares of the last sample period (1/6 to 1 s) in which a kernel ran, and in which memory was read or
    written.
    """
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    yield Scalar("gpu_utilization", rates.gpu / 100, "ratio")
    yield Scalar("gpu_memory_utilization", rates.memory / 100, "ratio")


def memory(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the used and the total memory of the GPU in bytes, over all processes."""
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    yield Scalar("gpu_memory_used_bytes", float(info.used), "bytes")
    yield Scalar("gpu_memory_total_bytes", float(info.total), "bytes")


def temperature(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the temperature of the GPU chip in degrees Celsius."""
    degrees = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    yield Scalar("gpu_temperature_celsius", float(degrees), "celsius", {"sensor": "gpu"})


def memory_temperature(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the temperature of the GPU memory in degrees Celsius."""
    degrees = _field(nvml, handle, nvml.NVML_FI_DEV_MEMORY_TEMP)
    yield Scalar("gpu_temperature_celsius", degrees, "celsius", {"sensor": "memory"})


def clock(name: str, constant: str, nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the current clock frequency of the multiprocessors or of the memory in Hz."""
    hertz = nvml.nvmlDeviceGetClockInfo(handle, getattr(nvml, constant)) * 1e6
    yield Scalar("gpu_clock_hertz", hertz, "hertz", {"clock": name})


def highest_clock(name: str, constant: str, nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the highest possible clock frequency of the multiprocessors or of the memory in Hz."""
    hertz = nvml.nvmlDeviceGetMaxClockInfo(handle, getattr(nvml, constant)) * 1e6
    yield Scalar("gpu_clock_limit_hertz", hertz, "hertz", {"clock": name})


def throttling(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield 1 for each reason that currently reduces the GPU clocks, and 0 for each other reason."""
    mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    for name, constant in THROTTLE_REASONS.items():
        bit = getattr(nvml, f"nvmlClocksThrottleReason{constant}")
        yield Scalar("gpu_throttled", float(bool(mask & bit)), None, {"reason": name})


def ecc(name: str, constant: str, nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the number of corrected or uncorrected memory errors since the driver was loaded."""
    count = nvml.nvmlDeviceGetTotalEccErrors(handle, getattr(nvml, constant), nvml.NVML_VOLATILE_ECC)
    yield Scalar("gpu_ecc_errors_total", float(count), "errors", {"type": name})


def remapped_rows(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the number of remapped memory rows, and whether a remapping has failed or waits for a GPU reset."""
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    states = {"corrected": corrected, "uncorrected": uncorrected, "pending": pending, "failed": failed}
    for name, count in states.items():
        yield Scalar("gpu_remapped_rows", float(count), None, {"state": name})


def pcie(name: str, constant: str, nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield bytes per second over PCIe in one direction, measured by NVML over 20 ms."""
    rate = nvml.nvmlDeviceGetPcieThroughput(handle, getattr(nvml, constant)) * _KIB
    yield Scalar("gpu_pcie_bytes_per_second", float(rate), "bytes per second", {"direction": name})


def nvlink(name: str, constant: str, nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the number of bytes that all NVLink connections of the GPU have transferred in one direction."""
    carried = _field(nvml, handle, (getattr(nvml, constant), _ALL_LINKS)) * _KIB
    yield Scalar("gpu_nvlink_bytes_total", carried, "bytes", {"direction": name})


@dataclass(frozen=True, slots=True)
class Reading:
    """A named function that reads one metric of a GPU.

    Each metric has its own function, because a GPU may support only some metrics.
    """

    name: str
    read: Callable[[Any, Any], Iterable[Scalar]]


def _whole(function: Callable[[Any, Any], Iterator[Scalar]]) -> Reading:
    return Reading(function.__name__, function)


def _parts(function: Callable[[str, str, Any, Any], Iterator[Scalar]], **constants: str) -> list[Reading]:
    """Return functions that read a metric, one for each value of its label.

    `constants` contains the name of NVML's constant for each label value.
    """
    return [
        Reading(f"{function.__name__} ({name})", functools.partial(function, name, constant))
        for name, constant in constants.items()
    ]


def _scaled(name: str, scalar: str, unit: str, function: str, divisor: float) -> Reading:
    """Return a function that reads one metric.

    The metric is the result of the NVML function named `function`, divided by `divisor`.
    """
    return Reading(name, lambda nvml, handle: [Scalar(scalar, float(getattr(nvml, function)(handle) / divisor), unit)])


READINGS: Final = (
    _whole(utilization),
    _whole(memory),
    _scaled("power", "gpu_power_watts", "watts", "nvmlDeviceGetPowerUsage", 1e3),
    _scaled("power_limit", "gpu_power_limit_watts", "watts", "nvmlDeviceGetEnforcedPowerLimit", 1e3),
    _scaled("energy", "gpu_energy_joules_total", "joules", "nvmlDeviceGetTotalEnergyConsumption", 1e3),
    _whole(temperature),
    _whole(memory_temperature),
    *_parts(clock, sm="NVML_CLOCK_SM", memory="NVML_CLOCK_MEM"),
    *_parts(highest_clock, sm="NVML_CLOCK_SM", memory="NVML_CLOCK_MEM"),
    _whole(throttling),
    *_parts(ecc, corrected="NVML_MEMORY_ERROR_TYPE_CORRECTED", uncorrected="NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
    _whole(remapped_rows),
    *_parts(pcie, sent="NVML_PCIE_UTIL_TX_BYTES", received="NVML_PCIE_UTIL_RX_BYTES"),
    _scaled("pcie_replays", "gpu_pcie_replays_total", "packets", "nvmlDeviceGetPcieReplayCounter", 1),
    *_parts(nvlink, sent="NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", received="NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"),
)

_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal")
"""Names of the members of NVML's union for values, indexed by the type number of a value."""


def _field(nvml: Any, handle: Any, number: Any) -> float:
    found = nvml.nvmlDeviceGetFieldValues(handle, [number])[0]
    if found.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(found.nvmlReturn)
    return float(getattr(found.value, _MEMBERS[found.valueType]))
