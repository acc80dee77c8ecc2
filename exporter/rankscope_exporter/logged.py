"""Numbers that training logs: taken without waiting for the device, read later on the publisher's thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rankscope_exporter.deferred import Transfer
from rankscope_exporter.record import Scalar

UNITS: Final[dict[str, str]] = {
    "tokens": "tokens",
    "samples": "samples",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "step_seconds": "seconds",
}
LABEL_OF_GROUP: Final[dict[str, str]] = {"loss": "loss", "learning_rate": "group"}
"""A mapping given for one of these names logs one number per key, told apart by this label."""


@dataclass(slots=True)
class Pending:
    """One number on its way: a float, or a tensor that a device copy is still filling."""

    name: str
    value: float | Transfer
    labels: Mapping[str, str] = field(default_factory=dict)

    def scalar(self) -> Scalar:
        """Return the number; waits for its copy, so it is called off the training thread."""
        value = self.value.wait() if isinstance(self.value, Transfer) else self.value
        return Scalar(self.name, float(value), UNITS.get(self.name), self.labels)


def take(name: str, value: Any) -> Iterator[Pending]:
    """Yield what `log(name=value)` means: one number, or one per key of a mapping; None is absent.

    Raises TypeError for what is no number, ValueError for a tensor of several elements.
    """
    if value is None:
        return
    if isinstance(value, Mapping):
        label = LABEL_OF_GROUP.get(name, "key")
        for key, item in value.items():
            for pending in take(name, item):
                yield Pending(name, pending.value, {label: str(key)})
    elif isinstance(value, torch.Tensor):
        yield _take_tensor(name, value)
    else:
        yield Pending(name, float(value))


def _take_tensor(name: str, value: torch.Tensor) -> Pending:
    value = _without_mesh(name, value.detach())
    if value.numel() != 1:
        raise ValueError(f"log({name}=…) takes one number, not a tensor of shape {tuple(value.shape)}")
    if value.is_complex() or value.is_meta:
        raise ValueError(f"log({name}=…) takes a real number, not {value.dtype} on {value.device}")
    return Pending(name, Transfer.of(value.reshape(())))


def _without_mesh(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor behind a DTensor that is whole on every rank.

    Reading any other one is a collective. It would start on our thread and pair with one of training's own.
    """
    placements = getattr(value, "placements", None)
    if placements is None:
        return value
    if not all(placement.is_replicate() for placement in placements):
        raise ValueError(f"log({name}=…) got a DTensor that is not whole on this rank: log its .full_tensor()")
    local: torch.Tensor = value.to_local()  # type: ignore[attr-defined]  # a DTensor: it has placements
    return local
