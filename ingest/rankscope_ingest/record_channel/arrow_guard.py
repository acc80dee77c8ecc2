"""Is this body a whole, harmless Arrow stream? Answered before anything is inflated.

A stream cut between two messages reads as a valid shorter one, and 8 MB of lz4 can claim to hold terabytes. So the
end-of-stream mark is demanded, and the sizes that compressed buffers claim are summed from the message headers;
pyarrow offers no limit of its own. The few flatbuffer fields needed are read by hand (Arrow format, Message.fbs).
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import pyarrow as pa

from rankscope_ingest.base.errors import DecodeError

END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
MAX_INFLATED_BYTES: Final = 1 << 29

# Arrow's own threads cost more than they save: a spool has hundreds of small buffers, a poll inflates in milliseconds.
_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)

# Positions of fields in the tables of Message.fbs.
_MESSAGE_HEADER: Final = 2
_BATCH_BUFFERS: Final = 2
_BATCH_COMPRESSION: Final = 3
_BUFFER: Final = np.dtype([("offset", "<i8"), ("length", "<i8")])


def open_stream(body: bytes, *, max_inflated_bytes: int = MAX_INFLATED_BYTES) -> pa.Table:
    """Return the table in `body`. Raises DecodeError when it is cut, malformed, or would inflate beyond the limit."""
    if not body.endswith(END_OF_STREAM):
        raise DecodeError("the body does not end with the end-of-stream mark: it was cut, or it is no Arrow stream")
    try:
        claimed = inflated_bytes(body)
        if claimed > max_inflated_bytes:
            raise DecodeError(f"the body would inflate to {claimed} bytes; the limit is {max_inflated_bytes}")
        with pa.ipc.open_stream(body, options=_OPTIONS) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowException, ArithmeticError, LookupError, OSError, ValueError, struct.error) as error:
        raise DecodeError(f"not an Arrow record stream: {_first_line(error)}") from error
    if len(set(table.column_names)) < table.num_columns:
        raise DecodeError("the stream has two columns of one name")
    return table


def inflated_bytes(body: bytes) -> int:
    """Return how many bytes the buffers of all record batches in `body` claim to hold once inflated."""
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
            raise DecodeError(f"a record stream holds no message of type {message.type!r}")


def _batch_bytes(metadata: bytes, body: pa.Buffer) -> int:
    message = _root(metadata)
    header = _table_at(metadata, _field(metadata, message, _MESSAGE_HEADER))
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
        raise DecodeError("not an Arrow record stream: a buffer that does not begin at a multiple of 8 bytes")
    # Each compressed buffer begins with its inflated size; -1 says that it was left as it is.
    packed = buffers[buffers["length"] >= 8]
    claims = np.frombuffer(body, "<i8", len(body) // 8)[packed["offset"] // 8]
    return sum(np.where(claims < 0, packed["length"], claims).tolist())  # Python's integers do not wrap


def _uint32(metadata: bytes, position: int) -> int:
    return int(struct.unpack_from("<I", metadata, position)[0])


def _root(metadata: bytes) -> int:
    return _uint32(metadata, 0)


def _table_at(metadata: bytes, position: int | None) -> int:
    if position is None:
        raise DecodeError("not an Arrow record stream: a message without a header")
    return position + _uint32(metadata, position)


def _field(metadata: bytes, table: int, number: int) -> int | None:
    """Return where field `number` of the flatbuffer table at `table` stands, or None when it was left out."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", metadata, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", metadata, vtable + slot)[0]
    return table + offset if offset else None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
