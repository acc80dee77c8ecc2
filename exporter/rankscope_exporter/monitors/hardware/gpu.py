"""Reads the state of this rank's GPU through NVML.

The GPU is found by its UUID, because CUDA_VISIBLE_DEVICES changes the device numbers. `nvidia-ml-py` is imported at run
time. Without this package or a driver, there are no GPU metrics; that is not an error.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.monitors.hardware.nvml_metrics import READINGS, Reading
from rankscope_exporter.records.step_record import Scalar

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
        self._readings = list(READINGS)
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
        """Return the current values of all metrics that the GPU supports.

        Each metric is read independently. An error other than NVMLError is reported.
        """
        found = [scalar for reading in list(self._readings) for scalar in self._read(reading, report)]
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
        """Release NVML.

        Other code of the process can still use NVML, which remains initialized until its last user releases it.
        """
        if self._events is not None:
            _quietly(self._nvml, self._nvml.nvmlEventSetFree, self._events)
        _quietly(self._nvml, self._nvml.nvmlShutdown)

    def _read(self, reading: Reading, report: Report) -> Iterable[Scalar]:
        try:
            return list(reading.read(self._nvml, self._handle))
        except self._nvml.NVMLError as error:
            self._log_once(reading.name, error)
            if error.value in {getattr(self._nvml, f"NVML_ERROR_{name}") for name in _FINAL}:
                self._readings.remove(reading)
        except AttributeError as error:  # an older nvidia-ml-py does not have the function
            self._log_once(reading.name, error)
            self._readings.remove(reading)
        except Exception as error:  # noqa: BLE001 - the other metrics are read after an error of one
            report(f"reading {reading.name} of the GPU", error)
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
