"""Numbers on a device that become rows of a dataset: taken now, read on the publisher's thread when they arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Row = Mapping[str, Any]
"""One row of a dataset: field name -> value, as the contract names them; what is left out is null."""


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
    rows: Callable[[torch.Tensor], Iterable[Row]]

    def read(self) -> list[Row]:
        """Return the rows; on the publisher's thread."""
        return list(self.rows(self.transfer.wait()))
