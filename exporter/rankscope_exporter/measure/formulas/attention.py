"""Entropy and maximum of the attention weights of each head over a whole batch, in bounded memory.

Row i of a head attends with p = softmax_j(scale · q_i·k_j + mask_ij) over the keys j that are not hidden. The module
converts all masks to one common form. A part of a mask is computed when it is needed, so a broadcast mask needs little
memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from rankscope_exporter.measure.formulas import without_autocast, working_type

HIDING: Final = -1e4
"""Largest value of an additive mask that hides a key.

The weight of the key is 0 then, also for scripts that use a large negative number instead of minus infinity.
"""


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of attention scores. `values` is [batch, heads, queries, keys], broadcast with strides of 0.

    If `values` is bool, True means that the key is hidden; otherwise it is added to the scores. If `causal` is true,
    key j is hidden from query i where j > i, both counted from 0, as in torch's `is_causal`. `rows` has the positions
    of the queries that are read.
    """

    values: torch.Tensor | None = None
    causal: bool = False
    rows: range = field(default_factory=lambda: range(0))

    def grouped(self, key_heads: int, rows: range) -> Mask:
        """Return the mask of the queries `rows`, with the dimension of heads split into [key heads, groups]."""
        values = self.values
        if values is not None:
            values = torch.unflatten(values[:, :, rows.start :: rows.step], 1, (key_heads, -1))
        return replace(self, values=values, rows=rows)

    def add_to(self, scores: torch.Tensor, part: tuple[slice, slice, slice]) -> torch.Tensor | None:
        """Add an additive mask to `scores` in place. Return bool, True where a key is hidden; None if no key is hidden.

        `part` selects the elements of the batch, the key heads and the queries of `scores`.
        """
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
            keys = torch.arange(scores.shape[-1], device=scores.device)
            own = torch.arange(self.rows.start, self.rows.stop, self.rows.step, device=scores.device)[rows]
            later = keys > own[:, None]
            hidden = later if hidden is None else hidden | later
        return hidden


def hides_of(mask: torch.Tensor, *, true_attends: bool) -> torch.Tensor:
    """Return a mask in which True hides a key: integers become bool, an additive mask is unchanged."""
    if mask.is_floating_point():
        return mask
    return (mask == 0) if true_attends else (mask != 0)


def broadcast(mask: torch.Tensor, batch: int, heads: int, queries: int, keys: int) -> torch.Tensor | None:
    """Return `mask` as [batch, heads, queries, keys] without a copy; None if its shape does not fit.

    Dimensions are aligned from the last one, as in torch. In addition, [batch * heads, queries, keys] is split,
    [batch, queries, keys] applies to all heads, and [batch, keys] applies to all heads and queries.
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


MAX_BYTES: Final = 64 << 20
"""Largest number of bytes of temporary memory for the computation of statistics from attention scores."""

_BYTES_PER_SCORE: Final = 5
"""Number of bytes of temporary memory per attention score, divided by the size of an element.

For each score, the memory contains the score, its exponential, its share of the converted queries and of the converted
keys, and the flag that hides its key.
"""

_HIDDEN: Final = -1e30
_LEAST: Final = -80.0
"""Smallest attention score, minus the maximum of the row of scores.

A smaller score is replaced by this value, because its exponential is at most 2e-35 and changes no sum. Without this
limit, results of exp() would be 0, and such calls are ten times slower on a CPU.
"""
_CERTAIN: Final = 1e-20
"""Entropies below this value are set to 0, because they come from rounding or from hidden keys."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The dimensions of query and key in one call. `groups` heads of the query share one head of the key."""

    batch: int
    key_heads: int
    groups: int
    queries: int
    keys: int
    width: int


Chunk = tuple[slice, slice, slice]
"""A part of the attention scores of one call: slices of batch elements, key heads and queries."""


