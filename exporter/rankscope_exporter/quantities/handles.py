"""Hooks on tensors of one step, let go of together: those of a leaf would outlive the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle


class Handles:
    """What was registered on tensors since the last removal."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def hook(self, tensor: torch.Tensor, hook: Callable[..., None]) -> None:
        """Have `hook` called with the gradient of `tensor`."""
        self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]  # untyped in torch

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
