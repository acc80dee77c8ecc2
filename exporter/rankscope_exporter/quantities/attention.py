"""Entropy and maximum of the attention of each head, from the query, key and mask that a module is given.

torch's own `nn.MultiheadAttention` projects its inputs itself: they are projected once more.
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
from rankscope_exporter.quantities.attention_options import Arguments, AttentionOptions
from rankscope_exporter.quantities.base import Hooking, Quantity, QuantityOptions, SamplingGate, Table
from rankscope_exporter.quantities.module_calls import ModuleCalls, Running, local_matrix_or_reason
from rankscope_exporter.records.host_transfer import Numbers, Row
from rankscope_exporter.statistics.formulas import without_autocast, working_type
from rankscope_exporter.statistics.formulas.attention import HIDING, Mask, attention_sums, broadcast, hides_of
from rankscope_exporter.statistics.tensor_access import why_not_measurable

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


ENTROPY: Final = "attention_entropy"
SOFTMAX_MAX: Final = "softmax_max"

_DIMENSIONS: Final = 4


class Attention(Quantity):
    """Two features of each head (`index`) and micro-batch, over all elements of the batch and all queries:

    p_i = softmax_j(scale · q_i·k_j + mask_ij) in float32 (float64 of float64), over the keys that are not hidden;
    `attention_entropy` is the mean over the queries i of -Σ_j p_ij ln p_ij, in nats: 0 where each query sees one key;
    `softmax_max` is the mean over the queries i of max_j p_ij: the plain maximum is always 1 under a causal mask,
    whose first query has one key. A query without any key is left out; a head without any query has no rows. A NaN
    among what is seen makes both NaN.
    """  # noqa: D400 - the list goes on

    name: ClassVar[str] = "attention"
    measures_tensors: ClassVar[bool] = False
    options_class: ClassVar[type[QuantityOptions]] = AttentionOptions
    of_modules: ClassVar[bool] = True
    options: AttentionOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._calls: ModuleCalls
        self._gate: SamplingGate

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Register on every module of the targets."""
        self._gate = gate
        self._calls = ModuleCalls(self.name, hooking, gate)
        for named in self._calls.find(self.monitored.framework.module, self.targets):
            module = named.module
            if module is not None:
                self._calls.before(named, functools.partial(self._read, Arguments(module, self.options)))

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every moment
        """Nothing of this step has been called yet."""
        self._calls.on_step_begin()

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        """Say what was missing."""
        self._calls.on_step_end()

    def _read(self, arguments: Arguments, call: Running, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        module = call.module
        if is_multihead(module):
            found = projected(module, args, kwargs)
        else:
            found = _found(arguments, self.options.permutation, args, kwargs)
        if isinstance(found, str):
            self._calls.missing(found, call.named)
            return
        query, key, mask = found
        own = is_multihead(module)  # whose masks already say what is causal
        sums = attention_sums(
            query,
            key,
            Mask(mask, causal=not own and arguments.causal(module, args, kwargs)),
            scale=None if own else arguments.scale(args, kwargs),
            rows=self.options.rows,
        )
        self._gate.table.defer("features", sums, functools.partial(_rows, call.named.name, call.micro_step))


def _found(
    arguments: Arguments, permutation: tuple[int, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | str:
    """Return query and key as [batch, heads, sequence, width], and the mask of the scores; or why not, in words."""
    query, key = arguments.query_and_key(args, kwargs)
    reason = _why_not(query, key)
    if reason is not None:
        return reason
    query, key = (tensor.detach().permute(permutation) for tensor in (query, key))
    reason = _why_no_pair(query, key)
    mask = arguments.mask(args, kwargs)
    if reason is None and isinstance(mask, torch.Tensor):
        reason = _unusable("mask", mask)
    if reason is not None or not isinstance(mask, torch.Tensor):
        return reason or (query, key, None)
    batch, heads, queries, _ = query.shape
    meant = hides_of(mask.detach(), true_attends=arguments.true_attends)
    fits = broadcast(meant, batch, heads, queries, key.shape[2])
    return (query, key, fits) if fits is not None else f"mask of shape {list(mask.shape)} fits no scores of its calls"


def _why_not(query: Any, key: Any) -> str | None:
    for what, tensor in (("query", query), ("key", key)):
        if not isinstance(tensor, torch.Tensor):
            return f"{what} is no tensor among its arguments"
        reason = _unusable(what, tensor)
        if reason is not None:
            return reason
        if tensor.dim() != _DIMENSIONS or not tensor.is_floating_point():
            return f"{what} is {list(tensor.shape)}, not four dimensions of numbers: target the core of the attention"
    return None


def _unusable(what: str, tensor: torch.Tensor) -> str | None:
    if hasattr(tensor, "placements"):
        return f"{what} is a distributed tensor, whose parts do not meet on one rank"
    reason = why_not_measurable(tensor)
    return None if reason is None else f"{what} is {reason}"


def _why_no_pair(query: torch.Tensor, key: torch.Tensor) -> str | None:
    """Return why [batch, heads, sequence, width] of both do not belong together."""
    if query.shape[3] != key.shape[3] or key.shape[0] not in (1, query.shape[0]):
        return (
            f"query {list(query.shape)} and key {list(key.shape)} (batch, heads, sequence, width) do not fit: see order"
        )
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        return f"{query.shape[1]} heads of the query share no {key.shape[1]} heads of the key evenly: see order"
    return None if key.shape[2] else "key has no elements"


def _rows(module: str, micro_step: int, sums: Numbers) -> Iterable[Row]:
    for head, (entropy, largest, count) in enumerate(sums.T.tolist()):
        if count:
            for kind, total in ((ENTROPY, entropy), (SOFTMAX_MAX, largest)):
                yield {"kind": kind, "module": module, "index": head, "micro_step": micro_step, "value": total / count}
