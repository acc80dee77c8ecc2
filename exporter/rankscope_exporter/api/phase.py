"""Phases that the script declares by `with monitor.phase("evaluation"): …`, and methods that Dynamo does not trace."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from rankscope_exporter.base.copies import CopiesDoNothing
from rankscope_exporter.base.tracing import is_dynamo_compiling, uncompiled

M = TypeVar("M", bound=Callable[..., None])


def _nothing(*_: Any) -> None:
    """Do nothing."""


class OpenPhases(CopiesDoNothing):
    """The phases of a training that are open now, from the outermost to the innermost.

    When a phase opens, the function `begins` is called with the name of the phase. When it closes, the function `ended`
    is called with its name and its duration in seconds.
    """

    def __init__(
        self, begins: Callable[[str], None] = _nothing, ended: Callable[[str, float], None] = _nothing
    ) -> None:
        self.names: list[str] = []
        self._begins = begins
        self._ended = ended

    def _unattached(self) -> dict[str, Any]:
        return {"names": [], "_begins": _nothing, "_ended": _nothing}

    def begin(self, name: str) -> None:
        """Open the phase `name`."""
        self.names.append(name)
        self._begins(name)

    def end(self, name: str, seconds: float) -> None:
        """Close the innermost open phase with this name. The phase lasted `seconds`.

        Phases with other names remain open, because other threads may have opened them.
        """
        if name in self.names:
            del self.names[len(self.names) - 1 - self.names[::-1].index(name)]
            self._ended(name, seconds)


class Phase(CopiesDoNothing, contextlib.ContextDecorator):
    """A phase of the training, which lasts from `__enter__` to `__exit__`.

    The object can be entered several times. As a decorator, it opens one phase for each call of the function.
    """

    def __init__(self, name: str, phases: OpenPhases) -> None:
        self.name = name
        self._phases = phases
        self._began: list[float] = []

    def _unattached(self) -> dict[str, Any]:
        return {"_began": []}

    def _recreate_cm(self) -> Phase:
        return Phase(self.name, self._phases)

    def __enter__(self) -> Self:
        self._began.append(time.monotonic())
        self._phases.begin(self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._began:
            self._phases.end(self.name, time.monotonic() - self._began.pop())


def opaque(method: M) -> M:
    """Return `method` in a form that Dynamo does not trace: a call inside compiled code has no effect."""

    @uncompiled
    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_dynamo_compiling():
            self._was_compiled()
        else:
            method(self, *args, **kwargs)

    return cast("M", entry)
