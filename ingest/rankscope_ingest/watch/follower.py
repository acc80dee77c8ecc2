"""Follow a log by offset: find appended bytes, a rotation and a truncation, and return the file to import.

A log of this machine is imported where it is. The bytes of a log of another machine are appended to a copy. The size of
the copy is the position in the log, so that a restarted process continues where the last one ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope_ingest.importers import KnownImport
from rankscope_ingest.importers.common.lines import ZIP
from rankscope_ingest.importers.common.log_identity import (
    PROBE_BYTES,
    Mark,
    digest_of,
    has_equal_beginning,
    stored_path,
)
from rankscope_ingest.importers.common.log_identity import (
    marks as marks_of,
)
from rankscope_ingest.watch.files import CHUNK_BYTES, FileState, LogFile, LogUnreadableError, unpack

PACKED: Final = ".gz"
OLDER: Final = "older"
"""Name of the folder next to the copy of a log that has its older part while this part is imported."""
OVERLAP_BYTES: Final = 512
"""Number of bytes before the new ones that are read again and compared with the end of the copy."""


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
        self._marks: Sequence[Mark] = ()  # of a log that was not imported yet

    async def parts(self, known: Sequence[KnownImport]) -> AsyncIterator[Part]:
        """Yield the older part of a log that was rotated since the last call, and then the log.

        `known` has the imported logs of the run. The caller imports each part before it requests the next one. Raises
        LogUnreadableError if the log cannot be read.
        """
        state = await self._file.state()
        has_grown, note, path = state != self._last, None, stored_path(self.path)
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
            self._marks = () if stored else marks_of(self.path, state.size)
        yield Part(path=self.path, state=state, has_grown=has_grown, note=note)
        self._last = state

    async def _begins(self, marks: Sequence[Mark], name: str | None = None) -> bool:
        """Return whether the log, or the file `name` next to it, begins like the imported log with these `marks`."""
        available = (await self._file.state(name)).size
        size, digest = next((mark for mark in reversed(marks) if mark[0] <= available), (0, ""))
        count = min(size, PROBE_BYTES)
        begin = await self._file.read(0, count, name)
        end = await self._file.read(size - count, count, name)
        # The marks of an archive, which does not grow, are those of its content.
        return (name is None and begin.startswith(ZIP)) or digest_of(size, begin, end) == digest

    async def _older(self, marks: Sequence[Mark]) -> tuple[str | None, Path | None]:
        """Return the name of the older part of the log, and the file to import; the incomplete copy without a name."""
        for name in await self._file.rotated():
            older = self._copy.parent / OLDER / name.removesuffix(PACKED)
            if name.endswith(PACKED):
                if await unpack(self._file, name, older) and has_equal_beginning(older, marks[-1:]):
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
