"""Groups of tensors that are measured together at every step, by a compiled kernel or by torch operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rankscope_exporter.statistics import torch_backend
from rankscope_exporter.statistics.device_arguments import DeviceArguments
from rankscope_exporter.statistics.kernel_arguments import KernelArguments
from rankscope_exporter.statistics.kernels import ready_kernel
from rankscope_exporter.statistics.table import Rows, StatisticsTable, contiguous_rows
from rankscope_exporter.statistics.tensor_access import PLAIN_TYPES, elements_of

_Spec = tuple[tuple[int, ...], torch.dtype]


class MeasureGroup:
    """A fixed set of table entries that are measured together.

    Their tensors may differ, move or be absent at each step.

    If `compiled` is false, torch operations are used even if the compiled kernel is ready. The function `described` is
    called with the entry and the tensor when a tensor is measured for the first time, and when its shape or dtype has
    changed. If it returns False, it is called again for the next tensor of this entry. It is not called for a first
    tensor with the shape and dtype that `known` has for the entry.
    """

    def __init__(
        self,
        rows: Sequence[int],
        *,
        zero_below: float = 0.0,
        compiled: bool = True,
        described: Callable[[int, torch.Tensor], bool] | None = None,
        known: Sequence[_Spec | None] | None = None,
    ) -> None:
        self.rows: Rows = contiguous_rows(rows)
        self._zero_below = zero_below
        self._compiled = compiled
        self._arguments: KernelArguments | DeviceArguments | None = None
        self._described = described
        self._known: list[_Spec | None] = [None] * len(self.rows) if known is None else list(known)

    def measure(self, tensors: Sequence[torch.Tensor | None], table: StatisticsTable) -> None:
        """Compute the raw statistics of `tensors` and write them to the entries of the group in `table`.

        For a tensor that is absent, the entry is not changed.
        """
        if len(tensors) != len(self.rows):
            raise ValueError(f"{len(tensors)} tensors for {len(self.rows)} entries: pass None for an absent tensor")
        with torch.no_grad():
            local = [tensor if type(tensor) in PLAIN_TYPES else _local(tensor) for tensor in tensors]
            compiled = table.kernel(ready_kernel) if self._compiled else None
            if compiled is None:
                self._with_torch(local, range(len(local)), table)
                self._describe(local)
                return
            if self._arguments is None:
                arguments = KernelArguments if table.device.type == "cpu" else DeviceArguments
                self._arguments = arguments(self.rows, self._zero_below)
            others = self._arguments.run(compiled, local, table)
            if others:
                self._with_torch(local, others, table)
            # An activation is measured alone. It may have another shape at the same address.
            if self._arguments.have_moved or len(local) == 1:
                self._describe(local)

    def _describe(self, tensors: Sequence[torch.Tensor | None]) -> None:
        if self._described is None:
            return
        specs: dict[_Spec, _Spec] = {}  # one object for all tensors with the same shape and dtype
        for position, (known, tensor) in enumerate(zip(self._known, tensors, strict=True)):
            if tensor is None:
                continue
            spec = tensor.shape, tensor.dtype
            if known != spec and self._described(self.rows[position], tensor):
                self._known[position] = specs.setdefault(spec, spec)

    def _with_torch(
        self, tensors: Sequence[torch.Tensor | None], positions: Sequence[int], table: StatisticsTable
    ) -> None:
        found: list[int] = []
        flats: list[torch.Tensor] = []
        sizes: list[int] = []
        for position in positions:
            tensor = tensors[position]
            if tensor is not None and (flat := elements_of(tensor)) is not None:
                found.append(position)
                flats.append(flat)
                sizes.append(tensor.numel())
        is_whole = len(found) == len(self.rows)
        rows = self.rows if is_whole else contiguous_rows([self.rows[position] for position in found])
        torch_backend.measure(flats, sizes, rows, table, zero_below=self._zero_below)


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the local shard of a DTensor; return any other tensor unchanged."""
    if tensor is None or not hasattr(tensor, "to_local"):
        return tensor
    shard: torch.Tensor = tensor.to_local()
    return shard
