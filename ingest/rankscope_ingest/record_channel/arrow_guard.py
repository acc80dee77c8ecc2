"""Read an Arrow stream after checking that it is complete and that its uncompressed size is below a limit.

A stream that is truncated between two messages looks like a valid shorter stream. The end-of-stream marker is therefore
required. A body of 8 MB that is compressed with lz4 can declare terabytes, and pyarrow has no limit. The declared sizes
of all compressed buffers are therefore added before pyarrow decompresses them. The sizes are read directly from the
flatbuffers that Arrow's Message.fbs defines.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import pyarrow as pa

from rankscope_ingest.base.errors import DecodeError

END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
MAX_INFLATED_BYTES: Final = 1 << 29

# Without Arrow's thread pool, which costs more than it saves: buffers are small, and a poll takes milliseconds.
_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)

# Numbers of fields in the tables of Message.fbs.
_MESSAGE_HEADER: Final = 2
_BATCH_BUFFERS: Final = 2
_BATCH_COMPRESSION: Final = 3
_BUFFER: Final = np.dtype([("offset", "<i8"), ("length", "<i8")])


def open_stream(body: bytes, *, max_inflated_bytes: int = MAX_INFLATED_BYTES) -> pa.Table:
    """Return the Arrow table in `body`.

    Raises DecodeError if the body is truncated or malformed, or if its uncompressed size is above `max_inflated_bytes`.
    """
    if not body.endswith(END_OF_STREAM):
        raise DecodeError(
            "the body does not end with the end-of-stream marker: it is truncated, or not an Arrow stream"
        )
    try:
        declared = inflated_bytes(body)
        if declared > max_inflated_bytes:
            raise DecodeError(f"the uncompressed body has {declared} bytes; the limit is {max_inflated_bytes} bytes")
        with pa.ipc.open_stream(body, options=_OPTIONS) as reader:
            table = reader.read_all()
        table.validate(full=True)
        names = table.column_names
    except (pa.ArrowException, ArithmeticError, LookupError, OSError, ValueError, struct.error) as error:
        raise DecodeError(
            f"the body is not an Arrow record stream: {str(error).partition(chr(10))[0] or type(error).__name__}"
        ) from error
    if len(set(names)) < table.num_columns:
        raise DecodeError("the record stream has two columns with the same name")
    return table


def inflated_bytes(body: bytes) -> int:
    """Return the uncompressed size in bytes that the record batches in `body` declare for their buffers."""
    total = 0
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return total
        if message.type == "record batch":
            total += _batch_bytes(message.metadata.to_pybytes(), message.body)
        elif message.type != "schema":
            raise DecodeError(f"a record stream must not have messages of type {message.type!r}")


def _batch_bytes(metadata: bytes, body: pa.Buffer) -> int:
    header_field = _field(metadata, _uint32(metadata, 0), _MESSAGE_HEADER)
    if header_field is None:
        raise DecodeError("the body is not an Arrow record stream: a message has no header")
    header = header_field + _uint32(metadata, header_field)
    position = _field(metadata, header, _BATCH_BUFFERS)
    if position is None:
        return 0
    compressed = _field(metadata, header, _BATCH_COMPRESSION) is not None
    vector = position + _uint32(metadata, position)
    count = _uint32(metadata, vector)
    buffers = np.frombuffer(metadata, _BUFFER, count, vector + 4)
    if not compressed:
        return int(buffers["length"].sum())
    if buffers["offset"].min(initial=0) < 0 or (buffers["offset"] & 7).any():
        raise DecodeError("the body is not an Arrow record stream: a buffer does not start at a multiple of 8 bytes")
    # Each compressed buffer starts with its uncompressed size; -1 means that it is not compressed.
    packed = buffers[buffers["length"] >= 8]
    declared = np.frombuffer(body, "<i8", len(body) // 8)[packed["offset"] // 8]
    return sum(np.where(declared < 0, packed["length"], declared).tolist())  # Python integers do not overflow


def _uint32(metadata: bytes, position: int) -> int:
    return int(struct.unpack_from("<I", metadata, position)[0])


def _field(metadata: bytes, table: int, number: int) -> int | None:
    """Return the position of the field with this number in the flatbuffer table at the position `table`.

    Return None if the field is absent.
    """
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", metadata, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", metadata, vtable + slot)[0]
    return table + offset if offset else None
