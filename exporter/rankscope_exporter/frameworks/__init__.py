"""How a training framework wraps a model. A framework is added by adding a file with a `Framework` subclass."""

from __future__ import annotations

import importlib
import pkgutil

from torch import nn

from rankscope_exporter.frameworks.base import Framework

__all__ = ["Framework", "framework_of"]


def framework_of(model: nn.Module) -> Framework:
    """Return the adapter for `model`: the one of highest priority that knows its wrapper."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    candidates = sorted(Framework.__subclasses__(), key=lambda cls: cls.priority, reverse=True)
    return next(cls(model) for cls in candidates if cls.matches(model))
