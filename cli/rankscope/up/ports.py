"""Which port each program listens on: its usual one, the one it had before, or any that is free."""

from __future__ import annotations

import contextlib
import enum
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

USUAL: Final = {"service": 9470, "prometheus": 9090, "alertmanager": 9093}
PROC: Final = Path("/proc")
_LISTENING: Final = "0A"


class Ports(enum.StrEnum):
    """How ports are chosen."""

    FIXED = "fixed"
    FREE = "free"


def choose(
    names: Iterable[str],
    ports: Ports,
    former: dict[str, int],
    *,
    is_free: Callable[[int], bool],
    any_free: Callable[[], int],
) -> tuple[dict[str, int], list[str]]:
    """Return the port of each name, and a line for each that could not have the port one would expect.

    What was chosen before is kept where it still can be: trainings that run already look for the service there.
    """
    chosen: dict[str, int] = {}
    notes = []
    for name in names:
        usual = USUAL[name] if ports is Ports.FIXED else None
        wanted = usual or former.get(name)
        if wanted is not None and wanted not in chosen.values() and is_free(wanted):
            chosen[name] = wanted
            continue
        fallback = former.get(name, 0)
        chosen[name] = fallback if fallback and fallback != wanted and is_free(fallback) else _other(chosen, any_free)
        if wanted is not None:
            notes.append(f"port {wanted} is taken: {name} listens on {chosen[name]} instead")
    return chosen, notes


def remembered(notes: object) -> dict[str, int]:
    """Return the ports of the last time; what somebody else wrote there counts for nothing."""
    if not isinstance(notes, dict):
        return {}
    return {str(name): port for name, port in notes.items() if type(port) is int and 0 < port < 65536}


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether nobody listens on `port`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT is free to the programs, too
        with contextlib.suppress(OSError):
            probe.bind((host, port))
            return True
    return False


def any_free(host: str = "127.0.0.1") -> int:
    """Return a port that is free at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _other(chosen: dict[str, int], any_free: Callable[[], int]) -> int:
    while (port := any_free()) in chosen.values():
        pass
    return port


@dataclass(frozen=True, slots=True)
class Listener:
    """A process that listens; without a name it belongs to somebody else, and we may not look."""

    pid: int | None = None
    name: str = ""

    def __str__(self) -> str:
        return "a process of another user" if self.pid is None else f"{self.name} (process {self.pid})"


def listeners(proc: Path = PROC) -> dict[int, Listener]:
    """Return the listener on each port."""
    ports = dict(_listening_sockets(proc))
    owners = dict(_socket_owners(proc, set(ports)))
    return {port: owners.get(inode, Listener()) for inode, port in ports.items()}


def _listening_sockets(proc: Path) -> Iterator[tuple[str, int]]:
    """Yield inode and port of every socket that listens."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _LISTENING:
                    yield fields[9], int(fields[1].rpartition(":")[2], 16)


def _socket_owners(proc: Path, inodes: set[str]) -> Iterator[tuple[str, Listener]]:
    for folder in proc.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # not ours to look at, or gone meanwhile
            for descriptor in folder.iterdir():
                inode = str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")
                if inode in inodes:
                    yield inode, Listener(int(folder.parent.name), (folder.parent / "comm").read_text().strip())
