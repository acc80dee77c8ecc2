"""A list of objects that belong to the training: an object that the training drops leaves the list."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableSequence
from typing import Any, TypeVar

T = TypeVar("T")


class Borrowed(MutableSequence[T]):
    """A list of those of its items that are still alive. For modules and optimizers, never for tensors.

    torch.utils.swap_tensors refuses a tensor with a weak reference.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._references = [weakref.ref(item) for item in items]

    def _alive(self) -> list[T]:
        found = (reference() for reference in self._references)
        return [item for item in found if item is not None]

    def _keep(self, items: Iterable[T]) -> None:
        self._references = [weakref.ref(item) for item in items]

    def __len__(self) -> int:
        return len(self._alive())

    def __getitem__(self, place: Any) -> Any:
        return self._alive()[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        items = self._alive()
        items[place] = value
        self._keep(items)

    def __delitem__(self, place: Any) -> None:
        items = self._alive()
        del items[place]
        self._keep(items)

    def insert(self, index: int, value: T) -> None:
        """Insert `value` before position `index`."""
        items = self._alive()
        items.insert(index, value)
        self._keep(items)
