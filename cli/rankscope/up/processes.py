"""Child processes that stop when this process exits.

Each child has a separate process group and is stopped by the id of this group. The module `die_with_parent` stops the
children if this process is killed by SIGKILL.
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
