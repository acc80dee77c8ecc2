"""The formulas compared with the published one, and with the matrix products of a forward and backward pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.observers.throughput.model_shape import (
    Decoder,
    decoder_flops_per_token,
    parameter_and_attention_flops,
    parameter_flops,
)

# Table 1 of Narayanan et al. 2021: billions of parameters, heads, width, layers. All with s = 2048 and V = 51 200.
PUBLISHED = [
    (1.7, 24, 2304, 24),
    (3.6, 32, 3072, 30),
    (7.5, 32, 4096, 36),
    (18.4, 48, 6144, 40),
    (39.1, 64, 8192, 48),
    (76.1, 80, 10240, 60),
    (145.6, 96, 12288, 80),
    (310.1, 128, 16384, 96),
    (529.6, 128, 20480, 105),
    (1008.0, 160, 25600, 128),
]
SEQUENCE, VOCABULARY = 2048, 51_200


def megatron(batch: int, sequence: int, layers: int, hidden: int, vocabulary: int) -> float:
    """Return the FLOPs of a batch by the formula of the paper, without recomputed activations: 72 B s l h² (…)."""
    return (
        72 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden))
    )


def parameters(layers: int, hidden: int, vocabulary: int, sequence: int) -> float:
    """Return the paper's number of parameters, P = 12 l h² (1 + 13/12h + (V + s)/12lh)."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))


def gpt(heads: int, hidden: int, layers: int, vocabulary: int) -> Decoder:
    return Decoder(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_width=hidden // heads,
        feed_forward=4 * hidden,
        gated=False,
        vocabulary=vocabulary,
    )


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers"), PUBLISHED)
def test_formula_reproduces_the_published_megatron_figures(billions, heads, hidden, layers):
    batch = 512
    ours = batch * SEQUENCE * decoder_flops_per_token(gpt(heads, hidden, layers, VOCABULARY), SEQUENCE)

    assert megatron(batch, SEQUENCE, layers, hidden, VOCABULARY) == pytest.approx(ours, rel=0.01)
    assert billions == pytest.approx(parameters(layers, hidden, VOCABULARY, SEQUENCE) / 1e9, rel=0.01, abs=0.05)


@pytest.mark.thorough
@given(
    heads=st.integers(1, 64),
    width=st.sampled_from([32, 64, 128]),
    layers=st.integers(1, 128),
    sequence=st.integers(1, 131_072),
    vocabulary=st.integers(1, 300_000),
)
def test_formula_equals_megatrons_for_any_dense_gpt(heads, width, layers, sequence, vocabulary):
    ours = sequence * decoder_flops_per_token(gpt(heads, heads * width, layers, vocabulary), sequence)

    assert megatron(1, sequence, layers, heads * width, vocabulary) == pytest.approx(ours, rel=1e-9)


def test_formula_counts_grouped_queries_gates_and_experts():
    decoder = Decoder(
        layers=2,
        hidden=64,
        heads=8,
        kv_heads=2,
        head_width=16,
        feed_forward=96,
        gated=True,
        vocabulary=1000,
        active_experts=2,
        experts=8,
        shared_feed_forward=48,
    )
    queries, keys = 64 * 128, 64 * 32
    attention = 2 * queries + 2 * keys + 2 * 10 * 128  # in and out, keys and values, and both products over 10 tokens
    experts = 64 * 8 + 2 * 3 * 64 * 96 + 3 * 64 * 48
    by_hand = 6 * (2 * (attention + experts) + 64 * 1000)

    assert by_hand == decoder_flops_per_token(decoder, 10)


def test_parameter_counts_six_flops_and_a_frozen_one_four():
    assert 6 * 7 + 4 * 3 == parameter_flops(7, 3)
    assert 6 * 7 + 12 * 5 * 11 * 13 == parameter_and_attention_flops(7, 0, layers=5, hidden=11, sequence=13)
