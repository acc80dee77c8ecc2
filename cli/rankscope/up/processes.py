"""Child processes that stop when this process exits. Each has a separate process group and is stopped by its id.

`die_with_parent` covers the case that this process is killed by SIGKILL.
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
DIE_WITH_PARENT: Final = Path(__file__).with_name("die_with_parent.py")


@contextlib.contextmanager
def child(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` with its output in `log`; on exit of the context, stop the process and its group."""
    log.write_bytes(b"")
    process = start(command, log, environment)
    try:
        yield process
    finally:
        stop(process)


def start(command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `command` and append its output to `log`.

    Call it from the main thread: the kernel stops the child when the thread that started it exits.
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
    """Send SIGTERM, then SIGKILL after `grace_seconds`; return the exit code."""
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
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP, so that these signals also stop the children."""

    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _own_environment() -> dict[str, str]:
    """Return the environment without RANKSCOPE_ variables, which the user has set for other trainings and stores."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
