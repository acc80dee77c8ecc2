"""Memory of this process and its device, read on the publisher's thread."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Final

import torch

from rankscope_exporter.record import Scalar

_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def memory_scalars(device: torch.device) -> list[Scalar]:
    """Return resident memory, and on CUDA what torch's allocator holds; neither waits for the device."""
    scalars = [Scalar("resident_memory_bytes", float(resident_bytes()), "bytes")]
    if device.type == "cuda":
        scalars += [
            Scalar("device_memory_allocated_bytes", float(torch.cuda.memory_allocated(device)), "bytes"),
            Scalar("device_memory_reserved_bytes", float(torch.cuda.memory_reserved(device)), "bytes"),
        ]
    return scalars


def resident_bytes() -> int:
    """Return the resident memory of this process; where /proc is missing, its peak so far."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
