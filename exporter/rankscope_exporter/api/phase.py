"""Phases that the script announces, `with monitor.phase("evaluation"): …`, and calls that compiled code must skip."""

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


def _nobody(*_: Any) -> None:
    """Do nothing."""


class OpenPhases(CopiesDoNothing):
    """The phases under way, the innermost last; `begins` and `ended` are called with the name of each."""

    def __init__(self, begins: Callable[[str], None] = _nobody, ended: Callable[[str, float], None] = _nobody) -> None:
        self.names: list[str] = []
        self._begins = begins
        self._ended = ended

    def _unattached(self) -> dict[str, Any]:
        return {"names": [], "_begins": _nobody, "_ended": _nobody}

    def begin(self, name: str) -> None:
        """Begin a phase."""
        self.names.append(name)
        self._begins(name)

    def end(self, name: str, seconds: float) -> None:
        """End the phase of this name that began last; phases of other names may have begun since on other threads."""
        if name in self.names:
            del self.names[len(self.names) - 1 - self.names[::-1].index(name)]
            self._ended(name, seconds)


class Phase(CopiesDoNothing, contextlib.ContextDecorator):
    """Lasts from `__enter__` to `__exit__`, and may be entered again afterwards. As a decorator, it is one per call."""

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
    """Return `method` in a form that Dynamo does not look into: in compiled code it does nothing."""

    @uncompiled
    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_dynamo_compiling():
            self._was_compiled()
        else:
            method(self, *args, **kwargs)

    return cast("M", entry)
