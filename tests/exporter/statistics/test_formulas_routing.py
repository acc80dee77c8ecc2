"""Tests of router features, compared with a reference for each token; and of constraints on all feature formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.exporter.statistics.conftest import Operations, normal

from rankscope_exporter.statistics.formulas.attention import Mask, attention_sums
from rankscope_exporter.statistics.formulas.routing import routing_sums, similarity
from rankscope_exporter.statistics.formulas.spectral import spectral_numbers


def test_routing_equals_the_reference_per_token(monkeypatch):
    monkeypatch.setattr("rankscope_exporter.statistics.formulas.routing._TOKENS", 12)
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

    waiting = ("_local_scalar_dense", "nonzero", "equal.default", "masked_select", "linalg", "unique", "bincount")
    assert not {
        name for name in operations.names if any(word in name for word in waiting) and "vector_norm" not in name
    }
