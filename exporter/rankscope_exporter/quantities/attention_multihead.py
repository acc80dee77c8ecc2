"""Query, key and mask of torch's own `nn.MultiheadAttention`, which projects its inputs itself: projected once more."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch
from torch import nn
from torch.nn.functional import linear

from rankscope_exporter.features import without_autocast, working_type
from rankscope_exporter.features.masks import HIDING, broadcast
from rankscope_exporter.quantities.module_weights import whole_matrix
from rankscope_exporter.statistics.tensors import why_not_measurable

_SIGNATURE: Final = inspect.signature(nn.MultiheadAttention.forward)
_BATCHED: Final = 3


def is_multihead(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Return whether the module is torch's own, or one that runs its forward."""
    return type(module).forward is nn.MultiheadAttention.forward


def projected(
    module: nn.MultiheadAttention, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | str:
    """Return query and key as [batch, heads, sequence, width], and the mask of the scores; or why not, in words."""
    given = _SIGNATURE.bind(module, *args, **kwargs).arguments
    if module.bias_k is not None or module.add_zero_attn:
        return "adds keys of its own (bias_k, add_zero_attn)"
    for name in ("query", "key"):
        reason = why_not_measurable(given[name])
        if reason is not None:
            return f"{name} is {reason}"
    if module.in_proj_weight is not None:
        weights = [whole_matrix(module.in_proj_weight)]
    else:
        weights = [whole_matrix(module.q_proj_weight), whole_matrix(module.k_proj_weight)]
    matrices = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(matrices) < len(weights):
        return "projects with a weight that is not whole on this rank"
    parts = matrices[0].chunk(3)[:2] if len(matrices) == 1 else matrices
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    query = _heads(module, given["query"], parts[0], biases[0])
    key = _heads(module, given["key"], parts[1], biases[1])
    batch, count, queries, _ = query.shape
    mask = given.get("attn_mask")
    padding = given.get("key_padding_mask")
    forms = [mask, None if padding is None else padding.reshape(batch, 1, 1, -1)]
    full = [broadcast(form, batch, count, queries, key.shape[2]) for form in forms if form is not None]
    known = [one for one in full if one is not None]
    if len(known) < len(full):
        return "has a mask that fits no scores of its calls"
    return query, key, _both(known)


def _heads(module: nn.MultiheadAttention, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    x = x.detach()
    if x.dim() < _BATCHED:
        x = x[None]
    elif not module.batch_first:
        x = x.transpose(0, 1)
    dtype = working_type(x.dtype)
    with without_autocast(x.device):
        out = linear(x.to(dtype), weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype))
    return torch.unflatten(out, -1, (module.num_heads, module.head_dim)).transpose(1, 2)


def _both(masks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one mask that does what each does; True hides in both, as torch has it here."""
    if len(masks) < 2:
        return masks[0] if masks else None
    if all(mask.dtype is torch.bool for mask in masks):
        return masks[0] | masks[1]
    hides = [mask if mask.dtype is torch.bool else mask <= HIDING for mask in masks]
    added = sum(mask for mask in masks if mask.dtype is not torch.bool)
    assert isinstance(added, torch.Tensor)
    return added.masked_fill(hides[0] | hides[1], 2 * HIDING)
