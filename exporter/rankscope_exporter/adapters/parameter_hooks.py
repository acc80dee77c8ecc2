"""Gradient hooks of parameters, and forward passes that a training loop announces.

Hooks hold neither the parameter nor a weak reference to it. `torch.utils.swap_tensors`, an option of `Module.to()` and
`load_state_dict`, gives a parameter another tensor. The parameter keeps its table of hooks, but torch calls no hook of
this table, including hooks that are registered in it later. The monitor therefore renews its hooks when a step begins.
If a table contained only hooks of the monitor, it is removed with these hooks. A hook that the script registers after a
swap then works as it does without a monitor.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from rankscope_exporter.adapters.torch_private import ACCUMULATED, GRADIENT, tensor_address


class Removable(Protocol):
    """A handle of one hook or of several hooks, such as torch's `RemovableHandle`."""

    def remove(self) -> None:
        """Remove the hook."""


class CallbackHandle:
    """A handle whose method `remove` calls a function."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def remove_all(handles: Iterable[Removable]) -> None:
    """Remove all handles in order. If a removal raises an error, raise it after all other handles have been removed."""
    with ExitStack() as stack:  # runs callbacks in reverse order, also after an error
        for handle in reversed(list(handles)):
            stack.callback(handle.remove)


class HookTable(OrderedDict[int, Callable[..., None]]):
    """Hooks that the monitor itself calls, by the number of their handle."""

    def register(self, hook: Callable[..., None]) -> Removable:
        handle = RemovableHandle(self)
        self[handle.id] = hook
        return handle


class Announced:
    """Forward hooks for a model that the training never calls as a whole.

    The trainer calls `begins` and `ends` for each training forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.before = HookTable()
        self.after = HookTable()

    def begins(self) -> None:
        """Call the hooks that are registered for the beginning of a training forward pass."""
        for hook in tuple(self.before.values()):
            hook(self._model(), (), {})

    def ends(self) -> None:
        """Call the hooks that are registered for the end of a training forward pass."""
        for hook in tuple(self.after.values()):
            hook(self._model(), (), None)


_OWN: Final = "of_rankscope"
"""Name of an attribute of the monitor's own hooks."""


class TensorHook:
    """One hook in a table of hooks of a tensor. The tensor is passed to each method and never stored."""

    __slots__ = ("_content", "_hook", "_hooks", "_is_shared", "_table", "number")

    def __init__(self, tensor: torch.Tensor, hook: Callable[..., Any], *, table: str) -> None:
        self._hook = unserializable_hook(hook)  # type: ignore[no-untyped-call]  # else torch warns when the tensor is saved
        setattr(self._hook, _OWN, True)
        self._table = table
        self._content = (0, 0)
        """Address of the tensor, and number of references to its table of hooks.

        It differs after the tensor behind its Python object was swapped. The number of references detects a new tensor
        at the address of a freed one, because the freed tensor also referred to the table.
        """
        self._is_shared = False
        self._hooks: dict[int, Any] = {}
        self._attach(tensor)

    def renew(self, tensor: torch.Tensor) -> None:
        """Register the hook again if it was removed from the table, or if `swap_tensors` was called with `tensor`."""
        table = getattr(tensor, self._table)
        if table is None or self.number not in table:
            self._attach(tensor)
            return
        content = tensor_address(tensor), sys.getrefcount(table)
        if content == self._content and len(table) == 1:
            return
        # After the table is set again, torch calls the hooks in it. If the script had a hook before the swap, torch
        # would not call it without a monitor, so the table is not set.
        if content != self._content and not self._is_shared:
            setattr(tensor, self._table, table)
            content = tensor_address(tensor), sys.getrefcount(table)
        self._content = content
        self._is_shared |= _has_others(table)

    def remove(self) -> None:
        """Remove the hook from its table, which `tidy` can remove afterwards if it is empty."""
        self._hooks.pop(self.number, None)

    def tidy(self, tensor: torch.Tensor) -> None:
        """Remove the table of hooks if it is empty after `remove` and the script never used it."""
        table = getattr(tensor, self._table)
        if table is not None and not table and not self._is_shared:
            setattr(tensor, self._table, None)

    def _attach(self, tensor: torch.Tensor) -> None:
        table = getattr(tensor, self._table)
        self._is_shared = table is not None and (not table or _has_others(table))
        # The handle is not kept: a model may have many thousands of parameters, and a handle has two objects.
        if self._table == GRADIENT:
            self.number = int(tensor.register_hook(self._hook).id)  # type: ignore[no-untyped-call]  # untyped in torch
            """The number that torch gave the hook. It is unique in the process."""
        elif table is None:
            self.number = _first_accumulated(tensor, self._hook)
        else:
            self.number = int(tensor.register_post_accumulate_grad_hook(self._hook).id)  # type: ignore[no-untyped-call]  # as above
        table = self._hooks = getattr(tensor, self._table)
        self._content = tensor_address(tensor), sys.getrefcount(table)


def _first_accumulated(parameter: torch.Tensor, hook: Callable[..., Any]) -> int:
    """Register `hook` as `register_post_accumulate_grad_hook` does, in a third of its time, and return its number.

    The parameter has no table of hooks yet, and requires gradients.
    """
    table: OrderedDict[int, Any] = OrderedDict()
    number = int(RemovableHandle(table).id)
    table[number] = hook
    setattr(parameter, ACCUMULATED, table)
    return number


def has_foreign_hooks(parameter: torch.Tensor, tables: Iterable[str] = (GRADIENT, ACCUMULATED)) -> bool:
    """Return whether other code has a hook in one of the `tables` of hooks of `parameter`."""
    return any(_has_others(getattr(parameter, table) or {}) for table in tables)


def _has_others(table: dict[int, Any]) -> bool:
    return not all(hasattr(hook, _OWN) for hook in table.values())


def remove_hook(handle: Removable, parameter: nn.Parameter | None) -> None:
    """Remove the hook with the handle `handle` from `parameter`; None if the parameter is unavailable."""
    handle.remove()
    if isinstance(handle, TensorHook) and parameter is not None:
        handle.tidy(parameter)


@dataclass(slots=True, eq=False)
class ParameterHook:
    """A hook on a parameter. The object stores no reference to the parameter, and calls `find` each time it needs it.

    The function `find` returns the parameter, or None while the parameter is unavailable. The function `register`
    registers the hook on the parameter that it receives.
    """

    find: Callable[[], nn.Parameter | None]
    register: Callable[[nn.Parameter], Removable]
    is_removed: bool = field(default=False, init=False)
    _handle: Removable | None = field(default=None, init=False)

    def renew_found(self) -> bool:
        """Find the parameter, and register the hook if it is missing; return whether the hook is registered.

        A hook cannot be registered on a frozen parameter.
        """
        parameter = self.find()
        if parameter is None or not parameter.requires_grad:
            return False
        self.renew(parameter)
        return True

    def renew(self, parameter: nn.Parameter) -> None:
        """Register the hook unless present; `parameter` has just been found, and requires gradients."""
        if self._handle is None:
            self._handle = self.register(parameter)
        elif isinstance(self._handle, TensorHook):
            self._handle.renew(parameter)

    def remove(self) -> None:
        """Remove the hook from the parameter."""
        handle, self._handle, self.is_removed = self._handle, None, True
        if handle is not None:
            remove_hook(handle, self.find())
