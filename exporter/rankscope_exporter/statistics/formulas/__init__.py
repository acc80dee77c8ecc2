"""Numbers about a module that are no statistics of one tensor: formulas over tensors, without hooks or a host sync.

Nothing here draws from a global random generator, and the autocast that training may be in does not reach in.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which products are as precise as their operands are."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def working_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: float32, and float64 where that is what was given."""
    return torch.float64 if dtype is torch.float64 else torch.float32
