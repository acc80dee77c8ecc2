"""HTTP requests of the record channel: send a request to a rank and return the complete body of the response.

The headers of the response are checked. Errors are raised as FetchError. docs/record-channel.md describes the protocol.

`open_stream` reads a body after checking that it is complete and that its uncompressed size is below a limit. A stream
that is truncated between two messages looks like a valid shorter stream. The end-of-stream marker is therefore
required. A body of 8 MB that is compressed with lz4 can declare terabytes, and pyarrow has no limit. The declared sizes
of all compressed buffers are therefore added before pyarrow decompresses them. The sizes are read directly from the
flatbuffers that Arrow's Message.fbs defines. `bodies` checks the content.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import numpy as np
import pyarrow as pa

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.wire import channel
from rankscope_contract.wire.tls import MakeContext
from rankscope_ingest.base.config import Network
from rankscope_ingest.base.errors import DecodeError, FetchError
from rankscope_ingest.network.http_client import HttpClient

MAX_BODY_BYTES: Final = 1 << 28  # a single record may exceed the requested size
MAX_PLAN_BYTES: Final = 1 << 26
MAX_STACKS_BYTES: Final = 1 << 20
MAX_TEXT_BYTES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStatus:
    """The state of a rank's ring buffer, from the headers of a response.

    `head` is the sequence number of the newest record in the buffer, or None if the header is missing. `queued` is the
    number of further records that the rank has not put into the buffer yet.
    """

    head: int | None = None
    queued: int = 0
    ring_fill: float = 0.0
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The complete body of a response, not parsed yet.

    `first` and `last` are sequence numbers of records and `rows` is the number of records, all from the headers. The
    caller compares them with the content.
    """

    data: bytes
    first: int
    last: int
    rows: int
    ring: RingStatus


@dataclass(frozen=True, slots=True)
class NothingNew:
    """Response with status 204: the rank has no records after the requested sequence number."""

    ring: RingStatus


@dataclass(frozen=True, slots=True)
class Drained:
    """Response with status 503: all records of the rank are committed, and its process exits soon."""


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """Response with status 409: another process, with the given incarnation, responds at the address."""

    incarnation: str


Answer = Body | NothingNew | Drained | OtherProcess


class Fetcher(HttpClient):
    """HTTP client of the record channel. Each request contains the token of the service, if one is set."""

    def __init__(
        self,
        *,
        networks: Sequence[Network],
        token: str | None,
        timeout_seconds: float,
        tls: MakeContext | None = None,
        server_name: str | None = None,
    ) -> None:
        super().__init__(networks=networks, tls=tls, server_name=server_name)
        self._authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_seconds = timeout_seconds

    async def records(
        self, url: str, *, incarnation: str, after: int, committed: int, lease: str | None, max_bytes: int, notice: bool
    ) -> Answer:
        """Request the records after the sequence number `after`: up to `max_bytes` bytes, but at least one record.

        `committed` is the last committed sequence number. `lease` is the id that permits this service to mark records
        of the rank as committed. Both are sent to the rank; if `lease` is None, neither is sent. With a `notice` for
        the rank, it is asked to register immediately. Raises FetchError if the request fails or the response violates
        the protocol.
        """
        headers = {"Accept": channel.ARROW_STREAM, channel.SCHEMA_HEADER: str(SCHEMA_VERSION), **self._authorization}
        headers |= {channel.NOTICE_HEADER: "1"} if notice else {}
        query = {"incarnation": incarnation, "after": str(after), "max_bytes": str(max_bytes)}
        if lease is not None:
            headers[channel.LEASE_HEADER] = lease
            query["committed"] = str(committed)
        timeout = self._timeout_seconds
        async with self.request(
            "GET", url + channel.RECORDS_PATH, headers=headers, query=query, timeout_seconds=timeout
        ) as response:
            return await self._read_records(response, incarnation)

    async def plan(self, url: str, plan_id: str) -> str:
        """Return the text of the plan `plan_id`, which lists the tensors and statistics of a record.

        The caller compares the hash of the text with `plan_id`. Raises FetchError if the request fails or the text is
        not UTF-8.
        """
        data = await self._whole("GET", url + channel.PLAN_PATH + plan_id, MAX_PLAN_BYTES)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise FetchError("garbage", f"plan {plan_id} is not UTF-8 text") from error

    async def stacks(self, url: str) -> dict[str, Any]:
        """Request the current Python stacks of a rank, and return its JSON document.

        Raises FetchError if the request fails or the response is not a JSON object.
        """
        data = await self._whole("POST", url + channel.STACKS_PATH, MAX_STACKS_BYTES)
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FetchError("garbage", f"the stacks of {url} are not valid JSON") from error
        if not isinstance(document, dict):
            raise FetchError("garbage", f"the stacks of {url} are not a JSON object")
        return document

    async def _whole(self, method: str, url: str, max_bytes: int) -> bytes:
        headers = {"Accept": "application/json", **self._authorization}
        async with self.request(method, url, headers=headers, timeout_seconds=self._timeout_seconds) as response:
            if response.status != 200:
                raise await _refusal(response)
            return await _whole_body(response, max_bytes)

    async def _read_records(self, response: aiohttp.ClientResponse, incarnation: str) -> Answer:
        if response.status == 503 and response.headers.get(channel.STATE_HEADER) == channel.STATE_DRAINING:
            return Drained()
        if response.status == 409 and channel.INCARNATION_HEADER in response.headers:
            return OtherProcess(response.headers[channel.INCARNATION_HEADER])
        if response.status not in {200, 204}:
            raise await _refusal(response)
        if response.headers.get(channel.INCARNATION_HEADER) != incarnation:
            raise FetchError(
                "garbage", f"the response header {channel.INCARNATION_HEADER} is not the requested incarnation"
            )
        if response.headers.get(channel.SCHEMA_HEADER, str(SCHEMA_VERSION)) != str(SCHEMA_VERSION):
            raise FetchError("schema", _schema_text(response))
        ring = _ring_status(response)
        if response.status == 204:
            return NothingNew(ring)
        if response.content_type != channel.ARROW_STREAM:
            raise FetchError("garbage", f"Content-Type is {response.content_type!r}, not {channel.ARROW_STREAM}")
        return Body(
            data=await _whole_body(response, MAX_BODY_BYTES),
            first=_integer(response, channel.FIRST_HEADER),
            last=_integer(response, channel.LAST_HEADER),
            rows=_integer(response, channel.ROWS_HEADER),
            ring=ring,
        )


