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


def megatron(batch: int, sequence: int, layers: int, hidden: int, vocabulary: int) -> float:
    """Return the FLOPs of a batch by the formula of the paper, without recomputed activations: 72 B s l h² (…)."""
    return (
        72 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden))
    )


@given(
    heads=st.integers(1, 64),
    width=st.sampled_from([32, 64, 128]),
    layers=st.integers(1, 128),
    sequence=st.integers(1, 131_072),
    vocabulary=st.integers(1, 300_000),
)
def test_formula_equals_megatrons_for_any_dense_gpt(heads, width, layers, sequence, vocabulary):
    sizes = {"layers": layers, "hidden": heads * width, "vocabulary": vocabulary}
    decoder = Decoder(
        **sizes, heads=heads, kv_heads=heads, head_width=width, feed_forward=4 * heads * width, gated=False
    )

    assert megatron(1, sequence, **sizes) == pytest.approx(sequence * decoder_flops_per_token(decoder, sequence))


def test_formula_counts_grouped_queries_gates_and_experts():
    sizes = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 2, "head_width": 16, "feed_forward": 96}
    mixture = {"active_experts": 2, "experts": 8, "shared_feed_forward": 48}
    decoder = Decoder(**sizes, **mixture, gated=True, vocabulary=1000)
    queries, keys = 64 * 128, 64 * 32
    attention = 2 * queries + 2 * keys + 2 * 10 * 128  # in and out, keys and values, and both products over 10 tokens
    experts = 64 * 8 + 2 * 3 * 64 * 96 + 3 * 64 * 48
    by_hand = 6 * (2 * (attention + experts) + 64 * 1000)

    assert by_hand == decoder_flops_per_token(decoder, 10)


def test_parameter_counts_six_flops_and_a_frozen_one_four():
    assert 6 * 7 + 4 * 3 == parameter_flops(7, 3)
    assert 6 * 7 + 12 * 5 * 11 * 13 == parameter_and_attention_flops(7, 0, layers=5, hidden=11, sequence=13)
