"""The hooks of one quantity that come with a step that it measures and go with the next that it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rankscope_exporter.frameworks.base import Removable
from rankscope_exporter.quantities.base import Hook


@dataclass(slots=True)
class _Coming:
    hook: Hook
    register: Callable[[], Removable | None]
    handle: Removable | None

    def come(self) -> None:
        if self.handle is None:
            self.hook.was_called = False
            self.handle = self.register()

    def go(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class ComingHooks:
    """Knows how each hook is registered, and which are there.

    A hook that was not called stays until it is: it costs nothing meanwhile. Its module may be part of compiled code,
    which would be compiled again without it.
    """

    def __init__(self) -> None:
        self._all: list[_Coming] = []
        self._some_are_away = False
        self.some_may_go = False
        """Whether `go` would look for hooks to take away."""

    def add(self, hook: Hook, register: Callable[[], Removable | None]) -> None:
        """Register a hook, now and whenever they come again; `register` returns None where it cannot come this time.

        Raises what `register` raises, and forgets the hook.
        """
        hook.called_in_vain = self._called_in_vain
        self._all.append(_Coming(hook, register, register()))
        self.some_may_go = self._some_are_away = True

    def come(self) -> None:
        """Register those that are away."""
        self.some_may_go = True
        if self._some_are_away:
            for coming in self._all:
                coming.come()
            self._some_are_away = any(coming.handle is None for coming in self._all)

    def go(self) -> None:
        """Take those away that were called since they came."""
        if self.some_may_go:
            self.some_may_go = False
            for coming in self._all:
                if coming.hook.was_called:
                    coming.go()
                    self._some_are_away = True

    def remove(self) -> None:
        """Take all away for good."""
        for coming in self._all:
            coming.go()
        self._all.clear()

    def _called_in_vain(self) -> None:
        self.some_may_go = True
