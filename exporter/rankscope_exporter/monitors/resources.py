"""Observers of memory and of the monitor's CPU time. The values are published as scalars in the record of a step.

The publisher thread reads the memory of the process and of the device's allocator for each sampled step. The CPU time
is added to the record of a step every EVERY_SECONDS (10 s).
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from rankscope_exporter.records.record import Scalar, StepObserver, StepRecord

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
        """Return a scalar with the resident memory of this process in bytes.

        On systems without /proc, it is the highest resident memory so far.
        """
        try:
            resident = int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
        except OSError:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            resident = peak if sys.platform == "darwin" else peak * 1024
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
