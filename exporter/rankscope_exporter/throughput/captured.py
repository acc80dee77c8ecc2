"""Shapes of the arguments of a forward pass: how many samples and tokens it was given."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

_IDS: Final = "input_ids"
_MOST_LEVELS: Final = 4
"""Depth of nested arguments that is searched: a structure may contain itself."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensor that determines the amount of work: token ids where there are some, otherwise the first tensor."""

    shape: tuple[int, ...] = ()
    """Empty where no tensor was passed."""
    is_integer: bool = False
    dtype: torch.dtype | None = None
    """Type in which autocast computes matrix products; None without autocast."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype | None = None) -> Inputs:
        """Return the shape of the leading tensor among the arguments. No tensor is kept."""
        arguments = (kwargs, *args)
        tensor = next((found for value in arguments for found in _named(value)), None)
        if tensor is None:
            tensor = next((found for value in (*args, kwargs) for found in _tensors(value)), None)
        if tensor is None:
            return cls(dtype=dtype)
        is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool
        return cls(tuple(tensor.shape), not is_number, dtype)

    @property
    def samples(self) -> int | None:
        """Return the size of the batch."""
        return self.shape[0] if self.shape else None

    @property
    def tokens(self) -> int | None:
        """Return the number of token ids; None where the forward pass takes no ids."""
        return math.prod(self.shape) if self.is_integer and len(self.shape) in (1, 2) else None

    @property
    def are_embeddings(self) -> bool:
        """Return whether the leading tensor has the shape of embedded tokens: batch, sequence, width."""
        return not self.is_integer and len(self.shape) == 3

    @property
    def sequence(self) -> int:
        """Return the number of tokens in one sequence."""
        return self.shape[1] if len(self.shape) > 1 else 1


def _named(value: Any) -> Iterator[torch.Tensor]:
    """Yield the token ids of a dictionary that names them."""
    if isinstance(value, dict | UserDict) and _IDS in value:
        yield from _tensors(value[_IDS])


def _tensors(value: Any, levels: int = _MOST_LEVELS) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not value.is_nested:  # it has no shape
            yield value
    elif levels and isinstance(value, list | tuple | dict | UserDict):
        for item in value if isinstance(value, list | tuple) else value.values():
            yield from _tensors(item, levels - 1)
