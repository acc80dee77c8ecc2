"""Readiness of the compiled kernel: imported and compiled on a thread of its own, used from the moment it is there.

Importing numba takes seconds, and it is optional; until it is ready, or where it is missing, torch operations do the
same work.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from rankscope_exporter.own_threads import OwnThread

log = logging.getLogger(__name__)

_FORK_WAITS_SECONDS: Final = 10.0

_state_lock = threading.Lock()
_thread: threading.Thread | None = None
_kernel: Callable[..., None] | None = None
_seconds = 0.0


def kernel() -> Callable[..., None] | None:
    """Return the compiled kernel, None as long as there is none."""
    return _kernel


def backend_name(*, coming: bool = False) -> str:
    """Return what measures tensors on the CPU now, "numba" or "torch"; with `coming`, what will after the warm-up."""
    if _kernel is not None or (coming and importlib.util.find_spec("numba") is not None):
        return "numba"
    return "torch"


def warm_up() -> threading.Thread | None:
    """Begin to import and compile on a daemon thread, once a process; None when that is done or cannot be done."""
    global _thread  # noqa: PLW0603 - one kernel for the process, like the module that holds it
    with _state_lock:
        if _kernel is not None or importlib.util.find_spec("numba") is None:
            return None
        if _thread is None:
            _thread = OwnThread(target=_load, name="rankscope-warm-up")
            # A child forked during an import would find its lock held for ever, and an exit during a compilation
            # would take the compiler's memory away under it.
            os.register_at_fork(before=_wait)
            atexit.register(_wait)
            _thread.start()
        return _thread


def warm_up_seconds() -> float:
    """Return the CPU seconds that importing and compiling has taken in this process."""
    return _seconds


def _wait() -> None:
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(_FORK_WAITS_SECONDS)


def _load() -> None:
    global _kernel, _seconds  # noqa: PLW0603 - see warm_up
    numba_log = logging.getLogger("numba")
    if numba_log.level == logging.NOTSET:  # with the root at DEBUG, every compiled line would be logged
        numba_log.setLevel(logging.WARNING)
    try:
        kernels = importlib.import_module("rankscope_exporter.statistics.numba_kernels")
        compiled = None
        with contextlib.suppress(RuntimeError, OSError, EOFError):  # no writable folder, or a broken file in it
            compiled = kernels.compile_measure(cache=True)
        _kernel = compiled or kernels.compile_measure(cache=False)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        log.warning("numba cannot be used (%s): tensor statistics stay with torch operations", error)
    finally:
        _seconds = time.thread_time()
