"""Tensors that are measured together at every step: what can be prepared for them is prepared once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from rankscope_exporter.statistics import numba_backend, torch_backend
from rankscope_exporter.statistics.jobs import PointerJobs
from rankscope_exporter.statistics.table import Rows, StatisticsTable, contiguous_rows
from rankscope_exporter.statistics.tensors import PLAIN_TYPES, held, is_dense


class MeasureGroup:
    """A fixed set of entries. Its tensors may be other objects, absent or moved at each step.

    `compiled=False` stays with torch operations even when the compiled kernel is ready.
    """

    def __init__(self, rows: Sequence[int], *, zero_below: float = 0.0, compiled: bool = True) -> None:
        self.rows: Rows = contiguous_rows(rows)
        self._zero_below = zero_below
        self._compiled = compiled
        self._jobs = PointerJobs(self.rows, zero_below)

    def measure(self, tensors: Sequence[torch.Tensor | None], table: StatisticsTable) -> None:
        """Write the sums of `tensors` to the group's entries; an absent tensor leaves its entry as it is."""
        if len(tensors) != len(self.rows):
            raise ValueError(f"{len(tensors)} tensors for {len(self.rows)} entries: None stands for an absent one")
        with torch.no_grad():
            local = [tensor if type(tensor) in PLAIN_TYPES else _local(tensor) for tensor in tensors]
            kernel = table.kernel(numba_backend.kernel) if self._compiled and table.device.type == "cpu" else None
            if kernel is None:
                self._with_torch(local, range(len(local)), table)
                return
            local = [_gathered(tensor) for tensor in local]
            others = self._jobs.run(kernel, local, table)
            if others:
                self._with_torch(local, others, table)

    def _with_torch(
        self, tensors: Sequence[torch.Tensor | None], positions: Sequence[int], table: StatisticsTable
    ) -> None:
        found = [(self.rows[position], item) for position in positions if (item := held(tensors[position])) is not None]
        rows = self.rows if len(found) == len(self.rows) else contiguous_rows([row for row, _ in found])
        torch_backend.measure([item for _, item in found], rows, table, zero_below=self._zero_below)


def measure(
    tensors: Sequence[torch.Tensor | None], rows: Sequence[int], table: StatisticsTable, *, zero_below: float = 0.0
) -> None:
    """Write the sums of tensors[i] to entry rows[i] of `table`, with the group kept for equal `rows`."""
    _group(rows if isinstance(rows, range) else tuple(rows), zero_below).measure(tensors, table)


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the shard behind a DTensor, and any other tensor as it is."""
    if tensor is None or not hasattr(tensor, "to_local"):
        return tensor
    shard: torch.Tensor = tensor.to_local()
    return shard


def _gathered(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a part of a larger tensor as memory of its own: one copy and the kernel are cheaper than many passes."""
    if type(tensor) not in PLAIN_TYPES or tensor is None or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.contiguous()


@functools.lru_cache(maxsize=256)
def _group(rows: Rows, zero_below: float) -> MeasureGroup:
    return MeasureGroup(rows, zero_below=zero_below)
