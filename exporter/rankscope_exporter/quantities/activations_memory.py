"""Which tensors of a step have been read already: a tensor that several modules pass on is measured once.

The id() of a tensor is another tensor's once it is freed, so the entry of a tensor ends with the tensor. Nothing
here keeps a tensor alive for longer than the training does, but for leaves until the next call of a module.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class Memory(Generic[T]):
    """Remembers something of tensors of the graph, or of gradients on their way, until they are freed or written to.

    Weak references show when they are freed. Parameters, and leaves in general, must have none, because
    torch.utils.swap_tensors refuses a tensor with a weak reference: see Leaves.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], int, T]] = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return the value that was kept for this very tensor with its present content."""
        known = self._by_id.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != _version(tensor):
            return None
        return known[2]

    def before(self, tensor: torch.Tensor) -> T | None:
        """Return the value that was kept for this very tensor when it had another content."""
        known = self._by_id.get(id(tensor))
        return None if known is None or known[0]() is not tensor or known[1] == _version(tensor) else known[2]

    def keep(self, tensor: torch.Tensor, what: T) -> None:
        """Remember `what`; nothing of a tensor that counts no changes, and nothing of a parameter."""
        version = _version(tensor)
        if version is not None and not isinstance(tensor, nn.Parameter):
            self._by_id[id(tensor)] = weakref.ref(tensor), version, what

    def clear(self) -> None:
        """Forget everything."""
        self._by_id.clear()


class Leaves(Generic[T]):
    """Remembers something of leaf tensors: inputs, masks, parameters, and all that is computed without gradients.

    They are held, but only while the training holds them anyway, or nearly: what the calls under way were given, and
    what the last call to end was given and returned, until the next call begins or none is under way.
    """

    def __init__(self) -> None:
        self._under_way: list[dict[int, tuple[torch.Tensor, int, T]]] = []
        self._last: dict[int, tuple[torch.Tensor, int, T]] = {}

    def call_begins(self) -> None:
        """Note that a call begins; its arguments are read next."""
        self._under_way.append({})

    def arguments_read(self) -> None:
        """Drop the tensors of the last call."""
        self._last = {}

    def call_ended(self) -> None:
        """Note that the innermost call is over and its results have been read."""
        ended = self._under_way.pop() if self._under_way else {}
        self._last = ended if self._under_way else {}

    def clear(self) -> None:
        """Drop all tensors."""
        self._under_way.clear()
        self._last = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return the value that was kept for this very tensor with its present content."""
        for known in (*reversed(self._under_way), self._last):
            found = known.get(id(tensor))  # of a tensor that is held, so no other one has its id()
            if found is not None:
                return found[2] if found[1] == _version(tensor) else None
        return None

    def keep(self, tensor: torch.Tensor, what: T) -> None:
        """Remember `what` for the innermost call; nothing of a tensor that counts no changes."""
        version = _version(tensor)
        if version is not None and self._under_way:
            self._under_way[-1][id(tensor)] = tensor, version, what


def _version(tensor: torch.Tensor) -> int | None:
    if tensor.is_inference():
        return None
    version: int = tensor._version  # noqa: SLF001 - the count of in-place changes; torch has no other name for it
    return version
