"""Kill processes before the n-th call that changes a folder, thousands of times, cheaply in forks of one process."""

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope_storage.base.location import located

HERE = Path(__file__).parent
MODULE = "tests.storage.crashes.killing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One forked process: its calls that changed the folder, its acknowledged records, and how it ended."""

    calls: list[str]
    acknowledged: list[int]
    killed: bool
    error: str = ""


class Killer:
    """The process that is forked. Runs one life at a time.

    With `environment`, the stores are on a server that these variables name, and a proxy kills the forked process.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._notes = folder / "notes"
        more = {"LD_PRELOAD": str(compiled(folder))} if environment is None else environment
        env = {**os.environ, **more, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        command, pipe = [sys.executable, "-m", MODULE], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)

    def victim(self) -> int:
        """Return the process that runs the life of this moment."""
        return int(Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def live(self, operation: str, root: Path | str, at: int, *, may_fail: bool = False) -> Life:
        """Run `operation`, killed before the `at`-th call that changes `root`; 0 does not kill."""
        status = self._request("live", operation, root, at, may_fail=may_fail)
        lines = self._notes.read_text().splitlines()
        told = [int(line.split()[1]) for line in lines if line.startswith("acknowledged ")]
        calls = [line for line in lines if not line.startswith("acknowledged ")]
        error = "\n".join(calls) if status > 0 else ""
        return Life(calls=calls, acknowledged=told, killed=status == -signal.SIGKILL, error=error)

    def prepare(self, operation: str, root: Path | str) -> None:
        """Create the store with which `operation` begins, in a process that is not killed."""
        self._request("prepare", operation, root, 0)

    def content(self, root: Path | str) -> dict[str, Any]:
        return self._found("content", "", root)

    def after(self, operation: str, root: Path | str) -> dict[str, Any]:
        return self._found("after", operation, root)

    def _found(self, action: str, operation: str, root: Path | str) -> dict[str, Any]:
        self._request(action, operation, root, 0)
        found: dict[str, Any] = json.loads(self._notes.read_text())
        return found

    def _request(self, action: str, operation: str, root: Path | str, at: int, *, may_fail: bool = False) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"action": action, "operation": operation, "root": str(root), "at": at, "notes": str(self._notes)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the forking process has exited"
        status = int(line)
        wanted = (0, -signal.SIGKILL, 1 if may_fail else 0) if at else (0,)
        assert status in wanted, f"{action} {operation} at {at} ended with {status}: {self._notes.read_text()}"
        return status


def compiled(folder: Path) -> Path:
    library = folder / "kill_at.so"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-ldl"]
    subprocess.run(["gcc", "-o", str(library), str(HERE / "kill_at.c"), *options], check=True)
    return library


def main() -> None:
    """Fork for each input line, and print the exit status of the child."""
    from tests.storage.crashes import operations  # noqa: F401 - imported once, for all children

    for line in sys.stdin:
        job = json.loads(line)
        if job["operation"] == "import":
            importlib.import_module("rankscope_ingest.importers").importers()  # once for all children, not in each
        pid = os.fork()
        if pid == 0:
            _live(job)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _live(job: dict[str, Any]) -> None:
    from tests.storage.crashes import operations

    root, operation = located(job["root"]), job["operation"]
    notes = os.open(job["notes"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    try:
        if job["action"] == "prepare":
            operations.prepare(operation, root)
        elif job["action"] in {"content", "after"}:
            found = operations.after(operation, root) if operation else operations.content(root)
            os.write(notes, json.dumps(found, default=str).encode())
        else:
            if isinstance(root, Path):
                ctypes.CDLL(None).rankscope_arm(os.fsencode(root), job["at"], notes)
            operations.OPERATIONS[operation](root, lambda seq: os.write(notes, b"acknowledged %d\n" % seq) and None)
    except BaseException:
        os.write(notes, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
