"""Answer remote read from the store, one question at a time, in a thread of its own with a connection of its own.

One at a time bounds the memory: an answer may be as large as `max_samples` allows. A few that were read may be on their
way out beside it; who takes none of it for a minute loses the rest. So that no question keeps the others waiting, it is
ended when it takes too long, and when who asked has hung up.
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
from rankscope_ingest.remote_read import chunked
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
"""For one question: by default Prometheus waits a minute for the whole answer, and then for no word of why."""

SEND_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.5
_ON_THEIR_WAY: Final = 3
_PLAIN: Final = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
_STREAMED: Final = {"Content-Type": chunked.CONTENT_TYPE}


@dataclass(frozen=True, slots=True)
class _Answer:
    headers: dict[str, str]
    pieces: Iterator[bytes]


class RemoteRead:
    """History of the store at `path`, as Prometheus asks for it."""

    def __init__(self, path: str, section: RemoteReadSection, *, read_seconds: float = READ_SECONDS) -> None:
        self._path = path
        self._section = section
        self._read_seconds = read_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-remote-read")
        self._slots = asyncio.Semaphore(_ON_THEIR_WAY)
        self._turn = asyncio.Lock()  # so that the time of a question begins when the thread is free for it
        self._connection: Connection | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request. Raises RegistrationError with the status that Prometheus shows."""
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
        """Close the connection behind what is under way."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    async def _read(self, request: web.Request, body: bytes) -> _Answer:
        """Have a question answered in its turn, as long as somebody waits for it and it does not take too long."""
        async with self._turn:
            loop = asyncio.get_running_loop()
            patience = CancelToken()
            ends_at = loop.time() + self._read_seconds
            answering = loop.run_in_executor(self._thread, self._answer, body, patience)
            try:
                while not answering.done():
                    if _has_hung_up(request):
                        patience.end("who asked has hung up")
                    elif loop.time() >= ends_at:
                        patience.end(f"it took longer than {self._read_seconds:g} s")
                    await asyncio.wait([answering], timeout=_LOOK_SECONDS)
            except asyncio.CancelledError:
                while not answering.done():  # the next question finds the thread free
                    patience.end("the service stops")
                    await asyncio.wait([answering], timeout=_LOOK_SECONDS)
                answering.exception()
                raise
            return await answering

    def _answer(self, body: bytes, patience: CancelToken) -> _Answer:
        try:
            request = read_request(unpacked(body, MAX_REQUEST_BYTES))
            form = next((one for one in request.accepted or (SAMPLES,) if one in {SAMPLES, STREAMED_XOR_CHUNKS}), None)
            if form is None:
                raise RegistrationError(400, "answers are of samples or of streamed XOR chunks: accept one of them")
            if self._connection is None:
                self._connection = connect(self._path)
            limits = {"max_series": self._section.max_series, "max_samples": self._section.max_samples}
            outside = self._section.external_labels
            series = read(self._connection, request.questions, **limits, external_labels=outside, patience=patience)
        except (DecodeError, LimitError, QueryError) as error:
            raise RegistrationError(400, str(error)) from error
        except StoreError as error:
            raise RegistrationError(500, str(error)) from error
        if form == STREAMED_XOR_CHUNKS:
            return _Answer(_STREAMED, chunked.frames(series))
        return _Answer(_PLAIN, iter([packed(read_response(series))]))

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _has_hung_up(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()