def chunks(sizes: Sizes, limit: int) -> Iterator[Chunk]:
    """Yield the parts into which a call is divided to limit the memory.

    A part has at most `limit` scores, `limit` elements of queries and `limit` elements of keys. If the elements for a
    single query, in all heads that share a key head, exceed the limit, the query is a separate part. The same applies
    to the keys of a single head.
    """
    row = sizes.groups * max(sizes.keys, sizes.width)
    whole_head = max(sizes.queries * row, sizes.keys * sizes.width, 1)
    heads = min(max(limit // whole_head, 1), sizes.key_heads)
    together = heads * whole_head
    batch = min(max(limit // together, 1), sizes.batch) if heads == sizes.key_heads else 1
    rows = min(max(limit // max(batch * heads * row, 1), 1), sizes.queries)
    for first in range(0, sizes.batch, max(batch, 1)):
        for head in range(0, sizes.key_heads, max(heads, 1)):
            for start in range(0, sizes.queries, max(rows, 1)):
                yield slice(first, first + batch), slice(head, head + heads), slice(start, start + rows)


def sampled_rows(queries: int, rows: int | None) -> range:
    """Return the positions of the queries to read: all, or at most `rows` at equal distances.

    The queries before the first position and after the last one are equal in number, or differ by one.
    """
    if rows is None or queries <= rows:
        return range(queries)
    stride = -(-queries // rows)
    count = -(-queries // stride)
    first = (queries - 1 - (count - 1) * stride) // 2
    return range(first, queries, stride)


def attention_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    rows: int | None = None,
    max_bytes: int = MAX_BYTES,
) -> torch.Tensor:
    """Return float64 [3, heads] on the device: sums over the batch and over all queries with a visible key.

    The first sum is that of the entropies -Σ p ln p in nats, the second that of the largest p, and the third is the
    number of queries. `query` is [batch, heads, queries, width] and `key` is [batch, key heads, keys, width]. Head h of
    the query uses head h // groups of the key.
    """
    sampled = sampled_rows(query.shape[2], rows)
    batch, heads, _, width = query.shape
    sizes = Sizes(batch, key.shape[1], heads // key.shape[1], len(sampled), key.shape[2], width)
    dtype = working_type(query.dtype)
    factor = 1 / math.sqrt(max(width, 1)) if scale is None else scale
    grouped = torch.unflatten(query[:, :, sampled.start :: sampled.step], 1, (sizes.key_heads, sizes.groups))
    mask = mask.grouped(sizes.key_heads, sampled)
    key = key.expand(batch, -1, -1, -1)
    total = torch.zeros(3, sizes.key_heads, sizes.groups, dtype=torch.float64, device=query.device)
    with without_autocast(query.device):
        for part in chunks(sizes, max_bytes // (_BYTES_PER_SCORE * dtype.itemsize)):
            within, of_heads, of_rows = part
            queries = grouped[within, of_heads, :, of_rows].to(dtype) * factor
            keys = key[within, of_heads].to(dtype)
            scores = torch.matmul(queries.flatten(2, 3), keys.transpose(-1, -2))
            scores = torch.unflatten(scores, 2, queries.shape[2:4])
            total[:, of_heads] += _sums(scores, mask.add_to(scores, part))
    return total.flatten(1)


def _sums(scores: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Return the sums of entropies, of largest weights and of queries as [3, key heads, groups].

    `scores` is [batch, key heads, groups, rows, keys] and is overwritten. `hidden` is True where a key is hidden from a
    query.
    """
    if hidden is not None:
        scores.masked_fill_(hidden, _HIDDEN)
    scores -= scores.amax(-1, keepdim=True)
    scores.clamp_(min=_LEAST)
    weights = scores.exp()
    total = weights.sum(-1)
    entropy = total.log() - weights.mul_(scores).sum(-1) / total
    entropy.masked_fill_(entropy < _CERTAIN, 0)
    counted = torch.ones_like(total, dtype=torch.bool) if hidden is None else ~hidden.all(-1)
    counted = counted.expand_as(total)
    # Not a product with the mask: a row that does not count may contain a NaN.
    numbers = (entropy.masked_fill(~counted, 0), total.reciprocal().masked_fill(~counted, 0), counted)
    return torch.stack([number.sum((0, 3), dtype=torch.float64) for number in numbers])
