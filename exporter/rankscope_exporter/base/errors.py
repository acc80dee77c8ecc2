"""Errors that are raised before training starts, and the error boundary around everything that runs during training.

After `attach`, no error of the monitor is raised into training: `ErrorBoundary` counts it and logs it once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final


class RankscopeError(Exception):
    """Root of all errors of the exporter."""


class ConfigError(RankscopeError, ValueError):
    """A setting is wrong; the text names it and what would be right."""


class ServeError(ConfigError):
    """Serving cannot start as configured; the text names the fix."""


class CountError(RankscopeError, ValueError):
    """The FLOPs of a model cannot be counted; the text names the reason and the fix."""


MOST_CHARACTERS: Final = 1_000
"""Of what an error says of itself: some quote all they were given."""

log = logging.getLogger("rankscope")


class ErrorBoundary:
    """Calls functions on behalf of training and swallows what they raise. Thread-safe.

    `count` is exported as rankscope_exporter_faults_total. A fault is logged once per place and type with its
    traceback, later ones are only counted, so a hook that fails at every step does not flood the console.
    """

    def __init__(self) -> None:
        self.count = 0
        self.on_first: Callable[[str, BaseException], None] | None = None
        """Told of each fault that is logged, so that it reaches the store as well."""
        self._seen: set[tuple[str, type[BaseException]]] = set()
        self._lock = threading.RLock()  # a signal handler of the training may come to us on top of ourselves

    def call(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, or None when it raised."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - the façade: training never stops for telemetry
            self.report(where, error)
            return None

    def report(self, where: str, error: BaseException) -> None:
        """Count a fault that was caught at the edge of a background thread or by `call`."""
        with self._lock:
            self.count += 1
            first = (where, type(error)) not in self._seen
            self._seen.add((where, type(error)))
        if first:
            log.error("%s", fault_text(where, error), exc_info=error)
            if self.on_first is not None:
                with contextlib.suppress(Exception):  # what tells of a fault must not become one
                    self.on_first(where, error)


def fault_text(where: str, error: BaseException) -> str:
    """Return the sentence by which a fault is named."""
    has_path = isinstance(error, OSError) and error.filename is not None  # which its repr leaves out
    text = f"{type(error).__name__}: {error}" if has_path else repr(error)
    cut = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
    return f"{where} failed, training goes on: {cut}"
