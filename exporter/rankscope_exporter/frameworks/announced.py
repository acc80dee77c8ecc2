"""Forward passes that a training loop announces, because it calls parts of a model and never the whole of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import nn


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
