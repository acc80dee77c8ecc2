"""Spectral norms against singular value decompositions in float64: within the stated tolerance for every spectrum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tests.exporter.statistics.conftest import normal

from rankscope_exporter.statistics.formulas.spectral import batches, lanczos_steps, norms, spectral_numbers


def norms_of(weights: list[torch.Tensor], tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return spectral and Frobenius norm of each weight, by the device and then the host."""
    return norms(spectral_numbers(weights, tolerance).numpy())


def with_spectrum(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    left = torch.linalg.qr(normal(rows, len(values), seed=3).double())[0]
    right = torch.linalg.qr(normal(columns, len(values), seed=4).double())[0]
    return (left * values.double()) @ right.t()


SPECTRA = {
    "gaussian": normal(256, 256),
    "tall": normal(300, 40),
    "wide": normal(30, 400),
    "clustered": with_spectrum(torch.linspace(0.999, 1, 200), 200, 220),
    "one apart": with_spectrum(torch.cat([torch.tensor([1.0]), torch.full((199,), 0.9)]), 200, 200),
    "geometric": with_spectrum(0.9 ** torch.arange(200.0), 200, 200),
    "heavy tail": with_spectrum(1 / torch.arange(1.0, 201), 200, 200),
    "low rank": with_spectrum(torch.tensor([3.0, 2.0]), 150, 160),
    "rank one": torch.ones(64, 48),
    "identity": torch.eye(100),
    "huge": normal(50, 60) * 1e30,
    "tiny": normal(50, 60) * 1e-30,
    "one element": torch.tensor([[-2.5]]),
    "one row": normal(1, 50),
    "one column": normal(50, 1),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("tolerance", [0.05, 0.01, 1e-4])
def test_spectral_norm_is_within_its_tolerance_and_never_too_high(name, tolerance):
    weight = SPECTRA[name].float()
    expected = float(torch.linalg.svdvals(weight.double())[0])
    spectral, frobenius = norms_of([weight], tolerance)

    assert (1 - tolerance) * expected <= float(spectral[0]) <= (1 + 2e-6) * expected
    assert float(torch.linalg.norm(weight.double())) == pytest.approx(float(frobenius[0]), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_spectral_norm_is_equally_exact_for_every_dtype(dtype):
    weights = [normal(40, 60, seed=seed).to(dtype) for seed in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        spectral, _ = norms_of(weights, 1e-4)

    expected = [float(torch.linalg.svdvals(weight.double())[0]) for weight in weights]
    assert expected == pytest.approx(spectral.tolist(), rel=1e-4)


@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_batched_products_have_the_numbers_of_single_products(dtype, shape):
    weights = [(10.0**seed * normal(*shape, seed=seed)).to(dtype) for seed in range(4)]
    weights[2] = torch.zeros(shape, dtype=dtype)
    single = norms(spectral_numbers(weights, 1e-3, together=False).numpy())

    for expected, found in zip(single, norms(spectral_numbers(weights, 1e-3, together=True).numpy()), strict=True):
        assert expected == pytest.approx(found, rel=1e-5)


def test_norms_of_zero_and_non_finite_weights():
    weights = [torch.zeros(6, 9), normal(6, 9), normal(6, 9), normal(6, 9)]
    weights[1][2, 3] = math.nan
    weights[2][2, 3] = -math.inf
    spectral, frobenius = norms_of(weights, 0.01)

    assert [0, math.nan, math.nan] == pytest.approx(spectral.tolist()[:3], nan_ok=True)
    assert [0, math.nan, math.nan] == pytest.approx(frobenius.tolist()[:3], nan_ok=True)
    assert float(torch.linalg.svdvals(weights[3])[0]) == pytest.approx(float(spectral[3]), rel=1e-4)


def test_large_weight_is_processed_in_blocks(monkeypatch):
    monkeypatch.setattr("rankscope_exporter.statistics.formulas.spectral.MAX_ELEMENTS", 1000)
    monkeypatch.setattr("rankscope_exporter.statistics.formulas.spectral._BLOCK", 500)
    for weight in (normal(70, 60).bfloat16(), normal(60, 70).bfloat16().t(), normal(400, 30).bfloat16()):
        spectral, frobenius = norms_of([weight], 1e-3)

        assert float(torch.linalg.svdvals(weight.double())[0]) == pytest.approx(float(spectral[0]), rel=1e-3)
        assert float(torch.linalg.norm(weight.double())) == pytest.approx(float(frobenius[0]), rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 60, 300])
@pytest.mark.parametrize("kind", ["random", "in parts", "zeros", "tiny", "equal"])
def test_eigenproblem_is_solved_to_the_last_places(size, kind):
    generator = np.random.default_rng(size)
    diagonal, beside = generator.random((4, size)), generator.random((4, size)) / 2
    if kind == "in parts":
        beside[:, size // 2 :] = 0
        diagonal[:, size // 2 :] = 0
    if kind == "equal":
        beside[:] = 0
        diagonal[:] = 0.3
    factor = {"zeros": 0.0, "tiny": 1e-150}.get(kind, 1.0)
    ones = np.ones((4, 1))
    found, _ = norms(np.concatenate([ones, ones, factor * diagonal, factor * beside], 1))

    matrices = [np.diag(a) + np.diag(b[:-1], 1) + np.diag(b[:-1], -1) for a, b in zip(diagonal, beside, strict=True)]
    expected = np.sqrt(factor * np.linalg.eigvalsh(np.stack(matrices))[:, -1])
    assert expected == pytest.approx(found, rel=1e-14, abs=0)


def test_lanczos_steps_follow_from_size_and_tolerance():
    """By the formula 1.648 √n exp(-√ε (2k - 1)) <= 1e-6, ε = 1 - (1 - tolerance)²."""
    for size, tolerance in itertools.product((100, 4096, 100_000), (0.1, 0.01, 0.001)):
        steps = lanczos_steps(size, tolerance)
        share = 1 - (1 - tolerance) ** 2
        misses = [1.648 * math.sqrt(size) * math.exp(-math.sqrt(share) * (2 * k - 1)) for k in (steps, steps - 1)]
        assert steps == size or misses[0] <= 1e-6 < misses[1]
    assert [1, 1] == [lanczos_steps(1, 0.01), lanczos_steps(0, 0.01)]


def test_weights_of_one_shape_share_a_batch_up_to_a_size():
    weights = [torch.empty(4, 4), torch.empty(2, 3), torch.empty(4, 4), torch.empty(4, 4).half()]
    assert [[0, 2], [1], [3]] == batches(weights)
    large = torch.empty(1 << 11, 1 << 12, device="meta")
    assert [[0, 1], [2]] == batches([large, large, large])
