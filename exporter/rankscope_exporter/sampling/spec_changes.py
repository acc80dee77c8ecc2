"""Changes of the shapes and dtypes in the plan, when the measured tensors have others than the plan states.

A parameter that is converted or resized gets its new shape and dtype. The shape of an activation that varies, as with
sequences of different lengths, is removed from the plan instead, because every new plan is sent to the service.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import torch

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.sampling.plan import PlanRegistry
from rankscope_exporter.statistics.tensor_access import dtype_name, is_freed

MOST_CHANGES: Final = 8
"""Number of steps at which parameters of one quantity may change.

Later changes remove shape and dtype from the plan.
"""

_ALL_VARY_AFTER: Final = 2
"""Number of steps with changed activations after which all shapes of this quantity are removed from the plan."""


class SpecChanges:
    """The changes of the entries of one quantity."""

    def __init__(self, plan: PlanRegistry) -> None:
        self._plan = plan
        self._steps = 0
        self._has_changed = False
        self._all_vary = False

    def describe(self, row: int, tensor: torch.Tensor) -> bool:
        """Correct the entry at table row `row` if `tensor`, which was measured, has another dtype or shape.

        Return False for a tensor without memory, whose shape may be temporary.
        """
        entry, dtype = self._plan.entry(row), dtype_name(tensor.dtype)
        if entry.shape == tensor.shape and entry.dtype == dtype and not self._all_vary:
            return True
        if tensor.is_meta or (tensor.layout is torch.strided and is_freed(tensor)):
            return False
        self._describe(row, dtype, tuple(tensor.shape))
        return True

    def copy(self, source: range, target: range) -> None:
        """Correct the entries at `target`. Their statistics were copied from the rows `source`."""
        if len(target) > 1 and not self._has_changed:
            return
        for row, of in zip(target, source, strict=True):
            entry = self._plan.entry(of)
            if not entry.shape_varies:
                self._describe(row, entry.dtype, entry.shape)
            elif not self._plan.entry(row).shape_varies:
                self._has_changed = True
                self._vary(row, replace(self._plan.entry(row), dtype=entry.dtype))

    def _describe(self, row: int, name: str, shape: tuple[int, ...]) -> None:
        entry = self._plan.entry(row)
        if not (entry.dtype and name):  # dtype and shape are unknown
            return
        is_of_parameter = self._plan.is_of_parameter(row)
        # A framework may store a part of a parameter, or its gradient, as a flat tensor.
        is_flat = is_of_parameter and shape == (math.prod(entry.shape),)
        fits = entry.shape_varies or is_flat or entry.shape == shape
        if fits and entry.dtype == name:
            if self._all_vary:
                self._vary(row, entry)
            return
        self._has_changed = True
        if self._steps >= MOST_CHANGES or (
            entry.dtype != name and self._steps >= _ALL_VARY_AFTER and not is_of_parameter
        ):
            self._plan.replace(row, replace(entry, dtype="", shape=(), shape_varies=False))
        elif fits or is_of_parameter:
            self._plan.replace(row, replace(entry, dtype=name, shape=entry.shape if fits else shape))
        else:
            self._vary(row, replace(entry, dtype=name))

    def end_step(self, added: Iterable[range | None]) -> None:
        """End a sampled step. `added` are the table rows of the entries that were added after attach."""
        if not self._has_changed:
            return
        self._has_changed = False
        self._steps += 1
        if self._steps == _ALL_VARY_AFTER:
            for row in (row for rows in added for row in rows or ()):
                if not self._plan.is_of_parameter(row):
                    self._all_vary = True
                    self._vary(row, self._plan.entry(row))

    def _vary(self, row: int, entry: PlanEntry) -> None:
        if entry.dtype and not entry.shape_varies and not self._plan.is_of_parameter(row):
            self._plan.replace(row, replace(entry, shape=(), shape_varies=True))
