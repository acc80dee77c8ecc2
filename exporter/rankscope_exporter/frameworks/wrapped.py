"""Optimizers that wrap a torch optimizer and have no hooks of their own, such as Accelerate's."""

from __future__ import annotations

from typing import Any

import torch

from rankscope_exporter.errors import ConfigError


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside of wrappers that hold it as `optimizer`. Raises ConfigError without one."""
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer) or not hasattr(inner, "_optimizer_step_pre_hooks"):
        if not hasattr(inner, "optimizer"):
            raise ConfigError(f"{type(optimizer).__name__} is no torch optimizer and wraps none in `.optimizer`")
        inner = inner.optimizer
    return inner
