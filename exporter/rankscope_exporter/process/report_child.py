"""Make the report of a run in a child process, so that a training process never loads the store.

Whatever happens to the child process, the caller continues: it receives a line with the reason and the command.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rankscope_contract.wire.escaping import file_name

LIMIT_SECONDS: Final = 60.0
"""Time in seconds after which a child process that makes a report is killed."""

FOLDER: Final = "rankscope-reports"
"""Folder in the working directory for reports without a given path."""

_OF_COMMANDS: Final = ("typer", "rich")
_OF_STORE: Final = ("duckdb", "deltalake")
_OF_ALL: Final = (*_OF_COMMANDS, *_OF_STORE, "aiohttp", "pydantic")
"""Modules of the extras that the commands need, one or two of each extra."""

# The alarm ends the child also if its parent was killed. The folder of the script is not searched for modules.
_PROGRAM: Final = (
    *(sys.executable, "-P", "-c"),
    "import signal, sys; signal.alarm(int(sys.argv.pop(1))); from rankscope.__main__ import main; main()",
)


def command_line(*arguments: str) -> str:
    """Return the command `rankscope` with `arguments` as a person enters it, with the environment of this process."""
    program, folder = shutil.which("rankscope"), Path(sys.executable).parent
    is_own = program is not None and Path(program).parent == folder
    return shlex.join([*(["rankscope"] if is_own else [sys.executable, "-m", "rankscope"]), *arguments])


def installation(needed: Sequence[str] = _OF_ALL) -> str | None:
    """Return the command that installs the libraries of the commands; None if all modules in `needed` are found.

    A package that was installed from a folder or from a file is installed from there again.
    """
    if all(map(importlib.util.find_spec, needed)):
        return None
    source = "rankscope"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, LookupError):
        origin = json.loads(importlib.metadata.distribution(source).read_text("direct_url.json") or "{}")
        url = urllib.parse.urlsplit(origin["url"])
        source = urllib.request.url2pathname(url.path) if url.scheme == "file" else source
    has_pip = any(importlib.metadata.distributions(name="pip"))  # `find_spec` makes setuptools replace distutils
    program = [sys.executable, "-m", "pip", "install"] if has_pip else ["uv", "pip", "install", "-p", sys.executable]
    return shlex.join([*program, f"{source}[cli,store,service]"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportJob:
    """One report to make: its source, the run, the file to write, and variables for the child process."""

    source: str  # a store, a folder with records of ranks, a log, or the URL of a service
    run: str | None = None  # None: the newest one
    output: Path | None = None  # None: a file in FOLDER
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def path(self) -> Path:
        return (self.output or Path(FOLDER) / f"{file_name(self.run or 'report')}.html").absolute()

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the command `rankscope`."""
        chosen = [] if self.run is None else ["--run", self.run]
        return ["report", self.source, *chosen, "--output", str(self.path), "--summary"]

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the modules of the extras `cli` and `store` that the child process needs. A service has the store."""
        return _OF_COMMANDS if "://" in self.source else (*_OF_COMMANDS, *_OF_STORE)

    @property
    def command(self) -> str:
        return command_line(*self.arguments)


def make_report(job: ReportJob, say: Callable[[str], object], limit_seconds: float = LIMIT_SECONDS) -> Path | None:
    """Make a report in a child process, and return its path; None if there is none, for whatever reason.

    `say` receives the summary, or one line with the reason and the command. Waits at most `limit_seconds`.
    """
    missing = [name for name in job.needed if importlib.util.find_spec(name) is None]
    if missing:
        how = f"{installation(missing)}, then {job.command}"
        say(f"the report needs {missing[0]}, which is not installed here; to make it: {how}")
        return None
    arguments = [*_PROGRAM, str(max(1, round(limit_seconds))), *job.arguments]
    try:
        job.path.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(  # noqa: S603 - the program is our own
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_seconds,
            env={**os.environ, **job.environment},
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"the process did not end within {limit_seconds:g} s"
    except (OSError, ValueError) as error:
        reason = str(error)
    else:
        if done.returncode == 0 and job.path.is_file():
            say(f"the run has ended\n{done.stdout.rstrip()}")
            return job.path
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
    say(f"no report was made: {reason}; to make it: {job.command}")
    return None
