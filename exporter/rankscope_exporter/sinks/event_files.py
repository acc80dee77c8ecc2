"""Event files of TensorBoard as far as numbers need them, without protobuf, which a rank need not have.

A file is a row of records: length, its check sum, an `Event` message, its check sum. A message is made of the constant
bytes of its tags, known once for each plan, and of four bytes for each number.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Final

WALL_TIME: Final = b"\x09"  # field 1 of Event, a double
STEP: Final = b"\x10"  # field 2, a varint
FILE_VERSION: Final = b"\x1a"  # field 3, text
SUMMARY: Final = b"\x2a"  # field 5, a message of values
SESSION_LOG: Final = b"\x3a"  # field 7, a message
VALUE: Final = b"\x0a"  # field 1 of Summary
TAG: Final = b"\x0a"  # field 1 of Value
SIMPLE_VALUE: Final = b"\x15"  # field 2 of Value, a float

_START: Final = b"\x08\x01"  # field 1 of SessionLog: what earlier files hold from this step on is gone
_NUMBER: Final = struct.Struct("<f")
_LENGTH: Final = struct.Struct("<Q")
_SUM: Final = struct.Struct("<I")
_DOUBLE: Final = struct.Struct("<d")
_POLYNOMIAL: Final = 0x82F63B78
_LARGEST: Final = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


def beginning(seconds: float, step: int) -> bytes:
    """Return how a file begins whose first number is of `step`."""
    version = WALL_TIME + _DOUBLE.pack(seconds) + _with_length(FILE_VERSION, b"brain.Event:2")
    return _record(version) + _record(_head(seconds, step) + _with_length(SESSION_LOG, _START))


def value_head(tag: str) -> bytes:
    """Return what precedes the four bytes of a number under `tag`."""
    named = _with_length(TAG, tag.encode("utf-8", "replace")) + SIMPLE_VALUE
    return VALUE + _varint(len(named) + _NUMBER.size) + named


def event(seconds: float, step: int, numbers: Iterable[tuple[bytes, float]]) -> bytes:
    """Return the record of one moment: each number behind what `value_head` gave for it."""
    values = b"".join(head + _number(number) for head, number in numbers)
    return _record(_head(seconds, step) + _with_length(SUMMARY, values))


def _head(seconds: float, step: int) -> bytes:
    return WALL_TIME + _DOUBLE.pack(seconds) + STEP + _varint(step)


def _number(number: float) -> bytes:
    try:
        return _NUMBER.pack(number)
    except OverflowError:  # a count, or a double, that a float cannot hold
        return _NUMBER.pack(_LARGEST if number > 0 else -_LARGEST)


def _with_length(field: bytes, content: bytes) -> bytes:
    return field + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number > 0x7F:
        octets.append(0x80 | number & 0x7F)
        number >>= 7
    octets.append(number)
    return bytes(octets)


def _record(data: bytes) -> bytes:
    length = _LENGTH.pack(len(data))
    return b"".join((length, _SUM.pack(_masked_sum(length)), data, _SUM.pack(_masked_sum(data))))


def _masked_sum(data: bytes) -> int:
    """Return CRC-32C of `data`, rotated and shifted as the format wants it."""
    crc = _crc_function()(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _crc_function() -> Callable[[bytes], int]:
    """Return what computes CRC-32C: a library where there is one, which costs a fiftieth."""
    try:
        from google_crc32c import value  # noqa: PLC0415 - only where event files are written
    except ImportError:
        return crc32c
    found: Callable[[bytes], int] = value
    return found


def crc32c(data: bytes) -> int:
    """Return CRC-32C of `data`, four octets at a time."""
    low, high = _pair_tables()
    crc = 0xFFFFFFFF
    for word in memoryview(data[: len(data) & ~3]).cast("I") if sys.byteorder == "little" else ():
        crc ^= word
        crc = high[crc & 0xFFFF] ^ low[crc >> 16]
    table = _table()
    for octet in data[len(data) & ~3 :] if sys.byteorder == "little" else data:
        crc = table[(crc ^ octet) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@functools.cache
def _pair_tables() -> tuple[array[int], array[int]]:
    """Return what each two octets become after two and after four octets."""
    table = _table()
    two = [table[table[pair & 0xFF] & 0xFF ^ pair >> 8] ^ table[pair & 0xFF] >> 8 for pair in range(1 << 16)]
    four = (two[crc & 0xFFFF] ^ crc >> 16 for crc in two)
    return array("I", two), array("I", four)


@functools.cache
def _table() -> tuple[int, ...]:
    return tuple(
        functools.reduce(lambda crc, _: crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0), range(8), n) for n in range(256)
    )
