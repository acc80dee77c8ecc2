"""What must happen when the process forks or ends, for every monitor that is attached."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

from rankscope_contract.events import ExitReason


class Attached(Protocol):
    """What a monitor offers to the process around it."""

    def abandon_after_fork(self) -> None:
        """Become inert in a forked child; locks may be held by threads that do not exist here."""

    def end_of_process(self, reason: ExitReason, error: str | None) -> None:
        """The interpreter is about to exit."""


_attached: set[Attached] = set()
"""Strong references: a monitor that the script has dropped still has hooks, threads and a socket to answer for."""

_registered = False
_earlier_error: BaseException | None = None


def watch(monitor: Attached) -> None:
    """Tell `monitor` about forks and the end of the process until `forget` or its own end."""
    global _registered, _earlier_error  # noqa: PLW0603 - process-wide hooks can be registered but never removed
    # A notebook leaves the error of an earlier cell there.
    _earlier_error = getattr(sys, "last_value", None)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_at_exit)
    _attached.add(monitor)


def forget(monitor: Attached) -> None:
    """Stop telling `monitor`."""
    _attached.discard(monitor)


def _after_fork() -> None:
    for monitor in list(_attached):
        monitor.abandon_after_fork()
    _attached.clear()


def _at_exit() -> None:
    # Set by the interpreter when an uncaught exception ends the program. Without one nothing is known: an exit code,
    # and an exception that a launcher caught, do not show here.
    error = getattr(sys, "last_value", None)
    known = error is not None and error is not _earlier_error
    reason, text = exit_reason(error) if known else (ExitReason.UNKNOWN, None)
    for monitor in list(_attached):
        monitor.end_of_process(reason, text)


def encodable(text: str) -> str:
    """Return `text` with what UTF-8 cannot say written out: file names and tokenizers give such strings to messages."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def exit_reason(error: BaseException | None) -> tuple[ExitReason, str | None]:
    """Return why the process ends, given the exception that ends it, and that exception in words."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ExitReason.COMPLETED, None
    text = encodable(f"{type(error).__name__}: {error}")
    return (ExitReason.SIGNAL if isinstance(error, KeyboardInterrupt) else ExitReason.EXCEPTION), text
