"""Child processes that end with us: each in a group of its own, ended by its own id and never by name.

Also when we are killed with -9: see `leash`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

GRACE_SECONDS: Final = 15.0
LEASH: Final = Path(__file__).with_name("die_with_parent.py")


@contextlib.contextmanager
def child(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` with its output in `log`; on leaving, whatever of it is still there is ended."""
    log.write_bytes(b"")
    process = start(command, log, environment)
    try:
        yield process
    finally:
        stop(process)


def start(command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `command`, its output added to `log`. To be called from the main thread: its end is the child's end."""
    leashed = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *map(str, command)]
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - our own programs
            leashed,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_own_environment(), **environment},
            start_new_session=True,  # a Ctrl-C in the terminal is ours to hand on, in order
        )


def stop(process: subprocess.Popen[bytes], grace_seconds: float = GRACE_SECONDS) -> int:
    """Ask `process` to end, insist after a while, and return its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            kill(process)
    return kill(process)  # workers that outlived their parent


def kill(process: subprocess.Popen[bytes]) -> int:
    """End `process` and all of its group at once; return its exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


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


def _own_environment() -> dict[str, str]:
    """Return the environment without what the user has set for trainings and stores of their own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
