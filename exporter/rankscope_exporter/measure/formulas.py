"""Formulas for features of modules. A feature is not a statistic of one tensor.

The functions register no hooks and do not synchronise with the device. They use no global random generator, and the
autocast of the training has no effect on them.

Attention: entropy and maximum of the attention weights of each head over a whole batch, in bounded memory. Row i of a
head attends with p = softmax_j(scale · q_i·k_j + mask_ij) over the keys j that are not hidden. All masks are converted
to one common form. A part of a mask is computed when it is needed, so a broadcast mask needs little memory.

Routers: distribution of tokens over experts, and similarity of the weights of the experts.

Weights: the largest singular value of a matrix within a tolerance. The number of steps is fixed in advance.

The method is Lanczos on WᵀW (or WWᵀ, whichever is smaller) with full reorthogonalisation, from a direction that is
uniform on the sphere. After k steps, the relative error of the largest eigenvalue exceeds ε with a probability of at
most 1.648 √n exp(-√ε (2k - 1)). This holds for any spectrum (Kuczyński and Woźniakowski 1992, theorem 4.1). The
computed value is never too high. The direction comes from a separate generator with a fixed seed, so equal weights give
equal numbers.

The device computes only products and returns a few numbers per step. The host solves the small eigenproblem later, by
bisection in numpy. LAPACK would start its own threads from about 100 steps on, and take CPU time from training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import linear, normalize


def working_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which formulas are computed: float64 for float64 tensors, float32 for all other tensors."""
    return torch.float64 if dtype is torch.float64 else torch.float32


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


Chunk = tuple[slice, slice, slice]
"""A part of the attention scores of one call: slices of batch elements, key heads and queries."""


