"""torch's FLOP counter, without recomputed values, and with formulas that it lacks."""

from __future__ import annotations

import contextlib
from math import prod
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from rankscope_exporter.adapters.torch_private import TorchDispatchMode, nested_tensor_class
from rankscope_exporter.process.errors import CountError

_OF_TORCH: Final = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor"})
"""Namespaces of operators that do not multiply matrices if they have no formula."""


class Counter(FlopCounterMode):
    """Counts the FLOPs of a `with` block. The caller sets `in_backward` to true before the backward pass."""

    def __init__(self) -> None:
        mapping = {getattr(torch.ops.aten, name): formula for name, formula in _FORMULAS.items()}
        super().__init__(display=False, custom_mapping=mapping)
        # torch's tracker of modules hooks all modules of the process, and fails if a forward pass calls autograd.grad.
        tracker: Any = contextlib.nullcontext()
        tracker.parents = ("Global",)
        self.mod_tracker = tracker
        self.in_backward = False
        self.unknown: set[str] = set()
        """Names of operations that ran and have no formula."""

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # In a backward pass, operations run with gradients enabled only to recompute activations.
        if self.in_backward and torch.is_grad_enabled():
            return out
        if func_packet not in self.flop_registry and str(func_packet).partition(".")[0] not in _OF_TORCH:
            self.unknown.add(str(func_packet))
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]  # untyped in torch


class Filter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Divides operations on nested tensors, and raises CountError before one that communicates with other ranks."""

    supports_higher_order_operators = True

    def __init__(self, *, alone: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._alone = alone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and not self._alone:
            raise CountError(
                f"the model communicates with other ranks ({func}): count a full copy on one rank, before the model is "
                "divided"
            )
        nested = nested_tensor_class()
        if any(issubclass(kind, nested) for kind in types):
            return NotImplemented  # torch then dispatches the operations on its parts
        return func(*args, **(kwargs or {}))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
    return float(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # untyped in torch


def _attention_backward(_gradient: Any, *args: Any, **_: Any) -> float:
    return 2 * _attention(*args)  # without the scores, which the backward pass computes again


def _grouped_product(first: Any, second: Any, *_: Any, **__: Any) -> float:
    # If the groups divide the rows or columns of a matrix among them, each row or column counts once.
    groups = first[0] if len(first) == len(second) == 3 else 1
    return float(2 * groups * first[-2] * first[-1] * second[-1])


def _cudnn(rows: Any, weights: Any, *_: Any, **__: Any) -> float:
    return float(2 * prod(rows[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2))


def _mkldnn(rows: Any, first: Any, second: Any, *_: Any, **__: Any) -> float:
    return _cudnn(rows, (first, second))


_FORMULAS: Final = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_grouped_mm": _grouped_product,
    "_scaled_grouped_mm": _grouped_product,
    "_cudnn_rnn": _cudnn,
    "_cudnn_rnn_backward": lambda *args, **_: 2 * _cudnn(*args),
    "mkldnn_rnn_layer": _mkldnn,
    "mkldnn_rnn_layer_backward": lambda *args, **_: 2 * _mkldnn(*args),
}
"""Formulas of torch's operators, from the shapes of their arguments."""
