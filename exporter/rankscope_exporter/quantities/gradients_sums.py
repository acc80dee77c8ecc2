"""This rank's own gradients, summed over micro-batches where the framework reduces each and keeps no such sum.

What is kept is as large as the gradients of all parameters that are measured. It is there from the first gradient of a
measured step to the last, and only while the loop accumulates. Sums have the type that the framework itself sums in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_exporter.free_memory import free_bytes
from rankscope_exporter.naming import local_tensor
from rankscope_exporter.quantities.base import Gate, Hooking, QuantityOptions, Subject
from rankscope_exporter.quantities.handles import hook_gradient

_SHARE: Final = 4
"""Unasked, no more is kept than this part of the memory that is free when a step begins."""

_KEPT, _ABSENT, _SPENT = "kept", "absent", "spent"
"""What is said, each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsOptions(QuantityOptions):
    """Whether to keep a sum that the framework does not."""

    sum_micro_batches: bool | None = None
    """Keep this rank's own sum over micro-batches where each is reduced by itself: true always, false never, null where
    a quarter of the free memory holds it, once the loop is seen to accumulate so."""

    def __post_init__(self) -> None:
        QuantityOptions.__post_init__(self)
        if self.sum_micro_batches not in (None, True, False):
            raise ValueError(f"sum_micro_batches is true, false or null, not {self.sum_micro_batches!r}")


class LocalSums:
    """The sums of one step, by position of the parameter."""

    def __init__(self, subject: Subject, *, wanted: bool | None) -> None:
        self._subject = subject
        self._wanted = wanted
        self._is_known = False  # whether the loop was seen to accumulate what is reduced each time
        self._sums: dict[int, torch.Tensor] = {}
        self._hooked: set[int] = set()
        self._told: set[str] = set()
        self._hooking: Hooking | None = None
        self._gate: Gate | None = None
        self.are_kept = False
        """Whether the step under way is summed up here."""

    def install(self, hooking: Hooking, gate: Gate) -> None:
        """Note how to hook, which is done once it is needed."""
        self._hooking, self._gate = hooking, gate
        hooking.keep(_AtDetach(self.release))

    def step_begins(self) -> None:
        """Begin anew, if there is anything to sum up."""
        self.release()
        self.are_kept = self._is_needed() and self._fits()
        if self.are_kept:
            self._hook_parameters()

    def learn(self) -> None:
        """Note that a gradient came on top of one that is reduced already: later steps are summed up here."""
        self._is_known = True

    def release(self) -> None:
        """Let go of all sums."""
        self.are_kept = False
        self._sums.clear()

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the sums so far by position; None where no gradient came."""
        return [self._sums.get(index) for index in range(len(self._subject.parameters))]

    def _is_needed(self) -> bool:
        each = self._subject.framework.reduces_each_micro_batch
        if self._wanted is not None or self._hooking is None:
            return bool(self._wanted)
        return each is not False and bool(each or self._is_known)

    def _fits(self) -> bool:
        parameters = [item for item in self._subject.tensors() if item is not None and item.requires_grad]
        if not parameters:
            return False
        size, free = sum(map(self._bytes_of, parameters)), free_bytes(parameters[0].device)
        if self._wanted or size * _SHARE <= free:
            self._tell(_KEPT, f"this rank's own are summed up apart, in {_text(size)} more memory at measured steps")
            return True
        self._tell(
            _ABSENT,
            "grad_unreduced is absent where micro-batches are reduced one by one: their sum would take "
            f"{_text(size)} of {_text(free)} that are free; sum_micro_batches = true keeps it, and micro_gradients "
            "need none",
        )
        return False

    def _bytes_of(self, parameter: torch.nn.Parameter) -> int:
        form = self._subject.framework.local_form(parameter)
        shape = local_tensor(parameter).shape if form is None else form.shape
        return math.prod(shape) * self._dtype_of(parameter).itemsize

    def _dtype_of(self, parameter: torch.nn.Parameter) -> torch.dtype:
        return self._subject.framework.reduced_form(parameter).dtype

    def _hook_parameters(self) -> None:
        assert self._hooking is not None
        assert self._gate is not None
        for index, parameter in enumerate(self._subject.tensors()):
            if parameter is not None and parameter.requires_grad and index not in self._hooked:
                self._hooked.add(index)
                add = functools.partial(self._add, index, self._dtype_of(parameter))
                hook = self._hooking.guarded("a gradient to be summed up", add, self._gate)
                hook_gradient(self._hooking, self._subject, index, hook)

    def _add(self, index: int, dtype: torch.dtype, gradient: torch.Tensor) -> None:
        if self._hooking is not None:
            self._hooking.gradient_arrives()
        if not self.are_kept:
            return
        own, earlier = local_tensor(gradient).detach(), self._sums.get(index)
        try:
            if earlier is None:
                self._sums[index] = own.to(dtype, copy=True)
            elif earlier.is_sparse and not own.is_sparse:
                self._sums[index] = own.to(dtype) + earlier
            else:
                earlier.add_(own)
        except torch.OutOfMemoryError:  # training may still have enough: it gets back what was taken
            self.release()
            self._wanted = False
            self._tell(
                _SPENT, "memory did not suffice for a sum of micro-batches: grad_unreduced is absent from now on"
            )

    def _tell(self, about: str, sentence: str) -> None:
        if self._hooking is not None and about not in self._told:
            self._told.add(about)
            self._hooking.tell(f"gradients: {sentence}")


class _AtDetach:
    def __init__(self, remove: Callable[[], Any]) -> None:
        self.remove = remove


def _text(size: int) -> str:
    place = min(len(_UNITS) - 1, max(0, size.bit_length() - 1) // 10)
    return f"{size / 1024**place:.3g} {_UNITS[place]}"


_UNITS: Final = ("bytes", "KiB", "MiB", "GiB")
