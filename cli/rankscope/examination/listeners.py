"""Which process listens on which TCP port, from /proc; nothing is known where there is no /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_LISTENING: Final = "0A"


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
