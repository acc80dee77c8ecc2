"""Protobuf's wire format and snappy's blocks, as far as Prometheus' few messages need them. Pure.

By hand, as the messages are few and do not change; who reads them says which fields they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from rankscope_ingest.base.errors import DecodeError

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_SNAPPY: Final = "snappy"
_MOST_PACKED: Final = 64
"""Snappy's longest copy is 64 bytes in three: whoever claims more than this per byte lies about the length."""


def unpacked(body: bytes, max_bytes: int) -> bytes:
    """Return what is in a snappy block. Raises DecodeError, before anything is inflated where that can be."""
    length, place = varint(body, 0)
    if length > max_bytes:
        raise DecodeError(f"the request has {length} bytes; at most {max_bytes} are taken")
    if length > _MOST_PACKED * (len(body) - place):
        raise DecodeError(f"the body is no snappy block: {len(body)} bytes cannot hold {length}")
    try:
        data: bytes = pa.Codec(_SNAPPY).decompress(body, decompressed_size=length, asbytes=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise DecodeError(f"the body is no snappy block: {error}") from error
    return data


def packed(message: bytes) -> bytes:
    """Return `message` as a snappy block."""
    block: bytes = pa.Codec(_SNAPPY).compress(message, asbytes=True)
    return block


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, integer or bytes) of each field, known or not. Raises DecodeError."""
    return ((tag >> 3, value) for tag, value in tagged_fields(data))


def tagged_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number and wire type, integer or bytes) of each field, known or not. Raises DecodeError."""
    place = 0
    while place < len(data):
        tag, place = varint(data, place)
        kind = tag & 7
        if kind == VARINT:
            value, place = varint(data, place)
            yield tag, value
            continue
        if kind == LENGTH:
            length, place = varint(data, place)
        elif kind in {FIXED64, FIXED32}:
            length = 8 if kind == FIXED64 else 4
        else:
            raise DecodeError(f"a field of wire type {kind} is none of protobuf's")
        if place + length > len(data):
            raise DecodeError("the message ends in the middle of a field")
        yield tag, data[place : place + length]
        place += length


def varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the number at `place`, and the place behind it. Raises DecodeError."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise DecodeError("the message ends in the middle of a number")
        octet = data[place]
        place += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, place
    raise DecodeError("a number of the message is longer than 64 bits")


def varints(data: bytes) -> Iterator[int]:
    """Yield numbers that stand one behind the other."""
    place = 0
    while place < len(data):
        value, place = varint(data, place)
        yield value


def signed(value: Any) -> int:
    """Return a field as an int64."""
    if not isinstance(value, int):
        raise DecodeError("the message has bytes where a number belongs")
    return value - (1 << 64) if value >= 1 << 63 else value


def octets(value: Any) -> bytes:
    """Return a field as bytes."""
    if not isinstance(value, bytes):
        raise DecodeError("the message has a number where a message belongs")
    return value


def text(value: Any) -> str:
    """Return a field as text."""
    try:
        return octets(value).decode()
    except UnicodeDecodeError as error:
        raise DecodeError("a label of the message is not UTF-8") from error


def field(number: int, data: bytes) -> bytes:
    """Return a field of bytes as it is written."""
    return bytes([number << 3 | LENGTH]) + as_varint(len(data)) + data


def number_field(number: int, value: int) -> bytes:
    """Return a field of an integer as it is written."""
    return bytes([number << 3 | VARINT]) + as_varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def as_varint(value: int) -> bytes:
    """Return `value`, which is not negative, as a number of the wire."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
