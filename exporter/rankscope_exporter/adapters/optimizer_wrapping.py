"""Finds the torch optimizer inside of wrappers, such as Accelerate's, and replaces methods that torch cannot hook."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from rankscope_exporter.process.errors import ConfigError


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside of wrappers, which have it as the attribute `optimizer`.

    Raise ConfigError if there is no torch optimizer.
    """
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer) or "param_groups" not in vars(
        inner
    ):  # a wrapper without a table
        if not hasattr(inner, "optimizer"):
            raise ConfigError(
                f"{type(optimizer).__name__} is not a torch optimizer and has none as `.optimizer`: "
                "pass the torch optimizer"
            )
        inner = inner.optimizer
    return inner


_ABSENT: Final = object()

Around = Callable[..., Any]
"""A function that is called instead of a replaced method.

It receives the original method and the arguments of the call, and returns the result of the call.
"""


class PatchedMethod:
    """A method of the object `owner` that is replaced, until `remove` is called.

    A call of the method then calls the function `around`.

    The PatchedMethod has a weak reference to the owner.

    The replacement is a method of the owner, like the original. If the owner is copied, the replacement in the copy
    calls the original method of the copy. If the owner is pickled, the original method is pickled, so the owner can be
    loaded in an environment without Rankscope.
    """

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        self._owner = weakref.ref(owner)
        self._name = name
        self._before = owner.__dict__.get(name, _ABSENT)
        self._replacement = _Replacement(owner, name, self._before, around)
        owner.__dict__[name] = types.MethodType(self._replacement, owner)

    def remove(self) -> None:
        """Restore the original method.

        If other code has wrapped the replacement, the replacement cannot be removed. It then only calls the original
        method.
        """
        self._replacement.around = None
        owner = self._owner()
        if owner is None or getattr(owner.__dict__.get(self._name), "__func__", None) is not self._replacement:
            return
        if self._before is _ABSENT:
            del owner.__dict__[self._name]
        else:
            owner.__dict__[self._name] = self._before


class _Replacement:
    """The function that replaces a method of `owner`.

    If it is bound to a copy of the owner, it only calls the original method.
    """

    def __init__(self, owner: Any, name: str, before: Any, around: Around) -> None:
        self.__name__ = name  # pickle uses it to find the original in the class
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

    def _original(self, owner: Any) -> Any:
        method: Any = self._before
        if method is _ABSENT:
            found = inspect.getattr_static(type(owner), self.__name__, _ABSENT)
            if found is _ABSENT:  # an object that forwards attributes to another object
                return type(owner).__getattr__(owner, self.__name__)
            return found.__get__(owner, type(owner))
        if isinstance(method, types.MethodType) and method.__self__ is self._owner():
            return types.MethodType(method.__func__, owner)
        return method
