"""A message of remote write 1.0 (prompb/remote.proto) read by the rules, field by field. Pure, exact and slow.

What a sender may leave out is 0 or empty, as protobuf has it; what it may not send is refused, with everything else of
its request: a field of the wrong type, text that is not UTF-8, a field of another version of the protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rankscope_ingest.base import protobuf
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.protobuf import signed, tagged_fields

_DOUBLE: Final = struct.Struct("<d")
_SERIES, _METADATA = 0x0A, 0x1A
_LABEL, _SAMPLE, _EXEMPLAR, _HISTOGRAM = 0x0A, 0x12, 0x1A, 0x22
_NAME, _VALUE = 0x0A, 0x12
_NUMBER, _TIME = 0x09, 0x10


@dataclass(slots=True)
class OneSeries:
    """What a request says of one series; `labels` are their fields as they came, one behind the other."""

    labels: bytes = b""
    times_ms: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    exemplars: int = 0
    histograms: int = 0


def frames(data: bytes) -> tuple[list[bytes], int]:
    """Return the messages of all series of a request, and how many metrics it only describes. Raises DecodeError."""
    series, metadata = [], 0
    for tag, value in tagged_fields(data):
        if tag == _SERIES:
            series.append(protobuf.octets(value))
        elif tag == _METADATA:
            metadata += 1
        else:
            raise DecodeError(f"field {tag >> 3} is none of remote write 1.0 (prometheus.WriteRequest)")
    return series, metadata


def read_series(data: bytes) -> OneSeries:
    """Return what the message of a series says. Raises DecodeError."""
    found = OneSeries()
    for tag, value in tagged_fields(data):
        if tag == _LABEL:
            found.labels += protobuf.field(1, value)
        elif tag == _SAMPLE:
            ts, number = _sample(value)
            found.times_ms.append(ts)
            found.values.append(number)
        elif tag == _EXEMPLAR:
            found.exemplars += 1
        elif tag == _HISTOGRAM:
            found.histograms += 1
        else:
            _check_unknown(tag, 4, "TimeSeries")
    return found


def read_labels(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of label fields that stand one behind the other. Raises DecodeError."""
    for _, one in tagged_fields(data):
        name = value = ""
        for tag, text in tagged_fields(one):
            if tag == _NAME:
                name = protobuf.text(text)
            elif tag == _VALUE:
                value = protobuf.text(text)
            else:
                _check_unknown(tag, 2, "Label")
        yield name, value


def _sample(data: bytes) -> tuple[int, float]:
    ts, number = 0, 0.0
    for tag, value in tagged_fields(data):
        if tag == _NUMBER:
            (number,) = _DOUBLE.unpack(value)
        elif tag == _TIME:
            ts = signed(value)
        else:
            _check_unknown(tag, 2, "Sample")
    return ts, number


def _check_unknown(tag: int, highest: int, message: str) -> None:
    """Pass over fields that a later version may have added; the known ones have one type each."""
    if tag >> 3 <= highest:
        raise DecodeError(f"field {tag >> 3} of a {message} has wire type {tag & 7}, which it cannot have")