async def _whole_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body of `response`, which must have exactly Content-Length bytes.

    Raises FetchError, without reading the body, if it has no length or more than `limit` bytes.
    """
    length = response.content_length
    if length is None or "Transfer-Encoding" in response.headers:
        raise FetchError("garbage", "the response has no Content-Length, so that a truncated body cannot be detected")
    if length > limit:
        raise FetchError("garbage", f"the response has {length} bytes; the limit is {limit} bytes")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise FetchError("garbage", "the response has a Content-Encoding that was not requested")
    data = await response.read()
    if len(data) != length:
        raise FetchError("cut", f"received {len(data)} of {length} bytes")
    return data


async def _refusal(response: aiohttp.ClientResponse) -> FetchError:
    status = response.status
    if 300 <= status < 400:
        return FetchError("redirect", f"status {status}: redirects are not followed")
    text = (await response.content.read(MAX_TEXT_BYTES)).decode(errors="replace").strip()
    if status == 401:
        return FetchError(
            "unauthorized", "the rank requires a token: set [service] token of this service to the token of the ranks"
        )
    if status == 406:
        return FetchError("schema", _schema_text(response, text))
    if status == 416:
        return FetchError("cursor", f"the store has newer records than the rank: {text}")
    if status == 429:
        return FetchError(
            "busy",
            f"the rank limits requests and rejected this one: {text}",
            retry_after_seconds=_retry_after(response),
        )
    return FetchError("status", f"status {status}: {text}")


def _schema_text(response: aiohttp.ClientResponse, text: str = "") -> str:
    version = response.headers.get(channel.SCHEMA_HEADER, "unknown")
    return (
        f"the rank has schema version {version}, the service {SCHEMA_VERSION}: "
        f"install the same Rankscope release on both. {text}"
    ).rstrip()


def _ring_status(response: aiohttp.ClientResponse) -> RingStatus:
    fill = response.headers.get(channel.RING_FILL_HEADER, "0")
    try:
        ring_fill = min(max(float(fill), 0.0), 1.0)
    except ValueError as error:
        raise FetchError("garbage", f"{channel.RING_FILL_HEADER} is {fill!r}") from error
    head = _integer(response, channel.HEAD_HEADER) if channel.HEAD_HEADER in response.headers else None
    queued = _integer(response, channel.QUEUED_HEADER) if channel.QUEUED_HEADER in response.headers else 0
    return RingStatus(
        head=head,
        queued=queued,
        ring_fill=ring_fill if ring_fill == ring_fill else 0.0,  # noqa: PLR0124 - only NaN differs from itself
        is_draining=response.headers.get(channel.STATE_HEADER) == channel.STATE_DRAINING,
    )


def _integer(response: aiohttp.ClientResponse, header: str) -> int:
    text = response.headers.get(header, "")
    if len(text) > 20 or not text.removeprefix("-").isascii() or not text.removeprefix("-").isdecimal():
        raise FetchError("garbage", f"the response header {header} is {text!r}, not a number")
    return max(int(text), channel.NOTHING)


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 6 else None


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
