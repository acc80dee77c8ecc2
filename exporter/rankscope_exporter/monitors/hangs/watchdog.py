"""Thread that checks about once per second for activity of the training, and for stacks that a signal handler wrote.

Activity is any call into the monitor: a forward pass (also of an evaluation), a backward pass, an optimizer step,
`log()`, `event()`, or the start or end of a phase. A long gradient accumulation or an unannounced evaluation is
therefore not a hang, but a rank that waits in a collective is one.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.stacks import Standing
from rankscope_exporter.monitors.hangs.diagnosis import Diagnosis, StackSignal
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.threads import OwnThread


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """Seconds without activity of the training after which a hang is reported.

    `in_phase` applies in an announced phase and before the end of the first step, if it is longer than `training`.
    `training` applies at all other times. With `training` 0, no hang is detected.
    """

    training: float
    in_phase: float

    def at(self, step: int | None, phase: str | None, *, is_done: bool) -> float:
        """Return the limit after the completed step `step` in the announced phase `phase`.

        It is infinite if hangs are not detected, or if all planned steps have ended.
        """
        if is_done or self.training <= 0:
            return math.inf
        # Before the end of the first step, compilers and file systems may need long.
        return self.training if step is not None and phase is None else max(self.training, self.in_phase)


_MOST_SECONDS: Final = 1.0
_CHECKS_PER_LIMIT: Final = 8.0
_GIL_SHARE: Final = 0.5
"""Threshold for the share of a hang in which the watchdog thread could not run.

Above the threshold, the hang is attributed to C code that held the GIL, or to a process that was stopped.
"""


@dataclass(eq=False, kw_only=True)
class Watchdog:
    """Detects hangs of the training on a daemon thread.

    Training threads only store the time of their activity in `active_at`.
    """

    limits: HangLimits
    stack_signal: str | None
    diagnosis: Diagnosis
    boundary: ErrorBoundary
    progress: Callable[[], tuple[int | None, str | None]]
    """Function that returns the last published step, or None before the first one, and the name of the announced phase.

    The name is None outside of phases.
    """
    planned_steps: int | None
    print_line: Callable[[str], None]
    """Function that writes its argument to the console."""
    active_at: float = field(default_factory=time.monotonic, init=False)
    """Time of the last activity of the training, in monotonic seconds."""

    def __post_init__(self) -> None:
        limits = self.limits
        self._seconds = (
            min(_MOST_SECONDS, limits.training / _CHECKS_PER_LIMIT) if limits.training > 0 else _MOST_SECONDS
        )
        if hasattr(sys, "ps1"):  # at an interactive prompt, minutes without a step are normal
            self.limits = HangLimits(training=0, in_phase=0)
        self._signal: StackSignal | None = None
        self._hung_since: float | None = None  # last activity before the hang that was reported
        self._stopped = threading.Event()
        self.thread = OwnThread(target=self._run, name="rankscope-watchdog", on_fault=self.boundary.report)

    def start(self) -> None:
        """Register the handler of the signal in the setting `stacks_signal`, and start the watchdog thread.

        If another handler in C code uses the signal, this is reported and that handler remains.
        """
        if self.stack_signal is not None:
            self._signal = self.boundary.call("stacks_signal", StackSignal, self.stack_signal)
        self.active_at = time.monotonic()
        if self.limits.training > 0 or self._signal is not None:
            self.thread.start()

    def stop(self) -> None:
        """End the watchdog thread, and restore the previous handler of the signal in the setting `stacks_signal`."""
        self._stopped.set()
        if self.thread.ident is not None:
            self.thread.join(1.0)
        if self._signal is not None:
            found, self._signal = self._signal, None
            found.restore()

    def abandon_after_fork(self) -> None:
        """Unregister, in a forked child without a watchdog thread, the signal handler that writes stacks."""
        if self._signal is not None:
            self._signal.abandon_after_fork()
            self._signal = None

    def signal_note(self) -> str | None:
        """Return a line of text about the signal in the setting `stacks_signal`; None if no signal is set.

        The line belongs to the banner that rank 0 prints when the monitor is attached.
        """
        if self._signal is None:
            return None
        return f"{self._signal.name} writes stacks, also while C code holds the GIL, to {self._signal.path}"

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self._seconds):
            now = time.monotonic()
            late, before = now - before - self._seconds, now
            self.boundary.call("the watchdog", self.check, now, late)

    def check(self, now: float, late: float) -> None:
        """Report a hang that has begun or ended since the last check, which ran `late` seconds later than planned.

        A hang begins if there was no activity for the limit of the present state. `now` is in monotonic seconds.
        """
        if self._signal is not None:
            text = self.boundary.call("stacks_signal", self._signal.written)
            if text is not None:
                self.boundary.call("stacks_signal", self.diagnosis.take_written, text)
        step, phase = self.progress()
        is_done = self.planned_steps is not None and step is not None and step >= self.planned_steps
        active_at, since = self.active_at, self._hung_since
        if since is not None and active_at > since:
            self._hung_since = None
            self._report_end(active_at - since)
        elif since is None and now - active_at >= self.limits.at(step, phase, is_done=is_done):
            self._hung_since = active_at
            self._report_hang(now - active_at, late, step, phase)

    def _report_hang(self, seconds: float, late: float, step: int | None, phase: str | None) -> None:
        held = late if late > _GIL_SHARE * seconds else None
        text = f"no sign of training for {seconds:.0f} s" + (f" in phase {phase}" if phase else "")
        text += "" if step is None else f", after step {step}"
        if held is not None:
            text += f"; no Python code ran for {held:.0f} s: C code held the GIL, or the process was stopped"
        details = {"state": "began", "seconds": seconds, "phase": phase, "interpreter_held_seconds": held}
        event = Event(type=EventType.HANG, severity=Severity.CRITICAL, value=seconds, message=text, details=details)
        where = self.boundary.call("publishing the event and stacks of a hang", self._place, event)
        self.print_line(f"rank {self.diagnosis.rank}: {text}" + (f": {where}" if where else ""))

    def _place(self, event: Event) -> str | None:
        """Publish the event, the stacks and the flight record of a hang."""
        # Return a text with the function or collective in which this rank waits. Return None if neither stacks nor
        # flight record were read.
        taken = self.diagnosis.take("hang", severity=Severity.CRITICAL, first=event)
        if not taken.stacks.threads and taken.flight is None:
            return None
        return str(Standing.of(self.diagnosis.rank, taken.stacks, taken.flight))

    def _report_end(self, seconds: float) -> None:
        text = f"training continues after {seconds:.0f} s without activity"
        event = Event(type=EventType.HANG, value=seconds, message=text, details={"state": "ended", "seconds": seconds})
        self.boundary.call("recording the end of a hang", self.diagnosis.publish, event)
        self.print_line(f"rank {self.diagnosis.rank}: {text}")
