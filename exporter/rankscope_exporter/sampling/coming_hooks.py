"""Hooks of one quantity, registered when a step that it measures begins and removed when the next other step begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rankscope_exporter.frameworks.base import Removable
from rankscope_exporter.frameworks.parameter_hooks import ParameterHook
from rankscope_exporter.quantities.base import Hook


@dataclass(slots=True)
class _Coming:
    hook: Hook
    register: Callable[[], Removable | None]
    handle: Removable | None
    stays: bool

    def come(self) -> None:
        if self.handle is None:
            self.hook.was_called = False
            self.handle = self.register()
        elif isinstance(self.handle, ParameterHook):
            self.handle.renew_found()

    def go(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class ComingHooks:
    """Knows how each hook is registered, and which are there.

    A hook that was not called since it was registered is not removed before detach: it costs nothing. Its module may be
    part of compiled code, which Dynamo would compile again without the hook.
    """

    def __init__(self) -> None:
        self._all: list[_Coming] = []
        self._some_are_away = False
        self._are_on_parameters = False
        self.some_may_go = False
        """Whether `go` would look for hooks to take away."""

    def add(self, hook: Hook, register: Callable[[], Removable | None], *, stays: bool = False) -> None:
        """Register a hook, now and whenever they come again; `register` returns None where it cannot come this time.

        One that `stays` is also there at the steps that are not measured. Raises what `register` raises, and forgets
        the hook.
        """
        if not stays:
            hook.called_in_vain = self._called_in_vain
        handle = register()
        self._all.append(_Coming(hook, register, handle, stays))
        self._are_on_parameters |= isinstance(handle, ParameterHook)
        self.some_may_go = self._some_are_away = True

    def come(self) -> None:
        """Register those that are away, and renew those on parameters."""
        self.some_may_go = True
        if self._some_are_away or self._are_on_parameters:
            for coming in self._all:
                coming.come()
            self._some_are_away = any(coming.handle is None for coming in self._all)

    def go(self) -> None:
        """Take those away that were called since they came."""
        if self.some_may_go:
            self.some_may_go = False
            for coming in self._all:
                if coming.hook.was_called and not coming.stays:
                    coming.go()
                    self._some_are_away = True

    def retire(self) -> None:
        """Remove all that were called, for good; the others stay until `remove`."""
        for coming in self._all:
            if coming.hook.was_called:
                coming.go()
        self._all = [coming for coming in self._all if coming.handle is not None]
        self._some_are_away = self.some_may_go = False

    def remove(self) -> None:
        """Take all away for good."""
        for coming in self._all:
            coming.go()
        self._all.clear()

    def _called_in_vain(self) -> None:
        self.some_may_go = True
