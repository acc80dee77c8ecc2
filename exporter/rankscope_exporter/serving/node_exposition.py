"""Render one metrics page for all ranks of a launch on one host. The ranks exchange their pages over Unix sockets.

Each rank has one socket in a folder that only its user can enter, so no port, token or certificate is needed. A socket
that refuses connections belongs to a dead rank. Pages are merged as blocks of bytes; no line is parsed.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankscope_contract.metrics.catalogue import NODE_RANKS
from rankscope_contract.model.identity import Identity
from rankscope_contract.security.escaping import label_value
from rankscope_exporter.base.errors import ServeError
from rankscope_exporter.process.threads import CpuMeter, OwnThread
from rankscope_exporter.serving.config import hang_up

log = logging.getLogger(__name__)

GATHER_SECONDS: Final = 3.0
"""Longest wait in seconds for the metrics pages of other ranks; slower ranks are left out.

Prometheus waits 10 s by default.
"""
_ANSWER_SECONDS: Final = 10.0
_LONGEST_PATH: Final = 107  # bytes of a Unix socket address
_SIZE: Final = struct.Struct(">Q")  # length of the page, sent before it, to detect a truncated page
_CHUNK: Final = 1 << 20
_REQUEST: Final = b"?"


@dataclass(frozen=True, slots=True)
class Gathered:
    """Metrics pages of other ranks that responded, as (rank, page), and the number of live ranks without a response."""

    pages: Sequence[tuple[int, bytes]]
    silent: int


class NodePeers:
    """Serves the metrics page of this rank on a Unix socket, and requests the pages of the other ranks.

    It creates no thread and no file before `start()`.
    """

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
        """Identifier that is equal on all ranks that share one page; empty before `start()`."""

    def start(self) -> None:
        """Listen for requests of other ranks, and delete the socket files of dead processes.

        Raises ServeError if the folder cannot be used.
        """
        try:
            self.node = _private_folder(self._folder)
            for path in self._sockets():  # of any launch
                connection = _connect(path)
                if connection is not None:
                    connection.close()
            self._socket = _listening(self._folder / self._name)
        except OSError as error:
            raise ServeError(f"node_page: cannot use the folder {self._folder}: {error.strerror or error}") from error
        thread = OwnThread(target=self._serve, args=(self._socket,), name="rankscope-node", on_fault=self._on_fault)
        thread.start()

    def gather(self, seconds: float = GATHER_SECONDS) -> Gathered:
        """Return the metrics pages of all other ranks of this launch on this host, sorted by rank.

        Ranks that do not respond within `seconds` are counted.
        """
        others = [path for path in self._sockets(self._launch) if path.name != self._name]
        calls = {path: connection for path in others if (connection := _connect(path, _REQUEST)) is not None}
        bodies = _read_all(calls, time.monotonic() + seconds)
        pages = [
            (int(path.name.split("-")[1]), bytes(memoryview(body)[_SIZE.size :]))
            for path, body in bodies.items()
            if _is_complete(body)
        ]
        return Gathered(sorted(pages, key=lambda page: page[0]), len(calls) - len(pages))

    def close(self) -> None:
        """Delete the socket file of this rank and stop the thread that answers on the socket."""
        if self._socket is None:
            return
        (self._folder / self._name).unlink(missing_ok=True)
        hang_up(self._socket)  # wakes the accepting thread

    def abandon(self) -> None:
        """Close the inherited socket in a forked child.

        The socket file remains, because it belongs to the parent process.
        """
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
                self._answer(connection)
            self._meter.lap("node")

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_ANSWER_SECONDS)
            if connection.recv(1) != _REQUEST:  # a rank that only checks whether this process is alive
                return
            page = self._page()
            connection.sendall(_SIZE.pack(len(page)))
            connection.sendall(page)
        except OSError:
            log.debug("another rank disconnected before it received the page")
        except Exception as error:  # noqa: BLE001 - top of the thread: reported, and the next request is served
            self._on_fault("node page", error)

    def _sockets(self, launch: str = "") -> list[Path]:
        try:
            found = list(self._folder.iterdir())
        except FileNotFoundError:  # for example after a clean-up of the temporary folder
            return []
        return sorted(path for path in found if path.name.startswith(launch) and "~" not in path.name)


def _private_folder(folder: Path) -> str:
    """Create the folder of the Unix sockets, or check that only this user can enter it.

    Return an id of the folder that differs between containers.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ServeError(
            f"node_page: {folder} must be a folder that only this user can enter: remove it, or set TMPDIR to a "
            "private folder"
        )
    return f"{status.st_dev:x}.{status.st_ino:x}"


def _listening(path: Path) -> socket.socket:
    """Return a listening socket at `path`. The file gets this name only after the socket accepts connections."""
    temporary = path.with_name(f"{path.name}~")
    if len(os.fsencode(temporary)) > _LONGEST_PATH:
        raise ServeError(f"node_page: {temporary} is too long for a socket: set TMPDIR to a shorter folder")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(temporary))
        listening.listen()
        temporary.rename(path)
    except OSError:
        listening.close()
        raise
    return listening


