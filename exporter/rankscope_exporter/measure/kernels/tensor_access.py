"""Access to the memory of a tensor on this rank, or the reason why the tensor has no statistics.

The module computes no statistics.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch.nn.parameter import is_lazy

from rankscope_exporter.adapters.torch_private import is_wrapped
from rankscope_exporter.measure.kernels.c_kernel import CODES

PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that have memory of their own. A tensor of another type may be a wrapper of tensors."""

SUSPICIOUS_BELOW: Final = 1 << 36
"""Tensors at lower addresses may have no memory.

A tensor with freed memory has its offset as address. No heap is at such low addresses; a lower address is only checked
further.
"""

_DTYPE_NAMES: Final = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
    *("complex128", "complex64", "complex32"),
)
MEASURABLE: Final = frozenset(getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name))
"""The dtypes that can be measured. Packed and quantized dtypes are left out: their elements are codes, not numbers."""
_INTEGERS: Final = frozenset(dtype for dtype in MEASURABLE if not (dtype.is_floating_point or dtype.is_complex))
NO_CODES: Final = frozenset(dtype for dtype in MEASURABLE - _INTEGERS if dtype.itemsize > 1)
"""The dtypes of tensors for which `is_code` is False."""


def is_code(tensor: torch.Tensor) -> bool:
    """Return whether a state tensor has codes of a quantised state as elements. A single integer is a counter."""
    dtype = tensor.dtype
    return dtype not in NO_CODES and (dtype.itemsize == 1 or tensor.numel() != 1)


def elements_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the elements of `tensor` in the memory of this rank, in any order, as a tensor of one dimension.

    All elements that the result lacks are implicit zeros of a sparse tensor. Return None if `tensor` is None, freed,
    nested, packed or on the meta device. Raise TypeError if its class computes operations itself. Call this function
    with gradients disabled.
    """
    if tensor is not None and has_own_operations(type(tensor)):
        raise TypeError(f"{type(tensor).__name__} computes operations itself")
    if tensor is None or tensor.is_meta or tensor.is_nested or tensor.dtype not in MEASURABLE:
        return None
    if is_lazy(tensor):
        return None
    if type(tensor) not in PLAIN_TYPES:
        tensor = tensor.detach()
    if tensor.layout is torch.strided:
        return None if is_freed(tensor) else _flat(tensor)
    if tensor.layout is torch.sparse_coo:
        return _flat(tensor.coalesce().values())  # without `coalesce`, rows that occur twice would count twice
    return _flat(tensor.values() if tensor.layout in _COMPRESSED else tensor.to_dense())


@functools.lru_cache(maxsize=64)
def has_own_operations(kind: type[torch.Tensor]) -> bool:
    """Return whether a class that is not part of torch computes the operations of its tensors itself.

    Such tensors are not measured: the monitor must not run code of the script.
    """
    is_own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return is_own and kind.__module__.partition(".")[0] != "torch"


def why_not_measurable(tensor: torch.Tensor) -> str | None:
    """Return the reason why a tensor has no statistics, as text; None if it has statistics."""
    if has_own_operations(type(tensor)):
        return f"of the class {type(tensor).__name__}, which computes operations itself"
    if tensor.is_meta:
        return "a meta tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.dtype not in MEASURABLE:
        return f"packed or quantized ({str(tensor.dtype).removeprefix('torch.')})"
    return "inside of a functorch transform" if is_wrapped(tensor) else None


def is_integer(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` are integers or truth values, such as token ids, indices and masks."""
    return tensor.dtype in _INTEGERS


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape but no memory, such as a parameter that FSDP has resharded."""
    # Torch keeps the Python object of a storage, which garbage collections then visit: read the address first.
    if type(tensor) not in PLAIN_TYPES or tensor.data_ptr() >= SUSPICIOUS_BELOW:
        return False
    return not tensor.untyped_storage().nbytes() and tensor.numel() > 0


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill their memory without gap or overlap, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def readable_by_kernel(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Return `tensor`, or a copy without gaps, for the kernel of `device`; None if the kernel cannot read it."""
    if type(tensor) not in PLAIN_TYPES or tensor is None or tensor.dtype not in CODES or tensor.device != device:
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg():
        return None
    # Zeros without memory, which autograd makes in some formulas; a copy of freed memory would end the process.
    if tensor.numel() and (not tensor.data_ptr() or is_freed(tensor)):
        return None
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.contiguous()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous() or not is_dense(tensor):
        return tensor if tensor.dim() == 1 else tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))  # a transposed tensor need not be copied to be summed


_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")
