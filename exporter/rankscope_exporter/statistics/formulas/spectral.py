"""The largest singular value of a matrix to a stated tolerance, by a number of steps that is fixed beforehand.

Lanczos on WᵀW (or WWᵀ, whichever is smaller) with full reorthogonalisation. After k steps from a direction that is
uniform on the sphere, the largest eigenvalue is too low by a share of more than ε with a probability of at most
1.648 √n exp(-√ε (2k - 1)), whatever the spectrum is (Kuczyński and Woźniakowski 1992, theorem 4.1). It is never too
high. The direction comes from a generator of its own with a fixed seed, so equal weights give equal numbers.

On the device only products are made, a few numbers a step. The small eigenproblem is solved on the host, later, by
bisection in numpy. LAPACK would use threads of its own from about 100 steps on, and take CPU time from training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from rankscope_exporter.statistics.formulas import without_autocast, working_type

MISSES: Final = 1e-6
"""How likely it may be that one weight is off by more than the tolerance."""

MAX_ELEMENTS: Final = 1 << 24
"""Of matrices that are worked on together: 64 MiB where they must be copied to float32. A larger one is not copied."""

_POINTS: Final = 32
"""How many points of an interval are compared with the eigenvalues together."""

_BISECTIONS: Final = 12
"""Each leaves a 33rd of the interval: 33**-12 is 2**-60, less than the last place of a float64."""

_BLOCK: Final = 1 << 22
_SEED: Final = 2013


Float64s = npt.NDArray[np.float64]


def lanczos_steps(size: int, tolerance: float) -> int:
    """Return how many steps keep the largest singular value within `tolerance`, relative; all `size` are exact."""
    share = 1 - (1 - tolerance) ** 2  # of the eigenvalue, which is its square
    steps = (math.log(1.648 * math.sqrt(max(size, 1)) / MISSES) / math.sqrt(share) + 1) / 2
    return max(1, min(size, math.ceil(steps)))


def batches(weights: Iterable[torch.Tensor]) -> list[list[int]]:
    """Return the positions of `weights` that are worked on together: of one shape and type, and not too many."""
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


def spectral_numbers(weights: Sequence[torch.Tensor], tolerance: float) -> torch.Tensor:
    """Return float64 [weights, 2 + 2 * steps] on the device for `norms`; `weights` are 2-D, of one shape, not empty."""
    with without_autocast(weights[0].device):
        matrices = [_Matrix(weight) for weight in weights]
        steps = lanczos_steps(matrices[0].size, tolerance)
        scale = torch.stack([matrix.largest() for matrix in matrices])
        frobenius = torch.stack([matrix.frobenius() for matrix in matrices])
        # Squares of what lies in [-1, 1] neither overflow nor vanish.
        factor = torch.where(scale == 0, torch.ones_like(scale), scale).reciprocal()[:, None]
        diagonal, beside = _tridiagonal(matrices, factor, steps)
    return torch.cat([torch.stack([scale.double(), frobenius], 1), diagonal.double(), beside.double()], 1)


def norms(numbers: Float64s) -> tuple[Float64s, Float64s]:
    """Return spectral and Frobenius norm of each weight, from `spectral_numbers` on the host.

    Both are NaN where the weight holds what is not finite.
    """
    finite = np.asarray(np.isfinite(numbers).all(axis=1))
    known = np.where(finite[:, None], numbers, 0.0)
    scale, frobenius = known[:, 0], known[:, 1]
    diagonal, beside = np.split(known[:, 2:], 2, axis=1)
    spectral = np.sqrt(_largest_eigenvalues(diagonal, beside[:, :-1])) * scale
    return np.where(finite, spectral, np.nan), np.where(finite, frobenius, np.nan)


def _largest_eigenvalues(diagonal: Float64s, beside: Float64s) -> Float64s:
    """Return the largest eigenvalue, 0 at least, of symmetric tridiagonal matrices, to a few units of the last place.

    `diagonal` is [matrices, size], `beside` [matrices, size - 1]. x is above all eigenvalues exactly if all pivots of
    T - x are negative (Sturm).
    """
    magnitude = np.pad(np.abs(beside), ((0, 0), (1, 1)))
    low: Float64s = diagonal.max(1).clip(min=0)  # no eigenvalue on the diagonal is above the largest one
    high = np.maximum((diagonal + magnitude[:, :-1] + magnitude[:, 1:]).max(1), low)  # Gershgorin
    shares = np.linspace(0, 1, _POINTS + 2)
    squares = np.square(beside)
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
    with np.errstate(all="ignore"):  # behind a pivot of 0, which is not negative, nothing counts any more
        for row in range(diagonal.shape[1]):
            pivot = diagonal[:, row, None] - points - removed
            above &= pivot < 0
            if row < squares.shape[1]:
                removed = squares[:, row, None] / pivot
    return above


def _tridiagonal(matrices: Sequence[_Matrix], factor: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return diagonal and off-diagonal of the projected matrices, [weights, steps] each."""
    vector = _start(matrices[0], factor).expand(len(matrices), -1)
    basis = vector.new_zeros(len(matrices), steps, matrices[0].size)
    diagonal, beside = vector.new_zeros(2, len(matrices), steps)
    least = torch.finfo(vector.dtype).eps * 4
    for step in range(steps):
        basis[:, step] = vector
        image = torch.stack([matrix.gram(v, f) for matrix, v, f in zip(matrices, vector, factor, strict=True)])
        diagonal[:, step] = (image * vector).sum(1)
        done = basis[:, : step + 1]
        for _ in range(2):  # once leaves what rounding has mixed in
            share = torch.bmm(done, image[:, :, None])
            image = image - torch.bmm(done.transpose(1, 2), share)[:, :, 0]
        length = torch.linalg.vector_norm(image, dim=1)
        # What is left of a matrix of low rank is rounding: there the process has ended, and zeros change nothing.
        goes_on = length > least * diagonal[:, : step + 1].amax(1)
        beside[:, step] = torch.where(goes_on, length, torch.zeros_like(length))
        vector = torch.where(goes_on[:, None], image / length[:, None], torch.zeros_like(image))
    return diagonal, beside


