"""Formulas for features of modules, such as the entropy of attention. A feature is not a statistic of one tensor.

The functions register no hooks and do not synchronise with the device. They use no global random generator, and the
autocast of the training has no effect on them.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast, in which products have the precision of their operands."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def working_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which formulas are computed: float64 for float64 tensors, float32 for all other tensors."""
    return torch.float64 if dtype is torch.float64 else torch.float32
