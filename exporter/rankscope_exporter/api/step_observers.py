"""What goes along with every step of a session, measured or not: memory, throughput, phases, collectives, hardware."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rankscope_exporter.adapters.base import Hooking
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.monitors.flight_recorder.poller import FlightRecorderPoller
from rankscope_exporter.monitors.hardware.poller import HardwarePoller
from rankscope_exporter.observers.resources import MemoryObserver
from rankscope_exporter.observers.step_timing.observer import StepTimingObserver
from rankscope_exporter.observers.throughput.meter import Throughput
from rankscope_exporter.observers.throughput.parameter_counts import Parallel
from rankscope_exporter.records.pending_step import PendingStep
from rankscope_exporter.records.step_events import StepEvents
from rankscope_exporter.records.step_record import StepRecord


class StepObservers:
    """Built with the session; each notes little on the training thread, and does the rest on others."""

    def __init__(
        self,
        monitored: MonitoredModel,
        config: MonitorConfig,
        boundary: ErrorBoundary,
        *,
        device: torch.device,
        parallel: Parallel,
        rank: int,
        hand_over: Callable[[PendingStep], None],
        publish: Callable[[StepRecord], object],
        tell: Callable[[str], None],
        mention: Callable[[str], None],
    ) -> None:
        self._boundary = boundary
        self.memory = MemoryObserver(device)
        self.throughput = Throughput(
            monitored.framework,
            config.throughput,
            parallel,
            device=device,
            tell=tell,
            mention=mention,
            is_first=rank == 0,
        )
        self.phases = StepTimingObserver.of(monitored, device, hand_over, times_steps=config.phases)
        self.collectives = FlightRecorderPoller(config.collectives_share, publish, boundary)
        self.hardware = HardwarePoller(device, config.hardware.every_seconds, hand_over, boundary)

    def follow(self, step_events: StepEvents) -> None:
        """Hear of every step from now on."""
        for follower in (self.memory, self.throughput, self.phases, self.collectives):
            step_events.follow(follower)

    def start(self, hooking: Hooking) -> None:
        """Install the hooks of throughput and start the hardware thread; a part that does not start is reported."""
        self._boundary.call("starting throughput", self.throughput.install, hooking)
        self._boundary.call("starting to read the hardware", self.hardware.start)

    def overhead_seconds(self) -> dict[str, float]:
        """Return CPU seconds by who spent them off the training thread."""
        return {
            "hardware": self.hardware.cpu_seconds,
            "collectives": self.collectives.cpu_seconds,
        }

    def left_out(self) -> dict[str, int]:
        """Return what could not be told, by reason."""
        return {"collectives_overrun": self.collectives.overwritten, "phases_late": self.phases.left_out}
