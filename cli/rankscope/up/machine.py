"""Select the port of each program, and find the processes that listen on ports and the executables of programs."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rankscope.shell.errors import CommandError

DEFAULT_PORTS: Final = {"service": 9470, "prometheus": 9090, "alertmanager": 9093}
PROC: Final = Path("/proc")
_LISTENING: Final = "0A"


PortChoice = Literal["fixed", "free"]
"""Ways in which `rankscope up` selects ports: default ports or free ports."""


def valid_ports(notes: object) -> dict[str, int]:
    """Return the port of each program in `notes`, the ports that an earlier start saved. Ignore invalid entries."""
    if not isinstance(notes, dict):
        return {}
    return {str(name): port for name, port in notes.items() if type(port) is int and 0 < port < 65536}


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
    previous: dict[str, int],
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

    def is_usable(port: int) -> bool:
        return port != avoid and port not in chosen.values() and is_free(port)

    for name in names:
        usual = DEFAULT_PORTS[name] if ports == "fixed" else None
        wanted = usual or previous.get(name)
        if wanted is not None and is_usable(wanted):
            chosen[name] = wanted
            continue
        fallback = previous.get(name, 0)
        others = (port for port in iter(free_port, None) if port != avoid and port not in chosen.values())
        chosen[name] = fallback if fallback and fallback != wanted and is_usable(fallback) else next(others)
        if wanted is not None:
            notes.append(f"port {wanted} is in use: {name} listens on {chosen[name]} instead")
    return chosen, notes


@dataclass(frozen=True, slots=True)
class Listener:
    """A process that listens on a port. `pid` is None if /proc does not show it, as for a process of another user."""

    pid: int | None = None
    name: str = ""

    def __str__(self) -> str:
        return "a process of another user" if self.pid is None else f"{self.name} (process {self.pid})"


def listeners(proc: Path = PROC) -> dict[int, Listener]:
    """Return the listening process of each TCP port, according to /proc; empty on systems without /proc."""
    ports = dict(_listening_sockets(proc))
    owners = dict(_socket_owners(proc, set(ports)))
    return {port: owners.get(inode, Listener()) for inode, port in ports.items()}


def _listening_sockets(proc: Path) -> Iterator[tuple[str, int]]:
    """Yield the inode and the port of every listening TCP socket."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _LISTENING:
                    yield fields[9], int(fields[1].rpartition(":")[2], 16)


def _socket_owners(proc: Path, inodes: set[str]) -> Iterator[tuple[str, Listener]]:
    for folder in proc.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # process of another user, or it has exited
            for descriptor in folder.iterdir():
                inode = str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")
                if inode in inodes:
                    yield inode, Listener(int(folder.parent.name), (folder.parent / "comm").read_text().strip())


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
