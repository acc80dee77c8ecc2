"""Supervise programs: start them, wait until they are ready, restart them after an exit, and stop them in order.

The supervisor runs on the main thread only. `print_line` is called with one line of text per event.

Child processes stop when this process exits. Each child has a separate process group and is stopped by the id of this
group. The module `die_with_parent` stops the children if this process is killed by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rankscope.base.errors import CommandError
from rankscope.base.http_client import ClientTls, UnreachableError, get
from rankscope.up.programs import Program
from rankscope_ingest.base.stop_event import handling

GRACE_SECONDS: Final = 15.0
DIE_WITH_PARENT: Final = Path(__file__).with_name("die_with_parent.py")


@contextlib.contextmanager
def child(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` with its output in the file `log`.

    At the end of the context, stop the process and its process group.
    """
    log.write_bytes(b"")
    process = start(command, log, environment)
    try:
        yield process
    finally:
        stop(process)


def start(command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `command` in a new process group, append its output to `log`, and return the process.

    Call this function from the main thread, because the kernel stops the process when the thread that started it exits.
    """
    wrapped = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid()), *map(str, command)]
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - commands that rankscope builds itself
            wrapped,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_own_environment(), **environment},
            start_new_session=True,  # Ctrl-C must reach only this process, which stops the children in order
        )


def stop(process: subprocess.Popen[bytes], grace_seconds: float = GRACE_SECONDS) -> int:
    """Send SIGTERM to the process group, and SIGKILL after `grace_seconds`; return the exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            kill(process)
    return kill(process)  # also stops workers that outlive their parent


def kill(process: subprocess.Popen[bytes]) -> int:
    """Send SIGKILL to the process group; return the exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


@contextlib.contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """Raise KeyboardInterrupt in the context on SIGTERM and SIGHUP, so that these signals also stop the children."""

    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with handling(interrupt, signal.SIGINT):
        yield


def _own_environment() -> dict[str, str]:
    """Return the environment variables without those that start with RANKSCOPE_.

    The user may have set them for other trainings and stores.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}


READY_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.1
FIRST_DELAY_SECONDS: Final = 0.5
MAX_DELAY_SECONDS: Final = 30.0
MAX_RESTARTS: Final = 5
RESTART_WINDOW_SECONDS: Final = 600.0


class StopSignals:
    """Counter of stop signals. The first signal requests an orderly stop, the second an immediate stop."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Count SIGINT, SIGTERM and the first SIGHUP in the context; the process does not exit.

        The kernel and the shell both send SIGHUP when a terminal is closed.
        """

        def note(number: int, _frame: object) -> None:
            self.count = max(self.count, 1) if number == signal.SIGHUP else self.count + 1

        with handling(note):
            yield


@dataclass(slots=True)
class Restarts:
    """Decides whether and when a program is restarted. Exits older than RESTART_WINDOW_SECONDS do not count."""

    _ends: deque[float] = field(default_factory=deque)

    @property
    def count(self) -> int:
        """Return the number of exits of the program within RESTART_WINDOW_SECONDS."""
        return len(self._ends)

    def delay_after_exit(self, now: float) -> float | None:
        """Record an exit of the program at time `now`; return the delay in seconds before its restart.

        The delay doubles with each exit. Returns None, for no restart, after MAX_RESTARTS exits within
        RESTART_WINDOW_SECONDS.
        """
        while self._ends and now - self._ends[0] >= RESTART_WINDOW_SECONDS:
            self._ends.popleft()
        if len(self._ends) >= MAX_RESTARTS:
            return None
        self._ends.append(now)
        return float(min(FIRST_DELAY_SECONDS * 2 ** (len(self._ends) - 1), MAX_DELAY_SECONDS))


@dataclass(slots=True)
class _Running:
    program: Program
    process: subprocess.Popen[bytes]
    restarts: Restarts = field(default_factory=Restarts)
    start_at: float | None = None  # time of the next restart; None while the program runs
    is_given_up: bool = False


