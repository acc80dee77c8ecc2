"""Run programs under supervisord, which starts, restarts and stops them, and wait until they are ready.

supervisord is a child process with its own session, so that Ctrl-C reaches only this process. If this process is killed
by SIGKILL, the kernel sends SIGTERM to supervisord, which stops the programs. If supervisord is killed, so are they.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from rankscope.access.service import ClientTls, UnreachableError, request
from rankscope.shell.errors import CommandError
from rankscope.up.machine import StateDir
from rankscope.up.plan import Program
from rankscope_ingest.base.stop_signals import handling

MAX_RESTARTS: Final = 5
"""Restarts in a row of a program that does not run for START_SECONDS, after 1 s, 2 s, and so on."""

START_SECONDS: Final = 10
READY_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.1

_NAME: Final = "supervisord"
_CONFIG: Final = "supervisord.conf"
_FOLDER: Final = "UP_FOLDER"
"""A variable with a path, in whose value supervisord replaces no %(name)s. In the name of a log, it does so twice."""
_HEAD: Final = """\
[supervisord]
nodaemon = true
logfile = /dev/null
logfile_maxbytes = 0
pidfile = %(ENV_UP_FOLDER)s/config/supervisord.pid
"""
_PROGRAM: Final = """
[program:{name}]
command = {command}
priority = {priority}
autorestart = true
startsecs = {start_seconds}
startretries = {restarts}
stopwaitsecs = {grace_seconds:.0f}
redirect_stderr = true
stdout_logfile = %%(ENV_UP_FOLDER)s/logs/{name}.log
stdout_logfile_maxbytes = 0
"""
_EVENT: Final = re.compile(r" (exited|stopped|gave up|killing):? '?(\w+)'? (.*)")


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


class Supervisor:
    """The programs of one `rankscope up`.

    `folder` has the configuration and the log of supervisord. `print_line` is called with one line of text per event.
    `ends` has the latest exit of each program that has exited, and `given_up` the names of those that are no longer
    restarted. All methods must be called from one thread, because the kernel ends supervisord when this thread ends.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        folder: StateDir,
        *,
        print_line: Callable[[str], None],
        stop_signals: StopSignals,
        environment: Mapping[str, str] | None = None,
        client_tls: ClientTls | None = None,
    ) -> None:
        self._programs = {program.name: program for program in programs}
        self._folder = folder
        self._print_line = print_line
        self._signals = stop_signals
        self._environment = environment or {}
        self._client_tls = client_tls
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[str] | None = None
        self.ends: dict[str, str] = {}
        self.given_up: list[str] = []

    def start(self) -> None:
        """Start all programs and wait until they are ready.

        Raises CommandError if a program exits or is not ready after READY_SECONDS; the message has the last lines of
        its log.
        """
        self._folder.write({_CONFIG: supervisord_config(list(self._programs.values()))})
        command = [sys.executable, "-P", "-m", "supervisor.supervisord", "-c", str(self._folder.config(_CONFIG))]
        log = self._folder.log(_NAME)
        self._process = start(command, log, {**self._environment, _FOLDER: str(self._folder.path)})
        self._log = log.open(encoding="utf-8", errors="replace")
        deadline = time.monotonic() + READY_SECONDS
        for program in self._programs.values():
            self._wait_ready(program, deadline)

    def look(self) -> bool:
        """Print the exits of programs since the last call.

        Returns False when an essential program exited too often to be restarted. Raises CommandError when supervisord
        has exited: the kernel then kills the programs.
        """
        for kind, name, reason in self._events():
            if kind == "exited":
                self._print_line(f"{name} exited {reason}; restarting. {tail(self._folder.log(name))}")
            elif kind == "gave up":
                self._print_line(f"{name}: giving up after {MAX_RESTARTS} restarts")
        self._check_supervisord()
        return not any(self._programs[name].is_essential for name in self.given_up)

    def stop(self) -> None:
        """Stop the programs in their order, each after the previous one has exited.

        A second stop signal kills all of them.
        """
        if self._process is None or self._log is None:
            return
        self._process.terminate()
        while self._process.poll() is None and self._signals.count < 2:
            time.sleep(POLL_SECONDS / 2)
        self._process.kill()  # the kernel then kills the programs
        self._process.wait()
        for kind, name, _ in self._events():
            if kind == "killing":
                self._print_line(f"{name} did not stop in time and was killed")
        self._log.close()
        self._process = None

    def _events(self) -> Iterator[tuple[str, str, str]]:
        """Yield the new events in the log of supervisord: kind, program and reason."""
        for line in self._log or ():
            if found := _EVENT.search(line):
                kind, name, reason = found.groups()
                if kind in {"exited", "stopped"}:
                    self.ends[name] = reason
                elif kind == "gave up":
                    self.given_up.append(name)
                yield kind, name, reason

    def _wait_ready(self, program: Program, deadline: float) -> None:
        while not self._is_ready(program):
            if self._signals.count:
                raise CommandError("interrupted before all programs were ready", code=130)
            for _, name, reason in self._events():
                raise CommandError(f"{name} exited during the start {reason}. {tail(self._folder.log(name))}")
            self._check_supervisord()
            if time.monotonic() >= deadline:
                waited = f"{program.name} was not ready after {READY_SECONDS:g} s"
                raise CommandError(f"{waited}. {tail(self._folder.log(program.name))}")
            time.sleep(POLL_SECONDS)

    def _check_supervisord(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise CommandError(f"supervisord has exited. {tail(self._folder.log(_NAME))}")

    def _is_ready(self, program: Program) -> bool:
        try:
            response = request(program.url + program.ready_path, timeout_seconds=1.0, client_tls=self._client_tls)
        except UnreachableError:
            return False
        return response.status == 200 or program.is_essential  # a degraded service still serves requests


def supervisord_config(programs: Sequence[Program]) -> str:
    """Return the configuration of supervisord. It stops the programs in the order of `programs`."""
    return _HEAD + "".join(
        _PROGRAM.format(
            name=program.name,
            command=_quoted([*ended_with_parent("KILL"), *program.command]),
            priority=len(programs) - place,  # the highest number is started last and stopped first
            start_seconds=START_SECONDS,
            restarts=MAX_RESTARTS,
            grace_seconds=program.grace_seconds,
        )
        for place, program in enumerate(programs)
    )


def _quoted(command: Sequence[str]) -> str:
    """Return a command for supervisord, which replaces %(name)s, and ignores the text after a space and ; or #."""
    # Two quotes end and begin the quoted text, in which a space always is.
    return re.sub(r" ([;#])", r" ''\1", shlex.join(command).replace("%", "%%"))


def ended_with_parent(signal_name: str) -> list[str]:
    """Return the beginning of a command to which the kernel sends a signal when its parent ends."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise CommandError("setpriv is not on PATH: apt install util-linux")
    return [setpriv, "--pdeathsig", signal_name]


def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own with its output in the file `log`, and return the process.

    It gets SIGTERM when the calling thread ends. Of the environment, it gets the variables that do not start with
    RANKSCOPE_, which the user may have set for other trainings and stores, and those in `environment`.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
    with log.open("wb") as output:
        return subprocess.Popen(  # noqa: S603 - commands that rankscope builds itself
            [*ended_with_parent("TERM"), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**inherited, **environment},
            start_new_session=True,
        )


def tail(log: Path, lines: int = 3) -> str:
    """Return the path of a log and its last lines, for an error message."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return f"Last lines of {log}:\n  " + "\n  ".join(text.splitlines()[-lines:] or ["(empty)"])
