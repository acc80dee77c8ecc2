"""Calls every attached monitor when the process forks or exits."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
from typing import Any, Final, NoReturn, Protocol

from rankscope_contract.model.events import Event, EventType, ExitReason, Severity
from rankscope_contract.model.redaction import redacted_text
from rankscope_exporter.process import stop_signals
from rankscope_exporter.process.errors import encodable


class AttachedMonitor(Protocol):
    """Interface of an attached monitor: the methods that are called when the process forks or exits."""

    def abandon_after_fork(self) -> None:
        """Stop all work in a forked child, without a lock: threads that hold locks may not exist there."""

    def end_of_process(self, reason: ExitReason, error: str | None) -> None:
        """Publish the exit record and stop the monitor. Called when the interpreter is about to exit."""


_STOPPED_BY_CODE: Final = {
    128 + number: name
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if (number := getattr(signal, name, None)) is not None
}
"""Names of signals by the exit code of a script that has caught the signal.

The exit code is 128 + number of the signal, as in shells.
"""

_attached: set[AttachedMonitor] = set()
"""All attached monitors.

The references are strong, because a monitor without other references still has hooks, threads and a socket. The objects
hold no reference to a model.
"""

_registered = False
_earlier_error: BaseException | None = None
_called_exit: SystemExit | None = None


def watch(monitor: AttachedMonitor) -> None:
    """Register `monitor`, so that its methods are called at forks and at process end, until `forget` is called."""
    global _registered, _earlier_error  # noqa: PLW0603 - process-wide hooks can be registered but never removed
    # In a notebook, `last_value` may be the error of an earlier cell.
    _earlier_error = getattr(sys, "last_value", None)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_at_exit)
    _attached.add(monitor)


def watched() -> list[AttachedMonitor]:
    """Return the monitors of this process that have not been forgotten."""
    return list(_attached)


def forget(monitor: AttachedMonitor) -> None:
    """Remove `monitor` from the monitors that are called at forks and at the end of the process."""
    _attached.discard(monitor)


def note_calls_of_exit() -> None:
    """Store the status of later calls of `sys.exit`: at the end of the process, the interpreter does not show it."""
    former = sys.exit
    if former.__module__ == __name__:
        return

    def exit(status: Any = None, /) -> NoReturn:  # noqa: A001 - replaces the function of this name
        global _called_exit  # noqa: PLW0603 - see `watch`
        _called_exit = SystemExit(status)
        former(status)

    sys.exit = exit


def called_exit() -> SystemExit | None:
    """Return the exception of the last call of `sys.exit`; None without one, or if the calls are not stored."""
    return _called_exit


def _after_fork() -> None:
    with contextlib.ExitStack() as stack:  # if one call raises, the others still run; Python prints the error
        stack.callback(_attached.clear)
        for monitor in watched():
            stack.callback(monitor.abandon_after_fork)
        stack.callback(stop_signals.forget_after_fork)


def _at_exit() -> None:
    # The interpreter sets `last_value` when an uncaught exception ends the program. An exit code, or an exception that
    # a launcher caught, is not visible here.
    error = getattr(sys, "last_value", None)
    known = error is not None and error is not _earlier_error
    reason, text = exit_reason(error) if known else (ExitReason.UNKNOWN, None)
    with contextlib.ExitStack() as stack:  # see above
        for monitor in watched():
            stack.callback(monitor.end_of_process, reason, text)


def exit_reason(error: BaseException | None) -> tuple[ExitReason, str | None]:
    """Return the exit reason and the text of the exception `error`, which ends the process.

    For `sys.exit(0)`, the reason states that the run is complete. The function `weighed_reason` corrects this reason if
    not all planned steps were made.
    """
    if error is None:
        return ExitReason.COMPLETED, None
    text = redacted_text(encodable(f"{type(error).__name__}: {error}".removesuffix(": ")))
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return ExitReason.COMPLETED, "sys.exit(0)"
        name = _STOPPED_BY_CODE.get(error.code) if isinstance(error.code, int) else None
        return (ExitReason.EXCEPTION, text) if name is None else (ExitReason.SIGNAL, f"{name}, {text}")
    # torch's elastic agent turns a signal into this exception if training runs in the agent's process.
    is_signal = isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SignalException"
    return (ExitReason.SIGNAL if is_signal else ExitReason.EXCEPTION), text


def weighed_reason(
    reason: ExitReason, error: str | None, last_step: int | None, planned_steps: int | None, asked: str | None = None
) -> tuple[ExitReason, str | None]:
    """Return the exit reason and the error text, corrected by the number of planned steps and by a stop signal.

    `reason` and `error` are the uncorrected values. `asked` is the name of the stop signal that arrived, None without
    one.

    A process without an error that made all planned steps is complete. A process that called `sys.exit(0)` before the
    last planned step is not complete, because scripts exit in this way after a stop request. If a training loop ends
    before the last planned step without a signal and without an error, the reason is not changed.
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
    """Return the event that a rank publishes last, with the exit reason, the last step and the error."""
    details = json.dumps({"reason": reason, "last_step": last_step, "error": error}, ensure_ascii=False)
    calm = reason in (ExitReason.COMPLETED, ExitReason.UNKNOWN)
    return Event(
        type=EventType.EXIT,
        severity=Severity.INFO if calm else Severity.CRITICAL,
        message=f"{reason}: {error}" if error else str(reason),
        details=details,
    )
