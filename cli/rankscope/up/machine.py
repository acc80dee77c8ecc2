"""The parts of this machine that `rankscope up` uses: its state folder, ports, and the executables of programs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import psutil

from rankscope.shell.errors import CommandError
from rankscope_contract.wire.spool import write_whole

if TYPE_CHECKING:
    from rankscope_storage.base.location import Location

DEFAULT_FOLDER: Final = "rankscope-live"
_NOTES: Final = "live.json"
_LOCK: Final = "lock"


@dataclass(frozen=True, slots=True)
class StateDir:
    """A state folder of `rankscope up`: generated configuration, data of Prometheus and Alertmanager, logs and ports.

    Only the owner can read its subfolders, because they contain tokens and notification addresses. A lock file ensures
    that only one `rankscope up` process uses the folder at a time.
    """

    path: Path

    def __post_init__(self) -> None:
        # Prometheus resolves relative paths against the folder of its configuration file.
        object.__setattr__(self, "path", self.path.absolute())

    @classmethod
    def next_to(cls, store: str | Location) -> StateDir:
        """Return the default state folder, which is next to the store."""
        from rankscope_storage.base.location import local_folder

        return cls(local_folder(store).parent / DEFAULT_FOLDER)

    def log(self, name: str) -> Path:
        """Return the path of the log file of a program."""
        return self.path / "logs" / f"{name}.log"

    def data(self, name: str) -> Path:
        """Return the path of the data folder of a program."""
        return self.path / "data" / name

    def config(self, name: str) -> Path:
        """Return the path of a generated configuration file."""
        return self.path / "config" / name

    def create(self) -> None:
        """Create the folder, with subfolders that only the owner can read.

        Raises CommandError if the folder cannot be created, or if it contains files but no lock file of `rankscope up`.
        """
        try:
            if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / _LOCK).exists():
                raise CommandError(f"{self.path} was not created by rankscope up: name an empty folder with --state")
            self.path.mkdir(parents=True, exist_ok=True)
            for part in ("logs", "data", "config"):
                (self.path / part).mkdir(mode=0o700, exist_ok=True)
            (self.path / _LOCK).touch(0o600)
        except OSError as error:
            raise CommandError(
                f"cannot write to {self.path}: {error.strerror}; name another folder with --state"
            ) from error

    def write(self, files: Mapping[str, str]) -> None:
        """Write generated configuration files atomically; only the owner can read them."""
        for name, text in files.items():
            write_whole(self.config(name), text)

    def save_notes(self, notes: Mapping[str, Any]) -> None:
        """Save ports and URLs for the next start and for `rankscope doctor`."""
        write_whole(self.path / _NOTES, json.dumps(notes, indent=2) + "\n")

    def load_notes(self) -> dict[str, Any]:
        """Return the saved ports and URLs; an empty dict if the file is missing, or if any of them is invalid."""
        try:
            notes = json.loads((self.path / _NOTES).read_text(encoding="utf-8"))
            are_ports = all(type(port) is int and 0 < port < 65536 for port in notes.get("ports", {}).values())
            are_urls = all(isinstance(url, str) for url in notes.get("urls", {}).values())
        except (OSError, ValueError, AttributeError):
            return {}
        return notes if are_ports and are_urls else {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this folder in the context.

        Raises CommandError if another process holds the lock; the message names that process.
        """
        with (self.path / _LOCK).open("a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                holder = lock.read().strip() or "another process"
                raise CommandError(
                    f"{self.path} is in use by {holder}: stop it, or name another folder with --state"
                ) from error
            lock.truncate(0)
            lock.write(f"process {os.getpid()}")
            lock.flush()
            yield


DEFAULT_PORTS: Final = {"service": 9470, "prometheus": 9090, "alertmanager": 9093}
PortChoice = Literal["fixed", "free"]
"""Ways in which `rankscope up` selects ports: default ports or free ports."""


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a program can listen on `port` of the address `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the programs can use a port in TIME_WAIT, too
        with contextlib.suppress(OSError):
            probe.bind((host, port))
            return True
    return False


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now. Another process can take the port before the caller uses it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def choose(
    names: Iterable[str],
    ports: PortChoice,
    previous: Mapping[str, int],
    *,
    avoid: int | None = None,
    is_free: Callable[[int], bool] = is_free,
    free_port: Callable[[], int] = free_port,
) -> tuple[dict[str, int], list[str]]:
    """Return the port of each program in `names`, and a line for each program that could not get its preferred port.

    With `fixed`, the preferred port is the default port, and the second choice is the port of the previous
    start, because running trainings still use this address of the service. Otherwise the preferred port is that of the
    previous start. If no such port is free, any free port is chosen. The port `avoid` is never chosen.
    """
    chosen: dict[str, int] = {}
    notes = []
    for name in names:
        preferred = [DEFAULT_PORTS[name]] if ports == "fixed" else []
        preferred += [previous[name]] if name in previous else []
        taken = {avoid, *chosen.values()}
        candidates = chain(preferred, iter(free_port, None))
        chosen[name] = next(port for port in candidates if port not in taken and is_free(port))
        if preferred and chosen[name] != preferred[0]:
            notes.append(f"port {preferred[0]} is in use: {name} listens on {chosen[name]} instead")
    return chosen, notes


def listeners() -> dict[int, str]:
    """Return the process that listens on each TCP port, such as "python3 (process 12)".

    The result is empty if the system does not list the connections of other processes.
    """
    try:
        sockets = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    except psutil.AccessDenied:
        return {}
    return {one.laddr.port: _process_text(one.pid) for one in sockets}


def _process_text(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    with contextlib.suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} (process {pid})"
    return f"process {pid}"


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
