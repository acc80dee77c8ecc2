"""Simulated readings of a GPU and of PyTorch's allocator for a rank that trains on a CPU."""

import itertools
from typing import Any

from tests.exporter.monitors.hardware.recorded_nvml import RecordedNvml

from rankscope_exporter.monitors import hardware
from rankscope_exporter.monitors.hardware import ResourceObserver, allocator_scalars

UUID = "bbbbbbbb-0000-1111-2222-333333333333"
READINGS_PER_ERROR = 20
MANY_READINGS = 10_000
GIB = 1 << 30
SIZES = {"allocated": 6, "reserved": 8}


def simulate() -> None:
    """Replace the readers of NVML and CUDA in this process. Memory errors, XIDs and allocation retries recur."""
    errors = {
        "nvmlDeviceGetTotalEccErrors/1/0": [at // READINGS_PER_ERROR for at in range(MANY_READINGS)],
        "xids": [{"xid": 31, "after": at} for at in range(READINGS_PER_ERROR, MANY_READINGS, READINGS_PER_ERROR)],
    }
    nvml = RecordedNvml(changes={f"GPU-{UUID}": errors})
    calls = itertools.count()

    def of_allocator(_observer: ResourceObserver) -> list[Any]:
        stats = {f"{name}_bytes.all.{when}": GIB * size for name, size in SIZES.items() for when in ("current", "peak")}
        return list(allocator_scalars(stats | {"num_alloc_retries": next(calls) // READINGS_PER_ERROR, "num_ooms": 0}))

    hardware.uuid_of = lambda _device: UUID
    hardware.load_nvml = lambda: nvml
    ResourceObserver.of_allocator = of_allocator  # type: ignore[method-assign]
