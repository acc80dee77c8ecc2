"""Take what Prometheus pushes: answered when it is stored, refused while there is no room, the same request taken once.

Prometheus keeps what is not answered in its own log and sends it again, so an answer is given only after the commit,
and a refusal (503) costs nothing. What it sends again is known by its bytes: while the first one waits, while this
process remembers, and after a restart by the receipts beside the newest commits.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Final, Protocol

from aiohttp import web

from rankscope_ingest.base.config import RemoteWriteSection
from rankscope_ingest.base.errors import BusyError, DecodeError, RegistrationError
from rankscope_ingest.base.protobuf import unpacked
from rankscope_ingest.pipeline.batcher import PendingBatch
from rankscope_ingest.pipeline.flusher import Appender, Committed, Flusher, QuarantineSink
from rankscope_ingest.remote_write.batcher import RECEIPTS, SampleBatcher, halves
from rankscope_ingest.remote_write.decoder import WriteReader, Written
from rankscope_storage.base.errors import StoreError

RETRY_AFTER_SECONDS: Final = 5
_MESSAGE: Final = "prometheus.WriteRequest"
_TAKEN: Final = (
    f"send remote write 1.0 ({_MESSAGE}): Content-Type: application/x-protobuf, Content-Encoding: snappy;"
    " 2.0 is not taken"
)


async def answer(receiver: RemoteWrite, counts: Counts, request: web.Request) -> web.Response:
    """Return 204 when what came is stored, 503 when it may come again. Raises RegistrationError for what may not."""
    try:
        _check_form(request)
        await receiver.take(*await _body(receiver, request))
    except BusyError as error:
        # 503 and not 429: unless it is configured, Prometheus throws away what is answered with 429.
        counts.write_answered("busy")
        return web.Response(status=503, text=str(error), headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
    except DecodeError as error:
        counts.write_answered("malformed")
        raise RegistrationError(400, str(error)) from error
    except RegistrationError as error:
        counts.write_answered("too_large" if error.status == 413 else "unsupported")
        raise
    return web.Response(status=204)


def _check_form(request: web.Request) -> None:
    message = _parameter(request.headers.get("Content-Type", ""), "proto")
    if request.content_type != "application/x-protobuf" or message not in {None, _MESSAGE}:
        raise RegistrationError(415, f"{message or request.content_type} is not understood: {_TAKEN}")
    encoding = request.headers.get("Content-Encoding", "snappy").lower()
    if encoding != "snappy":
        raise RegistrationError(415, f"Content-Encoding {encoding} is not understood: {_TAKEN}")


def _parameter(content_type: str, name: str) -> str | None:
    for part in content_type.split(";")[1:]:
        key, _, value = part.partition("=")
        if key.strip().lower() == name:
            return value.strip().strip('"')
    return None


async def _body(receiver: RemoteWrite, request: web.Request) -> tuple[bytes, int]:
    """Return what was sent, and the room that is reserved for it."""
    reserved = receiver.reserve(request.content_length)
    try:
        body = await _read(request, receiver.max_bytes)
    except BaseException:
        receiver.release(reserved)
        raise
    receiver.release(reserved - len(body))
    return body, len(body)


async def _read(request: web.Request, limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise RegistrationError(413, f"a request may have [remote_write] max_bytes, {limit}")
    return bytes(body)


log = logging.getLogger(__name__)

FLUSH_ROWS: Final = 200_000
ANSWER_SECONDS: Final = 20.0
"""How long a request waits for its commit: below the 30 s after which Prometheus gives up by default."""

_MOST_WAITING: Final = 2_048
_REMEMBERED: Final = 8_192
_COMMITS_READ: Final = 64
_INLINE_BYTES: Final = 65_536  # less is read faster than a thread is woken
_BODIES_AT_ONCE: Final = 4
"""So many of the largest requests may be on their way in at once."""


class Store(Appender, Protocol):
    """The store as the receiver sees it; every method blocks and may raise StoreError."""

    def commit_info(self, key: str, commits: int) -> list[str]:
        """Return what the newest commits say under `key`."""
        ...


class Counts(Protocol):
    """Where it is counted how that goes."""

    def write_answered(self, outcome: str) -> None:
        """Count a request."""
        ...

    def written(self, samples: int) -> None:
        """Count samples that were taken."""
        ...

    def write_dropped(self, reason: str, count: int) -> None:
        """Count what is not stored."""
        ...


class RemoteWrite:
    """Requests of remote write, on the event loop; only reading a large one and storing are in threads."""

    def __init__(
        self,
        section: RemoteWriteSection,
        store: Store,
        counts: Counts,
        *,
        on_commit: Callable[[PendingBatch, Committed], None],
        clock: Callable[[], float],
        aside: QuarantineSink | None = None,
    ) -> None:
        self._section = section
        self._store = store
        self._counts = counts
        self._clock = clock
        self._after_commit = on_commit
        self._reader = WriteReader()
        self._one_at_a_time = asyncio.Lock()
        self._batcher = SampleBatcher(
            flush_rows=FLUSH_ROWS,
            flush_after_seconds=section.hold_seconds,
            max_pending_rows=section.max_pending_samples,
        )
        self._flusher = Flusher(
            store, self._batcher, on_commit=self._on_commit, clock=clock, aside=aside, halves=halves
        )
        self._open: dict[str, asyncio.Future[None]] = {}  # by receipt
        self._stored: dict[str, None] = {}  # receipts, the oldest first
        self._reading: set[asyncio.Task[None]] = set()
        self._body_bytes = 0
        self._is_closed = False
        self._told: set[str] = set()

    @property
    def max_bytes(self) -> int:
        """The largest request that is taken, packed or unpacked."""
        return self._section.max_bytes

    @property
    def pending_rows(self) -> int:
        """Samples that came and are not yet committed."""
        return self._batcher.pending_rows

    @property
    def trouble(self) -> str | None:
        """Why nothing can be stored, or None."""
        return self._flusher.trouble

    async def begin(self) -> None:
        """Remember what a former service stored last: its senders may not have heard of it."""
        try:
            found = await asyncio.to_thread(self._store.commit_info, RECEIPTS, _COMMITS_READ)
        except StoreError as error:
            log.warning("the newest commits cannot be read: what is sent again may be stored twice: %s", error)
            return
        for receipts in reversed(found):
            self._remember(receipts.split())

    async def run(self) -> None:
        """Store what was taken, until cancelled. Raises ShardLostError when the store is no longer ours."""
        await self._flusher.run()

    async def finish(self) -> None:
        """Take no more, store what was taken, and answer for it."""
        self._is_closed = True
        await self._flusher.commit_now()

    def close(self) -> None:
        """Have those who still wait come again later, so that nobody holds up the end."""
        self._is_closed = True
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(BusyError("the service was stopped before it could store this"))
                waiting.exception()

    def reserve(self, size: int | None) -> int:
        """Make room for a body of `size` bytes, or of any; return what to give back. Raises before it is read."""
        if size is not None and size > self.max_bytes:
            raise RegistrationError(413, f"{size} bytes are more than [remote_write] max_bytes, {self.max_bytes}")
        wanted = self.max_bytes if size is None else size
        self._check_room()
        if self._body_bytes + wanted > _BODIES_AT_ONCE * self.max_bytes:
            raise BusyError("too many requests are on their way in")
        self._body_bytes += wanted
        return wanted

    def release(self, reserved: int) -> None:
        """Give back what a body had."""
        self._body_bytes -= reserved

    async def take(self, body: bytes, reserved: int = 0) -> None:
        """Return when the samples of `body` are stored. Raises DecodeError, or BusyError to try again.

        The room that was `reserved` for it is given back as soon as it is read: what waits is counted in samples.
        """
        waiting = self._begin(body, reserved)
        del body  # it may be large, and the store slow
        if waiting is None:
            self._counts.write_answered("repeated")
            return
        done, _ = await asyncio.wait([waiting], timeout=ANSWER_SECONDS)
        if not done:
            raise BusyError(f"what was sent is kept, and not stored yet: {self.trouble or 'the store is slow'}")
        waiting.result()
        self._counts.write_answered("ok")

    def _begin(self, body: bytes, reserved: int) -> asyncio.Future[None] | None:
        """Return what is done when `body` is stored, None where it was stored before."""
        receipt = hashlib.blake2b(body, digest_size=12).hexdigest()
        if receipt in self._stored or receipt in self._open:
            self.release(reserved)
            return self._open.get(receipt)
        try:
            self._check_room()
        except BaseException:
            self.release(reserved)
            raise
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[receipt] = waiting
        # Apart from the request, which may be gone in a moment: what was read counts as known, so it must be kept too.
        task = asyncio.create_task(self._gather(body, receipt, waiting))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        task.add_done_callback(lambda _: self.release(reserved))
        return waiting

    async def _gather(self, body: bytes, receipt: str, waiting: asyncio.Future[None]) -> None:
        try:
            written = await self._read(body)
            self._check_open()  # it may have been closed meanwhile
        except BaseException as error:
            del self._open[receipt]
            if not waiting.done():
                waiting.set_exception(error if isinstance(error, Exception) else BusyError("try again"))
                waiting.exception()  # nobody may wait any more
            if not isinstance(error, Exception):
                raise
            return
        self._batcher.add(written, receipt, self._clock())
        self._count(written)

    async def _read(self, body: bytes) -> Written:
        async with self._one_at_a_time:
            if len(body) < _INLINE_BYTES and not self._reader.is_to_tidy:
                return self._read_now(body)
            return await asyncio.to_thread(self._read_now, body)

    def _read_now(self, body: bytes) -> Written:
        return self._reader.read(unpacked(body, self.max_bytes))

    def _check_open(self) -> None:
        if self._is_closed:
            raise BusyError("the service is being stopped")

    def _check_room(self) -> None:
        self._check_open()
        if self._batcher.is_full or len(self._open) >= _MOST_WAITING:
            raise BusyError(f"samples come faster than they are stored: {self.trouble or 'the store is slow'}")

    def _count(self, written: Written) -> None:
        self._counts.written(written.rows)
        left_out = {
            "exemplar": written.exemplars,
            "histogram": written.histograms,
            "metadata": written.metadata,
            "oversized": written.oversized,
            "repeated": written.repeated,
        }
        for reason, count in left_out.items():
            if count:
                self._counts.write_dropped(reason, count)
        for reason in ("histogram", "oversized"):
            if left_out[reason] and reason not in self._told:
                self._told.add(reason)
                log.warning("remote write: %s is not stored; this is said once, and counted", _NOT_STORED[reason])

    def _on_commit(self, batch: PendingBatch, commit: Committed) -> None:
        receipts = batch.info[RECEIPTS].split()
        self._remember(receipts)
        for receipt in receipts:
            waiting = self._open.pop(receipt)
            if not waiting.done():
                waiting.set_result(None)
        self._after_commit(batch, commit)

    def _remember(self, receipts: list[str]) -> None:
        self._stored.update(dict.fromkeys(receipts))
        for old in list(self._stored)[: max(0, len(self._stored) - _REMEMBERED)]:
            del self._stored[old]


_NOT_STORED: Final = {
    "histogram": "a native histogram",
    "oversized": "a series with more than 128 labels, or 64 KiB of them,",
}