def _connect(path: Path, request: bytes = b"") -> socket.socket | None:
    """Connect to the Unix socket at `path`, send `request` and return the connection; None if that fails.

    If no process listens on the socket, its file is deleted.
    """
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no file descriptor is left; the page shows the ranks that are already connected
        log.debug("cannot connect to %s: %s", path, error)
        return None
    connection.setblocking(False)
    try:
        connection.connect(str(path))
        connection.send(request)
    except BlockingIOError:  # its queue of connections is full, so it counts as a rank that does not respond
        return connection
    except OSError as error:
        log.debug("cannot connect to %s: %s", path, error)
        connection.close()
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            with contextlib.suppress(OSError):  # deleted by a later call
                path.unlink(missing_ok=True)
        return None
    return connection


def _read_all(calls: dict[Path, socket.socket], deadline: float) -> dict[Path, bytearray]:
    """Return the bytes that each connection received before it closed or the deadline passed.

    All connections are read in parallel.
    """
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
    """Return bytes that `connection` has received; b"" at the end of the connection, None if no data has arrived."""
    try:
        return connection.recv(_CHUNK)
    except BlockingIOError:
        return None
    except OSError:  # connection reset: the length of the page shows that it is incomplete
        return b""


def _is_complete(body: bytearray) -> bool:
    return len(body) >= _SIZE.size and _SIZE.unpack_from(body)[0] == len(body) - _SIZE.size


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


_HELP: Final = b"# HELP "
_NEXT: Final = b"\n# HELP "
"""Bytes that mark the start of every metric family on a page except the first one.

Names and labels cannot contain these bytes, because their line breaks are escaped.
"""
_TYPE: Final = b"# TYPE "


class NodeExposition:
    """Renders the metrics page of all ranks on this host.

    Each rank can render this page, so the page does not depend on one particular rank.
    """

    def __init__(
        self,
        identity: Identity,
        own: Callable[[], Sequence[Any]],
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
    ) -> None:
        self._identity = identity
        self._own = own
        self._on_fault = on_fault
        self.peers = NodePeers(identity, lambda: joined(own()), on_fault=on_fault, meter=meter)

    def pieces(self) -> list[Any]:
        """Return the metrics page of all ranks that respond, as byte buffers in ascending order of the rank."""
        identity = self._identity
        try:
            gathered = self.peers.gather()
        except Exception as error:  # noqa: BLE001 - the page of this rank is shown without the others
            self._on_fault("reading the pages of the other ranks", error)
            gathered = Gathered((), 0)
        # One page per rank: a process of an earlier launch with the same id may still exist.
        pages = {**dict(gathered.pages), identity.rank: joined(self._own())}
        return [
            rank_counts(identity.run, identity.host, shown=len(pages), silent=gathered.silent),
            *merged(pages[rank] for rank in sorted(pages)),
        ]


@dataclass(slots=True)
class _Family:
    head: memoryview
    samples: list[memoryview] = field(default_factory=list)


def merged(pages: Iterable[bytes]) -> list[memoryview]:
    """Merge several metrics pages into one and return its byte buffers.

    All samples of a family follow one HELP and one TYPE line.
    """
    families: dict[bytes, _Family] = {}
    for page in pages:
        for name, head, samples in _families(page):
            families.setdefault(name, _Family(head)).samples.append(samples)
    return [piece for family in families.values() for piece in (family.head, *family.samples)]


def rank_counts(run: str, host: str, *, shown: int, silent: int) -> bytes:
    """Return the lines of the metric that counts ranks.

    It has two samples: the ranks on the page, and the live ranks that did not respond in time.
    """
    labels = f'run="{label_value(run)}",host="{label_value(host)}"'
    lines = "".join(
        f'{NODE_RANKS.name}{{{labels},state="{state}"}} {count}\n'
        for state, count in (("shown", shown), ("silent", silent))
    )
    head = f"# HELP {NODE_RANKS.name} {NODE_RANKS.help}\n# TYPE {NODE_RANKS.name} {NODE_RANKS.type}\n"
    return (head + lines).encode("utf-8", "replace")


def joined(pieces: Iterable[Any]) -> bytes:
    """Return the byte buffers of a metrics page, joined to one bytes object."""
    return b"".join(memoryview(piece).cast("B") for piece in pieces)


def _families(page: bytes) -> Iterator[tuple[bytes, memoryview, memoryview]]:
    """Yield the name, the HELP and TYPE lines, and the sample lines of each metric family on `page`.

    Text of the page before its first HELP line is left out.
    """
    view = memoryview(page)
    start = 0 if page.startswith(_HELP) else page.find(_NEXT) + 1 or len(page)
    while start < len(page):
        end = page.find(_NEXT, start) + 1 or len(page)
        samples = page.find(b"\n", start, end) + 1
        if page.startswith(_TYPE, samples):
            samples = page.find(b"\n", samples, end) + 1
        name = page[start + len(_HELP) : page.find(b" ", start + len(_HELP), end)]
        yield name, view[start:samples], view[samples:end]
        start = end
