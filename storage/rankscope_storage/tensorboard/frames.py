"""Records of an event file: length, checksum of the length, data, checksum of the data.

`messages` decodes the data. After a damaged record, the reader searches for the next eight bytes that are followed by
their checksum, and continues there. Random bytes look like a length with its checksum at one of four billion positions.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

import google_crc32c

MAX_RECORD_BYTES: Final = 4 << 20
"""Size of the largest record that is read, in bytes.

Scalars need a few hundred bytes; larger records contain images."""

_LENGTH: Final = struct.Struct("<Q")
_CRC: Final = struct.Struct("<I")
_HEADER_BYTES: Final = 12
_SCAN_BYTES: Final = 1 << 20

_MAYBE_HEADER: Final = re.compile(rb"(?s)(?=.{6}\0\0(?!\0{4}).{4})")
"""Places of headers of records below 2^48 bytes, without a run of zeros: checking each byte takes 20 times as long."""

OnFault = Callable[[int, str], None]
"""Function that receives the number of a damaged or skipped record, counted from 1, and a description of the fault."""


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of `data`, rotated and shifted as the event file format requires."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """Return `data` as one record of an event file, with length and checksums."""
    length = _LENGTH.pack(len(data))
    return b"".join((length, _CRC.pack(masked_crc(length)), data, _CRC.pack(masked_crc(data))))


def is_header(head: bytes) -> bool:
    """Return whether `head`, the first bytes of a file, is the header of a record of an event file."""
    return len(head) >= _HEADER_BYTES and _CRC.unpack_from(head, 8)[0] == masked_crc(head[:8])


def read_frames(file: BinaryIO, size: int, on_fault: OnFault) -> Iterator[tuple[int, bytes]]:
    """Yield number (counted from 1) and data of each record of an event file that has correct checksums.

    `size` is the size of the file in bytes. For a damaged or skipped record, call `on_fault` with its number and a
    description. This includes a record that is cut off at the end of the file, which its writer may not have finished.
    """
    number = 0
    while header := file.read(_HEADER_BYTES):
        number += 1
        start = file.tell() - len(header)
        data = _data(file, header, start, size)
        if isinstance(data, bytes):
            yield number, data
            continue
        if data is _Fault.TOO_LONG:
            on_fault(number, f"longer than {MAX_RECORD_BYTES:,} bytes: this record is skipped")
            file.seek(start + _HEADER_BYTES + _LENGTH.unpack_from(header)[0] + 4)
            continue
        found = _next_header(file, start + 1)
        if found is None:
            on_fault(number, f"{data} at byte {start:,}, and no further record was found")
            return
        on_fault(number, f"{data} at byte {start:,}; the next record begins at byte {found:,}")
        file.seek(found)


class _Fault(enum.StrEnum):
    CUT = "cut off"
    DAMAGED = "damaged"
    TOO_LONG = "too long"


def _data(file: BinaryIO, header: bytes, start: int, size: int) -> bytes | _Fault:
    """Return the data of the record that begins at byte `start`, or the fault of this record."""
    if len(header) < _HEADER_BYTES:
        return _Fault.CUT
    if not is_header(header):
        return _Fault.DAMAGED
    (length,) = _LENGTH.unpack_from(header)
    if length > size - start - _HEADER_BYTES - 4:
        return _Fault.CUT
    if length > MAX_RECORD_BYTES:
        return _Fault.TOO_LONG
    data, crc = file.read(length), file.read(4)
    if len(crc) < 4:
        return _Fault.CUT
    return data if _CRC.unpack(crc)[0] == masked_crc(data) else _Fault.DAMAGED


def _next_header(file: BinaryIO, start: int) -> int | None:
    """Return the byte position of the first record header at or after byte `start`, or None if there is none."""
    while True:
        file.seek(start)
        chunk = file.read(_SCAN_BYTES + _HEADER_BYTES - 1)
        for place in map(re.Match.start, _MAYBE_HEADER.finditer(chunk)):
            if is_header(chunk[place : place + _HEADER_BYTES]):
                return start + place
        if len(chunk) < _HEADER_BYTES:
            return None
        start += len(chunk) - _HEADER_BYTES + 1
