"""Input and output tensors of a collective on this rank. The module reads no element of a tensor and sends nothing.

A buffer is left out if its content has no meaning on this rank. Examples are the buffer of a broadcast on a receiving
rank before the call, and the result of a reduction on ranks that are not its destination.
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
    """Names of the parameters of a collective function.

    `inputs` and `outputs` name the tensors. `sent_on` is the name of the parameter that contains the only sending rank;
    None if all ranks send. `received_on` is the name of the parameter that contains the only receiving rank; None if
    all ranks receive.
    """

    inputs: str | None = None
    outputs: str | None = None
    sent_on: str | None = None
    received_on: str | None = None


_INTO_TENSOR: Final = _Form("input_tensor", "output_tensor")
_SCATTERED: Final = _Form("input", "output")

_FORMS: Final[dict[str, _Form]] = {
    "send": _Form(inputs="tensor"),
    "recv": _Form(outputs="tensor"),
    "isend": _Form(inputs="tensor"),
    "irecv": _Form(outputs="tensor"),
    "broadcast": _Form("tensor", "tensor", sent_on="src"),
    "all_reduce": _Form("tensor", "tensor"),
    "reduce": _Form("tensor", "tensor", received_on="dst"),
    "scatter": _Form("scatter_list", "tensor", sent_on="src"),
    "reduce_scatter": _Form("input_list", "output"),
    "_reduce_scatter_base": _SCATTERED,
    "reduce_scatter_tensor": _SCATTERED,
    "reduce_scatter_single": _SCATTERED,
    "all_gather": _Form("tensor", "tensor_list"),
    "gather": _Form("tensor", "gather_list", received_on="dst"),
    "_all_gather_base": _INTO_TENSOR,
    "all_gather_into_tensor": _INTO_TENSOR,
    "all_gather_single": _INTO_TENSOR,
    "all_to_all": _Form("input_tensor_list", "output_tensor_list"),
    "all_to_all_single": _SCATTERED,
}

OPERATIONS: Final = (*_FORMS, BATCH)
"""Names of the functions of torch.distributed that this module supports."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One input or output tensor of a call. `index` is its position in a list of tensors; None for a single tensor."""

    index: int | None
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class CallTensors:
    """The input and output tensors of a collective call on this rank, and its process group."""

    inputs: Sequence[TensorPart] = ()
    outputs: Sequence[TensorPart] = ()
    group: Any = None


def call_tensors_of(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallTensors | None:
    """Return the tensors of a call of the function `op`.

    Return None if the call will fail because of its arguments, or if this rank is not in the group of the call.
    """
    if not dist.is_initialized():
        return None
    if op == BATCH:
        return _of_batch(args[0] if args else kwargs.get("p2p_op_list"))
    form = _FORMS[op]
    try:
        inputs = _signature(op).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself will raise it
        return None
    group = inputs.get("group")
    if not _is_member(group):
        return None
    return CallTensors(
        _parts(inputs, form.inputs) if _is_here(form.sent_on, inputs, group) else (),
        _parts(inputs, form.outputs) if _is_here(form.received_on, inputs, group) else (),
        group,
    )


def is_coalescing(group: Any) -> bool:
    """Return whether torch now collects the calls for the process group `group`, to execute them together later."""
    world = getattr(dist.distributed_c10d, "_world", None)  # it has no public name
    pending = getattr(world, "pg_coalesce_state", None) or {}
    return (dist.group.WORLD if group is None else group) in pending


def group_text(group: Any) -> str:
    """Return name and size of a process group as text."""
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
    except (ValueError, RuntimeError):  # not a group of torch
        return False


def _is_here(name: str | None, inputs: Mapping[str, Any], group: Any) -> bool:
    """Return whether a call of a collective concerns this rank.

    `name` is the name of the argument with the rank, such as "dst". If it is None, the call concerns every rank.

    The argument is a rank of the world. With the prefix `group_`, it is a rank of the group.
    """
    if name is None:
        return True
    of_group = inputs.get(f"group_{name}")
    if of_group is not None:
        return bool(dist.get_rank(group) == of_group)
    return bool(dist.get_rank() == (inputs.get(name) or 0))  # 0 where torch has a default


@cache
def _signature(op: str) -> inspect.Signature:
    # The function in torch.distributed itself may be a replacement of other code.
    return inspect.signature(getattr(dist.distributed_c10d, op))
