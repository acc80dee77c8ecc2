"""Thread that reads the state of the GPU, the process and the machine every few seconds.

Each reading is published as a separate record with its time and without a step, so no value is repeated at later steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.hardware.gpu import Gpu, load_nvml, uuid_of
from rankscope_exporter.monitors.hardware.host import Host, host_scalars
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.records.pending_step import PendingStep, now_microseconds

_STOP_SECONDS: Final = 2.0
"""Maximum seconds that the end of training waits for a reading of the hardware metrics that is in progress."""


class HardwarePoller:
    """Reads and publishes hardware metrics on one daemon thread, which runs from `start` to `stop`."""

    def __init__(
        self,
        device: torch.device,
        every_seconds: float,
        hand_over: Callable[[PendingStep], None],
        boundary: ErrorBoundary,
        *,
        nvml: Callable[[], Any] = load_nvml,
    ) -> None:
        self._device = device
        self._every_seconds = every_seconds
        self._hand_over = hand_over
        self._boundary = boundary
        self._load_nvml = nvml
        self._stopped = threading.Event()
        self._thread = OwnThread(target=self._run, name="rankscope-hardware", on_fault=boundary.report)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the hardware thread so far."""
        return self._thread.cpu_seconds

    def start(self) -> None:
        """Start the hardware thread. Does nothing if the interval between readings is 0."""
        if self._every_seconds > 0:
            self._thread.start()

    def stop(self) -> None:
        """End the hardware thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        gpu = self._boundary.call("opening the GPU", self._open)
        host = Host(self._boundary.report)
        before = self._boundary.call("reading the machine", host.state)
        while not self._stopped.wait(self._every_seconds):
            before = self._boundary.call("publishing the hardware", self._publish, gpu, host, before) or before
        if gpu is not None:
            self._boundary.call("closing the GPU", gpu.close)

    def _open(self) -> Gpu | None:
        uuid = uuid_of(self._device)
        nvml = None if uuid is None else self._load_nvml()
        return None if uuid is None or nvml is None else Gpu.open(nvml, uuid)

    def _publish(self, gpu: Gpu | None, host: Host, before: Any) -> Any:
        """Publish the current hardware metrics, and return the state of the machine.

        The caller passes this state as `before` to the next call, which derives the CPU utilization from it.

        GPU and machine are read independently: an error of one does not affect the other.
        """
        call, report = self._boundary.call, self._boundary.report
        events = [] if gpu is None else call("reading XIDs", gpu.xids, report) or []
        of_gpu = [] if gpu is None else call("reading the GPU", gpu.read, report) or []
        state = call("reading the machine", host.state)
        of_host = [] if before is None or state is None else list(host_scalars(before, state))
        scalars = [*of_host, *of_gpu]
        if scalars or events:
            self._hand_over(PendingStep(None, now_microseconds(), events=events, later=[lambda: scalars]))
        return state
