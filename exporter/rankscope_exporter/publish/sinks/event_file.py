"""Bytes of TensorBoard's event files, written without protobuf.

A file is a sequence of records, each with a length, a checksum, an `Event` message and a checksum. A message consists
of the constant bytes of its tags, which can be computed once, and of four bytes for each value. A file contains the
number of its first step, and readers discard this step and all later steps of older files in the same folder.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Final

from rankscope_contract.model.event_tags import Buckets

WALL_TIME: Final = b"\x09"  # field 1 of Event, a double
STEP: Final = b"\x10"  # field 2, a varint
FILE_VERSION: Final = b"\x1a"  # field 3, text
SUMMARY: Final = b"\x2a"  # field 5, a message of values
SESSION_LOG: Final = b"\x3a"  # field 7, a message
VALUE: Final = b"\x0a"  # field 1 of Summary
TAG: Final = b"\x0a"  # field 1 of Value
SIMPLE_VALUE: Final = b"\x15"  # field 2 of Value, a float
HISTOGRAM: Final = b"\x2a"  # field 5 of Value, a message with these five doubles and two lists of doubles
LOW, HIGH, COUNT, TOTAL, SQUARES = (bytes([8 * number + 1]) for number in range(1, 6))
LIMITS, COUNTS = b"\x32", b"\x3a"

_START: Final = b"\x08\x01"  # field 1 of SessionLog: readers discard the steps of earlier files from this step on
_NUMBER: Final = struct.Struct("<f")
_LENGTH: Final = struct.Struct("<Q")
_SUM: Final = struct.Struct("<I")
_DOUBLE: Final = struct.Struct("<d")
_POLYNOMIAL: Final = 0x82F63B78
_LARGEST: Final = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


def beginning(seconds: float, step: int) -> bytes:
    """Return the bytes with which a TensorBoard event file begins; `step` is that of the first value."""
    version = WALL_TIME + _DOUBLE.pack(seconds) + _with_length(FILE_VERSION, b"brain.Event:2")
    return _record(version) + _record(_head(seconds, step) + _with_length(SESSION_LOG, _START))


def value_head(tag: str) -> bytes:
    """Return the constant bytes that precede a float32 value with the tag `tag` in a TensorBoard event file."""
    named = _with_length(TAG, tag.encode("utf-8", "replace")) + SIMPLE_VALUE
    return VALUE + _varint(len(named) + _NUMBER.size) + named


def histogram_value(tag: str, histogram: Buckets) -> bytes:
    """Return the bytes of a value that is a histogram, with the tag `tag`, in an event file."""
    numbers = {
        LOW: histogram.low,
        HIGH: histogram.limits[-1],
        COUNT: sum(histogram.counts),
        TOTAL: histogram.total,
        SQUARES: histogram.squares,
    }
    message = b"".join(field + _DOUBLE.pack(number) for field, number in numbers.items())
    for field, listed in ((LIMITS, histogram.limits), (COUNTS, histogram.counts)):
        message += _with_length(field, b"".join(map(_DOUBLE.pack, listed)))
    return _with_length(VALUE, _with_length(TAG, tag.encode("utf-8", "replace")) + _with_length(HISTOGRAM, message))


def event(seconds: float, step: int, values: Iterable[bytes]) -> bytes:
    """Return the TensorBoard record of some values of one step."""
    return _record(_head(seconds, step) + _with_length(SUMMARY, b"".join(values)))


def _head(seconds: float, step: int) -> bytes:
    return WALL_TIME + _DOUBLE.pack(seconds) + STEP + _varint(step)


def number_bytes(number: float) -> bytes:
    """Return `number` as four bytes, which follow those of `value_head` for its tag."""
    try:
        return _NUMBER.pack(number)
    except OverflowError:  # a count or a double out of the range of float32
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
    """Return the CRC-32C checksum of `data`, rotated and masked as the format of TensorBoard event files requires."""
    crc = _crc_function()(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _crc_function() -> Callable[[bytes], int]:
    """Return a function that computes CRC-32C.

    It is the function of the package google-crc32c if this package is installed, because that function is 50 times
    faster than `crc32c` in this module.
    """
    try:
        from google_crc32c import value  # noqa: PLC0415 - only where event files are written
    except ImportError:
        return crc32c
    found: Callable[[bytes], int] = value
    return found


def crc32c(data: bytes) -> int:
    """Return the CRC-32C checksum of `data`. It is computed four bytes at a time."""
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
    """Return two tables of CRC-32C remainders, both indexed by a 16-bit value."""
    # The first table has the remainder of the value after two bytes, the second table the one after four bytes.
    table = _table()
    two = [table[table[pair & 0xFF] & 0xFF ^ pair >> 8] ^ table[pair & 0xFF] >> 8 for pair in range(1 << 16)]
    four = (two[crc & 0xFFFF] ^ crc >> 16 for crc in two)
    return array("I", two), array("I", four)


@functools.cache
def _table() -> tuple[int, ...]:
    return tuple(
        functools.reduce(lambda crc, _: crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0), range(8), n) for n in range(256)
    )
