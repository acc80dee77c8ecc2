"""Copy tensors to the host and convert them to rows of a dataset of the step record.

Each tensor is copied without waiting for the device, and the publisher thread reads the copy. Rows are made from numpy
arrays, because a torch operation on the publisher thread would start a team of OpenMP threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from rankscope_exporter.statistics.table import queued_event

Row = Mapping[str, Any]
"""One row of a dataset of the step record, such as `scalars`: a mapping from field names to values.

A missing field is null.
"""

Numbers = npt.NDArray[Any]
"""The elements of a tensor on the host as a numpy array. The dtype must exist in numpy; bfloat16 does not."""


@dataclass(slots=True)
class Transfer:
    """A copy of a tensor to the host, which may be in progress. A CPU tensor is copied immediately."""

    value: torch.Tensor
    copied: Any = None  # the CUDA event after the copy

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Transfer:
        """Start to copy `tensor` to the host.

        Never waits for the device. Afterwards `tensor` may be changed in place.
        """
        tensor = tensor.detach()
        if tensor.device.type != "cuda":
            return cls(tensor.clone())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return cls(host, queued_event(tensor.device))

    def wait(self) -> torch.Tensor:
        """Return the copied tensor on the host.

        Waits until the copy is complete; do not call it on the training thread.
        """
        if self.copied is not None:
            self.copied.synchronize()
        return self.value


@dataclass(slots=True)
class Deferred:
    """A tensor that is copied to the host, and the function `rows`, which converts its elements to rows.

    These rows belong to `dataset`, a dataset of the step record such as `features`.
    """

    dataset: str
    transfer: Transfer
    rows: Callable[[Numbers], Iterable[Row]]

    def read(self) -> list[Row]:
        """Return the rows that the function `rows` makes from the copied tensor.

        Called on the publisher thread; waits until the copy is complete.
        """
        return list(self.rows(self.transfer.wait().cpu().numpy()))
