"""Memory of this process and of its device's allocator, and the cost of the monitor, as rows of the store.

Memory is read on the publisher thread with every sampled step; the cost is added from time to time.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from rankscope_exporter.records.pending_step import PendingStep
from rankscope_exporter.records.step_events import StepObserver
from rankscope_exporter.records.step_record import Scalar

_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

_OF_ALLOCATOR: Final = {
    "device_memory_allocated_bytes": ("allocated_bytes.all.current", "bytes"),
    "device_memory_reserved_bytes": ("reserved_bytes.all.current", "bytes"),
    "device_memory_allocated_peak_bytes": ("allocated_bytes.all.peak", "bytes"),
    "device_memory_reserved_peak_bytes": ("reserved_bytes.all.peak", "bytes"),
    "device_memory_alloc_retries_total": ("num_alloc_retries", None),
    "device_memory_ooms_total": ("num_ooms", None),
}


class MemoryObserver(StepObserver):
    """Adds what memory is held to each measured step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def on_step_end(self, pending_step: PendingStep) -> None:
        """Have it read when the step is published."""
        if pending_step.sampled:
            pending_step.later += [self.of_process, self.of_allocator]

    def of_process(self) -> list[Scalar]:
        """Return the resident memory of this process."""
        return [Scalar("resident_memory_bytes", float(resident_bytes()), "bytes")]

    def of_allocator(self) -> list[Scalar]:
        """Return the memory that torch's allocator holds of an accelerator; does not wait for the device."""
        if self._device.type == "cpu":
            return []
        return list(allocator_scalars(torch.accelerator.memory_stats(self._device)))


def allocator_scalars(stats: Mapping[str, int]) -> Iterator[Scalar]:
    """Yield what the allocator of a device says; what it does not know is absent."""
    for name, (key, unit) in _OF_ALLOCATOR.items():
        if key in stats:
            yield Scalar(name, float(stats[key]), unit)


def resident_bytes() -> int:
    """Return the resident memory of this process; where /proc is missing, its peak so far."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


EVERY_SECONDS: Final = 10.0


class OverheadReporter(StepObserver):
    """Adds what each thread has cost, and the stretch, to the first step and the last, and every so often."""

    def __init__(
        self,
        seconds: Callable[[], Mapping[str, float]],
        stretch: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._stretch = stretch
        self._clock = clock
        self._due_at = float("-inf")

    def on_step_end(self, pending_step: PendingStep) -> None:
        """Have the numbers read on the publisher's thread."""
        now = self._clock()
        if now >= self._due_at:
            self._due_at = now + EVERY_SECONDS
            pending_step.later.append(self._scalars)

    def on_training_end(self) -> None:
        """Have them once more with the last step."""
        self._due_at = float("-inf")

    def _scalars(self) -> list[Scalar]:
        spent = [
            Scalar("overhead_seconds", value, "seconds", {"thread": name}) for name, value in self._seconds().items()
        ]
        return [*spent, Scalar("sampling_stretch", float(self._stretch()))]