def _start(matrix: _Matrix, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(device=like.device).manual_seed(_SEED)
    vector = torch.randn(matrix.size, generator=generator, device=like.device, dtype=like.dtype)
    length: torch.Tensor = torch.linalg.vector_norm(vector)
    return vector / length


class _Matrix:
    """A weight as a tall matrix in blocks of rows, each turned into the working type when it is used."""

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.detach()
        self._dtype = working_type(weight.dtype)
        if weight.numel() <= MAX_ELEMENTS:
            weight = weight.to(self._dtype)
        tall = weight if weight.shape[0] >= weight.shape[1] else weight.t()
        self.size = tall.shape[1]
        whole = weight.dtype is self._dtype
        self._blocks = [tall] if whole else torch.split(tall, max(1, _BLOCK // self.size))

    def gram(self, vector: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return (factor · W)ᵀ (factor · W) · vector."""
        parts = []
        for block in self._blocks:
            rows = block.to(self._dtype)
            parts.append(torch.mv(rows.t(), torch.mv(rows, vector) * factor))
        return torch.stack(parts).sum(0) * factor

    def largest(self) -> torch.Tensor:
        """Return the largest magnitude; NaN when there is a NaN."""
        ends = [torch.stack(torch.aminmax(block.to(self._dtype))).abs() for block in self._blocks]
        return torch.stack(ends).amax()

    def frobenius(self) -> torch.Tensor:
        """Return the Frobenius norm in float64."""
        pieces = [piece for block in self._blocks for piece in torch.split(block, max(1, _BLOCK // self.size))]
        lengths = [torch.linalg.vector_norm(piece.to(self._dtype), dtype=torch.float64) for piece in pieces]
        whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(lengths))
        return whole
