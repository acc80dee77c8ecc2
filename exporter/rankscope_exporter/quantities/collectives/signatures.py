"""Which tensors a collective is given and which it gives back on this rank. Reads no element, sends nothing.

What a rank neither gives nor gets is left out: the buffer of a broadcast before it arrives, that of a reduction on
ranks which are not its destination.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist

BATCH: Final = "batch_isend_irecv"
_SENDS: Final = "isend"


@dataclass(frozen=True, slots=True)
class _Form:
    """Names of the parameters that hold what is given and what is got, and of the one that says on which rank alone."""

    inputs: str | None = None
    outputs: str | None = None
    given_on: str | None = None
    got_on: str | None = None


_INTO_TENSOR: Final = _Form("input_tensor", "output_tensor")
_SCATTERED: Final = _Form("input", "output")

_FORMS: Final[dict[str, _Form]] = {
    "send": _Form(inputs="tensor"),
    "recv": _Form(outputs="tensor"),
    "isend": _Form(inputs="tensor"),
    "irecv": _Form(outputs="tensor"),
    "broadcast": _Form("tensor", "tensor", given_on="src"),
    "all_reduce": _Form("tensor", "tensor"),
    "reduce": _Form("tensor", "tensor", got_on="dst"),
    "scatter": _Form("scatter_list", "tensor", given_on="src"),
    "reduce_scatter": _Form("input_list", "output"),
    "_reduce_scatter_base": _SCATTERED,
    "reduce_scatter_tensor": _SCATTERED,
    "reduce_scatter_single": _SCATTERED,
    "all_gather": _Form("tensor", "tensor_list"),
    "gather": _Form("tensor", "gather_list", got_on="dst"),
    "_all_gather_base": _INTO_TENSOR,
    "all_gather_into_tensor": _INTO_TENSOR,
    "all_gather_single": _INTO_TENSOR,
    "all_to_all": _Form("input_tensor_list", "output_tensor_list"),
    "all_to_all_single": _SCATTERED,
}

OPERATIONS: Final = (*_FORMS, BATCH)
"""The functions of torch.distributed that are known."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One tensor of a side: its position in a list, None when it is alone."""

    index: int | None
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class CallTensors:
    """What a call is given and what it gives back, on this rank; and the group it is of."""

    inputs: Sequence[TensorPart] = ()
    outputs: Sequence[TensorPart] = ()
    group: Any = None


def call_tensors_of(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallTensors | None:
    """Return the sides of a call; None when it is one that cannot succeed, or that this rank has no part in."""
    if not dist.is_initialized():
        return None
    if op == BATCH:
        return _of_batch(args[0] if args else kwargs.get("p2p_op_list"))
    form = _FORMS[op]
    try:
        inputs = _signature(op).bind_partial(*args, **kwargs).arguments
    except TypeError:  # which the call itself is about to say
        return None
    group = inputs.get("group")
    if not _is_member(group):
        return None
    return CallTensors(
        _parts(inputs, form.inputs) if _is_here(form.given_on, inputs, group) else (),
        _parts(inputs, form.outputs) if _is_here(form.got_on, inputs, group) else (),
        group,
    )


def is_coalescing(group: Any) -> bool:
    """Return whether calls for `group` are only noted down by now, to be made together; it has no public name."""
    world = getattr(dist.distributed_c10d, "_world", None)
    noted = getattr(world, "pg_coalesce_state", None) or {}
    return (dist.group.WORLD if group is None else group) in noted


def group_text(group: Any) -> str:
    """Return a group in words."""
    group = dist.group.WORLD if group is None else group
    display_name = getattr(group, "group_desc", "") or getattr(group, "group_name", "")
    return f"group {display_name or '?'} of {dist.get_world_size(group)} ranks"


def _of_batch(operations: Any) -> CallTensors | None:
    if not isinstance(operations, list) or not all(isinstance(item, dist.P2POp) for item in operations):
        return None
    sends = [getattr(item.op, "__name__", "") == _SENDS for item in operations]
    parts = [TensorPart(position, item.tensor) for position, item in enumerate(operations)]
    return CallTensors(
        [part for part, is_sent in zip(parts, sends, strict=True) if is_sent],
        [part for part, is_sent in zip(parts, sends, strict=True) if not is_sent],
        operations[0].group if operations else None,
    )


def _parts(inputs: Mapping[str, Any], name: str | None) -> Sequence[TensorPart]:
    value = None if name is None else inputs.get(name)
    if isinstance(value, torch.Tensor):
        return (TensorPart(None, value),)
    if isinstance(value, list | tuple):
        return [TensorPart(position, item) for position, item in enumerate(value) if isinstance(item, torch.Tensor)]
    return ()


def _is_member(group: Any) -> bool:
    try:
        return dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):  # of no group that torch knows
        return False


def _is_here(name: str | None, inputs: Mapping[str, Any], group: Any) -> bool:
    """Return whether the argument `name`, which is of all ranks or of those in the group, means this one."""
    if name is None:
        return True
    of_group = inputs.get(f"group_{name}")
    if of_group is not None:
        return bool(dist.get_rank(group) == of_group)
    return bool(dist.get_rank() == (inputs.get(name) or 0))  # 0 where torch has a default


@cache
def _signature(op: str) -> inspect.Signature:
    # Not of what stands in torch.distributed: that may be anybody's.
    return inspect.signature(getattr(dist.distributed_c10d, op))
