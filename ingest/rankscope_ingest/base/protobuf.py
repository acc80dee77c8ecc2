"""Messages of Prometheus remote read and remote write, parsed by google.protobuf, and snappy's block format.

The schema follows prompb/remote.proto and prompb/types.proto. Fields that a caller only counts, copies or caches are
declared as `bytes`, which is possible because `bytes` and a nested message have the same wire format. TimeSeries is
divided for remote write: the message `TimeSeries` contains the samples, and `SeriesHead` contains the other fields,
which are unknown fields of `TimeSeries`. The messages of remote write 2.0 follow
prompb/io/prometheus/write/v2/types.proto. The packages `remote_read` and `remote_write` interpret the messages.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
from google.protobuf import message

from rankscope_ingest.base.errors import DecodeError
from rankscope_storage.base.protobuf import message_classes

_SNAPPY: Final = "snappy"
_MAX_COMPRESSION: Final = 64
"""Maximum compression ratio of a snappy block: the longest copy element produces 64 bytes from three."""

MESSAGES: Final = message_classes(
    "prometheus",
    {
        "WriteRequest": "repeated TimeSeries timeseries = 1; repeated bytes metadata = 3",
        "TimeSeries": "repeated Sample samples = 2",
        "SeriesHead": "repeated bytes labels = 1; repeated bytes exemplars = 3; repeated bytes histograms = 4",
        "Label": "string name = 1; string value = 2",
        "Sample": "double value = 1; int64 timestamp = 2",
        "ReadRequest": "repeated Query queries = 1; repeated int32 accepted_response_types = 2",
        "Query": "int64 start_timestamp_ms = 1; int64 end_timestamp_ms = 2; repeated LabelMatcher matchers = 3; "
        "ReadHints hints = 4",
        "LabelMatcher": "int32 type = 1; string name = 2; string value = 3",
        "ReadHints": "int64 step_ms = 1; string func = 2; int64 start_ms = 3; int64 end_ms = 4; int64 range_ms = 7",
        "ReadResponse": "repeated QueryResult results = 1",
        "QueryResult": "repeated bytes timeseries = 1",
        "ChunkedReadResponse": "repeated ChunkedSeries chunked_series = 1; int64 query_index = 2",
        "ChunkedSeries": "repeated bytes labels = 1; repeated Chunk chunks = 2",
        "Chunk": "int64 min_time_ms = 1; int64 max_time_ms = 2; int32 type = 3; bytes data = 4",
    },
)
WRITE_2_MESSAGES: Final = message_classes(
    "io.prometheus.write.v2",
    {
        "Request": "repeated string symbols = 4; repeated TimeSeries timeseries = 5",
        "TimeSeries": "repeated uint32 labels_refs = 1; repeated Sample samples = 2; repeated bytes histograms = 3; "
        "repeated Exemplar exemplars = 4; bytes metadata = 5",
        "Sample": "double value = 1; int64 timestamp = 2",
        "Exemplar": "repeated uint32 labels_refs = 1",
        "Metadata": "int32 type = 1; uint32 help_ref = 3; uint32 unit_ref = 4",
    },
)
"""The protobuf message classes for Prometheus remote write 2.0, by message name."""


def parse(name: str, data: bytes, classes: Mapping[str, Any] = MESSAGES) -> Any:
    """Return the message of class `name` that is serialized in `data`. Raises DecodeError if `data` is malformed."""
    try:
        return classes[name].FromString(data)
    except message.DecodeError as error:
        raise DecodeError(
            f"not a valid {classes[name].DESCRIPTOR.full_name}: malformed or truncated protobuf, or invalid UTF-8"
        ) from error


@functools.lru_cache(maxsize=1 << 13)  # the series of a response share most labels
def label_bytes(name: str, value: str) -> bytes:
    """Return a serialized Prometheus Label message."""
    data: bytes = MESSAGES["Label"](name=name, value=value).SerializeToString()
    return data


def unpacked(body: bytes, max_bytes: int) -> bytes:
    """Return the uncompressed content of a snappy block.

    Raises DecodeError if the block is malformed or its content has more than `max_bytes`. The declared size is checked
    before decompression starts.
    """
    size, place = _varint(body)
    if size > max_bytes:
        raise DecodeError(f"the uncompressed request has {size} bytes; the limit is {max_bytes} bytes")
    if size > _MAX_COMPRESSION * (len(body) - place):
        raise DecodeError(f"not a snappy block: {len(body)} compressed bytes cannot contain {size} uncompressed bytes")
    try:
        data: bytes = pa.Codec(_SNAPPY).decompress(body, decompressed_size=size, asbytes=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise DecodeError(f"not a snappy block: {error}") from error
    return data


def packed(data: bytes) -> bytes:
    """Return `data` compressed as a snappy block."""
    block: bytes = pa.Codec(_SNAPPY).compress(data, asbytes=True)
    return block


def _varint(data: bytes) -> tuple[int, int]:
    """Return the varint at the start of `data` and its length in bytes.

    Raises DecodeError if the varint is truncated.
    """
    value = 0
    for place, octet in enumerate(data[:10]):
        value |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return value, place + 1
    raise DecodeError("not a snappy block: the size at its start is truncated or longer than 64 bits")


def as_varint(value: int) -> bytes:
    """Return a non-negative integer encoded as a varint."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
