"""Quantity `attention`: entropy and maximum of the attention weights of each head.

They are computed from the query, key and mask that a module receives. torch's own `nn.MultiheadAttention` projects its
inputs inside of the module. For it, the quantity computes the projection of query and key a second time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeGuard

import torch
from torch import nn
from torch.nn.functional import linear

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.model.module_names import NamedModule
from rankscope_exporter.quantities.attention_options import Arguments, AttentionOptions
from rankscope_exporter.quantities.base import QuantityOptions, Table
from rankscope_exporter.quantities.hook_handles import hook_after
from rankscope_exporter.quantities.module_quantity import (
    ModuleQuantity,
    Running,
    local_matrix_or_reason,
    unusable_reason,
)
from rankscope_exporter.records.host_transfer import Numbers, Row
from rankscope_exporter.statistics.formulas import without_autocast, working_type
from rankscope_exporter.statistics.formulas.attention import HIDING, Mask, attention_sums, broadcast, hides_of
from rankscope_exporter.statistics.tensor_access import why_not_measurable

_SIGNATURE: Final = inspect.signature(nn.MultiheadAttention.forward)
_BATCHED: Final = 3
_MOST_NODES: Final = 64
_PRODUCTS: Final = ("Bmm", "Mm")
_KEEP_SCORES: Final = ("View", "UnsafeView", "Permute", "Transpose", "Expand", "ToCopy", "Div", "Mul", "Softmax")
"""Names of operations between the product of query and key and the softmax that hide no key."""


def is_multihead(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Return whether the module is torch's own multi-head attention, or a subclass with the same method `forward`."""
    return type(module).forward is nn.MultiheadAttention.forward


