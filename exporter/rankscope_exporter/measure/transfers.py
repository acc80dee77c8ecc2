"""Copies of torch's tensors to the host for a record: the numbers that a script logs, and rows of other datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rankscope_contract.model.redaction import MAX_LABEL, redacted_name
from rankscope_contract.model.scalar_names import logged_name
from rankscope_exporter.adapters.tracing import untransformed
from rankscope_exporter.measure.kernels.statistics_table import queued_event
from rankscope_exporter.records.record import LABEL_OF_GROUP, Pending, Transfer


def copied_to_host(tensor: torch.Tensor) -> Transfer:
    """Start to copy `tensor` to the host.

    Never waits for the device. Afterwards `tensor` may be changed in place.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return Transfer(tensor.clone())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return Transfer(host, queued_event(tensor.device))


def take(name: str, value: Any) -> list[Pending]:
    """Return the numbers of a call `log(name=value)`: one number, or one per key of a mapping.

    Other names of losses, such as `val/loss`, are replaced. The list is empty if the value is None. Raises TypeError if
    the value is not a number, ValueError for a tensor with several elements.
    """
    if value is None:
        return []
    stored, labels = logged_name(name)
    if not isinstance(value, Mapping):
        number = _copied(name, value) if isinstance(value, torch.Tensor) else float(value)
        return [Pending(stored, number, labels)]
    label, found = LABEL_OF_GROUP.get(stored, "key"), []
    for key, item in value.items():
        for pending in take(name, item):
            text = redacted_name(str(key), MAX_LABEL)
            found.append(Pending(stored, pending.value, {**pending.labels, label: text}))
    return found


def _copied(name: str, value: torch.Tensor) -> Transfer:
    value = untransformed(value).detach()
    placements = getattr(value, "placements", None)
    if placements is not None:  # a DTensor. If it is divided among ranks, reading it would be a collective.
        if not all(placement.is_replicate() for placement in placements):
            raise ValueError(f"log({name}=…) takes no DTensor that is divided among ranks: log its .full_tensor()")
        value = value.to_local()  # type: ignore[attr-defined]  # see above
    if value.numel() != 1:
        raise ValueError(f"log({name}=…) takes one number, not a tensor of shape {tuple(value.shape)}")
    if value.is_complex() or value.is_meta:
        raise ValueError(f"log({name}=…) must be a real number, not a tensor of {value.dtype} on device {value.device}")
    return copied_to_host(value.reshape(()))
