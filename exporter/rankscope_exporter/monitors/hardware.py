"""State of this rank's GPU, the process and the machine, and the CPU time of the monitor.

A thread reads GPU, process and machine every few seconds. Each reading is published as a separate record with its time
and without a step, so no value is repeated at later steps. The memory of the process and of the device's allocator, and
the CPU time of the monitor, are scalars in the record of a step (`ResourceObserver`).

The GPU is read through NVML, and its metrics are in base units. It is found by its UUID, because CUDA_VISIBLE_DEVICES
changes the device numbers. `nvidia-ml-py` is imported at run time. Without this package or a driver, there are no GPU
metrics; that is not an error.

CPU, memory, page faults and disk I/O are read from /proc.
"""

from __future__ import annotations

import importlib
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from rankscope_contract.metrics.hardware import BAD_THROTTLE_REASONS, THROTTLED_SECONDS
from rankscope_contract.model.events import GPU_ECC, GPU_THROTTLED, Event, EventType, Severity
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.records.record import Scalar, StepObserver, StepRecord

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


def throttling(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield 1 for each reason that currently reduces the GPU clocks, and 0 for each other reason."""
    mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    for name, constant in THROTTLE_REASONS.items():
        bit = getattr(nvml, f"nvmlClocksThrottleReason{constant}")
        yield Scalar("gpu_throttled", float(bool(mask & bit)), None, {"reason": name})


def remapped_rows(nvml: Any, handle: Any) -> Iterator[Scalar]:
    """Yield the number of remapped memory rows, and whether a remapping has failed or waits for a GPU reset."""
    states = ("corrected", "uncorrected", "pending", "failed")
    for name, count in zip(states, nvml.nvmlDeviceGetRemappedRows(handle), strict=True):
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
    **_one("gpu_memory_used_bytes", "bytes", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    **_one("gpu_memory_total_bytes", "bytes", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
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
        found = [scalar for name in READINGS for scalar in self._read(name, report)]
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
            return list(READINGS[name](self._nvml, self._handle))
        except (self._nvml.NVMLError, AttributeError) as error:  # AttributeError: an older nvidia-ml-py
            self._log_once(name, error)
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
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
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
        details={"xid": xid, "gpu": uuid},
    )


_REPEAT_SECONDS: Final = 60.0
"""Interval in seconds at which the event of a throttled GPU is repeated: without a further one, it is over."""


@dataclass(slots=True)
class GpuEvents:
    """Events about the readings of one GPU: new uncorrectable memory errors, and lasting throttling by heat or power.

    The alerts of Prometheus on the same metrics have the same rules.
    """

    errors: float | None = None  # at the last reading; the counter of the driver can be above zero before a run
    throttled_since: float | None = None
    due_at: float = 0.0

    def of(self, scalars: Iterable[Scalar], now: float) -> Iterator[Event]:
        """Yield the events of one reading, which was taken at `now` in monotonic seconds."""
        reasons = []
        for scalar in scalars:
            if scalar.name == "gpu_throttled" and scalar.value and scalar.labels["reason"] in BAD_THROTTLE_REASONS:
                reasons.append(scalar)
            if scalar.name == "gpu_ecc_errors_total" and scalar.labels["type"] == "uncorrected":
                known, self.errors = self.errors, scalar.value
                if known is not None and (count := scalar.value - known) > 0:
                    gpu, errors = scalar.labels["gpu"], f"memory error{'s' if count > 1 else ''}"
                    text = f"{count:.0f} new {errors} that ECC could not correct on {gpu}"
                    yield _gpu_event(GPU_ECC, Severity.CRITICAL, count, text, gpu)
        if not reasons:
            self.throttled_since = None
        elif self.throttled_since is None:
            self.throttled_since, self.due_at = now, now + THROTTLED_SECONDS
        elif now >= self.due_at:
            self.due_at, seconds = now + _REPEAT_SECONDS, now - self.throttled_since
            names, gpu = ", ".join(scalar.labels["reason"] for scalar in reasons), reasons[0].labels["gpu"]
            text = f"{gpu} has reduced its clocks for {seconds / 60:.0f} min because of heat or power supply ({names})"
            yield _gpu_event(GPU_THROTTLED, Severity.WARNING, seconds, text, gpu)


def _gpu_event(rule: str, severity: str, value: float, message: str, gpu: str) -> Event:
    return Event(type=EventType.GPU, severity=severity, rule=rule, value=value, message=message, details={"gpu": gpu})


def _quietly(nvml: Any, function: Any, *args: Any) -> None:
    try:
        function(*args)
    except nvml.NVMLError as error:
        log.debug("releasing NVML or its events failed: NVML error: %s", error)


_PROC: Final = Path("/proc")

State = Mapping[str, float]
"""State of the process and the machine at one time: the known values by the name of their metric.

In addition, it has the sums of the busy clock ticks, and of the busy and idle clock ticks, of all CPUs. They are not
published, but used to compute the CPU utilization.
"""

_BUSY: Final = "busy_ticks"
_ALL: Final = "all_ticks"


def host_scalars(before: State, now: State) -> Iterator[Scalar]:
    """Yield a metric for each value of the state `now`, and one for the CPU utilization of the machine.

    The utilization is that of the time between the earlier state `before` and the state `now`.
    """
    for name in now:
        if name not in (_BUSY, _ALL):
            yield Scalar(name, now[name], next((unit for unit in ("bytes", "seconds") if unit in name), None))
    passed = now[_ALL] - before[_ALL] if _ALL in now and _ALL in before else 0.0
    if passed > 0:
        yield Scalar("host_cpu_utilization", min(1.0, max(0.0, (now[_BUSY] - before[_BUSY]) / passed)), "ratio")


def machine_state() -> State:
    """Return the state of the process and the machine. Values of a file of /proc that cannot be read are absent."""
    memory, io, status = (proc_table(_PROC / name) for name in ("meminfo", "self/io", "self/status"))
    # User, nice, system, idle, iowait, irq, softirq and steal time of all CPUs.
    ticks = [float(word) for line in _lines(_PROC / "stat")[:1] for word in line.split()[1:9]]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "process_cpu_seconds_total": usage.ru_utime + usage.ru_stime,
        "process_major_faults_total": float(usage.ru_majflt),
        "process_involuntary_switches_total": float(usage.ru_nivcsw),
        "process_threads": status.get("Threads"),
        "process_read_bytes_total": io.get("read_bytes"),
        "process_written_bytes_total": io.get("write_bytes"),
        "host_memory_available_bytes": memory.get("MemAvailable"),
        "host_memory_total_bytes": memory.get("MemTotal"),
        "host_swap_used_bytes": memory["SwapTotal"] - memory["SwapFree"] if "SwapFree" in memory else None,
        _BUSY: sum(ticks) - sum(ticks[3:5]) if ticks else None,
        _ALL: sum(ticks) if ticks else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def proc_table(path: Path) -> dict[str, float]:
    """Return the numbers of a file in /proc with lines `name: number` or `name: number kB`, in bytes, by name.

    The table is empty if the file cannot be read.
    """
    pairs = ((line.partition(":")[0], line.partition(":")[2].split()) for line in _lines(path))
    return {
        key: float(words[0]) * (_KIB if words[1:] == ["kB"] else 1)
        for key, words in pairs
        if words and words[0].isdigit()
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


_STOP_SECONDS: Final = 2.0
"""Maximum seconds that the end of training waits for a reading of the hardware metrics that is in progress."""


@dataclass(eq=False)
class HardwarePoller:
    """Reads and publishes hardware metrics on one daemon thread, which runs from `start` to `stop`."""

    device: torch.device
    every_seconds: float
    hand_over: Callable[[StepRecord], None]
    boundary: ErrorBoundary

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._events = GpuEvents()
        self.thread = OwnThread(target=self._run, name="rankscope-hardware", on_fault=self.boundary.report)

    def start(self) -> None:
        """Start the hardware thread. Does nothing if the interval between readings is 0."""
        if self.every_seconds > 0:
            self.thread.start()

    def stop(self) -> None:
        """End the hardware thread."""
        self._stopped.set()
        if self.thread.is_alive():
            self.thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        gpu = self.boundary.call("opening the GPU", self._open)
        before = self.boundary.call("reading the machine", machine_state)
        while not self._stopped.wait(self.every_seconds):
            before = self.boundary.call("publishing the hardware", self._publish, gpu, before) or before
        if gpu is not None:
            self.boundary.call("closing the GPU", gpu.close)

    def _open(self) -> Gpu | None:
        uuid = uuid_of(self.device)
        nvml = None if uuid is None else load_nvml()
        return None if uuid is None or nvml is None else Gpu.open(nvml, uuid)

    def _publish(self, gpu: Gpu | None, before: Any) -> Any:
        """Publish the current hardware metrics, and return the state of the machine.

        The caller passes this state as `before` to the next call, which derives the CPU utilization from it.

        GPU and machine are read independently: an error of one does not affect the other.
        """
        call, report = self.boundary.call, self.boundary.report
        events = [] if gpu is None else call("reading XIDs", gpu.xids, report) or []
        of_gpu = [] if gpu is None else call("reading the GPU", gpu.read, report) or []
        events = [*events, *self._events.of(of_gpu, time.monotonic())]
        state = call("reading the machine", machine_state)
        of_host = [] if before is None or state is None else list(host_scalars(before, state))
        scalars = [*of_host, *of_gpu]
        if scalars or events:
            self.hand_over(StepRecord.now(events=events, later=[lambda: scalars]))
        return state


_STATM: Final = _PROC / "self/statm"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

_OF_ALLOCATOR: Final = {
    "device_memory_allocated_bytes": ("allocated_bytes.all.current", "bytes"),
    "device_memory_reserved_bytes": ("reserved_bytes.all.current", "bytes"),
    "device_memory_allocated_peak_bytes": ("allocated_bytes.all.peak", "bytes"),
    "device_memory_reserved_peak_bytes": ("reserved_bytes.all.peak", "bytes"),
    "device_memory_alloc_retries_total": ("num_alloc_retries", None),
    "device_memory_ooms_total": ("num_ooms", None),
}


def allocator_scalars(stats: Mapping[str, int]) -> Iterator[Scalar]:
    """Yield a scalar for each published statistic of a device's allocator that `stats` contains."""
    for name, (key, unit) in _OF_ALLOCATOR.items():
        if key in stats:
            yield Scalar(name, float(stats[key]), unit)


EVERY_SECONDS: Final = 10.0


@dataclass(slots=True)
class ResourceObserver(StepObserver):
    """Adds scalars about memory to each sampled step, and two overhead measures to a step every 10 s.

    The overhead measures are the CPU seconds of each monitor thread, and the sampling stretch. They are always added to
    the first and to the last step. The publisher thread reads all of them before it publishes the step.
    """

    device: torch.device
    seconds: Callable[[], Mapping[str, float]]
    """Function that returns the CPU seconds that each thread of the monitor has used so far, by name of the thread."""
    stretch: Callable[[], int]
    """Function that returns the factor by which the overhead controller has multiplied the sampling interval."""
    due_at: float = field(default=float("-inf"), init=False)

    def on_publish(self, record: StepRecord) -> None:
        if record.is_skipped is None:  # not the end of a step
            return
        if record.sampled:
            record.later += [self.of_process, self.of_allocator]
        now = time.monotonic()
        if now >= self.due_at:
            self.due_at = now + EVERY_SECONDS
            record.later.append(self._scalars)

    def on_training_end(self) -> None:
        self.due_at = float("-inf")

    def of_process(self) -> list[Scalar]:
        """Return a scalar with the resident memory of this process in bytes; none if a container hides it."""
        try:
            resident = int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
        except OSError:
            return []
        return [Scalar("resident_memory_bytes", float(resident), "bytes")]

    def of_allocator(self) -> list[Scalar]:
        """Return scalars with statistics of torch's allocator for an accelerator. Does not wait for the device."""
        if self.device.type == "cpu":
            return []
        return list(allocator_scalars(torch.accelerator.memory_stats(self.device)))

    def _scalars(self) -> list[Scalar]:
        spent = [
            Scalar("overhead_seconds", value, "seconds", {"thread": name}) for name, value in self.seconds().items()
        ]
        return [*spent, Scalar("sampling_stretch", float(self.stretch()))]
