"""Objects that do nothing: copies of monitors, callbacks and sinks, and a substitute for all classes of the exporter.

A model or a trainer often holds its monitor or callback. The model is copied for an average of the weights, pickled for
a checkpoint or sent to another process. All of this must work as without a monitor: a copy does nothing, and the
original continues.

If the exporter cannot be imported, because a package is missing or does not fit another, training continues without a
monitor, and one line names the reason and the command that helps.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, ClassVar, Final, Self

log = logging.getLogger("rankscope")


class CopiesDoNothing:
    """Base class of objects whose copies do nothing.

    This holds for copies by `copy`, `pickle`, `torch.save` and `spawn`.

    A copy has every method and attribute. Threads, sockets, locks and the model are not copied. The method
    `_unattached` of a subclass returns the attributes that hold such objects, with their values before `attach`. An
    attribute whose value is an object of this class is replaced by a copy of that object.
    """

    is_copy: bool = False
    """True if the object is a copy, whose methods do nothing."""

    def _unattached(self) -> dict[str, Any]:
        """Return the attributes that are not copied, with the values that they have in an object before `attach`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        left_out = self._unattached()
        kept = {name: value for name, value in vars(self).items() if name not in left_out}
        return {name: copy.copy(v) if isinstance(v, CopiesDoNothing) else v for name, v in kept.items()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update({**state, **self._unattached(), "is_copy": True})

    def _refuses(self, what: str) -> bool:
        """Return whether this object is a copy. If so, log a warning that the call `what` has no effect."""
        if self.is_copy:
            kind = type(self).__name__
            log.warning("%s on a copy of a %s has no effect: create a %s in the process that trains", what, kind, kind)
        return self.is_copy


class NotCopied:
    """A callable that is not copied together with the object that contains it.

    The copy of the object contains a method of the standard library that does nothing instead. The copy can therefore
    be loaded where Rankscope is not installed.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__  # does nothing, whatever it is given

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


REQUIRED: Final = ("numpy", "pyarrow", "prometheus_client")


class _NoPhase(contextlib.ContextDecorator, contextlib.nullcontext[None]):
    """A phase that is not recorded, as a context manager or a decorator."""


class Inert:
    """An object with the interface of a Monitor, a configuration or a callback, that does nothing."""

    address = run = ended = None
    faults = 0
    _RESULTS: ClassVar[dict[str, Any]] = {"current": (), "structure": "", "overhead_seconds": {}, "measuring": {}}

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def attach(self, *_: Any, **__: Any) -> Self:
        return self

    def phase(self, *_: Any) -> _NoPhase:
        return _NoPhase()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self._RESULTS.get(name)


def inert_because(error: Exception) -> type[Inert]:
    """Log that the exporter is off because of `error`, and the command that helps. Return the class Inert."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    remedy = f"pip install {missing}" if missing in REQUIRED else f"pip install --upgrade {' '.join(REQUIRED)}"
    with contextlib.suppress(metadata.PackageNotFoundError):
        if "pyarrow" in str(error) and metadata.version("numpy").startswith("1."):
            remedy = "pip install 'pyarrow<26', or 'numpy>=2'"
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    log.error("Rankscope is off, training continues without a monitor: %s; to get one: %s", text, remedy)
    return Inert
