"""A copy of a model on the meta device: its modules and shapes, whole and unwrapped, none of its numbers and hooks.

The model itself is only read. Where it is sharded the copy has the parameters whole, as DTensor or DeepSpeed know them;
what FSDP, `torch.compile` and activation checkpointing put around its modules is left out. So are attributes that lead
elsewhere: a trainer, and through it to what wraps the model and to the data, another model, a group of processes.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from rankscope_exporter.naming import WRAPPER_LEVELS, entry

# Bound to the live model: `forward` as accelerate replaces it, and what `module.compile()` has made.
_LEFT_OUT: Final = frozenset({"forward", "_original_forward", "_old_forward", "_compiled_call_impl"})

_VALUES: Final = (
    *(type(None), bool, int, float, complex, str, bytes, type, Enum),
    *(torch.Tensor, torch.dtype, torch.device, FunctionType, BuiltinFunctionType),
)
_OTHERS: Final = (nn.Module, *filter(None, [getattr(torch.distributed, "ProcessGroup", None)]))

_MOST_PARTS: Final = 10_000
"""Of one attribute: a trainer leads to a data set, which may be a long list."""


class NotCopiedError(ValueError):
    """The model holds something of which there is no copy without its tensors."""


def bare_copy(model: nn.Module) -> nn.Module:
    """Return the copy. Raises NotCopiedError, or whatever an attribute of the model says when it is copied."""
    shells = {id(module): _shell(module) for module in model.modules() if not _is_wrapper(module)}
    memo: dict[int, Any] = dict(shells)
    for module in model.modules():
        if _is_wrapper(module):
            memo[id(module)] = shells[id(_inside(module))]
    with _ToMeta():
        for module in model.modules():
            if not _is_wrapper(module):
                _fill(shells[id(module)], module, memo)
    whole: nn.Module = memo[id(model)]
    return whole


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter over all ranks that hold shards of it, as far as it knows."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _is_wrapper(module: nn.Module) -> bool:
    return any(entry(module._modules, level) is not None for level in WRAPPER_LEVELS)  # noqa: SLF001 - `__getattr__` may be the user's


def _inside(module: nn.Module) -> nn.Module:
    inner = next(filter(None, (entry(module._modules, level) for level in WRAPPER_LEVELS)), None)  # noqa: SLF001 - see above
    return module if inner is None else _inside(inner)


def _shell(module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        raise NotCopiedError(f"{type(module).__name__} is a scripted module")
    shell: nn.Module = object.__new__(_own_class(type(module)))
    nn.Module.__init__(shell)
    shell.__dict__["training"] = module.training
    return shell


def _own_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the user's class where FSDP has made one of it and of its own."""
    bases = cls.__bases__
    made = len(bases) == 2 and bases[0].__module__.startswith("torch.distributed.") and issubclass(bases[1], nn.Module)
    return bases[1] if made else cls


def _fill(shell: nn.Module, module: nn.Module, memo: dict[int, Any]) -> None:
    own = module.__dict__
    for table in ("_parameters", "_buffers"):
        tensors: Mapping[str, torch.Tensor | None] = own[table]
        shell.__dict__[table] = {name: _without_numbers(tensor, memo) for name, tensor in list(tensors.items())}
    shell.__dict__["_modules"] = {
        name: None if child is None else memo[id(child)] for name, child in list(own["_modules"].items())
    }
    known = {*nn.Module().__dict__, *_LEFT_OUT}
    for name, value in list(own.items()):
        if name not in known and not name.startswith("__composable_api") and _is_of_the_model(value, memo, set()):
            shell.__dict__[name] = copy.deepcopy(value, memo)


def _is_of_the_model(value: Any, memo: Mapping[int, Any], seen: set[int]) -> bool:
    """Return whether nothing that `value` leads to is another module, a group of processes, or of many parts."""
    if isinstance(value, _VALUES) or id(value) in memo or id(value) in seen:
        return True
    seen.add(id(value))
    if len(seen) > _MOST_PARTS or isinstance(value, _OTHERS):
        return False
    return all(_is_of_the_model(part, memo, seen) for part in _parts(value))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, dict):
        return [item for pair in list(value.items()) for item in pair]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(getattr(value, "__dict__", {}).values())


def _without_numbers(tensor: torch.Tensor | None, memo: dict[int, Any]) -> torch.Tensor | None:
    if tensor is None:
        return None
    if is_lazy(tensor):
        raise NotCopiedError("a parameter has no shape yet")
    if id(tensor) not in memo:
        empty = torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    made: torch.Tensor = memo[id(tensor)]
    return made


class _ToMeta(TorchFunctionMode):
    """While it is on, a tensor that is copied becomes one of its shape that holds nothing."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.__deepcopy__:
            return _without_numbers(args[0], args[1])
        return function(*args, **(kwargs or {}))
