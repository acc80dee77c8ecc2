"""Numbers on a device that become rows of a dataset: copied now, read on the publisher thread when they have arrived.

Rows are made of numpy arrays: a torch operation on the publisher thread would start an OpenMP team (own_threads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

Row = Mapping[str, Any]
"""One row of a dataset: field name -> value, as the contract names them; what is left out is null."""

Numbers = npt.NDArray[Any]
"""A deferred tensor on the host. Its element type is one that numpy has, so not bfloat16."""


@dataclass(slots=True)
class Transfer:
    """A tensor on its way to the host. On a CPU it is there already."""

    value: torch.Tensor
    copied: Any = None  # the CUDA event after the copy

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Transfer:
        """Begin to copy `tensor`, which its owner may change in place afterwards; never waits for the device."""
        tensor = tensor.detach()
        if tensor.device.type != "cuda":
            return cls(tensor.clone())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        copied.record()
        return cls(host, copied)

    def wait(self) -> torch.Tensor:
        """Return the numbers on the host; waits for the copy, so it is called off the training thread."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.value


@dataclass(slots=True)
class Deferred:
    """Rows of `dataset` that `rows` makes of the numbers when they have arrived."""

    dataset: str | None  # None: no rows, the numbers are used otherwise
    transfer: Transfer
    rows: Callable[[Numbers], Iterable[Row]]

    def read(self) -> list[Row]:
        """Return the rows; on the publisher's thread."""
        return list(self.rows(self.transfer.wait().cpu().numpy()))
