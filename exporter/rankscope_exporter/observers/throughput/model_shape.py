"""Reads the sizes of a decoder from its configuration (Hugging Face, Megatron-Core, nanoGPT), and computes its FLOPs.

The functions have no side effects. A multiplication with its addition is two FLOPs, and the backward pass counts twice
the forward pass. Attention counts without a causal mask, and recomputed activations do not count. These are the
conventions of Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM")
without recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from rankscope_exporter.model.parameter_names import entry

FLOPS_PER_MULTIPLICATION: Final = 2
TRAINING: Final = 3
"""Ratio of the FLOPs of a training step to the FLOPs of the forward pass of this step.

The forward pass counts once, and the backward pass twice.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes of a decoder that determine its FLOPs per token."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    """Width of the hidden layer in one MLP, or in one expert."""
    gated: bool
    """True if an MLP has a third weight matrix, as SwiGLU has."""
    vocabulary: int
    active_experts: int = 1
    """Number of experts that process each token; 1 for a dense MLP."""
    experts: int = 0
    """Number of experts among which the router chooses; 0 without a router."""
    shared_feed_forward: int = 0
    """Width of the shared expert, which processes every token; 0 without one."""


def decoder_flops_per_token(decoder: Decoder, sequence: int, frozen: float = 0) -> float:
    """Return the FLOPs of one token by Megatron's formula, extended to grouped queries, gated MLPs and experts.

    `sequence` is the number of tokens in one sequence; `frozen` is the share of the weights, from 0 to 1, for which
    the backward pass computes no gradient.

    With as many key heads as query heads, an MLP four times as wide as the model and no frozen weights, B sequences of
    s tokens need 72 B s l h² (1 + s/6h + V/12lh) FLOPs, for l layers of width h and a vocabulary of V tokens.
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
    """Return the FLOPs of one token if each parameter is used once.

    These are 6 FLOPs per trained parameter and 4 FLOPs per frozen parameter.
    """
    return TRAINING * FLOPS_PER_MULTIPLICATION * trained + 2 * FLOPS_PER_MULTIPLICATION * frozen


def parameter_and_attention_flops(trained: float, frozen: float, *, layers: int, hidden: int, sequence: int) -> float:
    """Return the FLOPs of one token in the matrix products with parameters and in attention: 6 N + 12 L h s.

    N is the number of parameters, L the number of layers, h the width of the model, and s the number of tokens in a
    sequence.
    """
    return parameter_flops(trained, frozen) + 12 * layers * hidden * sequence


_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_query_groups", "n_kv_heads"),
    "head_width": ("head_dim", "kv_channels"),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "num_moe_experts"),
    "active_experts": ("num_experts_per_tok", "moe_router_topk"),
    "expert_width": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    "shared_width": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
}
_GATES: Final = ("gate_proj", "gate_up_proj", "w3")
_HUGGING_FACE: Final = "model_type"
"""Name of an attribute that every Hugging Face configuration has.

A Hugging Face configuration does not show whether the model has an output layer, so the modules of the model are
searched for one.
"""


def sizes_of(module: nn.Module) -> dict[str, int]:
    """Return the sizes of the decoder that the configuration of `module`, or `module` itself, contains.

    The keys are Rankscope's own names of the sizes, such as "layers". `_NAMES` has the names that
    the frameworks use for each size, such as "n_layer".
    """
    found: dict[str, int] = {}
    for holder in (_config(module), module):  # Megatron's models have the vocabulary size as an attribute of the model
        for own, names in _NAMES.items():
            values = (value for name in names if (value := _plain(holder, name)) is not None)
            if (value := next(values, None)) is not None:
                found.setdefault(own, value)
    return found


def decoder_of(module: nn.Module) -> Decoder | None:
    """Return the decoder that the configuration of `module` describes; None if a needed size is missing.

    An encoder of tokens counts as a decoder, because the formula ignores the causal mask. The vocabulary is 0 if a
    Hugging Face model has no output layer, for example a sequence classifier.
    """
    sizes = sizes_of(module)
    if not {"layers", "hidden", "heads", "vocabulary"} <= sizes.keys():
        return None
    heads, hidden = sizes["heads"], sizes["hidden"]
    experts = sizes.get("experts", 0)
    dense = sizes.get("feed_forward", 4 * hidden)
    return Decoder(
        layers=sizes["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=sizes.get("kv_heads", heads),
        head_width=sizes.get("head_width", hidden // heads),
        feed_forward=sizes.get("expert_width", dense) if experts else dense,
        gated=_is_gated(module),
        vocabulary=sizes["vocabulary"] if _has_output_layer(module, sizes["vocabulary"]) else 0,
        active_experts=sizes.get("active_experts", 1) if experts else 1,
        experts=experts,
        shared_feed_forward=sizes.get("shared_width", 0),
    )


def has_two_sequences(module: nn.Module) -> bool:
    """Return whether the configuration describes a model with an encoder and a decoder, which get different tokens."""
    return getattr(_config(module), "is_encoder_decoder", False) is True


def _has_output_layer(module: nn.Module, vocabulary: int) -> bool:
    if not isinstance(getattr(_config(module), _HUGGING_FACE, None), str):
        return True
    return any(vars(child).get("out_features") == vocabulary for child in module.modules())


def _config(module: nn.Module) -> Any:
    # A list of modules has no `config`, so the first module is used.
    inner = entry(module._modules, "0") if isinstance(module, nn.ModuleList) else module  # noqa: SLF001 - no code of the user's runs
    return getattr(inner, "config", None)


def _plain(holder: Any, name: str) -> int | None:
    value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _is_gated(module: nn.Module) -> bool:
    configured = getattr(_config(module), "gated_linear_unit", None)
    if isinstance(configured, bool):
        return configured
    # Also parameters, because fused experts have their matrices as parameters of one module.
    named = (*module.named_modules(), *module.named_parameters())
    return any(name.rpartition(".")[2] in _GATES for name, _ in named)
