"""The file of a log: its size and times, its bytes, the rotated files next to it, and the clock of its machine."""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.lines import readable
from rankscope_ingest.watch.address import LogAddress

CHUNK_BYTES: Final = 1 << 20
MAX_ROTATED: Final = 8
"""Maximum number of files next to the log that are compared with the log after a rotation."""
TOLERANCE_SECONDS: Final = 60.0
_ESTIMATED: Final = "time of the last change of the growing log"


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
            return rotated_names(self.path.name, ((entry.name, entry.stat().st_mtime) for entry in self._folder()))
        except OSError:
            return []

    def _folder(self) -> list[Path]:
        return [entry for entry in self.path.parent.iterdir() if entry.name.startswith(self.path.name)]

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
