"""Which keys a query may attend to: masks in the forms in which modules are given them, brought to one.

Pure; a part of a mask is made when it is asked for, so a mask that is broadcast stays small.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import torch

HIDING: Final = -1e4
"""An additive mask of this or less hides a key: whichever number stands for minus infinity, its weight is 0."""


@dataclass(frozen=True, slots=True)
class Mask:
    """`values` is [batch, heads, queries, keys], broadcast by strides of 0: bool, True where a key is hidden, or added.

    `causal` hides key j from query i where j > i, both counted from 0, as torch's `is_causal` does.
    """

    values: torch.Tensor | None = None
    causal: bool = False
    rows: range = field(default_factory=lambda: range(0))

    def grouped(self, key_heads: int, rows: range) -> Mask:
        """Return the mask of some rows, its heads as [key heads, groups]."""
        values = self.values
        if values is not None:
            values = torch.unflatten(values[:, :, rows.start :: rows.step], 1, (key_heads, -1))
        return replace(self, values=values, rows=rows)

    def add_to(self, scores: torch.Tensor, part: tuple[slice, slice, slice]) -> torch.Tensor | None:
        """Add what is additive to `scores`, and return which are hidden; None when none is."""
        within, heads, rows = part
        hidden = None
        if self.values is not None:
            values = self.values[within, heads, :, rows]
            if values.dtype is torch.bool:
                hidden = values
            else:
                scores += values
                hidden = values <= HIDING
        if self.causal:
            later = self._later(scores, rows)
            hidden = later if hidden is None else hidden | later
        return hidden

    def _later(self, scores: torch.Tensor, rows: slice) -> torch.Tensor:
        keys = torch.arange(scores.shape[-1], device=scores.device)
        own = torch.arange(self.rows.start, self.rows.stop, self.rows.step, device=scores.device)[rows]
        return keys > own[:, None]


def hides_of(mask: torch.Tensor, *, true_attends: bool) -> torch.Tensor:
    """Return a bool or additive mask: of what is no floating point number, non-zero elements are True."""
    if mask.is_floating_point():
        return mask
    return (mask == 0) if true_attends else (mask != 0)


def broadcast(mask: torch.Tensor, batch: int, heads: int, queries: int, keys: int) -> torch.Tensor | None:
    """Return `mask` as [batch, heads, queries, keys] without a copy; None when it does not fit.

    It is aligned at its last dimensions, as torch does it. Beyond that, [batch * heads, queries, keys] is taken apart,
    [batch, queries, keys] holds for all heads, and [batch, keys] for all heads and queries.
    """
    target = (batch, heads, queries, keys)
    shape = tuple(mask.shape)
    if len(shape) == len(target) - 1 and shape[0] not in (1, heads):
        if shape[0] == batch * heads:
            mask = torch.unflatten(mask, 0, (batch, heads))
        elif shape[0] == batch:
            mask = mask[:, None]
    elif len(shape) == 2 and shape[0] not in (1, queries) and shape[0] == batch:
        mask = mask[:, None, None]
    padded = (1,) * (len(target) - mask.dim()) + tuple(mask.shape)
    if len(padded) != len(target) or any(own not in (1, wanted) for own, wanted in zip(padded, target, strict=True)):
        return None
    return mask.expand(target)
