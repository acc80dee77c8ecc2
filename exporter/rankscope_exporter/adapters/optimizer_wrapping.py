"""Finds the torch optimizer inside of wrappers, such as Accelerate's, and replaces methods that torch cannot hook."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.adapters.placement import loaded
from rankscope_exporter.adapters.torch_private import has_step_hooks
from rankscope_exporter.process.errors import ConfigError

_MOST_LEVELS: Final = 4
"""Levels of objects within each other that are searched for torch optimizers."""


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside of wrappers. Raise ConfigError if there is none."""
    if found := inner_optimizers(optimizer):
        return found[0]
    raise ConfigError(f"{type(optimizer).__name__} is no torch optimizer and contains none: pass the torch optimizer")


def inner_optimizers(optimizer: Any, levels: int = _MOST_LEVELS) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers that `optimizer` steps: those that its attributes hold, or else itself."""
    is_whole = has_step_hooks(optimizer)
    if is_whole and isinstance(optimizer, loaded("torch.distributed.optim", "ZeroRedundancyOptimizer")):
        return [optimizer]
    held = [item for item in _held(optimizer) if levels and item is not optimizer]
    found = dict.fromkeys(inner for item in held for inner in inner_optimizers(item, levels - 1))
    return [*found] or ([optimizer] if is_whole else [])


def _held(wrapper: Any) -> Iterator[Any]:
    """Yield the objects with a method `step` and with parameter groups that a wrapper holds, also in lists."""
    for value in (_attribute(wrapper, "optimizer"), *(_attribute(wrapper, "__dict__") or {}).values()):
        inside = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else (value,)
        for item in inside:
            is_other = isinstance(item, torch.Tensor | torch.nn.Module | dict | str)
            if not is_other and _attribute(item, "step") is not None and _attribute(item, "param_groups") is not None:
                yield item


def _attribute(item: Any, name: str) -> Any:
    try:
        return getattr(item, name, None)
    except Exception:  # noqa: BLE001 - code of the script
        return None


class OuterStep:
    """The step of an object that steps torch optimizers, and may change the parameters after them.

    The update of these optimizers ends when this step returns.
    """

    def __init__(self, owner: Any) -> None:
        self._owner: Callable[[], Any] = weakref.ref(owner)
        self._ended: list[Callable[[], None]] | None = None  # what to call at the end of the step that runs

    def install(self) -> list[Removable]:
        """Observe the step. A second call has no effect: several inner optimizers have the same outer step."""
        owner, self._owner = self._owner(), lambda: None
        if has_step_hooks(owner):
            return [owner.register_step_pre_hook(self._begins), owner.register_step_post_hook(self._ends)]
        return [] if owner is None else [PatchedMethod(owner, "step", self._step)]

    def postponed(self, updated: Callable[..., None]) -> Callable[..., None]:
        """Return a hook of an inner optimizer that calls `updated` when the outer step has returned."""

        def inner_updated(*arguments: Any) -> None:
            if self._ended is None:
                updated(*arguments)
            else:
                self._ended.append(functools.partial(updated, *arguments))

        return inner_updated

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begins()
        try:
            return original(*args, **kwargs)
        finally:
            self._ends()

    def _begins(self, *_: Any) -> None:
        self._ends()  # the last step has raised
        self._ended = []

    def _ends(self, *_: Any) -> None:
        ended, self._ended = self._ended, None
        for updated in ended or ():
            updated()


class PatchedMethod:
    """A method of the object `owner` that is replaced, until `remove` is called.

    A call of the method then calls the function `around` with the original method and the arguments of the call, and
    returns its result.

    The replacement is a method of the owner, like the original. The PatchedMethod has a weak reference to the owner. If
    the owner is copied, the replacement in the copy calls the original method of the copy. If the owner is pickled, the
    original method is pickled, so the owner can be loaded in an environment without Rankscope.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        before: Any = owner.__dict__.get(name)
        self.__dict__.update(getattr(before, "__dict__", {}))  # by which a scheduler knows the method that it replaced
        self.__name__ = name  # pickle uses it to find the original in the class
        self._around: Callable[..., Any] | None = around
        self._owner = weakref.ref(owner)
        self._before = before
        owner.__dict__[name] = types.MethodType(self, owner)

    def remove(self) -> None:
        """Restore the original method.

        If other code has wrapped the replacement, the replacement cannot be removed. It then only calls the original
        method.
        """
        self._around = None
        owner = self._owner()
        if owner is None or getattr(owner.__dict__.get(self.__name__), "__func__", None) is not self:
            return
        if self._before is None:
            del owner.__dict__[self.__name__]
        else:
            owner.__dict__[self.__name__] = self._before

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        original = self._original(owner)
        if self._around is None or owner is not self._owner():
            return original(*args, **kwargs)
        return self._around(original, *args, **kwargs)

    def __get__(self, owner: Any, kind: type[Any] | None = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def _original(self, owner: Any) -> Any:
        method = self._before
        if method is None:
            found = inspect.getattr_static(type(owner), self.__name__, None)
            if found is None:  # an object that forwards attributes to another object
                return type(owner).__getattr__(owner, self.__name__)
            return found.__get__(owner, type(owner))
        if isinstance(method, types.MethodType) and method.__self__ is self._owner():
            return types.MethodType(method.__func__, owner)
        return method
