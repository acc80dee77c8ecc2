"""A signal that has the stacks written, where the configuration names one: it works while C code holds the interpreter.

faulthandler's handler runs in C, at once, whatever the process does. It writes to a file of ours, which a thread picks
up as soon as Python runs again; until then, and should that never come, the file can be read where it lies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
from pathlib import Path
from typing import Final

from rankscope_exporter.base.errors import ConfigError

STACK_SIGNALS: Final = ("SIGUSR1", "SIGUSR2", "SIGQUIT")
"""Signals that mean nothing to Python itself. Others end a process or report a fault."""


class StackSignal:
    """Registers at construction; `restore` puts everything back. A handler that was there is called as before."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._number = signal.Signals[name]
        self._before = signal.getsignal(self._number)
        _refuse_foreign(self._number, self._before)
        descriptor, path = tempfile.mkstemp(prefix=f"rankscope-stacks-{os.getpid()}-", suffix=".txt")  # mode 0600
        os.close(descriptor)
        self.path = Path(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._seen = 0
        # Chained to the default action, the signal would end the process.
        chain = self._before not in (signal.SIG_DFL, signal.SIG_IGN)
        faulthandler.register(self._number, file=self._descriptor, all_threads=True, chain=chain)

    def written(self) -> str | None:
        """Return what a handler wrote since the last call, once it is whole: when the file has stopped growing."""
        size = os.fstat(self._descriptor).st_size
        if size == 0 or size != self._seen:
            self._seen = size
            return None
        text = os.pread(self._descriptor, size, 0).decode("utf-8", "replace")
        os.ftruncate(self._descriptor, 0)
        self._seen = 0
        return text

    def restore(self) -> None:
        """Put back the handler that was there, keep one that was set since, and remove the file."""
        since = signal.getsignal(self._number)
        faulthandler.unregister(self._number)
        if since is not self._before and since is not None:
            with contextlib.suppress(ValueError):  # only the main thread may, and only it can have set that handler
                signal.signal(self._number, since)
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)

    def abandon_after_fork(self) -> None:
        """In a forked child: what it does with the signal is its own business, and the file is its parent's."""
        faulthandler.unregister(self._number)
        os.close(self._descriptor)


def _refuse_foreign(number: signal.Signals, handler: object) -> None:
    """Raise ConfigError when C code has the signal: faulthandler holds one file for each and forgets the other."""
    if handler is None or (handler in (signal.SIG_DFL, signal.SIG_IGN) and _is_caught(number)):
        others = " or ".join(name for name in STACK_SIGNALS if name != number.name)
        raise ConfigError(f"stacks_signal: {number.name} has a handler in C already (faulthandler?); name {others}")


def _is_caught(number: signal.Signals) -> bool:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux: nothing tells
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
