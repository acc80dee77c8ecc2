"""FLOPs of training by formula: forward and backward of a decoder, or six for each parameter. Pure arithmetic.

A multiplication with its addition is two FLOPs, the backward pass is twice the forward. Attention counts whole, as if
no mask made half of it needless, and nothing is counted that is computed a second time: the conventions of Narayanan et
al. 2021 ("Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM") without recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FLOPS_PER_MULTIPLICATION: Final = 2
TRAINING: Final = 3
"""Forward once, backward twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes that decide what a decoder computes for a token."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    """Width between the matrices of one MLP, or of one expert."""
    gated: bool
    """Whether an MLP has a third matrix, as SwiGLU has."""
    vocabulary: int
    active_experts: int = 1
    """How many experts a token goes to; 1 for a dense MLP."""
    experts: int = 0
    """How many a router chooses from; 0 without one."""
    shared_feed_forward: int = 0
    """Width of what every token goes through beside the experts."""


def decoder_flops_per_token(decoder: Decoder, sequence: int, frozen: float = 0) -> float:
    """Return the FLOPs of one token by Megatron's formula, extended to grouped queries, gated MLPs and experts.

    `sequence` is the number of tokens in one sequence; `frozen` is the share of the weights, from 0 to 1, for which
    the backward pass computes no gradient. With as many key heads as query heads, an MLP four times as wide as the
    model and no frozen weights, B sequences of s tokens need 72 B s l h² (1 + s/6h + V/12lh) FLOPs.
    """
    hidden, queries = decoder.hidden, decoder.heads * decoder.head_width
    keys = decoder.kv_heads * decoder.head_width
    projections = hidden * (2 * queries + 2 * keys)
    scores = 2 * sequence * queries
    matrices = 3 if decoder.gated else 2
    width = decoder.feed_forward * decoder.active_experts + decoder.shared_feed_forward
    layer = projections + matrices * hidden * width + hidden * decoder.experts
    weights = decoder.layers * layer + hidden * decoder.vocabulary
    return FLOPS_PER_MULTIPLICATION * ((TRAINING - frozen) * weights + TRAINING * decoder.layers * scores)


def parameter_flops(trained: float, frozen: float = 0) -> float:
    """Return the FLOPs of a token that meets each parameter once: 6 N, and 4 for what is frozen."""
    return TRAINING * FLOPS_PER_MULTIPLICATION * trained + 2 * FLOPS_PER_MULTIPLICATION * frozen


def parameter_and_attention_flops(trained: float, frozen: float, *, layers: int, hidden: int, sequence: int) -> float:
    """Return 6 N + 12 L h s: what a token costs by its parameters, and by those it attends to."""
    return parameter_flops(trained, frozen) + 12 * layers * hidden * sequence
