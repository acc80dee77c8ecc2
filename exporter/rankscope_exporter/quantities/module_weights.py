"""The weight of a module: where it is held, and whether it is a whole matrix on this rank. Reads no element."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from rankscope_exporter.statistics.tensors import is_freed, why_not_measurable

_NAMES: Final = ("weight", "wg")
_MATRIX: Final = 2


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """Return the `weight` or `wg` that a module holds itself; None without one, and when it is computed."""
    # The dictionaries themselves: a parametrized weight is a property, which computes and may change its buffers.
    known = {**vars(module), **module._parameters}  # noqa: SLF001 - see above
    held = [known[name] for name in _NAMES if isinstance(known.get(name), torch.Tensor)]
    return next((weight for weight in held if is_matrix(weight)), held[0] if held else None)


def is_matrix(weight: torch.Tensor | None) -> bool:
    """Return whether a weight has two dimensions."""
    return weight is not None and weight.dim() == _MATRIX


def may_become_whole(weight: torch.Tensor | None) -> bool:
    """Return whether it may be in parts, flat or freed between two calls, as FSDP has it."""
    return weight is None or hasattr(weight, "placements") or weight.dim() != _MATRIX or is_freed(weight)


def whole_matrix(weight: torch.Tensor | None) -> torch.Tensor | str:
    """Return the matrix that lies on this rank; or why there is none, in words."""
    if weight is None:
        return "has a weight that is computed, or none"
    placements = getattr(weight, "placements", None)
    if placements is not None:
        if not all(placement.is_replicate() for placement in placements):
            return "has a weight in parts on several ranks"
        weight = weight.to_local()  # type: ignore[attr-defined]  # a DTensor
    reason = why_not_measurable(weight)
    if reason is None and is_freed(weight):
        reason = "freed while it is not used"
    if reason is None and (weight.dim() != _MATRIX or not weight.is_floating_point()):
        reason = f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}, no matrix of numbers"
    return weight if reason is None else f"has a weight that is {reason}"
