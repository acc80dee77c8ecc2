"""A model without a wrapper: one process, or a loop that reduces its gradients by itself."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from rankscope_exporter.frameworks.base import Framework


class Plain(Framework):
    """Any module. What reaches the optimizer is what backward left, unless the loop changed it in between."""

    name: ClassVar[str] = "plain"
    priority: ClassVar[int] = -1

    @classmethod
    def matches(cls, model: nn.Module) -> bool:  # noqa: ARG003 - the fallback takes every model
        """Return True: this is the fallback."""
        return True
