"""The ranks of one launch on one host find each other: one socket each in a folder that only their user can enter.

No port, token or certificate is needed between them, and a rank that is gone is one whose socket nobody answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import selectors
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope_contract.model.identity import Identity
from rankscope_exporter.base.errors import ServeError
from rankscope_exporter.process.threads import CpuMeter, OwnThread

log = logging.getLogger(__name__)

GATHER_SECONDS: Final = 3.0
"""A live rank that does not show its page within this time is left out: Prometheus itself waits ten seconds."""
_ANSWER_SECONDS: Final = 10.0
_LONGEST_PATH: Final = 107  # what a socket's address holds, in bytes
_SIZE: Final = struct.Struct(">Q")  # goes before the page, so that one cut short is not taken for whole
_CHUNK: Final = 1 << 20
_PLEASE: Final = b"?"


@dataclass(frozen=True, slots=True)
class Gathered:
    """The pages of the neighbours that answered, by rank, and how many live ones did not."""

    pages: Sequence[tuple[int, bytes]]
    silent: int


class NodePeers:
    """This rank's socket, and the way to the others'. No thread and no file before `start()`."""

    def __init__(
        self,
        identity: Identity,
        page: Callable[[], bytes],
        *,
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
    ) -> None:
        self._rank = identity.rank
        self._page = page
        self._on_fault = on_fault
        self._meter = meter
        self._launch = _short(f"{identity.run}\0{identity.launch_id}")
        self._name = f"{self._launch}-{identity.rank}-{_short(identity.incarnation)}"
        self._folder = Path(tempfile.gettempdir()) / f"rankscope-{os.geteuid()}"
        self._socket: socket.socket | None = None
        self.node = ""

    def start(self) -> None:
        """Make this rank's page available to the others. Raises ServeError when that cannot be."""
        try:
            self.node = _private_folder(self._folder)
            self._sweep()
            self._socket = _listening(self._folder / self._name)
        except OSError as error:
            raise ServeError(f"node_page: {self._folder}: {error.strerror or error}") from error
        OwnThread(target=self._serve, args=(self._socket,), name="rankscope-node").start()

    def gather(self, seconds: float = GATHER_SECONDS) -> Gathered:
        """Return the pages of all other ranks of this launch on this host."""
        others = [path for path in self._sockets(self._launch) if path.name != self._name]
        calls = {path: connection for path in others if (connection := _call(path, _PLEASE)) is not None}
        bodies = _read_all(calls, time.monotonic() + seconds)
        pages = [(_rank_of(path), page) for path, body in bodies.items() if (page := _whole(body)) is not None]
        return Gathered(sorted(pages, key=lambda item: item[0]), len(calls) - len(pages))

    def close(self) -> None:
        """Leave the node's page."""
        if self._socket is None:
            return
        (self._folder / self._name).unlink(missing_ok=True)
        _hang_up(self._socket)  # wakes the accepting thread

    def abandon(self) -> None:
        """In a forked child: close the inherited socket and leave the file to the parent."""
        if self._socket is not None:
            os.close(self._socket.detach())

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                listening.close()
                return
            with connection:
                self._show(connection)
            self._meter.lap("node")

    def _show(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_ANSWER_SECONDS)
            if connection.recv(1) != _PLEASE:  # somebody only looked whether anybody lives here
                return
            page = self._page()
            connection.sendall(_SIZE.pack(len(page)))
            connection.sendall(page)
        except OSError:
            log.debug("a neighbour left before it had the page")
        except Exception as error:  # noqa: BLE001 - the thread's edge: told to the façade, and the next one is served
            self._on_fault("node page", error)

    def _sockets(self, launch: str = "") -> list[Path]:
        try:
            found = list(self._folder.iterdir())
        except FileNotFoundError:  # somebody tidied up the temporary folder
            return []
        return sorted(path for path in found if path.name.startswith(launch) and "~" not in path.name)

    def _sweep(self) -> None:
        """Take away what killed processes of any launch have left."""
        for path in self._sockets():
            connection = _call(path)
            if connection is not None:
                connection.close()


def _private_folder(folder: Path) -> str:
    """Make the folder, or see that it is ours alone; return what tells it from that of another container."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ServeError(
            f"node_page: {folder} must be a folder that only this user can enter: remove it, or set TMPDIR to a folder "
            "of your own"
        )
    return f"{status.st_dev:x}.{status.st_ino:x}"


def _listening(path: Path) -> socket.socket:
    """Return a listening socket at `path`, which appears only once it answers."""
    begun = path.with_name(f"{path.name}~")
    if len(os.fsencode(begun)) > _LONGEST_PATH:
        raise ServeError(f"node_page: {begun} is too long for a socket: set TMPDIR to a shorter folder")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(begun))
        listening.listen()
        begun.rename(path)
    except OSError:
        listening.close()
        raise
    return listening


def _call(path: Path, word: bytes = b"") -> socket.socket | None:
    """Return a connection on which `word` was said; None when nobody lives there, and then the file goes too."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no file descriptor is left: the neighbours that were called already are shown
        log.debug("%s cannot be called: %s", path, error)
        return None
    connection.setblocking(False)
    try:
        connection.connect(str(path))
        connection.send(word)
    except BlockingIOError:  # too many wait there already: it stays silent
        return connection
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        with contextlib.suppress(OSError):  # swept another time
            path.unlink(missing_ok=True)
        return None
    except OSError as error:
        log.debug("%s cannot be called: %s", path, error)
        connection.close()
        return None
    return connection


def _read_all(calls: dict[Path, socket.socket], deadline: float) -> dict[Path, bytearray]:
    """Read what everybody sends until all hung up or the time is over; the ranks make their pages side by side."""
    bodies = {path: bytearray() for path in calls}
    with selectors.DefaultSelector() as waiting:
        for path, connection in calls.items():
            waiting.register(connection, selectors.EVENT_READ, path)
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                chunk = _received(calls[key.data])
                bodies[key.data] += chunk or b""
                if chunk == b"":
                    waiting.unregister(key.fileobj)
    for connection in calls.values():
        connection.close()
    return bodies


def _received(connection: socket.socket) -> bytes | None:
    """Return what came, nothing at the end; None when nothing is there yet after all."""
    try:
        return connection.recv(_CHUNK)
    except BlockingIOError:
        return None
    except OSError:  # reset: what came so far is not whole, and is judged by its size
        return b""


def _whole(body: bytearray) -> bytes | None:
    if len(body) < _SIZE.size or _SIZE.unpack_from(body)[0] != len(body) - _SIZE.size:
        return None
    return bytes(memoryview(body)[_SIZE.size :])


def _rank_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def _hang_up(listening: socket.socket) -> None:
    try:
        listening.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("the node's socket was already closed")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
