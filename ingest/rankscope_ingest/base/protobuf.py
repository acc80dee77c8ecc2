"""Messages of Prometheus remote read and remote write, parsed by google.protobuf, and snappy's block format.

The schema follows prompb/remote.proto and prompb/types.proto. Fields that a caller only counts, copies or caches are
declared as `bytes`, which is possible because `bytes` and a nested message have the same wire format. TimeSeries is
divided for remote write: the message `TimeSeries` contains the samples, and `SeriesHead` contains the other fields,
which are unknown fields of `TimeSeries`. The messages of remote write 2.0 follow
prompb/io/prometheus/write/v2/types.proto. The packages `remote_read` and `remote_write` interpret the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from rankscope_ingest.base.errors import DecodeError

_SNAPPY: Final = "snappy"
_MAX_COMPRESSION: Final = 64
"""Maximum compression ratio of a snappy block: the longest copy element produces 64 bytes from three."""

_SCALARS: Final = {"double": 1, "int64": 3, "int32": 5, "string": 9, "bytes": 12, "uint32": 13}
"""Numbers of FieldDescriptorProto.Type by name.

A type name that is missing here is the name of a message of this schema (type number 11).
"""

_Schema = Mapping[str, Sequence[str]]
"""Declarations of the fields of each message, by message name."""

_MESSAGES: Final[_Schema] = {
    "WriteRequest": ("repeated TimeSeries timeseries = 1", "repeated bytes metadata = 3"),
    "TimeSeries": ("repeated Sample samples = 2",),
    "SeriesHead": ("repeated bytes labels = 1", "repeated bytes exemplars = 3", "repeated bytes histograms = 4"),
    "Label": ("string name = 1", "string value = 2"),
    "Sample": ("double value = 1", "int64 timestamp = 2"),
    "ReadRequest": ("repeated Query queries = 1", "repeated int32 accepted_response_types = 2"),
    "Query": (
        "int64 start_timestamp_ms = 1",
        "int64 end_timestamp_ms = 2",
        "repeated LabelMatcher matchers = 3",
        "ReadHints hints = 4",
    ),
    "LabelMatcher": ("int32 type = 1", "string name = 2", "string value = 3"),
    "ReadHints": (
        "int64 step_ms = 1",
        "string func = 2",
        "int64 start_ms = 3",
        "int64 end_ms = 4",
        "int64 range_ms = 7",
    ),
    "ReadResponse": ("repeated QueryResult results = 1",),
    "QueryResult": ("repeated bytes timeseries = 1",),
    "ChunkedReadResponse": ("repeated ChunkedSeries chunked_series = 1", "int64 query_index = 2"),
    "ChunkedSeries": ("repeated bytes labels = 1", "repeated Chunk chunks = 2"),
    "Chunk": ("int64 min_time_ms = 1", "int64 max_time_ms = 2", "int32 type = 3", "bytes data = 4"),
}

_WRITE_2_MESSAGES: Final[_Schema] = {
    "Request": ("repeated string symbols = 4", "repeated TimeSeries timeseries = 5"),
    "TimeSeries": (
        "repeated uint32 labels_refs = 1",
        "repeated Sample samples = 2",
        "repeated bytes histograms = 3",
        "repeated Exemplar exemplars = 4",
        "bytes metadata = 5",
    ),
    "Sample": ("double value = 1", "int64 timestamp = 2"),
    "Exemplar": ("repeated uint32 labels_refs = 1",),
    "Metadata": ("int32 type = 1", "uint32 help_ref = 3", "uint32 unit_ref = 4"),
}


def _message_classes(package: str, schema: _Schema) -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"rankscope/{package}.proto", package=package, syntax="proto3")
    for name, declarations in schema.items():
        fields = file.message_type.add(name=name).field
        for declaration in declarations:
            *repeated, kind, field, _, number = declaration.split()
            one = fields.add(name=field, number=int(number), label=3 if repeated else 1, type=_SCALARS.get(kind, 11))
            if kind not in _SCALARS:
                one.type_name = f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in schema}


MESSAGES: Final = _message_classes("prometheus", _MESSAGES)
"""The protobuf message classes for Prometheus remote read and remote write 1.0, by message name."""

WRITE_2_MESSAGES: Final = _message_classes("io.prometheus.write.v2", _WRITE_2_MESSAGES)
"""The protobuf message classes for Prometheus remote write 2.0, by message name."""


def parse(name: str, data: bytes, classes: Mapping[str, Any] = MESSAGES) -> Any:
    """Return the message of class `name` that is serialized in `data`. Raises DecodeError if `data` is malformed."""
    try:
        return classes[name].FromString(data)
    except message.DecodeError as error:
        raise DecodeError(
            f"not a valid {classes[name].DESCRIPTOR.full_name}: malformed or truncated protobuf, or invalid UTF-8"
        ) from error


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
