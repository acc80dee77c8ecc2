"""Read logs by offset: their addresses, their files, and the parts of them that must be imported.

An address is a path on this machine, or `ssh://user@host:port/path`. The file of a log has its size, times and bytes,
the rotated files next to it, and the clock of its machine.

`Follower` finds appended bytes, a rotation and a truncation. A log of this machine is imported where it is. The bytes
of a log of another machine are appended to a copy. The size of the copy is the position in the log, so that a restarted
process continues where the last one ended.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Protocol
from urllib.parse import unquote

from rankscope_ingest.base.errors import ConfigError, IngestError
from rankscope_ingest.importers import KnownImport
from rankscope_ingest.importers.common import log_identity
from rankscope_ingest.importers.common.lines import ZIP, readable
from rankscope_storage.base.escaping import path_segment
from rankscope_storage.base.location import Location, local_folder
from rankscope_storage.files.sorting import own_part

SCHEME: Final = "ssh://"
FOLDER: Final = "_watch"
"""Name of the folder with copies of logs of other machines, which is inside the folder of the store.

Readers of Delta tables, vacuum and retention ignore names that start with an underscore.
"""

_EXAMPLE: Final = "ssh://user@host/data/train.log"
_MACHINE: Final = re.compile(r"(?:\[(?P<ip>[^\[\]]+)\]|(?P<host>(?!-)[^:\[\]]+))(?::(?P<port>\d{1,5}))?")
CHUNK_BYTES: Final = 1 << 20
MAX_ROTATED: Final = 8
"""Maximum number of files next to the log that are compared with the log after a rotation."""
TOLERANCE_SECONDS: Final = 60.0
_ESTIMATED: Final = "time of the last change of the growing log"
PACKED: Final = ".gz"
OLDER: Final = "older"
"""Name of the folder next to the copy of a log that has its older part while this part is imported."""
OVERLAP_BYTES: Final = 512
"""Number of bytes before the new ones that are read again and compared with the end of the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAddress:
    """The address of a log. `host` is None for a log on this machine.

    A path of another machine that is relative belongs to the home folder of the user.
    """

    path: str
    host: str | None = None
    user: str | None = None
    port: int | None = None

    @staticmethod
    def parse(text: str) -> LogAddress:
        """Return the address in `text`. Raises ConfigError, whose message shows the expected form, for a wrong one."""
        if not text.startswith(SCHEME):
            if "://" in text:
                raise ConfigError(f"{text}: a log is a path or an address such as {_EXAMPLE}")
            return LogAddress(path=str(Path(text).expanduser().absolute()))
        place, _, path = text.removeprefix(SCHEME).partition("/")
        user, _, machine = place.rpartition("@")
        if ":" in user:
            raise ConfigError(
                f"{SCHEME}…@{machine}: a password in the address is not accepted, because other users can read it: "
                "use a key, or enter the password when the command asks for it"
            )
        found = _MACHINE.fullmatch(machine)
        if found is None or not 0 < int(found["port"] or 1) < 65536:
            raise ConfigError(f"{text}: {machine!r} is not a host or host:port: write an address such as {_EXAMPLE}")
        path = unquote(path)
        path = path[2:] if path.startswith("~/") else f"/{path}"
        if path.endswith("/") or not path.strip("/"):
            raise ConfigError(f"{text} has no path of a file: write an address such as {_EXAMPLE}")
        port = int(found["port"]) if found["port"] else None
        return LogAddress(path=path, host=found["ip"] or found["host"], user=unquote(user) or None, port=port)

    def __str__(self) -> str:
        """Return the text of the address, as `parse` accepts it."""
        if self.host is None:
            return self.path
        return f"{SCHEME}{self.machine}{self.path if self.path.startswith('/') else f'/~/{self.path}'}"

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return PurePosixPath(self.path).name

    @property
    def machine(self) -> str:
        """Return user, host and port as text, such as `user@host:22`; `this machine` for a log on this machine."""
        if self.host is None:
            return "this machine"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{f'{self.user}@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    def copy_in(self, store: Location) -> Path:
        """Return the path of the copy of a log of another machine. The name of the file does not change."""
        folder = own_part(str(PurePosixPath(self.path).parent))
        return local_folder(store) / FOLDER / path_segment(self.machine) / folder / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineClock:
    """The clock of the machine of a log, as far as it is known."""

    offset_seconds: float = 0.0
    """Time of that machine minus time of this machine."""
    source: str = "clock of this machine"
    """Source of the offset, for messages to the user."""
    zone_seconds: int | None = None
    """Offset of the time zone of that machine from UTC; None if the clock could not be read."""

    def after_change(self, modified: float, now: float) -> MachineClock:
        """Return the clock after a change of the log at `modified`, which was found at `now`, the time of this machine.

        A clock that was read does not change. Otherwise, the offset is estimated: a change is never later than the poll
        that finds it, so that the largest difference is the best.
        """
        if self.zone_seconds is not None:
            return self
        offset = max(modified - now, self.offset_seconds if self.source == _ESTIMATED else -math.inf)
        return MachineClock(offset_seconds=offset, source=_ESTIMATED)

    def moment(self, written: float | None, modified: float) -> float:
        """Return the time at which a row was written, in seconds since 1970 by this clock.

        `written` is the time in the row, which has no time zone, as if it were UTC. `modified` is the time of the last
        change of the log, which is not earlier. If the time zone is unknown, the result is `modified`.
        """
        if written is None or self.zone_seconds is None:
            return modified
        moments = (written - zone for zone in {0, self.zone_seconds})
        return max((moment for moment in moments if moment <= modified + TOLERANCE_SECONDS), default=modified)


class LogUnreadableError(IngestError):
    """The log cannot be read at present. The reader tries again."""


@dataclass(frozen=True, slots=True)
class FileState:
    """Size in bytes and time of the last change of a file, in seconds of the clock of its machine."""

    size: int
    modified: float


class LogFile(Protocol):
    """A log on this or another machine. All methods raise LogUnreadableError if the log cannot be read."""

    address: LogAddress

    async def state(self, name: str | None = None) -> FileState:
        """Return the state of the log, or of the file `name` in the same folder."""

    async def read(self, offset: int, size: int, name: str | None = None) -> bytes:
        """Return `size` bytes from `offset` of the log or of the file `name`; fewer bytes at the end of the file."""

    async def rotated(self) -> list[str]:
        """Return the names of files in the same folder that may be older parts of the log, the newest first."""

    async def clock(self) -> MachineClock | None:
        """Return the clock of the machine of the log, or None if it cannot be read."""


class LocalFile:
    """A log on this machine."""

    def __init__(self, address: LogAddress) -> None:
        self.address = address
        self.path = Path(address.path)

    async def state(self, name: str | None = None) -> FileState:
        """Return the state of the log, or of the file `name` in the same folder."""
        try:
            found = await asyncio.to_thread((self.path if name is None else self.path.with_name(name)).stat)
        except OSError as error:
            raise LogUnreadableError(f"{self.path}: {error.strerror or error}") from error
        return FileState(found.st_size, found.st_mtime)

    async def read(self, offset: int, size: int, name: str | None = None) -> bytes:
        """Return `size` bytes from `offset` of the log or of the file `name`."""
        return await asyncio.to_thread(self._read, offset, size, name)

    def _read(self, offset: int, size: int, name: str | None) -> bytes:
        path = self.path if name is None else self.path.with_name(name)
        with readable(path), path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    async def rotated(self) -> list[str]:
        """Return the names of files in the same folder that may be older parts of the log, the newest first."""
        try:
            entries = (entry for entry in self.path.parent.iterdir() if entry.name.startswith(self.path.name))
            return rotated_names(self.path.name, ((entry.name, entry.stat().st_mtime) for entry in entries))
        except OSError:
            return []

    async def clock(self) -> MachineClock | None:
        """Return the clock of this machine."""
        return MachineClock(zone_seconds=time.localtime().tm_gmtoff)


async def unpack(file: LogFile, name: str, target: Path) -> bool:
    """Write the content of `name`, a file in gzip format next to the log, to `target`.

    Return False if the file is incomplete: the program that compresses it may still run.
    """
    size = (await file.state(name)).size
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as unpacked:
        for begin in range(0, size, CHUNK_BYTES):
            data = await file.read(begin, CHUNK_BYTES, name)
            try:
                unpacked.write(await asyncio.to_thread(unpacker.decompress, data))
            except zlib.error:
                return False
    return unpacker.eof


def rotated_names(name: str, entries: Iterable[tuple[str, float]]) -> list[str]:
    """Return those names in `entries` that begin with the name of the log, the last changed first.

    `entries` has the names of the files in the folder, and the times of their last change. The log itself is omitted.
    """
    others = [entry for entry in entries if entry[0].startswith(name) and entry[0] != name]
    return [other for other, _ in sorted(others, key=lambda entry: -entry[1])][:MAX_ROTATED]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A file to import, which is the log or an older part of it."""

    path: Path
    state: FileState
    """The state of the log itself, by the clock of its machine."""
    has_grown: bool
    note: str | None = None
    """A message to the user about a rotation or truncation of the log."""
    is_old: bool = False
    """True for the older part of a rotated log."""


class Follower:
    """Returns the parts of one log that must be imported."""

    def __init__(self, file: LogFile, copy: Path) -> None:
        """`copy` is the path of the copy of a log of another machine, and of the content of a compressed older part."""
        self._file = file
        self._copy = copy
        self._is_local = file.address.host is None
        self.path = Path(file.address.path) if self._is_local else copy
        self._last: FileState | None = None
        self._marks: Sequence[log_identity.Mark] = ()  # of a log that was not imported yet

    async def parts(self, known: Sequence[KnownImport]) -> AsyncIterator[Part]:
        """Yield the older part of a log that was rotated since the last call, and then the log.

        `known` has the imported logs of the run. The caller imports each part before it requests the next one. Raises
        LogUnreadableError if the log cannot be read.
        """
        state = await self._file.state()
        has_grown, note, path = state != self._last, None, log_identity.stored_path(self.path)
        stored = next((log.marks for log in reversed(known) if log.path == path and log.marks), ())
        marks = stored or self._marks
        if has_grown and marks and not await self._begins(marks):
            note = f"the log was {'truncated' if state.size < marks[-1][0] else 'replaced'}"
            name, older = await self._older(marks)
            shown = self.path.with_name(name) if name and self._is_local else name
            note += f"; its older part is {shown}" if shown else "; no older part was found next to it"
            if older is not None:
                yield Part(path=older, state=state, has_grown=True, note=note, is_old=True)
                note = None
                if older.is_relative_to(self._copy.parent):
                    older.unlink(missing_ok=True)
        if not self._is_local:
            await self._append(self.path, state.size)
        if has_grown:
            self._marks = () if stored else log_identity.marks(self.path, state.size)
        yield Part(path=self.path, state=state, has_grown=has_grown, note=note)
        self._last = state

    async def _begins(self, marks: Sequence[log_identity.Mark], name: str | None = None) -> bool:
        """Return whether the log, or the file `name` next to it, begins like the imported log with these `marks`."""
        available = (await self._file.state(name)).size
        size, digest = next((mark for mark in reversed(marks) if mark[0] <= available), (0, ""))
        count = min(size, log_identity.PROBE_BYTES)
        begin = await self._file.read(0, count, name)
        end = await self._file.read(size - count, count, name)
        # The marks of an archive, which does not grow, are those of its content.
        return (name is None and begin.startswith(ZIP)) or log_identity.digest_of(size, begin, end) == digest

    async def _older(self, marks: Sequence[log_identity.Mark]) -> tuple[str | None, Path | None]:
        """Return the name of the older part of the log, and the file to import; the incomplete copy without a name."""
        for name in await self._file.rotated():
            older = self._copy.parent / OLDER / name.removesuffix(PACKED)
            if name.endswith(PACKED):
                if await unpack(self._file, name, older) and log_identity.has_equal_beginning(older, marks[-1:]):
                    self._copy.unlink(missing_ok=True)
                    return name, older
                older.unlink()
            elif await self._begins(marks[-1:], name):
                if self._is_local:
                    return name, self.path.with_name(name)
                older.parent.mkdir(parents=True, exist_ok=True)
                if self._copy.is_file():
                    self._copy.replace(older)
                await self._append(older, (await self._file.state(name)).size, name)
                return name, older
        return None, self._copy if not self._is_local and self._copy.is_file() else None

    async def _append(self, path: Path, end: int, name: str | None = None) -> None:
        """Append the bytes up to `end` of the log, or of the file `name` next to it, to the copy `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as copy:
            begin = copy.tell()
            if begin > end:  # nothing of the log was imported
                begin = copy.truncate(0)
            while begin < end:
                overlap = min(OVERLAP_BYTES, begin)
                data = await self._file.read(begin - overlap, overlap + min(CHUNK_BYTES, end - begin), name)
                copy.seek(begin - overlap)
                if data[:overlap] != copy.read(overlap):
                    copy.truncate(0)
                    raise LogUnreadableError(f"{self._file.address} was replaced while it was read")
                if len(data) == overlap:
                    return
                begin += copy.write(data[overlap:])
                copy.flush()
