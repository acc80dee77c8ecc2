"""Child processes that end with us: each in a group of its own, ended by its own id and never by name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

GRACE_SECONDS = 15.0


@contextlib.contextmanager
def child(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` with its output in `log`; on leaving, whatever of it is still there is ended."""
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own programs
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_own_environment(), **environment},
            start_new_session=True,  # a Ctrl-C in the terminal is ours to hand on, in order
        )
    try:
        yield process
    finally:
        stop(process)


def _own_environment() -> dict[str, str]:
    """Return the environment without what the user has set for trainings and stores of their own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}


def stop(process: subprocess.Popen[bytes]) -> int:
    """Ask `process` to end, insist after a while, and return its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
    _kill_group(process.pid)  # workers that outlived their parent
    return process.wait()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that children are ended on these too."""

    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
