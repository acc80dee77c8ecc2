"""Respond to remote read requests from the store: one query at a time, in a thread with its own DuckDB connection.

A response may have `max_samples` samples, so memory is bounded by running one query at a time. Up to three responses
are sent at the same time. If a client accepts no data for 60 s, its response is aborted. A query is cancelled when it
takes too long or its client has disconnected, so that the next query need not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from rankscope_ingest.base.config import RemoteReadSection
from rankscope_ingest.base.errors import DecodeError, RegistrationError
from rankscope_ingest.base.protobuf import packed, unpacked
from rankscope_ingest.remote_read import codec
from rankscope_ingest.remote_read.codec import (
    MAX_REQUEST_BYTES,
    SAMPLES,
    STREAMED_XOR_CHUNKS,
    read_request,
    read_response,
)
from rankscope_storage.base.errors import LimitError, QueryError, StoreError
from rankscope_storage.connection import Connection, connect
from rankscope_storage.prometheus.read import CancelToken, read

READ_SECONDS: Final = 45.0
"""Time limit of one query in seconds.

The limit is below 60 s, after which Prometheus by default cancels a remote read without showing a reason.
"""

SEND_SECONDS: Final = 60.0
_CHECK_SECONDS: Final = 0.5  # interval of checks for a disconnected client and the time limit
_MAX_RESPONSES: Final = 3
_PLAIN: Final = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
_STREAMED: Final = {"Content-Type": codec.CONTENT_TYPE}


@dataclass(frozen=True, slots=True)
class _Answer:
    headers: dict[str, str]
    pieces: Iterator[bytes]


class RemoteRead:
    """Serves remote read requests from the store at `path`."""

    def __init__(self, path: str, section: RemoteReadSection, *, read_seconds: float = READ_SECONDS) -> None:
        self._path = path
        self._section = section
        self._read_seconds = read_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-remote-read")
        self._slots = asyncio.Semaphore(_MAX_RESPONSES)
        self._turn = asyncio.Lock()  # the time limit of a query starts when the thread is free
        self._connection: Connection | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Send the response to a remote read request.

        Raises RegistrationError, whose HTTP status and reason Prometheus shows, if the query fails.
        """
        body = await request.read()
        loop = asyncio.get_running_loop()
        async with self._slots:
            found = await self._read(request, body)
            response = web.StreamResponse(headers=found.headers)
            while (piece := await loop.run_in_executor(self._thread, next, found.pieces, None)) is not None:
                if not response.prepared:
                    await response.prepare(request)
                async with asyncio.timeout(SEND_SECONDS):
                    await response.write(piece)
            if not response.prepared:
                await response.prepare(request)
            await response.write_eof()
            return response

    def close(self) -> None:
        """Close the DuckDB connection after the current query."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    async def _read(self, request: web.Request, body: bytes) -> _Answer:
        """Run a query after all previous ones and return its response.

        The query is cancelled if it exceeds the time limit or if the client has disconnected.
        """
        async with self._turn:
            loop = asyncio.get_running_loop()
            cancel = CancelToken()
            ends_at = loop.time() + self._read_seconds
            answering = loop.run_in_executor(self._thread, self._answer, body, cancel)
            try:
                while not answering.done():
                    if _is_disconnected(request):
                        cancel.end("the client has disconnected")
                    elif loop.time() >= ends_at:
                        cancel.end(f"it took longer than {self._read_seconds:g} s")
                    await asyncio.wait([answering], timeout=_CHECK_SECONDS)
            except asyncio.CancelledError:
                while not answering.done():  # return only when the thread is free for the next query
                    cancel.end("the service is stopping")
                    await asyncio.wait([answering], timeout=_CHECK_SECONDS)
                answering.exception()
                raise
            return await answering

    def _answer(self, body: bytes, cancel: CancelToken) -> _Answer:
        try:
            request = read_request(unpacked(body, MAX_REQUEST_BYTES))
            form = next((one for one in request.accepted or (SAMPLES,) if one in {SAMPLES, STREAMED_XOR_CHUNKS}), None)
            if form is None:
                raise RegistrationError(
                    400, "no accepted response type is supported: accept samples or streamed XOR chunks"
                )
            if self._connection is None:
                self._connection = connect(self._path)
            limits = {"max_series": self._section.max_series, "max_samples": self._section.max_samples}
            outside = self._section.external_labels
            series = read(self._connection, request.questions, **limits, external_labels=outside, patience=cancel)
        except (DecodeError, LimitError, QueryError) as error:
            raise RegistrationError(400, str(error)) from error
        except StoreError as error:
            raise RegistrationError(500, str(error)) from error
        if form == STREAMED_XOR_CHUNKS:
            return _Answer(_STREAMED, codec.frames(series))
        return _Answer(_PLAIN, iter([packed(read_response(series))]))

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _is_disconnected(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()
