"""All access of `rankscope doctor` to the machine and the network, behind one class that tests replace."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rankscope.access.service import ClientTls, Response, request
from rankscope.up.machine import Executable, Listener, executable_version, listeners


class Environment:
    """Everything that the checks of `rankscope doctor` read from the machine and the network. Tests replace it."""

    def __init__(self, client_tls: ClientTls | None = None) -> None:
        self._trust = client_tls

    def python(self) -> str:
        """Return the version of Python."""
        return platform.python_version()

    def installed_version(self, package: str) -> str | None:
        """Return the version of a Python package from its metadata, without importing the package.

        None if it is not installed.
        """
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def required_versions(self) -> Mapping[str, str]:
        """Return the lowest supported version of each required package, from the package metadata of Rankscope."""
        asked = importlib.metadata.requires("rankscope") or []
        pairs = (requirement.partition(";")[0].replace("==", ">=").partition(">=") for requirement in asked)
        return {name.strip().replace("_", "-"): least.strip() for name, sign, least in pairs if sign}

    def executable(self, executable: Executable) -> str | None:
        """Return the version that the executable prints, and its path; None if it is not on PATH."""
        path = executable.find()
        return None if path is None else f"{executable_version(path) or 'of unknown version'} ({path})"

    def get(self, url: str, token: str | None = None) -> Response:
        """Send GET `url` and return the response. Raises UnreachableError if no response was received."""
        return request(url, token=token, client_tls=self._trust)

    def free_bytes(self, path: Path) -> int:
        """Return the number of free bytes, measured at the nearest parent folder of `path` that exists."""
        return shutil.disk_usage(next(part for part in (path, *path.absolute().parents) if part.exists())).free

    def check_writable(self, folder: Path) -> None:
        """Create a temporary file without a name in `folder`; it disappears when it is closed.

        Raises OSError if no file can be created in `folder`.
        """
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")

    def listener(self, port: int) -> Listener | None:
        """Return the process that listens on the port, according to /proc; None if the port is free."""
        return listeners().get(port)

    def now(self) -> float:
        """Return the system time in seconds since the epoch."""
        return time.time()