def chunks(grouped: torch.Tensor, key: torch.Tensor, limit: int) -> Iterator[Chunk]:
    """Yield the parts into which a call is divided to limit the memory.

    `grouped` is the query, [batch, key heads, groups, queries, width]: its `groups` heads share one head of `key`. A
    part has at most `limit` scores, `limit` elements of queries and `limit` elements of keys. If the elements for a
    single query, in all heads that share a key head, exceed the limit, the query is a separate part. The same applies
    to the keys of a single head.
    """
    elements, key_heads, groups, queries, width = grouped.shape
    keys = key.shape[2]
    row = groups * max(keys, width)
    whole_head = max(queries * row, keys * width, 1)
    heads = min(max(limit // whole_head, 1), key_heads)
    together = heads * whole_head
    batch = min(max(limit // together, 1), elements) if heads == key_heads else 1
    rows = min(max(limit // max(batch * heads * row, 1), 1), queries)
    for first in range(0, elements, max(batch, 1)):
        for head in range(0, key_heads, max(heads, 1)):
            for start in range(0, queries, max(rows, 1)):
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
    key_heads, width = key.shape[1], query.shape[3]
    dtype = working_type(query.dtype)
    factor = 1 / math.sqrt(max(width, 1)) if scale is None else scale
    grouped = torch.unflatten(query[:, :, sampled.start :: sampled.step], 1, (key_heads, query.shape[1] // key_heads))
    mask = mask.grouped(key_heads, sampled)
    key = key.expand(len(query), -1, -1, -1)
    total = torch.zeros(3, *grouped.shape[1:3], dtype=torch.float64, device=query.device)
    with torch.autocast(query.device.type, enabled=False):
        for part in chunks(grouped, key, max_bytes // (_BYTES_PER_SCORE * dtype.itemsize)):
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


_TOKENS = 1 << 20
"""Largest number of logits that are processed at the same time, to limit the memory."""


def routing_sums(logits: torch.Tensor, top_k: int | None) -> torch.Tensor:
    """Return float64 [3 + experts] on the device, from logits [..., experts].

    The first three numbers are the number of tokens, the sum of the entropies -Σ p ln p in nats with p =
    softmax(logits), and the number of tokens without a NaN. The other numbers are, for each expert, the number of
    tokens without a NaN that have the expert among their `top_k`.
    """
    experts = logits.shape[-1]
    flat = logits.detach().reshape(-1, experts)
    total = torch.zeros(3 + experts, dtype=torch.float64, device=logits.device)
    with torch.autocast(logits.device.type, enabled=False):
        for part in torch.split(flat, max(1, _TOKENS // experts)):
            wide = part.to(working_type(part.dtype))
            log = wide.log_softmax(-1)
            # A logit of -inf excludes an expert: 0 · -inf must be 0.
            total[1] -= (log.exp() * log.masked_fill(log.isneginf(), 0)).sum(dtype=torch.float64)
            if top_k is not None:
                known = ~wide.isnan().any(-1)
                chosen = torch.zeros_like(wide).scatter_(-1, wide.topk(min(top_k, experts), -1).indices, 1)
                total[2] += known.sum()
                total[3:] += (chosen * known[:, None]).sum(0, dtype=torch.float64)
    total[0] = len(flat)
    return total


def similarity(weight: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the mean cosine of the weight vectors of two experts, over all pairs. A vector of zeros has the cosine 0.

    `weight` is 2-D. The experts are its rows if the number of rows is `experts`, otherwise its columns.
    """
    wide = weight.detach().to(working_type(weight.dtype))
    with torch.autocast(weight.device.type, enabled=False):
        vectors = normalize(wide if wide.shape[0] == experts else wide.t(), dim=1)
        vectors = vectors.double()
        together, own = vectors.sum(0).square().sum(), vectors.square().sum()
        return (together - own) / (experts * (experts - 1))


def product(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the output [..., n] of a linear layer for tokens [..., width], given a weight [n, width]."""
    dtype = working_type(given.dtype)
    with torch.autocast(given.device.type, enabled=False):
        return linear(given.detach().to(dtype), weight.detach().to(dtype), None if bias is None else bias.to(dtype))


MISSES: Final = 1e-6
"""Largest probability with which the error of one weight may exceed the tolerance."""

MAX_ELEMENTS: Final = 1 << 24
"""Largest number of elements in one batch of matrices: 64 MiB for each copy of the batch in float32.

A larger matrix is not copied.
"""

_POINTS: Final = 32
"""Number of points within an interval for which the bisection counts eigenvalues at the same time."""

_BISECTIONS: Final = 12
"""Number of bisection steps. Each step leaves a 33rd of the interval.

33**-12 is about 2**-60, which is less than the precision of a float64.
"""

_BLOCK: Final = 1 << 22
_SEED: Final = 2013


Float64s = npt.NDArray[np.float64]

Gram = Callable[[torch.Tensor], torch.Tensor]
"""Function that multiplies the vector of each matrix W, [weights, size], by (factor · W)ᵀ (factor · W)."""


def lanczos_steps(size: int, tolerance: float) -> int:
    """Return the Lanczos steps for a relative error of `tolerance`; as many as the smaller dimension are exact."""
    share = 1 - (1 - tolerance) ** 2  # of the eigenvalue, which is its square
    steps = (math.log(1.648 * math.sqrt(max(size, 1)) / MISSES) / math.sqrt(share) + 1) / 2
    return max(1, min(size, math.ceil(steps)))


def batches(weights: Iterable[torch.Tensor]) -> list[list[int]]:
    """Return the positions of `weights` in batches of equal shape, dtype and device, with at most MAX_ELEMENTS each."""
    found: list[list[int]] = []
    open_ones: dict[object, list[int]] = {}
    for position, weight in enumerate(weights):
        like = (weight.shape, weight.dtype, weight.device)
        batch = open_ones.get(like)
        if batch is None or (len(batch) + 1) * weight.numel() > MAX_ELEMENTS:
            batch = open_ones[like] = []
            found.append(batch)
        batch.append(position)
    return found


def spectral_numbers(
    weights: Sequence[torch.Tensor], tolerance: float, *, together: bool | None = None
) -> torch.Tensor:
    """Return float64 [weights, 2 + 2 * steps] on the device, from which `norms` computes the norms on the host.

    `weights` are 2-D, of equal shape, and not empty. If `together`, they are copied into one tensor, and two batched
    products per step replace two products per weight and step. This is the default on all devices but the CPU, because
    a GPU needs less time for the products than the host for starting them one by one.
    """
    together = weights[0].device.type != "cpu" if together is None else together
    with torch.autocast(weights[0].device.type, enabled=False):
        matrices = [_Matrix(weight) for weight in weights]
        steps = lanczos_steps(matrices[0].size, tolerance)
        scale = torch.stack([matrix.largest() for matrix in matrices])
        frobenius = torch.stack([matrix.frobenius() for matrix in matrices])
        # Squares of numbers in [-1, 1] do not overflow, and the largest does not vanish.
        factor = torch.where(scale == 0, torch.ones_like(scale), scale).reciprocal()[:, None]
        gram = _batched_gram(matrices, factor) if together and len(matrices) > 1 else _single_grams(matrices, factor)
        diagonal, off_diagonal = _tridiagonal(gram, _start(matrices[0], factor).expand(len(matrices), -1), steps)
    return torch.cat([torch.stack([scale.double(), frobenius], 1), diagonal.double(), off_diagonal.double()], 1)


def norms(numbers: Float64s) -> tuple[Float64s, Float64s]:
    """Return the spectral norm and the Frobenius norm of each weight, from the result of `spectral_numbers`.

    Both are NaN for a weight with a NaN or an Inf.
    """
    finite = np.asarray(np.isfinite(numbers).all(axis=1))
    known = np.where(finite[:, None], numbers, 0.0)
    scale, frobenius = known[:, 0], known[:, 1]
    diagonal, off_diagonal = np.split(known[:, 2:], 2, axis=1)
    spectral = np.sqrt(_largest_eigenvalues(diagonal, off_diagonal[:, :-1])) * scale
    return np.where(finite, spectral, np.nan), np.where(finite, frobenius, np.nan)


def _largest_eigenvalues(diagonal: Float64s, off_diagonal: Float64s) -> Float64s:
    """Return the largest eigenvalue of each symmetric tridiagonal matrix; 0 if it is negative.

    `diagonal` is [matrices, size], `off_diagonal` is [matrices, size - 1]. The relative error is a few units of the
    last place. A number x is above all eigenvalues of a matrix T exactly if all pivots of T - xI are negative (Sturm).
    """
    magnitude = np.pad(np.abs(off_diagonal), ((0, 0), (1, 1)))
    low: Float64s = diagonal.max(1).clip(min=0)  # no eigenvalue on the diagonal is above the largest one
    high = np.maximum((diagonal + magnitude[:, :-1] + magnitude[:, 1:]).max(1), low)  # Gershgorin
    shares = np.linspace(0, 1, _POINTS + 2)
    squares = np.square(off_diagonal)
    for _ in range(_BISECTIONS):
        points = low[:, None] + (high - low)[:, None] * shares
        points[:, -1] = high
        above = _above_all_eigenvalues(points[:, 1:-1], diagonal, squares)
        place = (~above).sum(1)[:, None]
        low = np.take_along_axis(points, place, 1)[:, 0]
        high = np.take_along_axis(points, place + 1, 1)[:, 0]
    return low


def _above_all_eigenvalues(points: Float64s, diagonal: Float64s, squares: Float64s) -> npt.NDArray[np.bool_]:
    above = np.ones(points.shape, np.bool_)
    removed: Float64s | float = 0.0
    with np.errstate(all="ignore"):  # after a pivot of 0, which is not negative, the other pivots are irrelevant
        for row in range(diagonal.shape[1]):
            pivot = diagonal[:, row, None] - points - removed
            above &= pivot < 0
            if row < squares.shape[1]:
                removed = squares[:, row, None] / pivot
    return above


def _single_grams(matrices: Sequence[_Matrix], factor: torch.Tensor) -> Gram:
    """Return a function that multiplies each vector by its matrix, one after the other."""
    return lambda vectors: torch.stack(
        [matrix.gram(vector, own) for matrix, vector, own in zip(matrices, vectors, factor, strict=True)]
    )


def _batched_gram(matrices: Sequence[_Matrix], factor: torch.Tensor) -> Gram:
    """Return a function that multiplies all vectors by their matrices in two products."""
    stacked = torch.stack([matrix.whole() for matrix in matrices])
    transposed = stacked.transpose(1, 2)

    def gram(vectors: torch.Tensor) -> torch.Tensor:
        images = torch.bmm(stacked, vectors[:, :, None]) * factor[:, :, None]
        return torch.bmm(transposed, images)[:, :, 0] * factor

    return gram


def _tridiagonal(gram: Gram, vector: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return diagonals and off-diagonals of the Lanczos method's tridiagonal matrices, [weights, steps] each.

    `vector` is the first direction of each matrix, [weights, size].
    """
    basis = vector.new_zeros(len(vector), steps, vector.shape[1])
    diagonal, off_diagonal = vector.new_zeros(2, len(vector), steps)
    least = torch.finfo(vector.dtype).eps * 4
    for step in range(steps):
        basis[:, step] = vector
        image = gram(vector)
        diagonal[:, step] = (image * vector).sum(1)
        done = basis[:, : step + 1]
        for _ in range(2):  # the first pass leaves rounding errors
            share = torch.bmm(done, image[:, :, None])
            image = image - torch.bmm(done.transpose(1, 2), share)[:, :, 0]
        length = torch.linalg.vector_norm(image, dim=1)
        # The rest of a matrix of low rank is rounding error: the process has ended, and zeros change nothing.
        continues = length > least * diagonal[:, : step + 1].amax(1)
        off_diagonal[:, step] = torch.where(continues, length, torch.zeros_like(length))
        vector = torch.where(continues[:, None], image / length[:, None], torch.zeros_like(image))
    return diagonal, off_diagonal


def _start(matrix: _Matrix, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(device=like.device).manual_seed(_SEED)
    vector = torch.randn(matrix.size, generator=generator, device=like.device, dtype=like.dtype)
    length: torch.Tensor = torch.linalg.vector_norm(vector)
    return vector / length


class _Matrix:
    """One weight as a tall matrix W, in blocks of rows. A block is converted to the working dtype when it is used."""

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.detach()
        self._dtype = working_type(weight.dtype)
        if weight.numel() <= MAX_ELEMENTS:
            weight = weight.to(self._dtype)
        tall = weight if weight.shape[0] >= weight.shape[1] else weight.t()
        self.size = tall.shape[1]
        whole = weight.dtype is self._dtype
        self._tall = tall
        self._blocks = [tall] if whole else torch.split(tall, max(1, _BLOCK // self.size))

    def whole(self) -> torch.Tensor:
        return self._tall.to(self._dtype)

    def gram(self, vector: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return (factor · W)ᵀ (factor · W) · vector for the matrix W of this weight."""
        parts = []
        for block in self._blocks:
            rows = block.to(self._dtype)
            parts.append(torch.mv(rows.t(), torch.mv(rows, vector) * factor))
        return torch.stack(parts).sum(0) * factor

    def largest(self) -> torch.Tensor:
        """Return the largest magnitude of an element; NaN if the weight contains a NaN."""
        ends = [torch.stack(torch.aminmax(block.to(self._dtype))).abs() for block in self._blocks]
        return torch.stack(ends).amax()

    def frobenius(self) -> torch.Tensor:
        """Return the Frobenius norm of the weight in float64."""
        pieces = [piece for block in self._blocks for piece in torch.split(block, max(1, _BLOCK // self.size))]
        lengths = [torch.linalg.vector_norm(piece.to(self._dtype), dtype=torch.float64) for piece in pieces]
        whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(lengths))
        return whole
