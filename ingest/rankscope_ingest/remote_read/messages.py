"""The few protobuf messages of Prometheus' remote read (prompb/remote.proto), in snappy's block format. Pure.

By hand, as they are small and do not change; samples are written as columns, since there may be millions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_ingest.errors import DecodeError
from rankscope_storage.remote_read.matchers import Matcher, MatchType
from rankscope_storage.remote_read.question import Question
from rankscope_storage.remote_read.series import Series

SAMPLES: Final = 0
MAX_REQUEST_BYTES: Final = 1 << 20

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_SNAPPY: Final = "snappy"
_SIX_BYTES_FROM, _SIX_BYTES_BELOW = 1 << 35, 1 << 42  # ms since 1970: from 1971 to 2109


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What is asked, and which forms of an answer are taken, best first; none named is samples."""

    questions: tuple[Question, ...]
    accepted: tuple[int, ...]


def unpacked(body: bytes) -> bytes:
    """Return what is in a snappy block. Raises DecodeError."""
    length, _ = _varint(body, 0)
    if length > MAX_REQUEST_BYTES:
        raise DecodeError(f"the request has {length} bytes; at most {MAX_REQUEST_BYTES} are taken")
    try:
        data: bytes = pa.Codec(_SNAPPY).decompress(body, decompressed_size=length, asbytes=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise DecodeError(f"the body is no snappy block: {error}") from error
    return data


def packed(message: bytes) -> bytes:
    """Return `message` as a snappy block."""
    block: bytes = pa.Codec(_SNAPPY).compress(message, asbytes=True)
    return block


def read_request(data: bytes) -> ReadRequest:
    """Return the request. Raises DecodeError for what is none, QueryError for a bad expression."""
    questions, accepted = [], []
    for number, value in _fields(data):
        if number == 1:
            questions.append(_question(_bytes(value)))
        elif number == 2:
            accepted += [value] if isinstance(value, int) else list(_varints(_bytes(value)))
    return ReadRequest(tuple(questions), tuple(accepted))


def read_response(answers: Iterable[Sequence[Series]]) -> bytes:
    """Return the answer of samples: one result for each question, in order."""
    return b"".join(_field(1, b"".join(_field(1, _time_series(one)) for one in series)) for series in answers)


def _question(data: bytes) -> Question:
    start = end = 0
    matchers = []
    for number, value in _fields(data):
        if number == 1:
            start = _signed(value)
        elif number == 2:
            end = _signed(value)
        elif number == 3:
            matchers.append(_matcher(_bytes(value)))
    return Question(tuple(matchers), start, end)


def _matcher(data: bytes) -> Matcher:
    kind, name, text = 0, "", ""
    for number, value in _fields(data):
        if number == 1:
            kind = _signed(value)
        elif number == 2:
            name = _text(value)
        elif number == 3:
            text = _text(value)
    if kind not in set(MatchType):
        raise DecodeError(f"there is no matcher of type {kind}")
    return Matcher(MatchType(kind), name, text)


def _time_series(series: Series) -> bytes:
    labels = b"".join(_field(1, _field(1, name.encode()) + _field(2, text.encode())) for name, text in series.labels)
    return labels + _samples(series.times_ms, series.values)


def _samples(times: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> bytes:
    if len(times) and not _SIX_BYTES_FROM <= times.min() <= times.max() < _SIX_BYTES_BELOW:
        return b"".join(_sample(int(ts), float(value)) for ts, value in zip(times, values, strict=True))
    rows = np.empty((len(times), 18), np.uint8)
    rows[:, :3] = (2 << 3 | _LENGTH, 16, 1 << 3 | _FIXED64)
    rows[:, 3:11] = np.ascontiguousarray(values, "<f8").view(np.uint8).reshape(-1, 8)
    rows[:, 11] = 2 << 3 | _VARINT
    for place in range(6):
        rows[:, 12 + place] = times >> 7 * place & 0x7F | (0x80 if place < 5 else 0)
    return rows.tobytes()


def _sample(ts: int, value: float) -> bytes:
    number = bytes([1 << 3 | _FIXED64]) + np.array(value, "<f8").tobytes()
    return _field(2, number + bytes([2 << 3 | _VARINT]) + _as_varint(ts & 0xFFFF_FFFF_FFFF_FFFF))


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | _LENGTH]) + _as_varint(len(data)) + data


def _as_varint(value: int) -> bytes:
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*octets, value])


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, integer or bytes) of each field, known or not."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        kind = tag & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield tag >> 3, value
            continue
        if kind == _LENGTH:
            length, place = _varint(data, place)
        elif kind in {_FIXED64, _FIXED32}:
            length = 8 if kind == _FIXED64 else 4
        else:
            raise DecodeError(f"a field of wire type {kind} is none of protobuf's")
        if place + length > len(data):
            raise DecodeError("the message ends in the middle of a field")
        yield tag >> 3, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
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


def _varints(data: bytes) -> Iterator[int]:
    place = 0
    while place < len(data):
        value, place = _varint(data, place)
        yield value


def _signed(value: Any) -> int:
    if not isinstance(value, int):
        raise DecodeError("the message has bytes where a number belongs")
    return value - (1 << 64) if value >= 1 << 63 else value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise DecodeError("the message has a number where a message belongs")
    return value


def _text(value: Any) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError as error:
        raise DecodeError("a label of the message is not UTF-8") from error
