"""Answer remote read from the store, one request at a time, in a thread of its own with a connection of its own.

One at a time bounds the memory: an answer may be as large as `max_samples` allows.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from rankscope_ingest.config import RemoteReadSection
from rankscope_ingest.errors import DecodeError, RegistrationError
from rankscope_ingest.remote_read.messages import SAMPLES, packed, read_request, read_response, unpacked
from rankscope_storage.connection import Connection, connect
from rankscope_storage.errors import LimitError, QueryError, StoreError
from rankscope_storage.remote_read.reading import read


class RemoteRead:
    """History of the store at `path`, as Prometheus asks for it."""

    def __init__(self, path: str, section: RemoteReadSection) -> None:
        self._path = path
        self._section = section
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-remote-read")
        self._connection: Connection | None = None

    async def answer(self, body: bytes) -> bytes:
        """Return the body of the answer. Raises RegistrationError with the status that Prometheus shows."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, body)

    def close(self) -> None:
        """Close the connection behind what is under way."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _answer(self, body: bytes) -> bytes:
        try:
            request = read_request(unpacked(body))
            if request.accepted and SAMPLES not in request.accepted:
                raise RegistrationError(400, "only answers of samples are given: accept SAMPLES too")
            if self._connection is None:
                self._connection = connect(self._path)
            limits = {"max_series": self._section.max_series, "max_samples": self._section.max_samples}
            return packed(read_response(read(self._connection, request.questions, **limits)))
        except (DecodeError, LimitError, QueryError) as error:
            raise RegistrationError(400, str(error)) from error
        except StoreError as error:
            raise RegistrationError(500, str(error)) from error

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
