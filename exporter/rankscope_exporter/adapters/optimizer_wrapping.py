"""Wrappers around torch optimizers, such as Accelerate's, and replaced methods where there is no hook."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from rankscope_exporter.base.errors import ConfigError


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside of wrappers that hold it as `optimizer`. Raises ConfigError without one."""
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer) or not hasattr(inner, "_optimizer_step_pre_hooks"):
        if not hasattr(inner, "optimizer"):
            raise ConfigError(f"{type(optimizer).__name__} is no torch optimizer and wraps none in `.optimizer`")
        inner = inner.optimizer
    return inner


_ABSENT: Final = object()

Around = Callable[..., Any]
"""Called with the original method and the arguments of the call, and returns what the call returns."""


class PatchedMethod:
    """Has `around` called instead of `owner.name` until `remove`. The owner is not kept alive.

    The replacement is a method of the owner, like the original. In a copy of the owner it calls the original method of
    the copy. A pickled owner has its original method and loads where Rankscope is not installed.
    """

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        self._owner = weakref.ref(owner)
        self._name = name
        self._before = owner.__dict__.get(name, _ABSENT)
        self._watched = _Watched(owner, name, self._before, around)
        owner.__dict__[name] = types.MethodType(self._watched, owner)

    def remove(self) -> None:
        """Restore the original; where another method has been put around the replacement, only pass calls on."""
        self._watched.around = None
        owner = self._owner()
        if owner is None or getattr(owner.__dict__.get(self._name), "__func__", None) is not self._watched:
            return
        if self._before is _ABSENT:
            del owner.__dict__[self._name]
        else:
            owner.__dict__[self._name] = self._before


class _Watched:
    """The function of the replacement. It may be bound to a copy of the owner, which is not watched."""

    def __init__(self, owner: Any, name: str, before: Any, around: Around) -> None:
        self.__name__ = name  # by which pickle finds the original, in the class
        self.around: Around | None = around
        self._owner = weakref.ref(owner)
        self._before = before

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        original = self._original(owner)
        if self.around is None or owner is not self._owner():
            return original(*args, **kwargs)
        return self.around(original, *args, **kwargs)

    def __get__(self, owner: Any, kind: type[Any] | None = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def _original(self, owner: Any) -> Callable[..., Any]:
        method: Any = self._before
        if method is _ABSENT:
            found = inspect.getattr_static(type(owner), self.__name__, _ABSENT)
            if found is _ABSENT:  # an object that passes on the attributes of another one
                method = type(owner).__getattr__(owner, self.__name__)
            else:
                method = found.__get__(owner, type(owner))
        elif isinstance(method, types.MethodType) and method.__self__ is self._owner():
            method = types.MethodType(method.__func__, owner)
        original: Callable[..., Any] = method
        return original
