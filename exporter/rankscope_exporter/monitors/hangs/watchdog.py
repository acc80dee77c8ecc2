"""A thread that checks about once a second for signs of training and for stacks that a signal left.

A sign is any call into the monitor: a forward pass (also one of an evaluation), a backward pass, an optimizer, `log()`,
`event()`, the begin or end of a phase. So a long accumulation of gradients or an evaluation that was not announced is
no hang, and a rank that waits in a collective is one. The detector is pure: the clock is an argument.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rankscope_contract.diagnostics.rank_groups import Standing
from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.hangs.diagnosis import Diagnosis
from rankscope_exporter.monitors.hangs.stack_signal import StackSignal
from rankscope_exporter.process.threads import OwnThread


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """How long training may give no sign of life, in seconds; 0 for ever."""

    training: float
    in_phase: float

    @property
    def is_on(self) -> bool:
        """Return whether anything is watched at all."""
        return self.training > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What is known of training at one moment."""

    heard_at: float  # monotonic seconds of the last sign of life
    has_stepped: bool  # a first step was finished: until then compilers and file systems may take their time
    is_done: bool  # all planned steps were made
    phase: str | None  # announced, such as an evaluation


@dataclass(frozen=True, slots=True)
class Hang:
    """Training gave no sign of life for `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """Training goes on, after `seconds` without a sign of life."""

    seconds: float


class HangDetector:
    """Tells a hang once, and its end once."""

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._hung_at: float | None = None  # when the silence that was told of had begun

    def look(self, sign: Sign, now: float) -> Hang | Resumed | None:
        """Return what is new at this moment."""
        if self._hung_at is not None:
            if sign.heard_at <= self._hung_at:
                return None
            began, self._hung_at = self._hung_at, None
            return Resumed(sign.heard_at - began)
        if sign.is_done or now - sign.heard_at < self._limit(sign):
            return None
        self._hung_at = sign.heard_at
        return Hang(now - sign.heard_at)

    def _limit(self, sign: Sign) -> float:
        is_calm = sign.has_stepped and sign.phase is None
        seconds = self._limits.training if is_calm else max(self._limits.training, self._limits.in_phase)
        return seconds if self._limits.is_on else float("inf")


_MOST_SECONDS: Final = 1.0
_LOOKS_PER_LIMIT: Final = 8.0
_GIL_SHARE: Final = 0.5
"""When this thread itself could not run for so much of a silence, something held the interpreter lock."""


class Watchdog:
    """`beat` is called by training, all else happens on a daemon thread of its own."""

    def __init__(
        self,
        limits: HangLimits,
        stack_signal: str | None,
        diagnosis: Diagnosis,
        boundary: ErrorBoundary,
        *,
        standing: Callable[[], tuple[int | None, str | None]],
        planned_steps: int | None,
        say: Callable[[str], None],
    ) -> None:
        """`standing` gives the last step published and the announced phase; `say` prints a line on the console."""
        # At a prompt, minutes without a step are somebody thinking.
        self._limits = HangLimits(training=0, in_phase=0) if hasattr(sys, "ps1") else limits
        self._signal_name = stack_signal
        self._signal: StackSignal | None = None
        self._watch = HangDetector(self._limits)
        self._diagnosis = diagnosis
        self._boundary = boundary
        self._standing = standing
        self._planned_steps = planned_steps
        self._say = say
        self._heard_at = time.monotonic()
        self._stopped = threading.Event()
        self._thread = OwnThread(target=self._run, name="rankscope-watchdog")
        self._seconds = min(_MOST_SECONDS, limits.training / _LOOKS_PER_LIMIT) if limits.is_on else _MOST_SECONDS
        self.cpu_seconds = 0.0
        """CPU time of the thread so far."""

    def beat(self) -> None:
        """Note a sign of life. One store, and from any thread."""
        self._heard_at = time.monotonic()

    def start(self) -> None:
        """Take the signal where one is named, and begin to look. A signal that is taken is said, and left alone."""
        if self._signal_name is not None:
            self._signal = self._boundary.call("stacks_signal", StackSignal, self._signal_name)
        self.beat()
        if self._limits.is_on or self._signal is not None:
            self._thread.start()

    def stop(self) -> None:
        """End the thread and give the signal back."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)
        if self._signal is not None:
            found, self._signal = self._signal, None
            found.restore()

    def abandon_after_fork(self) -> None:
        """In a forked child, where the thread does not exist."""
        if self._signal is not None:
            self._signal.abandon_after_fork()
            self._signal = None

    def signal_note(self) -> str | None:
        """Return what the banner says of the signal."""
        if self._signal is None:
            return None
        return f"{self._signal.name} writes stacks, also while C code holds the interpreter, to {self._signal.path}"

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self._seconds):
            now = time.monotonic()
            late, before = now - before - self._seconds, now
            self._boundary.call("the watchdog", self._look, now, late)
            self.cpu_seconds = time.thread_time()

    def _look(self, now: float, late: float) -> None:
        if self._signal is not None:
            self._boundary.call("stacks_signal", self._look_at_signal, self._signal)
        step, phase = self._standing()
        is_done = self._planned_steps is not None and step is not None and step >= self._planned_steps
        sign = Sign(heard_at=self._heard_at, has_stepped=step is not None, is_done=is_done, phase=phase)
        match self._watch.look(sign, now):
            case Hang(seconds):
                self._tell_hang(seconds, late, step, phase)
            case Resumed(seconds):
                self._tell_end(seconds)
            case None:
                pass

    def _look_at_signal(self, signal: StackSignal) -> None:
        text = signal.written()
        if text is not None:
            self._diagnosis.take_written(text, "signal")

    def _tell_hang(self, seconds: float, late: float, step: int | None, phase: str | None) -> None:
        held = late if late > _GIL_SHARE * seconds else None
        text = f"no sign of training for {seconds:.0f} s" + (f" in phase {phase}" if phase else "")
        text += "" if step is None else f", after step {step}"
        if held is not None:
            text += f"; for {held:.0f} s no Python ran: C code held the interpreter lock, or the process was stopped"
        details = json.dumps({"state": "began", "seconds": seconds, "phase": phase, "interpreter_held_seconds": held})
        event = Event(type=EventType.HANG, severity=Severity.CRITICAL, value=seconds, message=text, details=details)
        where = self._boundary.call("the place of a hang", self._place, event)
        self._say(f"rank {self._diagnosis.rank}: {text}" + (f": {where}" if where else ""))

    def _place(self, event: Event) -> str | None:
        """Record the event with stacks and flight record; return where this rank is, None where neither was read."""
        taken = self._diagnosis.take("hang", severity=Severity.CRITICAL, first=event)
        if not taken.stacks.threads and taken.flight is None:
            return None
        return str(Standing.of(self._diagnosis.rank, taken.stacks, taken.flight))

    def _tell_end(self, seconds: float) -> None:
        details = json.dumps({"state": "ended", "seconds": seconds})
        text = f"training goes on after {seconds:.0f} s without a sign"
        event = Event(type=EventType.HANG, value=seconds, message=text, details=details)
        self._boundary.call("recording the end of a hang", self._diagnosis.tell, event)
        self._say(f"rank {self._diagnosis.rank}: {text}")
