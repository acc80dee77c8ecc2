"""The largest singular value of a matrix within a tolerance. The number of steps is fixed in advance.

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
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from rankscope_exporter.measure.formulas import without_autocast, working_type

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
    with without_autocast(weights[0].device):
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
