"""Hooks on the gradient of a parameter, and forward passes that a training loop announces.

Hooks hold neither the parameter nor a weak reference to it. `torch.utils.swap_tensors`, an option of `Module.to()` and
`load_state_dict`, gives a parameter another tensor: the table of hooks remains with the parameter, but torch calls none
of its hooks, nor hooks registered in it later. So a hook is renewed when a step begins, and a table that held only
hooks of the monitor is removed with them: a hook that the script registers after a swap works as without a monitor.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook


class Removable(Protocol):
    """What torch gives for a hook, or several of them together."""

    def remove(self) -> None:
        """Take the hook away."""
        ...


class Announced:
    """Stands for the forward hooks of a model: a loop calls `begins` and `ends` around each training forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._before: list[Callable[..., None]] = []
        self._after: list[Callable[..., None]] = []

    def begins(self) -> None:
        """Say that a training forward begins."""
        for hook in tuple(self._before):
            hook(self._model(), ())

    def ends(self) -> None:
        """Say that it is over."""
        for hook in tuple(self._after):
            hook(self._model(), (), None)

    def before(self, hook: Callable[..., None]) -> Removable:
        """Register `hook` for the beginnings."""
        return _Entry(self._before, hook)

    def after(self, hook: Callable[..., None]) -> Removable:
        """Register `hook` for the ends."""
        return _Entry(self._after, hook)


class _Entry:
    def __init__(self, hooks: list[Callable[..., None]], hook: Callable[..., None]) -> None:
        self._hooks = hooks
        self._hook = hook
        hooks.append(hook)

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


ACCUMULATED: Final = "_post_accumulate_grad_hooks"
GRADIENT: Final = "_backward_hooks"
"""Attributes of a tensor: the tables of hooks that `register_post_accumulate_grad_hook` and `register_hook` fill."""

_ours: set[int] = set()
"""The numbers of our hooks. Torch numbers all hooks of the process and uses no number again."""


class TensorHook:
    """One hook in a table of a tensor. The tensor is passed to each call, never kept."""

    def __init__(self, tensor: torch.Tensor, hook: Callable[..., Any], *, table: str) -> None:
        self._hook = unserializable_hook(hook)  # type: ignore[no-untyped-call]  # else torch warns when the tensor is saved
        self._table = table
        self._content = (0, 0)
        self._has_company = False
        self._handle: Any = None
        self._attach(tensor)

    @property
    def number(self) -> int:
        """The number that torch has given the hook; no other hook has it."""
        return int(self._handle.id)

    def renew(self, tensor: torch.Tensor) -> None:
        """Register again where the hook is gone, and where `tensor` was swapped."""
        table = getattr(tensor, self._table)
        if table is None or self._handle.id not in table:
            self._leave()
            self._attach(tensor)
            return
        content = _content(tensor, table)
        if content == self._content and len(table) == 1:
            return
        # Once the table is set again, torch calls the hooks in it. But where the script had a hook before a swap, torch
        # calls none without a monitor, so the table is not set.
        if content != self._content and not self._has_company:
            setattr(tensor, self._table, table)
            content = _content(tensor, table)
        self._content = content
        self._has_company |= _has_others(table)

    def remove(self) -> None:
        """Take the hook away."""
        self._handle.remove()
        self._leave()

    def tidy(self, tensor: torch.Tensor) -> None:
        """Remove the empty table after `remove`, unless the script has used it."""
        table = getattr(tensor, self._table)
        if table is not None and not table and not self._has_company:
            setattr(tensor, self._table, None)

    def _attach(self, tensor: torch.Tensor) -> None:
        table = getattr(tensor, self._table)
        self._has_company = table is not None and (not table or _has_others(table))
        register = tensor.register_post_accumulate_grad_hook if self._table == ACCUMULATED else tensor.register_hook
        self._handle = register(self._hook)  # type: ignore[no-untyped-call]  # untyped in torch
        table = getattr(tensor, self._table)
        self._content = _content(tensor, table)
        _ours.add(self._handle.id)

    def _leave(self) -> None:
        _ours.discard(self._handle.id)


def _content(tensor: torch.Tensor, table: dict[int, Any]) -> tuple[int, int]:
    """Return what differs once the tensor behind the Python object `tensor` has been swapped.

    That is its address, or, where another tensor has got the address of a freed one, the number of references to the
    table: the freed one had one too.
    """
    return tensor._cdata, sys.getrefcount(table)  # noqa: SLF001 - torch has no public name for it


def _has_others(table: dict[int, Any]) -> bool:
    return any(number not in _ours for number in table)


class ParameterHook:
    """A hook of a parameter that is looked up when it is needed; `find` returns None while it cannot be had."""

    def __init__(
        self, find: Callable[[], torch.nn.Parameter | None], register: Callable[[torch.nn.Parameter], Removable]
    ) -> None:
        self._find = find
        self._register = register
        self._handle: Removable | None = None

    def renew_found(self) -> bool:
        """Register the hook if it is not there; return whether it is. A frozen parameter takes none."""
        parameter = self._find()
        if parameter is None or not parameter.requires_grad:
            return False
        self.renew(parameter)
        return True

    def renew(self, parameter: torch.nn.Parameter) -> None:
        """Register the hook if it is not there on `parameter`, which was just found and takes gradients."""
        if self._handle is None:
            self._handle = self._register(parameter)
        elif isinstance(self._handle, TensorHook):
            self._handle.renew(parameter)

    def remove(self) -> None:
        """Take the hook away."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.remove()
        parameter = self._find() if isinstance(handle, TensorHook) else None
        if isinstance(handle, TensorHook) and parameter is not None:
            handle.tidy(parameter)
