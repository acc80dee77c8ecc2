"""Formulas of attention, routing and spectral norms, compared with references in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from tests.exporter.measure.kernels.conftest import Operations, normal

from rankscope_exporter.measure.formulas import (
    Mask,
    attention_sums,
    batches,
    broadcast,
    hides_of,
    lanczos_steps,
    norms,
    routing_sums,
    sampled_rows,
    similarity,
    spectral_numbers,
)

BATCH, HEADS, WIDTH = 3, 4, 8


def reference(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None = None, scale: float | None = None
) -> tuple[list[float], list[float]]:
    """Return entropy and mean largest weight of each head, from complete matrices. Masked scores have bias -inf."""
    query, key = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    entropies, greatest = [], []
    for head in range(query.shape[1]):
        rows = scores[:, head].reshape(-1, scores.shape[3])
        rows = rows[(rows > -math.inf).any(1)]
        weights = torch.softmax(rows, -1)
        entropies.append(float(-torch.special.xlogy(weights, weights).sum(1).mean()))
        greatest.append(float(weights.amax(1).mean()))
    return entropies, greatest


def means(sums: torch.Tensor) -> tuple[list[float], list[float]]:
    return (sums[0] / sums[2]).tolist(), (sums[1] / sums[2]).tolist()


def bias_of(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)


def masks(queries: int, keys: int) -> dict[str, tuple[Mask, torch.Tensor | None]]:
    """Return masks in the form of the argument, each with the equivalent bias for all scores."""
    some = normal(BATCH, 1, queries, keys, seed=5) > 0.4
    some[0, 0, 1] = True  # a query that attends to no key
    added = normal(HEADS, queries, keys, seed=6)
    lowest = torch.where(some, torch.finfo(torch.float32).min, 0.0)
    later = torch.arange(keys) > torch.arange(queries)[:, None]
    padded = torch.arange(keys) >= torch.tensor([keys, 3, 0])[:, None]  # the last element of the batch has no key

    def given(mask: torch.Tensor, *, true_attends: bool = False, causal: bool = False) -> Mask:
        values = broadcast(hides_of(mask, true_attends=true_attends), BATCH, HEADS, queries, keys)
        assert values is not None
        return Mask(values, causal=causal)

    return {
        "none": (Mask(), None),
        "hides": (given(some), bias_of(some)),
        "attends": (given(~some, true_attends=True), bias_of(some)),
        "ones and zeros": (given((~some).long(), true_attends=True), bias_of(some)),
        "added to heads": (given(added), added.double()),
        "lowest numbers": (given(lowest), bias_of(some)),
        "minus ten thousand": (given(torch.where(some, -1e4, 0.0)), bias_of(some)),
        "causal": (Mask(causal=True), bias_of(later)),
        "causal and hides": (given(some, causal=True), bias_of(some | later)),
        "of one query": (given(some[0, 0, :1]), bias_of(some[0, 0, :1])),
        "by element": (given(some[:, 0]), bias_of(some)),
        "by element and head": (given(some.expand(-1, HEADS, -1, -1).flatten(0, 1)), bias_of(some)),
        "padding": (given(padded), bias_of(padded[:, None, None])),
    }


@pytest.mark.parametrize("max_bytes", [64 << 20, 4096, 1], ids=["at once", "in parts", "row by row"])
@pytest.mark.parametrize(("queries", "keys", "key_heads"), [(7, 7, 4), (5, 9, 2), (9, 4, 1)])
def test_attention_equals_that_of_whole_matrices(queries, keys, key_heads, max_bytes):
    query, key = normal(BATCH, HEADS, queries, WIDTH) * 2, normal(BATCH, key_heads, keys, WIDTH, seed=1)
    for name, (mask, bias) in masks(queries, keys).items():
        found = means(attention_sums(query, key, mask, max_bytes=max_bytes))
        for expected, got in zip(reference(query, key, bias), found, strict=True):
            assert expected == pytest.approx(got, rel=2e-6, abs=2e-6), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_attention_of_every_dtype_and_scale(dtype):
    query, key = (normal(2, 2, 6, WIDTH, seed=seed).to(dtype) for seed in (1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        found = means(attention_sums(query, key, Mask(), scale=3.0))

    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    for expected, got in zip(reference(query, key, scale=3.0), found, strict=True):
        assert expected == pytest.approx(got, rel=tolerance, abs=tolerance)


def test_extremes_of_attention_are_exact():
    """Entropy is 0 for one key and ln n for equal scores. A NaN affects only its head, a masked NaN affects none."""
    query, key = torch.ones(1, 3, 4, 2), torch.ones(1, 3, 4, 2)
    key[0, 1, 3, 0] = math.nan
    hidden = torch.zeros(1, 3, 4, 4, dtype=torch.bool)
    hidden[0, 2, :, 1:] = True
    entropy, greatest = means(attention_sums(query, key, Mask(hidden)))
    assert pytest.approx([math.log(4), math.nan, 0], nan_ok=True) == entropy
    assert pytest.approx([0.25, math.nan, 1], nan_ok=True) == greatest
    assert (0, 1) == (entropy[2], greatest[2])

    hidden[0, 1, :, 3] = True
    entropy, _ = means(attention_sums(query, key, Mask(hidden)))
    assert pytest.approx([math.log(4), math.log(3), 0]) == entropy
    assert [0, 0, 0] == attention_sums(query, key, Mask(torch.ones_like(hidden))).sum(0).tolist()


def test_sampled_rows_are_at_equal_distances():
    query, key = normal(2, 2, 50, WIDTH), normal(2, 2, 50, WIDTH, seed=1)
    chosen = sampled_rows(50, 12)
    hidden = torch.arange(50) > torch.arange(50)[:, None]
    expected = reference(query[:, :, list(chosen)], key, bias_of(hidden[list(chosen)]))

    sums = attention_sums(query, key, Mask(causal=True), rows=12)
    assert {2.0 * len(chosen)} == set(sums[2].tolist())
    for one, other in zip(expected, means(sums), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("sizes", [(1, 2, 512), (1, 64, 90), (256, 2, 32), (1, 16, 200)])
def test_scores_of_long_sequences_are_never_whole_in_memory(sizes):
    """The memory is limited for many queries, heads and elements of a batch. Whole scores would be 2 MiB."""
    batch, heads, queries = sizes
    query, key = normal(*sizes, 8), normal(*sizes, 8, seed=1)
    mask = broadcast(torch.zeros(queries, dtype=torch.bool), batch, heads, queries, queries)
    with Operations() as operations:
        attention_sums(query, key, Mask(mask, causal=True), max_bytes=1 << 19)

    assert operations.largest_bytes <= max(1 << 17, query.nbytes)


@pytest.mark.parametrize("shape", [(2, 2), (3, 6, 5), (7,), (2, 3, 5, 6), (1, 1, 1, 1, 1)])
def test_broadcast_returns_none_for_a_mask_that_does_not_fit(shape):
    assert broadcast(torch.zeros(shape), 3, 4, 6, 6) is None


def test_routing_equals_the_reference_per_token(monkeypatch):
    monkeypatch.setattr("rankscope_exporter.measure.formulas._TOKENS", 12)
    logits = normal(2, 9, 5)
    logits[1, 3, 2] = -math.inf
    logits[0, 0, 4] = -math.inf
    tokens, entropy, known, *chosen = routing_sums(logits, 2).tolist()

    expected, counts = 0.0, [0] * 5
    for token in logits.reshape(-1, 5).double():
        weights = torch.softmax(token, 0)
        expected -= float(torch.special.xlogy(weights, weights).sum())
        for expert in sorted(range(5), key=lambda i, t=token: float(t[i]))[-2:]:
            counts[expert] += 1
    assert (18, 18, counts) == (tokens, known, chosen)
    assert expected == pytest.approx(entropy, rel=1e-6)


def test_nan_token_makes_the_entropy_nan_and_is_not_counted():
    logits = normal(6, 4)
    logits[2, 1] = math.nan
    tokens, entropy, known, *chosen = routing_sums(logits, 1).tolist()

    assert (6, 5, 5) == (tokens, known, sum(chosen))
    assert math.isnan(entropy)
    assert [0, 0] == [*routing_sums(logits, None).tolist()[2:4]]
    assert [0] * 7 == routing_sums(torch.empty(0, 4), 2).tolist()


@pytest.mark.parametrize("transposed", [False, True])
def test_similarity_is_the_mean_cosine_of_all_pairs(transposed):
    weight = normal(6, 10)
    weight[2] = 0
    pairs = itertools.combinations(weight.double(), 2)
    expected = [float(torch.nn.functional.cosine_similarity(one, other, 0)) for one, other in pairs]

    found = similarity(weight.t() if transposed else weight, 6)
    assert sum(expected) / len(expected) == pytest.approx(float(found), rel=1e-6)
    assert pytest.approx(1) == float(similarity(torch.ones(4, 3), 4))


def everything() -> list[torch.Tensor]:
    queries, logits = normal(2, 4, 6, 4), normal(5, 4)
    return [
        attention_sums(queries, queries[:, :2], Mask(queries[:, :, :, :1] > 0, causal=True), rows=3),
        spectral_numbers([normal(20, 30), normal(20, 30, seed=1)], 0.01),
        routing_sums(logits, 2),
        similarity(logits, 5),
    ]


def test_formulas_use_no_global_generator_and_are_reproducible():
    """Also with deterministic algorithms."""
    before, first = torch.get_rng_state(), everything()
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(1)
    torch.use_deterministic_algorithms(mode=True)
    try:
        second = everything()
    finally:
        torch.use_deterministic_algorithms(mode=False)

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_formulas_have_no_host_synchronisation():
    """No operation reads a number on the host, or has a shape that depends on one."""
    with Operations() as operations:
        everything()

    assert [] == operations.waits


def norms_of(weights: list[torch.Tensor], tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    return norms(spectral_numbers(weights, tolerance).numpy())


def with_spectrum(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    left = torch.linalg.qr(normal(rows, len(values), seed=3).double())[0]
    return (left * values.double()) @ torch.linalg.qr(normal(columns, len(values), seed=4).double())[0].t()


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
    monkeypatch.setattr("rankscope_exporter.measure.formulas.MAX_ELEMENTS", 1000)
    monkeypatch.setattr("rankscope_exporter.measure.formulas._BLOCK", 500)
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
