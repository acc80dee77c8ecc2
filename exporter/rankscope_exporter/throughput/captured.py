"""What one training forward was given, without its tensors: shapes and types, of which a meta copy can be fed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, slice, range)


class NotCapturedError(ValueError):
    """An argument is of a kind that cannot be made again."""


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and type of a tensor that was passed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def made(self) -> torch.Tensor:
        """Return a tensor of this form that holds nothing."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one forward, each tensor as its form."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype | None = None
    """What autocast computes matrix products in; None without it."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype | None = None) -> Inputs:
        """Return what stands in for these arguments. Raises NotCapturedError."""
        return cls(tuple(_form(item) for item in args), {key: _form(item) for key, item in kwargs.items()}, dtype)

    def made(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of the same forms on the meta device."""
        return tuple(_made(item) for item in self.args), {key: _made(item) for key, item in self.kwargs.items()}

    def _leading(self) -> Form | None:
        """Return the tensor that says how much was passed: token ids where there are some, else the first one."""
        named = self.kwargs.get("input_ids")
        if isinstance(named, Form):
            return named
        return next(_forms((*self.args, *self.kwargs.values())), None)

    @property
    def samples(self) -> int | None:
        """Return the size of the batch."""
        form = self._leading()
        return form.shape[0] if form is not None and form.shape else None

    @property
    def tokens(self) -> int | None:
        """Return how many tokens were passed, None where the model takes none: of ids, or of rows of embeddings."""
        form = self._leading()
        if form is None or not form.shape:
            return None
        if not form.dtype.is_floating_point and not form.dtype.is_complex and len(form.shape) <= 2:
            return math.prod(form.shape)
        return None

    @property
    def rows(self) -> int | None:
        """Return how often every parameter is met: once for each token, or for each row of a matrix."""
        form = self._leading()
        if self.tokens is not None or form is None:
            return self.tokens
        return math.prod(form.shape[:-1]) if len(form.shape) in (2, 3) else None

    @property
    def sequence(self) -> int:
        """Return how many tokens stand in one sequence."""
        form = self._leading()
        return form.shape[1] if form is not None and len(form.shape) > 1 else 1


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise NotCapturedError(f"it takes a {value.layout} tensor")
        return Form(tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {key: _form(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_form(item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_form(item) for item in value)
    raise NotCapturedError(f"it takes a {type(value).__name__}, which cannot be made again")


def _made(value: Any) -> Any:
    if isinstance(value, Form):
        return value.made()
    if isinstance(value, dict):
        return {key: _made(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_made(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_made(item) for item in value)
    return value


def _forms(value: Any) -> Iterator[Form]:
    if isinstance(value, Form):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _forms(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _forms(item)
