"""Counts the FLOPs of operations while they run, by the formulas of `torch.utils.flop_counter` and additional formulas.

torch's `FlopCounterMode` is not used, because it hooks all modules of the process and counts recomputed values, such as
checkpointed activations and the scores in the backward pass of fused attention. It has no formula for fused attention
on a CPU, grouped matrix products of experts, and recurrent layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from rankscope_exporter.adapters.placement import loaded
from rankscope_exporter.base.errors import CountError

Formula = Callable[..., float]

_OF_TORCH: Final = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor"})
"""Namespaces of operators that do not multiply matrices.

An operator of these namespaces without a formula counts as 0 FLOPs.
"""


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Sums the FLOPs of all operations in a `with` block, including those on the threads of its backward pass.

    The caller sets `in_backward` to true before the backward pass. Operations that then run with gradients enabled
    recompute activations and are not counted. An operation that communicates with other ranks raises CountError before
    it runs.
    """

    supports_higher_order_operators = True

    def __init__(self, *, alone: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.in_backward = False
        self._alone = alone
        self._costs: list[float] = []  # the threads of several devices may append at the same time
        self._unknown: set[str] = set()

    @property
    def flops(self) -> float:
        """Return the number of FLOPs of the operations that have run in the `with` block so far."""
        return float(sum(self._costs))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the names of operations that ran in the `with` block and have no FLOP formula."""
        return tuple(sorted(self._unknown))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._counted(func, func, args, kwargs)
        if "c10d" in func.namespace and not self._alone:
            raise CountError(
                f"the model communicates with other ranks ({func}): count a full copy on one rank, before the model is "
                "divided"
            )
        nested = loaded("torch.nested._internal.nested_tensor", "NestedTensor")
        if any(issubclass(kind, nested) for kind in types):
            return NotImplemented  # torch then dispatches the operations on its parts
        packet = func._overloadpacket  # noqa: SLF001 - the key of torch's registry
        if packet not in _OWN and packet not in flop_registry and func.namespace != "prim":  # prim: tensor properties
            with self:
                simpler = func.decompose(*args, **kwargs)
            if simpler is not NotImplemented:
                return simpler
        return self._counted(func, packet, args, kwargs)

    def _counted(self, func: Any, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if self.in_backward and torch.is_grad_enabled():
            return out
        if key in _OWN:
            self._costs.append(_OWN[key](*args, **kwargs))
        elif key in flop_registry:
            self._costs.append(flop_registry[key](*args, **kwargs, out_val=out))
        elif func.namespace not in _OF_TORCH:
            self._unknown.add(str(key))
        return out


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> float:
    return float(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]  # untyped in torch


def _attention_backward(_gradient: torch.Tensor, *args: Any, **_: Any) -> float:
    return 2 * _attention(*args)


def _grouped_product(first: torch.Tensor, second: torch.Tensor, *_: Any, **__: Any) -> float:
    """Return the FLOPs of a grouped matrix product.

    If the groups divide the rows or columns of a matrix among them, each row or column counts once.
    """
    groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return 2.0 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


def _recurrent(rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    """Return the FLOPs of a recurrent layer in the forward pass: each input row is multiplied by each weight matrix."""
    return 2.0 * math.prod(rows.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _cudnn(rows: torch.Tensor, weights: Sequence[torch.Tensor], *_: Any, **__: Any) -> float:
    return _recurrent(rows, weights)


def _mkldnn(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *_: Any, **__: Any) -> float:
    return _recurrent(rows, (first, second))


def _twice(formula: Formula) -> Formula:
    return lambda *args, **kwargs: 2 * formula(*args, **kwargs)


def _operations(*names: str) -> Iterator[Any]:
    return (getattr(torch.ops.aten, name) for name in names)


_OWN: Final[Mapping[Any, Formula]] = {
    **dict.fromkeys(_operations("_scaled_dot_product_flash_attention_for_cpu"), _attention),
    **dict.fromkeys(
        _operations(
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
        ),
        _attention_backward,
    ),
    **dict.fromkeys(_operations("_grouped_mm", "_scaled_grouped_mm"), _grouped_product),
    **dict.fromkeys(_operations("_cudnn_rnn"), _cudnn),
    **dict.fromkeys(_operations("_cudnn_rnn_backward"), _twice(_cudnn)),
    **dict.fromkeys(_operations("mkldnn_rnn_layer"), _mkldnn),
    **dict.fromkeys(_operations("mkldnn_rnn_layer_backward"), _twice(_mkldnn)),
}
"""The additional FLOP formulas, by torch operator. They take precedence over the FLOP formulas of torch."""
