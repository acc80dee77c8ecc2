"""Data of a record that the publisher thread reads: numbers that the script logged, and copies of tensors to the host.

`measure.transfers` starts the copies without waiting for the device, and the publisher thread reads them. Rows are made
from numpy arrays, because a torch operation on the publisher thread would start a team of OpenMP threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy.typing as npt

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.schema import canonical_labels

if TYPE_CHECKING:
    import torch

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

    def wait(self) -> torch.Tensor:
        """Return the copied tensor on the host. Waits for the copy: not to be called on the training thread."""
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
        """Return the rows made from the copied tensor. Waits for the copy, on the publisher thread."""
        return list(self.rows(self.transfer.wait().cpu().numpy()))


UNITS: Final[dict[str, str]] = {
    "tokens": "tokens",
    "samples": "samples",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "step_seconds": "seconds",
}
LABEL_OF_GROUP: Final[dict[str, str]] = {"loss": "loss", "learning_rate": "group"}
"""Name of the label of the numbers in a logged mapping, by the name under which the script logs the mapping.

A logged mapping gives one number per key, and the key is the value of the label. If a name is
not a key of LABEL_OF_GROUP, the label is `key`.
"""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number that the script or the monitor has logged. `value` may be NaN or Inf.

    A scalar that was not logged has no object.
    """

    name: str
    value: float
    unit: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels_text(self) -> str | None:
        """Return the labels of this scalar as the text that the column `labels` of the dataset `scalars` contains."""
        return _labels_text(tuple(self.labels.items()))


@lru_cache(maxsize=1024)
def _labels_text(labels: tuple[tuple[str, str], ...]) -> str | None:
    return canonical_labels(dict(labels))  # a record has about ten labels, and the next record has the same ones


@dataclass(slots=True)
class Pending:
    """One logged number: a float, or a tensor that is being copied to the host."""

    name: str
    value: float | Transfer
    labels: Mapping[str, str] = field(default_factory=dict)

    def scalar(self) -> Scalar:
        """Return the number as a scalar. Waits for the copy of a tensor: not to be called on the training thread."""
        value = self.value.wait() if isinstance(self.value, Transfer) else self.value
        return Scalar(self.name, float(value), UNITS.get(self.name), self.labels)


AMOUNTS = ("tokens", "samples")
"""Names of logged numbers that are amounts per step.

Their rate per second and their running total are published as well.
"""


OF_MICRO_BATCHES: Final = "grad_unreduced of micro-batches"
"""Name of the rows of `grad_unreduced` with a number of a micro-batch, as a kind of expected rows."""


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The kinds of rows of a quantity that a step with an update has, unless something is wrong.

    Kinds that are absent by definition are left out.
    """

    quantity: str
    kinds: frozenset[str] = frozenset()
    remark: str = ""
    """The likely reason if rows are absent, as text."""
    names_unmeasured: bool = False
    """True if the quantity itself names the tensors that it has never measured."""


def skipped_event() -> Event:
    """Return the event of a step in which the optimizer did not update the parameters."""
    return Event(
        type=EventType.STEP_SKIPPED,
        severity=Severity.INFO,
        message="gradients were computed, but the optimizer did not run",
    )
