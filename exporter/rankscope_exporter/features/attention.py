"""How sharp the attention of each head is, over a whole batch and in bounded memory.

Row i of a head attends with p = softmax_j(scale · q_i·k_j + mask_ij) over the keys j that are not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from rankscope_exporter.features import without_autocast, working_type
from rankscope_exporter.features.masks import Mask

MAX_BYTES: Final = 64 << 20
"""Of all that is computed from scores, at a time."""

_BYTES_PER_SCORE: Final = 5
"""Times the size of an element: scores, their exponentials, queries and keys in the working type, what is hidden."""

_HIDDEN: Final = -1e30
_LEAST: Final = -80.0
"""Below the greatest score of a row: its exponential, 2e-35, changes no sum. One of 0 takes a CPU ten times as long."""
_CERTAIN: Final = 1e-20
"""An entropy below it is 0: rounding, or what hidden keys leave."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one call: `groups` heads of the query share one head of the keys."""

    batch: int
    key_heads: int
    groups: int
    queries: int
    keys: int
    width: int


Chunk = tuple[slice, slice, slice]
"""Batch elements, heads of the keys, queries."""


def chunks(sizes: Sizes, limit: int) -> Iterator[Chunk]:
    """Yield parts that together are all of a call; none has more than `limit` scores, elements of queries, or of keys.

    The rows of one group that alone are longer are a part by themselves, and so are the keys of one head.
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
    """Return which queries are looked at: all, or at most `rows` of them at equal distances, the rest on both sides."""
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
    """Return float64 [3, heads] on the device, summed over the batch and the rows that attend to anything:

    their entropies -Σ p ln p in nats, their greatest p, and how many there are. `query` is [batch, heads, queries,
    width], `key` [batch, key heads, keys, width]; head h of the query reads head h // groups of the keys.
    """  # noqa: D400 - the list goes on
    looked_at = sampled_rows(query.shape[2], rows)
    batch, heads, _, width = query.shape
    sizes = Sizes(batch, key.shape[1], heads // key.shape[1], len(looked_at), key.shape[2], width)
    dtype = working_type(query.dtype)
    factor = 1 / math.sqrt(max(width, 1)) if scale is None else scale
    grouped = torch.unflatten(query[:, :, looked_at.start :: looked_at.step], 1, (sizes.key_heads, sizes.groups))
    mask = mask.grouped(sizes.key_heads, looked_at)
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
    """Return [3, key heads, groups] of scores [batch, key heads, groups, rows, keys], which are used up."""
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
    # Products would not do: a row that is left out may hold a NaN.
    numbers = (entropy.masked_fill(~counted, 0), total.reciprocal().masked_fill(~counted, 0), counted)
    return torch.stack([number.sum((0, 3), dtype=torch.float64) for number in numbers])
