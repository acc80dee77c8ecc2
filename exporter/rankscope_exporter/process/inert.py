"""Stand-in for all classes of the exporter where it cannot be imported: a package is missing, or does not fit another.

Training continues without a monitor, and one line names the reason and the command that helps.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any, ClassVar, Final, Self

log = logging.getLogger("rankscope")

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
