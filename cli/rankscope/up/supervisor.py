"""Keep programs running: start them, wait until each is ready, start again what ends, end all of them in order.

Runs on the main thread alone; `say` gets one line for whatever happens.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rankscope.base.errors import CommandError
from rankscope.base.http_client import Trust, UnreachableError, get
from rankscope.up.processes import kill, start
from rankscope.up.programs import Piece

READY_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 0.1
FIRST_WAIT_SECONDS: Final = 0.5
LONGEST_WAIT_SECONDS: Final = 30.0
MOST_RESTARTS: Final = 5
WITHIN_SECONDS: Final = 600.0


class Requests:
    """Counts how often we were asked to end: once is in order, twice is at once."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Count SIGINT, SIGTERM and SIGHUP instead of dying of them."""

        def note(_signum: int, _frame: object) -> None:
            self.count += 1

        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(slots=True)
class Restarts:
    """The ends of one program. What ran for long has earned a fresh count."""

    _ends: deque[float] = field(default_factory=deque)

    @property
    def count(self) -> int:
        """Return how often it ended lately."""
        return len(self._ends)

    def wait_after_end(self, now: float) -> float | None:
        """Note an end; return the seconds to wait before the next start, None when it ended too often."""
        while self._ends and now - self._ends[0] >= WITHIN_SECONDS:
            self._ends.popleft()
        if len(self._ends) >= MOST_RESTARTS:
            return None
        self._ends.append(now)
        return float(min(FIRST_WAIT_SECONDS * 2 ** (len(self._ends) - 1), LONGEST_WAIT_SECONDS))


@dataclass(slots=True)
class _Running:
    piece: Piece
    process: subprocess.Popen[bytes]
    restarts: Restarts = field(default_factory=Restarts)
    start_at: float | None = None  # it ended, and is started again at this time
    is_given_up: bool = False


class Supervision:
    """All programs of one `up`."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        say: Callable[[str], None],
        requests: Requests,
        environment: Mapping[str, str] | None = None,
        trust: Trust | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pieces = pieces
        self._say = say
        self._requests = requests
        self._environment = environment or {}
        self._trust = trust
        self._clock = clock
        self._running: list[_Running] = []

    @property
    def given_up(self) -> list[str]:
        """Return the names of the programs that ended too often."""
        return [running.piece.name for running in self._running if running.is_given_up]

    def states(self) -> dict[str, str]:
        """Return how each program is, in a word."""
        return {running.piece.name: _state(running) for running in self._running}

    def start(self) -> None:
        """Start all and wait until each is ready. Raises CommandError with the end of the log of one that is not."""
        for piece in self._pieces:
            self._running.append(_Running(piece, start(piece.command, piece.log, self._environment)))
        deadline = self._clock() + READY_SECONDS
        for running in self._running:
            self._wait_ready(running, deadline)

    def look(self) -> bool:
        """Start again what ended and is due. Returns False once a program that is needed was given up."""
        for running in self._running:
            if running.start_at is None and not running.is_given_up and running.process.poll() is not None:
                self._note_end(running)
            elif running.start_at is not None and self._clock() >= running.start_at:
                running.start_at = None
                running.process = start(running.piece.command, running.piece.log, self._environment)
        return not any(running.is_given_up and running.piece.is_essential for running in self._running)

    def stop(self) -> None:
        """End all in order, each when the one before has ended; all at once when asked a second time."""
        for running in self._running:
            running.start_at = None
            if running.process.poll() is None:
                running.process.terminate()
                self._wait_end(running)

    def _wait_ready(self, running: _Running, deadline: float) -> None:
        while not self._is_ready(running.piece):
            piece, code = running.piece, running.process.poll()
            if self._requests.count:
                raise CommandError("ended before everything was ready", code=130)
            if code is not None:
                raise CommandError(f"{piece.name} ended with {code} instead of starting: {tail(piece)}")
            if self._clock() >= deadline:
                raise CommandError(f"{piece.name} was not ready within {READY_SECONDS:g} s: {tail(piece)}")
            time.sleep(LOOK_SECONDS)

    def _is_ready(self, piece: Piece) -> bool:
        try:
            answer = get(piece.ready_url, timeout_seconds=1.0, trust=self._trust)
        except UnreachableError:
            return False
        return answer.status == 200 or piece.is_essential  # a service in trouble says so itself, and serves

    def _note_end(self, running: _Running) -> None:
        name, code = running.piece.name, running.process.returncode
        wait = running.restarts.wait_after_end(self._clock())
        ended = f"{name} ended with {code}"
        if wait is None:
            running.is_given_up = True
            self._say(f"{ended} once more: given up after {MOST_RESTARTS} restarts. {tail(running.piece)}")
            return
        running.start_at = self._clock() + wait
        self._say(
            f"{ended}: started again in {wait:g} s ({running.restarts.count} of {MOST_RESTARTS}). {tail(running.piece)}"
        )

    def _wait_end(self, running: _Running) -> None:
        deadline = self._clock() + running.piece.grace_seconds
        while running.process.poll() is None and self._requests.count < 2 and self._clock() < deadline:
            time.sleep(LOOK_SECONDS / 2)
        if running.process.poll() is None:
            self._say(f"{running.piece.name} is killed: it had not ended yet")
            kill(running.process)


def tail(piece: Piece, lines: int = 3) -> str:
    """Return the end of a program's log, and where the rest stands."""
    try:
        text = piece.log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return f"Its log, {piece.log}, ends:\n  " + "\n  ".join(text.splitlines()[-lines:] or ["(nothing)"])


def _state(running: _Running) -> str:
    if running.is_given_up:
        return "given up"
    return "restarting" if running.start_at is not None else "ready"
