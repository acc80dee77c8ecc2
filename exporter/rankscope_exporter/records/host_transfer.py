"""Tensors that become rows of a dataset: copied to the host now, read by the publisher thread after the copy.

Rows are made from numpy arrays: a torch operation in the publisher thread would start an OpenMP team.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

Row = Mapping[str, Any]
"""One row of a dataset: field name -> value. Missing fields are null."""

Numbers = npt.NDArray[Any]
"""A deferred tensor on the host. Its dtype must exist in numpy; bfloat16 does not."""


@dataclass(slots=True)
class Transfer:
    """A tensor that is being copied to the host. A CPU tensor is copied immediately."""

    value: torch.Tensor
    copied: Any = None  # the CUDA event after the copy

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Transfer:
        """Start to copy `tensor`, which its owner may then change in place. Never waits for the device."""
        tensor = tensor.detach()
        if tensor.device.type != "cuda":
            return cls(tensor.clone())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        copied.record()
        return cls(host, copied)

    def wait(self) -> torch.Tensor:
        """Return the tensor on the host. Waits for the copy; do not call it on the training thread."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.value


@dataclass(slots=True)
class Deferred:
    """A transfer whose numbers the function `rows` converts to rows of `dataset`."""

    dataset: str | None  # None: `rows` uses the numbers itself and returns no rows
    transfer: Transfer
    rows: Callable[[Numbers], Iterable[Row]]

    def read(self) -> list[Row]:
        """Return the rows. Called on the publisher thread."""
        return list(self.rows(self.transfer.wait().cpu().numpy()))
