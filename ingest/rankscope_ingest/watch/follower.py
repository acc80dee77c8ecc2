"""Follow a log by offset: find appended bytes, a rotation and a truncation, and return the file to import.

A log of this machine is imported where it is. The bytes of a log of another machine are appended to a copy. The size of
the copy is the position in the log, so that a restarted process continues where the last one ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rankscope_ingest.importers import KnownImport
from rankscope_ingest.importers.common.log_identity import has_equal_beginning, stored_path
from rankscope_ingest.watch.files import CHUNK_BYTES, FileState, LocalFile, LogFile, LogUnreadableError, unpack

PACKED: Final = ".gz"
COMPARED_BYTES: Final = 512
"""Number of bytes at the beginning and at the end of the copy that are compared with the log.

Lines of a log contain steps and times, so that two logs are not equal at both places.
"""


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


class Follower(Protocol):
    """Returns the parts of one log that must be imported."""

    path: Path
    """The file that is imported: the log itself, or its copy."""

    def parts(self, known: Sequence[KnownImport]) -> AsyncIterator[Part]:
        """Yield the older part of a log that was rotated since the last call, and then the log.

        `known` has the imported logs of the run. The caller imports each part before it requests the next one. Raises
        LogUnreadableError if the log cannot be read.
        """


class LocalFollower:
    """Follows a log of this machine."""

    def __init__(self, file: LocalFile, unpacked: Path) -> None:
        """`unpacked` is the path for the content of a compressed older part."""
        self._file = file
        self._unpacked = unpacked
        self.path = file.path
        self._last: FileState | None = None

    async def parts(self, known: Sequence[KnownImport]) -> AsyncIterator[Part]:
        """Yield the older part of a log that was rotated since the last call, and then the log."""
        state = await self._file.state()
        has_grown, note = state != self._last, None
        last = next((log for log in reversed(known) if log.path == stored_path(self.path) and log.marks), None)
        if has_grown and last is not None and not has_equal_beginning(self.path, last.marks):
            size = last.marks[-1][0]
            note = f"the log was {'truncated' if state.size < size else 'replaced'}"
            if (old := await self._rotated(last)) is not None:
                path, name = old
                yield Part(
                    path=path, state=state, has_grown=True, note=f"{note}; its older part is {name}", is_old=True
                )
                self._unpacked.unlink(missing_ok=True)
                note = None
        elif self._last is not None and state.size < self._last.size:
            note = "the log was truncated"
        yield Part(path=self.path, state=state, has_grown=has_grown, note=note)
        self._last = state

    async def _rotated(self, last: KnownImport) -> tuple[Path, Path] | None:
        """Return the file with the older part of the log, and its own path if it is compressed."""
        for name in await self._file.rotated():
            path = own = self.path.with_name(name)
            if name.endswith(PACKED):
                path = self._unpacked
                if not await unpack(self._file, name, path):
                    continue
            is_whole = path.is_file() and path.stat().st_size >= last.marks[-1][0]
            if is_whole and has_equal_beginning(path, last.marks):
                return path, own
        self._unpacked.unlink(missing_ok=True)
        return None


class RemoteFollower:
    """Follows a log of another machine in the copy `path`."""

    def __init__(self, file: LogFile, path: Path) -> None:
        self._file = file
        self.path = path
        self._last: FileState | None = None

    async def parts(self, known: Sequence[KnownImport]) -> AsyncIterator[Part]:  # noqa: ARG002 - the copy is enough
        """Yield the older part of a log that was rotated since the last call, and then the log."""
        state = await self._file.state()
        if state == self._last and state.size == self._size():
            yield Part(path=self.path, state=state, has_grown=False)
            return
        note = None
        if self._size() and not await self._continues(state):
            note = f"the log was {'truncated' if state.size < self._size() else 'replaced'}"
            name = await self._complete()
            note += "; no older part was found next to it" if name is None else f"; its older part is {name}"
            yield Part(path=self.path, state=state, has_grown=True, note=note, is_old=True)
            self.path.unlink()
        begin = self._size()
        await self._append(begin, state.size)
        yield Part(path=self.path, state=state, has_grown=self._size() > begin or self._last is None)
        self._last = state

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    async def _continues(self, state: FileState) -> bool:
        """Return whether the log begins with the bytes of the copy."""
        return state.size >= self._size() and await self._equals(None)

    async def _equals(self, name: str | None) -> bool:
        """Return whether the log, or the file `name` next to it, has the first and last bytes of the copy."""
        size = self._size()
        for offset in {0, max(0, size - COMPARED_BYTES)}:
            count = min(COMPARED_BYTES, size - offset)
            own = await asyncio.to_thread(_read, self.path, offset, count)
            if await self._file.read(offset, count, name) != own:
                return False
        return True

    async def _complete(self) -> str | None:
        """Append the rest of the older part of the log to the copy; return the name of this part, or None."""
        unpacked = self.path.with_name(f"{self.path.name}.unpacked")
        for name in await self._file.rotated():
            if name.endswith(PACKED):
                is_whole = await unpack(self._file, name, unpacked)
                if is_whole and await asyncio.to_thread(_begins_with, unpacked, self.path):
                    unpacked.replace(self.path)
                    return name
                continue
            state = await self._file.state(name)
            if state.size >= self._size() and await self._equals(name):
                await self._append(self._size(), state.size, name)
                return name
        unpacked.unlink(missing_ok=True)
        return None

    async def _append(self, begin: int, end: int, name: str | None = None) -> None:
        """Append the bytes from `begin` to `end` of the log, or of the file `name` next to it, to the copy."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as copy:
            while begin < end:
                overlap = min(COMPARED_BYTES, begin)
                data = await self._file.read(begin - overlap, overlap + min(CHUNK_BYTES, end - begin), name)
                if data[:overlap] != _read(self.path, begin - overlap, overlap):
                    raise LogUnreadableError(f"{self._file.address} was replaced while it was read")
                data = data[overlap:]
                if not data:
                    return
                copy.write(data)
                copy.flush()
                begin += len(data)


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _begins_with(path: Path, beginning: Path) -> bool:
    """Return whether the file at `path` begins with the content of the file `beginning`."""
    with path.open("rb") as file, beginning.open("rb") as expected:
        return all(file.read(len(block)) == block for block in iter(lambda: expected.read(CHUNK_BYTES), b""))