class Supervisor:
    """Starts, restarts and stops all programs of one `rankscope up`."""

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        print_line: Callable[[str], None],
        stop_signals: StopSignals,
        environment: Mapping[str, str] | None = None,
        client_tls: ClientTls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pieces = programs
        self._print_line = print_line
        self._requests = stop_signals
        self._environment = environment or {}
        self._trust = client_tls
        self._clock = clock
        self._running: list[_Running] = []

    @property
    def given_up(self) -> list[str]:
        """Return the names of the programs that exited too often and are no longer restarted."""
        return [running.program.name for running in self._running if running.is_given_up]

    def states(self) -> dict[str, str]:
        """Return the state of each program by name: ready, restarting, or given up after too many exits."""
        return {running.program.name: _state(running) for running in self._running}

    def start(self) -> None:
        """Start all programs and wait until they are ready.

        Raises CommandError if a program exits or is not ready after READY_SECONDS; the message has the last lines of
        its log.
        """
        for program in self._pieces:
            self._running.append(_Running(program, start(program.command, program.log, self._environment)))
        deadline = self._clock() + READY_SECONDS
        for running in self._running:
            self._wait_ready(running, deadline)

    def look(self) -> bool:
        """Restart exited programs whose restart delay is over.

        Returns False when an essential program exited too often to be restarted.
        """
        for running in self._running:
            if running.start_at is None and not running.is_given_up and running.process.poll() is not None:
                self._handle_exit(running)
            elif running.start_at is not None and self._clock() >= running.start_at:
                running.start_at = None
                running.process = start(running.program.command, running.program.log, self._environment)
        return not any(running.is_given_up and running.program.is_essential for running in self._running)

    def stop(self) -> None:
        """Stop the programs in the order in which they were started, each after the previous one has exited.

        A second stop signal kills all of them.
        """
        for running in self._running:
            running.start_at = None
            if running.process.poll() is None:
                running.process.terminate()
                self._wait_for_exit(running)

    def _wait_ready(self, running: _Running, deadline: float) -> None:
        while not self._is_ready(running.program):
            program, code = running.program, running.process.poll()
            if self._requests.count:
                raise CommandError("interrupted before all programs were ready", code=130)
            if code is not None:
                raise CommandError(f"{program.name} exited with code {code} during the start. {tail(program)}")
            if self._clock() >= deadline:
                raise CommandError(f"{program.name} was not ready after {READY_SECONDS:g} s. {tail(program)}")
            time.sleep(POLL_SECONDS)

    def _is_ready(self, program: Program) -> bool:
        try:
            response = get(program.ready_url, timeout_seconds=1.0, client_tls=self._trust)
        except UnreachableError:
            return False
        return response.status == 200 or program.is_essential  # a degraded service still serves requests

    def _handle_exit(self, running: _Running) -> None:
        name, code = running.program.name, running.process.returncode
        delay = running.restarts.delay_after_exit(self._clock())
        exited = f"{name} exited with code {code}"
        if delay is None:
            running.is_given_up = True
            self._print_line(f"{exited}; giving up after {MAX_RESTARTS} restarts. {tail(running.program)}")
            return
        running.start_at = self._clock() + delay
        self._print_line(
            f"{exited}; restarting in {delay:g} s ({running.restarts.count} of {MAX_RESTARTS}). {tail(running.program)}"
        )

    def _wait_for_exit(self, running: _Running) -> None:
        deadline = self._clock() + running.program.grace_seconds
        while running.process.poll() is None and self._requests.count < 2 and self._clock() < deadline:
            time.sleep(POLL_SECONDS / 2)
        if running.process.poll() is None:
            self._print_line(f"{running.program.name} did not stop in time and was killed")
            kill(running.process)


def tail(program: Program, lines: int = 3) -> str:
    """Return the path of the program's log and its last lines, for an error message."""
    try:
        text = program.log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return f"Last lines of {program.log}:\n  " + "\n  ".join(text.splitlines()[-lines:] or ["(empty)"])


def _state(running: _Running) -> str:
    if running.is_given_up:
        return "given up"
    return "restarting" if running.start_at is not None else "ready"
