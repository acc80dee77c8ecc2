"""Prometheus and Alertmanager on this machine: under which names they go, and how one gets them."""

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
class Program:
    """One program that we start but do not bring along."""

    title: str
    names: tuple[str, ...]  # on PATH, the first that is there
    package: str  # of Debian

    def find(self, search: str | None = None) -> Path | None:
        """Return where the program is, looking through `search` or PATH."""
        found = (shutil.which(name, path=search) for name in self.names)
        return next((Path(path) for path in found if path), None)

    @property
    def remedy(self) -> str:
        """Return how one gets it, in one line."""
        return f"{self.title} is not on PATH: apt install {self.package}, or {HOME}"


HOME: Final = "https://prometheus.io/download"
PROMETHEUS: Final = Program("Prometheus", ("prometheus",), "prometheus")
# Debian's name first: theirs is what its package installs, upstream's tarball has the short one.
ALERTMANAGER: Final = Program("Alertmanager", ("prometheus-alertmanager", "alertmanager"), "prometheus-alertmanager")


def required(wanted: Mapping[Program, str]) -> dict[Program, Path]:
    """Return where programs are; each is given with the option to go on without it.

    Raises CommandError with one line about all that are missing: how to get them, and how to go on.
    """
    found = {program: program.find() for program in wanted}
    missing = [program for program, path in found.items() if path is None]
    if missing:
        titles, packages = " and ".join(one.title for one in missing), " ".join(one.package for one in missing)
        raise CommandError(
            f"{titles} {'is' if len(missing) == 1 else 'are'} not on PATH: apt install {packages}, or {HOME}; "
            f"or go on with {wanted[missing[0]]}"
        )
    return {program: path for program, path in found.items() if path is not None}


def version_of(path: Path) -> str | None:
    """Return the version that the program tells, None when it tells none."""
    try:
        # Some builds answer on standard output, some on standard error.
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"version (\d+(?:\.\d+)+)", said.stdout + said.stderr)
    return found[1] if found else None
