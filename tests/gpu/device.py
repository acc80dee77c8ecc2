"""The device of these tests: work of a known duration, durations on the device, and an error at each wait of the host.

With RANKSCOPE_GPU_STAND_IN=cpu, tests that need no CUDA run on the CPU, where work takes place immediately. This shows
that the tests run; it shows nothing about a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_exporter import MonitorConfig
from rankscope_exporter.quantities import quantity_classes
from rankscope_exporter.statistics.selection import VALUE_OPS

QUIET: Final = {"console": False, "exit_wait_seconds": 0}
CONFIGURATIONS: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "everything": {
        "quantities": list(quantity_classes()),
        "ops": [*VALUE_OPS, "nans", "infs", "zeros"],
        "options": {"parameters": {"updates": True}, "gradients": {"sum_micro_batches": True}},
    },
}
"""The default configuration, and one that measures all quantities and all statistics at each step."""


def configured(name: str, **settings: Any) -> MonitorConfig:
    """Return the configuration `name` of CONFIGURATIONS with further settings."""
    return MonitorConfig.from_mapping({**QUIET, **CONFIGURATIONS[name], **settings})


@dataclass(frozen=True, slots=True)
class Device:
    """The tested device."""

    name: torch.device

    @property
    def is_cuda(self) -> bool:
        return self.name.type == "cuda"

    def sleep(self, seconds: float) -> None:
        """Queue work that takes `seconds` to the current stream."""
        if self.is_cuda:
            torch.cuda._sleep(int(seconds * _cycles_per_second()))
        else:
            time.sleep(seconds)

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.name)

    def timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Return the seconds of the host, without a wait, and the seconds of the device for `work`."""
        self.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.is_cuda else []
        began = time.perf_counter()
        if events:
            events[0].record()
        work()
        host = time.perf_counter() - began
        if not events:
            return host, host
        events[1].record()
        self.synchronize()
        return host, events[0].elapsed_time(events[1]) / 1e3

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Raise an error in the thread that waits for the device, except in an explicit `synchronize`."""
        if not self.is_cuda:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@functools.cache
def _cycles_per_second() -> float:
    cycles = 200_000_000
    device = Device(torch.device("cuda", torch.cuda.current_device()))
    for _ in range(4):
        torch.cuda._sleep(cycles)  # the clock of the device rises under load
    return cycles / device.timed(lambda: torch.cuda._sleep(cycles))[1]
