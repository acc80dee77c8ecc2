"""Everything an examination asks of the world, in one place, so that a test can be the world."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rankscope.base.http_client import Answer, Trust, get
from rankscope.up.executables import Program, version_of
from rankscope.up.ports import Listener, listeners


class Surroundings(Protocol):
    """The machine and its network."""

    def python(self) -> str:
        """Return the version of Python."""
        ...

    def installed(self, package: str) -> str | None:
        """Return the version of a Python package, None where it is not installed."""
        ...

    def wanted(self) -> Mapping[str, str]:
        """Return the lowest version of each package that Rankscope asks for."""
        ...

    def program(self, program: Program) -> str | None:
        """Return path and version of a program, None where it is not on PATH."""
        ...

    def get(self, url: str, token: str | None = None) -> Answer:
        """Return the answer to a GET. Raises UnreachableError."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Return the free space where `path` lies."""
        ...

    def check_writable(self, folder: Path) -> None:
        """Raise OSError when no file can be made in `folder`; leaves no trace."""
        ...

    def listener(self, port: int) -> Listener | None:
        """Return who listens on a port of this machine."""
        ...

    def now(self) -> float:
        """Return the time, in seconds since the epoch."""
        ...


class Machine:
    """The real one."""

    def __init__(self, trust: Trust | None = None) -> None:
        self._trust = trust

    def python(self) -> str:
        """Return the version of Python."""
        return platform.python_version()

    def installed(self, package: str) -> str | None:
        """Return the version of a package, without importing it."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def wanted(self) -> Mapping[str, str]:
        """Return what our own metadata asks for."""
        asked = importlib.metadata.requires("rankscope") or []
        pairs = (requirement.partition(";")[0].replace("==", ">=").partition(">=") for requirement in asked)
        return {name.strip().replace("_", "-"): least.strip() for name, sign, least in pairs if sign}

    def program(self, program: Program) -> str | None:
        """Return where it is and which version."""
        path = program.find()
        return None if path is None else f"{version_of(path) or 'of unknown version'} ({path})"

    def get(self, url: str, token: str | None = None) -> Answer:
        """Ask over HTTP."""
        return get(url, token=token, trust=self._trust)

    def free_bytes(self, path: Path) -> int:
        """Ask the file system of the nearest folder that exists."""
        return shutil.disk_usage(next(part for part in (path, *path.absolute().parents) if part.exists())).free

    def check_writable(self, folder: Path) -> None:
        """Make a file without a name, which is gone when it is closed."""
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")

    def listener(self, port: int) -> Listener | None:
        """Look through /proc."""
        return listeners().get(port)

    def now(self) -> float:
        """Return the time of this machine."""
        return time.time()
