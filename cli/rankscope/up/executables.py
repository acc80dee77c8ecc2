"""Find the executables of Prometheus and Alertmanager. If one is missing, name the command that installs it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.base.errors import CommandError


@dataclass(frozen=True, slots=True)
class Executable:
    """An external program that `rankscope up` starts but does not install."""

    title: str
    names: tuple[str, ...]  # names to search on PATH, in this order
    package: str  # name of the Debian package

    def find(self, search: str | None = None) -> Path | None:
        """Return the path of the executable in the folders `search`, or without it on PATH; None if it is not found."""
        found = (shutil.which(name, path=search) for name in self.names)
        return next((Path(path) for path in found if path), None)

    @property
    def remedy(self) -> str:
        """Return one line that states that this program is not on PATH, and the command that installs it."""
        return f"{self.title} is not on PATH: apt install {self.package}, or {DOWNLOAD_URL}"


DOWNLOAD_URL: Final = "https://prometheus.io/download"
PROMETHEUS: Final = Executable("Prometheus", ("prometheus",), "prometheus")
# The Debian package installs the long name, the upstream tarball contains the short one.
ALERTMANAGER: Final = Executable("Alertmanager", ("prometheus-alertmanager", "alertmanager"), "prometheus-alertmanager")


def find_required(wanted: Mapping[Executable, str]) -> dict[Executable, Path]:
    """Return the paths of executables.

    `wanted` maps each program to the option with which `rankscope up` runs without it.

    Raises CommandError if executables are missing. The one-line message names them, their packages and these options.
    """
    found = {executable: executable.find() for executable in wanted}
    missing = [executable for executable, path in found.items() if path is None]
    if missing:
        titles, packages = " and ".join(one.title for one in missing), " ".join(one.package for one in missing)
        raise CommandError(
            f"{titles} {'is' if len(missing) == 1 else 'are'} not on PATH: apt install {packages}, or {DOWNLOAD_URL}; "
            f"or run with {wanted[missing[0]]}"
        )
    return {executable: path for executable, path in found.items() if path is not None}


def executable_version(path: Path) -> str | None:
    """Return the version that `PATH --version` prints; None if the command fails or prints no version within 10 s."""
    try:
        # Some builds print the version on standard output, some on standard error.
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"version (\d+(?:\.\d+)+)", done.stdout + done.stderr)
    return found[1] if found else None
