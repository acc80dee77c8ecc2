"""What must happen when the process forks or ends, for every monitor that is attached."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
from typing import Final, Protocol

from rankscope_contract.model.events import Event, EventType, ExitReason, Severity
from rankscope_exporter.model.parameter_names import encodable
from rankscope_exporter.process import stop_signals


class AttachedMonitor(Protocol):
    """What a monitor offers to the process around it."""

    def abandon_after_fork(self) -> None:
        """Become inert in a forked child; locks may be held by threads that do not exist here."""

    def end_of_process(self, reason: ExitReason, error: str | None) -> None:
        """The interpreter is about to exit."""


_STOPPED_BY_CODE: Final = {
    128 + number: name
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if (number := getattr(signal, name, None)) is not None
}
"""Exit codes by which a script that caught a signal says so, as a shell does."""

_attached: set[AttachedMonitor] = set()
"""Strong references: a monitor that the script has dropped still has hooks, threads and a socket to answer for."""

_registered = False
_earlier_error: BaseException | None = None


def watch(monitor: AttachedMonitor) -> None:
    """Tell `monitor` about forks and the end of the process until `forget` or its own end."""
    global _registered, _earlier_error  # noqa: PLW0603 - process-wide hooks can be registered but never removed
    # A notebook leaves the error of an earlier cell there.
    _earlier_error = getattr(sys, "last_value", None)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_at_exit)
    _attached.add(monitor)


def forget(monitor: AttachedMonitor) -> None:
    """Stop telling `monitor`."""
    _attached.discard(monitor)


def _after_fork() -> None:
    with contextlib.ExitStack() as stack:  # one that fails keeps no other from letting go; Python prints the error
        stack.callback(_attached.clear)
        for monitor in list(_attached):
            stack.callback(monitor.abandon_after_fork)
        stack.callback(stop_signals.forget_after_fork)


def _at_exit() -> None:
    # Set by the interpreter when an uncaught exception ends the program. Without one nothing is known: an exit code,
    # and an exception that a launcher caught, do not show here.
    error = getattr(sys, "last_value", None)
    known = error is not None and error is not _earlier_error
    reason, text = exit_reason(error) if known else (ExitReason.UNKNOWN, None)
    with contextlib.ExitStack() as stack:  # see above
        for monitor in list(_attached):
            stack.callback(monitor.end_of_process, reason, text)


def exit_reason(error: BaseException | None) -> tuple[ExitReason, str | None]:
    """Return why the process ends, given the exception that ends it, and that exception in words.

    `sys.exit(0)` says success without saying that all is done: what was planned decides, see `weighed_reason`.
    """
    if error is None:
        return ExitReason.COMPLETED, None
    text = encodable(f"{type(error).__name__}: {error}".removesuffix(": "))
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return ExitReason.COMPLETED, "sys.exit(0)"
        name = _STOPPED_BY_CODE.get(error.code) if isinstance(error.code, int) else None
        return (ExitReason.EXCEPTION, text) if name is None else (ExitReason.SIGNAL, f"{name}, {text}")
    # torch's elastic agent turns a signal into this exception where training runs in its process.
    is_signal = isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SignalException"
    return (ExitReason.SIGNAL if is_signal else ExitReason.EXCEPTION), text


def weighed_reason(
    reason: ExitReason, error: str | None, last_step: int | None, planned_steps: int | None, asked: str | None = None
) -> tuple[ExitReason, str | None]:
    """Return `reason` and `error` in the light of what was planned, and of the signal that `asked` for an end.

    Whoever made all planned steps is done, however the process ends without an error. Whoever calls `sys.exit(0)`
    before is not: that is how a script leaves that was asked to. A loop that simply ends sooner has its own reasons,
    unless it was asked by a signal that we heard.
    """
    is_calm = reason in (ExitReason.COMPLETED, ExitReason.UNKNOWN)
    is_done = planned_steps is not None and last_step is not None and last_step >= planned_steps
    if asked is not None and is_calm and not is_done:
        return ExitReason.SIGNAL, asked if error is None else f"{asked}, {error}"
    if planned_steps is None or last_step is None or not is_calm:
        return reason, None if reason is ExitReason.COMPLETED else error
    if is_done:
        return ExitReason.COMPLETED, None
    if error is None:
        return reason, None
    return ExitReason.UNKNOWN, f"{error} at step {last_step} of {planned_steps} planned"


def exit_event(reason: ExitReason, error: str | None, last_step: int | None) -> Event:
    """Return what a rank says last."""
    details = json.dumps({"reason": reason, "last_step": last_step, "error": error}, ensure_ascii=False)
    calm = reason in (ExitReason.COMPLETED, ExitReason.UNKNOWN)
    return Event(
        type=EventType.EXIT,
        severity=Severity.INFO if calm else Severity.CRITICAL,
        message=f"{reason}: {error}" if error else str(reason),
        details=details,
    )
