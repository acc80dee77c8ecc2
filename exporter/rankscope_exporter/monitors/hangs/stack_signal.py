"""Handler of the signal in the setting `stacks_signal`.

It writes the stacks of all threads, even while C code holds the GIL.

The handler of faulthandler runs in C immediately when the signal arrives. It writes to a file, which the watchdog
thread reads when Python code runs again. If that never happens, an operator can read the file.
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
"""Names of the signals that the setting `stacks_signal` accepts.

Python does not use these signals. Other signals terminate a process or report a fault.
"""


class StackSignal:
    """A signal handler of faulthandler that writes the stacks of all threads to a file.

    The constructor registers the handler, and `restore` removes it. A Python handler that was registered before is
    still called.
    """

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
        """Return the stacks that the signal handler has written to its file, and empty the file.

        Return None if there are no stacks, or if the handler may still be writing. The handler counts as finished when
        the file has the same size in two consecutive calls.
        """
        size = os.fstat(self._descriptor).st_size
        if size == 0 or size != self._seen:
            self._seen = size
            return None
        text = os.pread(self._descriptor, size, 0).decode("utf-8", "replace")
        os.ftruncate(self._descriptor, 0)
        self._seen = 0
        return text

    def restore(self) -> None:
        """Restore the previous signal handler, and delete the file to which the present handler writes stacks.

        If the script has installed a later handler for the signal, that handler remains.
        """
        since = signal.getsignal(self._number)
        faulthandler.unregister(self._number)
        if since is not self._before and since is not None:
            with contextlib.suppress(ValueError):  # only the main thread may set a handler
                signal.signal(self._number, since)
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)

    def abandon_after_fork(self) -> None:
        """Unregister the signal handler in a forked child.

        The file with the stacks belongs to the parent and is not deleted.
        """
        faulthandler.unregister(self._number)
        os.close(self._descriptor)


def _refuse_foreign(number: signal.Signals, handler: object) -> None:
    """Raise ConfigError if C code handles the signal `number`, because faulthandler would replace that handler."""
    if handler is None or (handler in (signal.SIG_DFL, signal.SIG_IGN) and _is_caught(number)):
        others = " or ".join(name for name in STACK_SIGNALS if name != number.name)
        raise ConfigError(
            f"stacks_signal: {number.name} already has a handler in C code, for example of faulthandler; use {others}"
        )


def _is_caught(number: signal.Signals) -> bool:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux: unknown
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