def projected(
    module: nn.MultiheadAttention, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | str:
    """Return query and key as [batch, heads, sequence, width], and the mask of the scores of `nn.MultiheadAttention`.

    If query, key or mask cannot be read from the arguments of the module's call, return the reason as text.
    """
    given = _SIGNATURE.bind(module, *args, **kwargs).arguments
    if module.bias_k is not None or module.add_zero_attn:
        return "adds its own keys (bias_k, add_zero_attn)"
    for name in ("query", "key"):
        reason = why_not_measurable(given[name])
        if reason is not None:
            return f"{name} is {reason}"
    if module.in_proj_weight is not None:
        weights = [local_matrix_or_reason(module.in_proj_weight)]
    else:
        weights = [local_matrix_or_reason(module.q_proj_weight), local_matrix_or_reason(module.k_proj_weight)]
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
    masks = [mask, None if padding is None else padding.reshape(batch, 1, 1, -1)]
    full = [broadcast(form, batch, count, queries, key.shape[2]) for form in masks if form is not None]
    known = [one for one in full if one is not None]
    if len(known) < len(full):
        return "has a mask that does not fit the scores of its calls"
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
    """Return one mask with the combined effect of all masks of torch's multi-head attention.

    In a bool mask, True means that a key is hidden.
    """
    if len(masks) < 2:
        return masks[0] if masks else None
    if all(mask.dtype is torch.bool for mask in masks):
        return masks[0] | masks[1]
    hides = [mask if mask.dtype is torch.bool else mask <= HIDING for mask in masks]
    added = sum(mask for mask in masks if mask.dtype is not torch.bool)
    assert isinstance(added, torch.Tensor)
    return added.masked_fill(hides[0] | hides[1], 2 * HIDING)


ENTROPY: Final = "attention_entropy"
SOFTMAX_MAX: Final = "softmax_max"

_DIMENSIONS: Final = 4


class Attention(ModuleQuantity):
    """Two features of each attention head and micro-batch, over all elements of the batch and all queries.

    `index` is the number of the head. The attention weights are p_i = softmax_j(scale · q_i·k_j + mask_ij), over the
    keys j that are not hidden, in float32, or in float64 for a float64 query. `attention_entropy` is the mean over the
    queries i of -Σ_j p_ij ln p_ij, in nats; it is 0 if each query sees one key. `softmax_max` is the mean over the
    queries i of max_j p_ij. The plain maximum would always be 1 under a causal mask, because the first query sees one
    key. A query without a visible key does not count, and a head without such queries has no rows. A NaN among the
    visible numbers makes both features NaN.

    A call without a mask and without a causal flag may mask inside of the module. If the autograd graph of its output
    shows a causal mask or none, this is used; otherwise, the module is reported and has no rows.
    """

    name: ClassVar[str] = "attention"
    options_class: ClassVar[type[QuantityOptions]] = AttentionOptions
    options: AttentionOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._unseen: dict[str, list[int]] = {}  # way of the calls of which the mask is not known yet, by module

    def _follow(self, named: NamedModule) -> None:
        if (module := named.module) is not None:
            self.before(named, functools.partial(self._read, Arguments(module, self.options)))
            self._register(named, hook_after, f"{self.name} of modules", functools.partial(self._ended, named))

    def _read(self, arguments: Arguments, call: Running, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        module = call.module
        own = is_multihead(module)  # its masks already contain the causal mask
        if is_multihead(module):
            found = projected(module, args, kwargs)
        else:
            found = _found(arguments, self.options.permutation, args, kwargs)
        if isinstance(found, str):
            self.missing(found, call.named)
            return
        query, key, mask = found
        scale = None if own else arguments.scale(args, kwargs)
        causal = False if own else arguments.causal(module, args, kwargs)
        ways = (False, True) if causal is None else (causal,)
        sums = [attention_sums(query, key, Mask(mask, causal=one), scale=scale, rows=self.options.rows) for one in ways]
        way = [] if causal is None else [0]
        if causal is None:
            self._unseen[call.named.name] = way
        rows = functools.partial(_rows, call.named.name, call.micro_step, way)
        self._gate.table.defer("features", torch.stack(sums), rows)

    def _ended(self, named: NamedModule, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        way = self._unseen.pop(named.name, None)
        if way is None:
            return
        if (causal := _causal_inside(output)) is None:
            self.missing(
                "gets no mask, and may have one inside that cannot be seen: set causal, or mask to none", named
            )
        else:
            way.append(int(causal))

    def on_step_begin(self, table: Table) -> None:
        """Delete the stored module calls of the last sampled step."""
        super().on_step_begin(table)
        self._unseen.clear()


def _causal_inside(output: Any) -> bool | None:
    """Return whether the call that returned `output` hides later keys, from its graph; None if it has another mask.

    A saved tensor with a hook is not read, because the hook may compute a part of the model again.
    """
    found = output[0] if isinstance(output, tuple) and output else output
    node, is_scores = getattr(found, "grad_fn", None), False
    for _ in range(_MOST_NODES):
        if node is None:
            return None
        name = node.name()
        if isinstance(is_causal := getattr(node, "_saved_is_causal", None), bool):
            return is_causal or (False if _has_no_bias(node) else None)
        if is_scores and not name.startswith(_KEEP_SCORES):
            return False if name.startswith(_PRODUCTS) else None
        is_scores |= "Softmax" in name
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _has_no_bias(node: Any) -> bool:
    names = {"_saved_attn_mask", "_saved_attn_bias"} & set(dir(node))
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)(True)  # noqa: SLF001 - no public name
    return not names or (hooks is None and all(getattr(node, name) is None for name in names))


def _found(
    arguments: Arguments, permutation: tuple[int, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | str:
    """Return query and key as [batch, heads, sequence, width], and the mask of the scores.

    If query, key or mask cannot be read from the arguments of the module's call, return the reason as text.
    """
    given = arguments.query_and_key(args, kwargs)
    for label, tensor in zip(("query", "key"), given, strict=True):
        reason = _why_unusable(label, tensor)
        if reason is not None:
            return reason
    query, key = (tensor.detach().permute(permutation) for tensor in given)
    batch, heads, queries, width = query.shape
    if key.shape[3] != width or key.shape[0] not in (1, batch):
        return (
            f"query {list(query.shape)} and key {list(key.shape)} (batch, heads, sequence, width) do not fit: see order"
        )
    if not key.shape[1] or heads % key.shape[1]:
        return f"{heads} heads of the query are not a multiple of {key.shape[1]} heads of the key: see order"
    if not key.shape[2]:
        return "key has no elements"
    mask = arguments.mask(args, kwargs)
    if not isinstance(mask, torch.Tensor):
        return query, key, None
    reason = unusable_reason(mask)
    if reason is not None:
        return f"mask is {reason}"
    hides = hides_of(mask.detach(), true_attends=arguments.true_attends)
    full = broadcast(hides, batch, heads, queries, key.shape[2])
    if full is None:
        return f"mask of shape {list(mask.shape)} does not fit the scores of its calls"
    return query, key, full


def _why_unusable(label: str, tensor: Any) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"{label} is not a tensor argument"
    reason = unusable_reason(tensor)
    if reason is None and (tensor.dim() != _DIMENSIONS or not tensor.is_floating_point()):
        reason = f"{list(tensor.shape)}, not four dimensions of numbers: target the core of the attention"
    return None if reason is None else f"{label} is {reason}"


def _rows(module: str, micro_step: int, way: Sequence[int], sums: Numbers) -> Iterable[Row]:
    """Yield the rows of a call. `way` has the position in `sums` of its mask, and is empty if the mask is unknown."""
    for head, (entropy, largest, count) in enumerate(sums[way[0]].T.tolist() if way else ()):
        if count:
            for kind, total in ((ENTROPY, entropy), (SOFTMAX_MAX, largest)):
                yield {"kind": kind, "module": module, "index": head, "micro_step": micro_step, "value": total / count}
