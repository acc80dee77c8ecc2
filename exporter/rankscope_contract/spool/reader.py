"""Read complete messages from spool files, which may end in the middle of a message.

The module does not import Arrow: a message is bytes. Record i of a file has sequence number `first + i`, because the
writer starts a new file wherever a record is missing. The reader therefore finds a record without decompression. The
caller passes the function `needed_plans`, which checks the content: it returns the hashes of the plans that a stream
uses, or None if the stream cannot be read.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope_contract.model.schema import plan_hash
from rankscope_contract.protocol.channel import NOTHING
from rankscope_contract.spool.layout import plan_name, segments

log = logging.getLogger(__name__)

END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
MAX_FILE_BYTES: Final = 1 << 29
"""Maximum size in bytes of a file that is read.

No rank writes larger files, and reading one could exhaust the memory of the rank or service.
"""
_CONTINUES: Final = 0xFFFFFFFF
_BODY_LENGTH_SLOT: Final = 4 + 2 * 3  # bodyLength is the fourth field of Message (Arrow format, Message.fbs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive records of a spool as a complete Arrow IPC stream."""

    data: bytes
    first: int
    last: int

    @property
    def rows(self) -> int:
        """Return the number of records in the stream."""
        return self.last - self.first + 1


def message_ends(data: bytes) -> list[int]:
    """Return the end offset in bytes of each complete message in `data`. The first message is the schema."""
    ends: list[int] = []
    position = 0
    while position + 8 <= len(data):
        mark, length = struct.unpack_from("<Ii", data, position)
        if mark != _CONTINUES or length <= 0 or position + 8 + length > len(data):
            break
        position += 8 + length + _body_length(data, position + 8, length)
        if position > len(data):
            break
        ends.append(position)
    return ends


def _body_length(data: bytes, start: int, length: int) -> int:
    """Return the `bodyLength` in bytes of the message whose metadata starts at `start`.

    For invalid metadata, return len(data).
    """
    try:
        table = start + int(struct.unpack_from("<I", data, start)[0])
        vtable = table - int(struct.unpack_from("<i", data, table)[0])
        if not start <= vtable < start + length:
            return len(data)
        size = int(struct.unpack_from("<H", data, vtable)[0])
        slot = int(struct.unpack_from("<H", data, vtable + _BODY_LENGTH_SLOT)[0]) if size > _BODY_LENGTH_SLOT else 0
        body = int(struct.unpack_from("<q", data, table + slot)[0]) if slot else 0
    except struct.error:
        return len(data)
    return body if body >= 0 else len(data)


NeededPlans = Callable[[bytes], Iterable[str] | None]


class SpoolReader:
    """Reads the files of one spool folder.

    Each call reads the files again, because their writer may still be active.
    """

    def __init__(self, folder: Path, needed_plans: NeededPlans) -> None:
        self.folder = folder
        self._needed_plans = needed_plans
        self._good_plans: set[str] = set()
        self._reported: set[tuple[str, int]] = set()

    def head(self) -> int:
        """Return the highest sequence number of a complete record, or -1 without records.

        Raises OSError if a file cannot be read.
        """
        for first, path in reversed(segments(self.folder)):
            records = len(message_ends(self._bytes(path))) - 1
            if records > 0:
                return first + records - 1
        return NOTHING

    def after(self, cursor: int, max_bytes: int) -> Stretch | None:
        """Return the next records after sequence number `cursor` from one file, or None if there are no more.

        Together, the records have at most `max_bytes` bytes, unless the first record alone is larger.
        """
        files = segments(self.folder)
        for place, (first, path) in enumerate(files):
            if place + 1 < len(files) and files[place + 1][0] <= cursor + 1:
                continue
            try:
                data = self._bytes(path)
            except FileNotFoundError:  # its records were committed in the meantime
                continue
            stretch = self._stretch(path, data, first, max(cursor + 1, first), max_bytes)
            if stretch is not None:
                return stretch
        return None

    def plan(self, plan_id: str) -> str | None:
        """Return the JSON text of the plan with this hash, or None if the spool does not contain the plan."""
        if not plan_id.isalnum():
            return None
        try:
            text = (self.folder / plan_name(plan_id)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        return text if plan_hash(text) == plan_id else None

    def _bytes(self, path: Path) -> bytes:
        size = path.stat().st_size
        if size <= MAX_FILE_BYTES:
            return path.read_bytes()
        self._report(path, 0, size, f"has {size} bytes, more than a rank writes: the file is skipped")
        return b""

    def _is_sound(self, stream: bytes) -> bool:
        needed = self._needed_plans(stream)
        if needed is None:
            return False
        for plan_id in set(needed) - self._good_plans:
            if self.plan(plan_id) is None:
                return False
            self._good_plans.add(plan_id)
        return True

    def _stretch(self, path: Path, data: bytes, first: int, start: int, max_bytes: int) -> Stretch | None:
        ends = message_ends(data)
        self._report(path, ends[-1] if ends else 0, len(data), "ends within a record: the records before it are read")
        index = start - first  # the message of `start` begins at ends[index]
        records = len(ends) - 1 - index
        if not ends or records <= 0:
            return None
        fitting = sum(end - ends[index] <= max_bytes for end in ends[index + 1 :])
        count = max(1, min(fitting, records))
        while count:
            stream = data[: ends[0]] + data[ends[index] : ends[index + count]] + END_OF_STREAM
            if self._is_sound(stream):
                return Stretch(data=stream, first=start, last=start + count - 1)
            count //= 2
        self._report(path, start, -1, f"is damaged from seq {start} on: the rest of this file is skipped")
        return None

    def _report(self, path: Path, at: int, size: int, problem: str) -> None:
        """Log `problem` once for each file and position `at`.

        Do not log it if `at` is the size of the file, because the writer may still append to the file.
        """
        if at != size and (path.name, at) not in self._reported:
            self._reported.add((path.name, at))
            log.warning("%s %s", path, problem)
