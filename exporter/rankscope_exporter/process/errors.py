"""Errors that are raised before training starts, and the error boundary around all code that runs during training.

After `attach`, no error of the monitor is raised into training: `ErrorBoundary` counts each error and logs it once.

Names of torch that a release or build of torch may lack, private ones in particular.

A name that is needed at an import is read by `adapters.torch_private.torch_name`. All other accesses run inside the
error boundary of a monitor, which recognizes a missing name with `missing_name`. Both publish one line for each name,
and training continues without the part that needs the name.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from rankscope_contract.model.redaction import redacted_text
from rankscope_contract.wire.spool import SpoolError


def missing_name(error: BaseException) -> str | None:
    """Return the name that torch lacks, such as "torch._C._name", if this is the reason of `error`, else None."""
    if isinstance(error, ImportError):
        return error.name if _is_of_torch(error.name) else None
    if not isinstance(error, AttributeError) or error.name is None:
        return None
    if isinstance(error.obj, ModuleType):
        return f"{error.obj.__name__}.{error.name}" if _is_of_torch(error.obj.__name__) else None
    owner = error.obj if isinstance(error.obj, type) else type(error.obj)
    # If a class of the script inherits from a class of torch, only its private names are names of torch.
    classes = owner.__mro__ if error.name.startswith("_") else (owner,)
    found = next((item for item in classes if _is_of_torch(item.__module__)), None)
    return None if found is None else f"{found.__name__}.{error.name}"


def _is_of_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch" and "torch" in sys.modules


class RankscopeError(Exception):
    """Base class of all errors that the exporter raises.

    If no code catches one, its traceback ends at the line of the script that caused it.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        _shorten_tracebacks()


@functools.cache
def _shorten_tracebacks() -> None:
    former, own = sys.excepthook, __name__.partition(".")[0]

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, RankscopeError):
            error.__cause__, error.__suppress_context__ = None, True
            entry = traceback
            while entry is not None and entry.tb_next is not None:
                if str(entry.tb_next.tb_frame.f_globals.get("__name__")).partition(".")[0] == own:
                    entry.tb_next = None
                entry = entry.tb_next
        former(kind, error, traceback)

    sys.excepthook = hook


class ConfigError(RankscopeError, ValueError):
    """Error: a setting is invalid. The text names the setting and the valid values."""


class ServeError(ConfigError):
    """Error: the rank cannot serve its records with this configuration. The text names the fix."""


class ShareError(RankscopeError):
    """Error: a change of the sampling applies to this rank only, because it could not be stored for other ranks."""


class CountError(RankscopeError, ValueError):
    """Error: the FLOPs of a model cannot be counted. The text names the reason and the fix."""


log = logging.getLogger("rankscope")


class ErrorBoundary:
    """Calls functions of the monitor during training and catches all their exceptions. Thread-safe.

    The attribute `count` is the number of caught exceptions, which is exported as rankscope_exporter_faults_total. The
    first exception of each type in each named operation is logged. The log contains its traceback, unless the error is
    one of this package, whose text names the remedy, or that a spool folder cannot be used. If torch lacks a name, one
    line is logged for this name, whichever operations need it. Further exceptions are only counted, so that a hook that
    fails at every step does not flood the console.
    """

    def __init__(self) -> None:
        self.count = 0
        self.on_first: Callable[[str, BaseException], None] | None = None
        """Function that is called with each logged error, and stores the error as an event."""
        self._seen: set[tuple[str, type[BaseException]] | str] = set()
        self._lock = (
            threading.RLock()
        )  # reentrant: a signal handler of the training may call the error boundary while this thread holds the lock

    def call(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`. If the function raises an exception, report it and return None."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - the façade: training never stops for telemetry
            self.report(where, error)
            return None

    def report(self, where: str, error: BaseException) -> None:
        """Count an error that `call` or a background thread caught.

        Log it if it is the first one of its type in the operation `where`.
        """
        missing = missing_name(error)
        key = missing or (where, type(error))
        with self._lock:
            self.count += not isinstance(error, SpoolError)  # records that are not on disk are counted as such
            first = key not in self._seen
            self._seen.add(key)
        if first:
            is_known = missing is not None or isinstance(error, SpoolError | RankscopeError)
            log.error("%s", fault_text(where, error), exc_info=None if is_known else error)
            if self.on_first is not None:
                with contextlib.suppress(Exception):  # reporting a fault must not raise
                    self.on_first(where, error)


def fault_text(where: str, error: BaseException) -> str:
    """Return the message that describes an error: the failed operation, and the type and text of the exception."""
    missing = missing_name(error)
    version = missing and sys.modules["torch"].__version__
    reason = error_text(error) if missing is None else f"torch {version} has no {missing}, which it needs"
    return f"{where} failed, training continues: {reason}"


def error_text(error: BaseException) -> str:
    """Return the type and the text of an exception with secrets masked. A text that quotes a whole input is cut."""
    has_path = isinstance(error, OSError) and error.filename is not None  # repr omits the path
    text = f"{type(error).__name__}: {error}" if has_path else repr(error)
    return redacted_text(str(error) if isinstance(error, SpoolError | RankscopeError) else text)


def encodable(text: str) -> str:
    """Return `text` with escapes for characters that UTF-8 cannot encode.

    File names and tokenizers produce such characters.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
