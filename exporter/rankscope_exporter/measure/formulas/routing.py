"""Distribution of tokens over experts by a router, and similarity of the weights of the experts."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, normalize

from rankscope_exporter.measure.formulas import without_autocast, working_type

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
    with without_autocast(logits.device):
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
    with without_autocast(weight.device):
        vectors = normalize(wide if wide.shape[0] == experts else wide.t(), dim=1)
        vectors = vectors.double()
        together, own = vectors.sum(0).square().sum(), vectors.square().sum()
        return (together - own) / (experts * (experts - 1))


def product(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the logits [..., experts] of tokens [..., width], given a weight [experts, width]."""
    dtype = working_type(given.dtype)
    with without_autocast(given.device):
        return linear(given.detach().to(dtype), weight.detach().to(dtype), None if bias is None else bias.to(dtype))
