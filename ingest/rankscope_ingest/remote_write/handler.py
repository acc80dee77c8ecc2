"""Receive remote write requests, respond after the commit of their samples, and store repeated requests once.

A request is rejected with status 503 if the service has no capacity for it. Prometheus keeps a request in its
write-ahead log until the response arrives, and sends a rejected request again. The receiver detects a repeated request
by its receipt, a hash of the body. The receiver compares the receipt with those of waiting requests, of requests that
this process has stored, and, after a restart, of the newest commits.

The `proto` parameter of Content-Type selects version 1.0 or 2.0 of the protocol. Responses to version 2.0 have headers
with the numbers of stored items. A receipt of version 2.0 therefore contains the number of stored samples.

Decoded requests are collected in batches, from which the table of a flush is built. The sender gets its response after
the commit, so a batch waits only for a short time. The receipts of a batch are stored in the metadata of its commit.
"""

from __future__ import annotations

import asyncio
import email.message
import enum
import functools
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
from aiohttp import web

from rankscope_ingest.base.background import start_task
from rankscope_ingest.base.config import RemoteWriteSection
from rankscope_ingest.base.errors import BusyError, DecodeError, RegistrationError
from rankscope_ingest.base.protobuf import unpacked
from rankscope_ingest.base.tables import NO_RUN, TIME, constant, samples_schema
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.pipeline.flusher import FlushClock, Flusher, PendingBatch, Quarantine
from rankscope_ingest.remote_write.decoder import DecodedRequest, WriteReader
from rankscope_ingest.remote_write.senders import OUTCOME, Senders, printable
from rankscope_storage.api.store import Commit, Writer
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.service_catalogue import REMOTE_WRITE_DROPPED, REMOTE_WRITE_REQUESTS, REMOTE_WRITE_SAMPLES
from rankscope_storage.prometheus.series import STALE_BITS
from rankscope_storage.writer.writer import MAX_RECEIPTS, RECEIPTS

log = logging.getLogger(__name__)

FROM_PROMETHEUS: Final = "prometheus"
RETRY_AFTER_SECONDS: Final = 5
_WRITTEN: Final = "X-Prometheus-Remote-Write-{}-Written"
FLUSH_ROWS: Final = 200_000
ANSWER_SECONDS: Final = 20.0
"""Time limit in seconds for a request that waits for its commit. Prometheus' default timeout is 30 s."""

_MAX_WAITING_REQUESTS: Final = 2_048
_COMMITS_READ: Final = 64
_MAX_EXPANSION: Final = 4
"""Maximum size of the labels of a request of version 2.0 with the symbols inserted, as a multiple of `max_bytes`."""

_MAX_INCOMING_BODIES: Final = 4
"""Maximum total size of the bodies that are received at the same time, as a multiple of the maximum size of a body."""

_WARNINGS: Final = {
    "exemplar": "exemplars are not stored",
    "histogram": "native histograms are not stored",
    "oversized": "series with more than 128 labels or 64 KiB of labels are not stored",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSamples(PendingBatch):
    """A batch of remote write requests that are stored in one commit. The flush thread builds their table."""

    requests: Sequence[DecodedRequest]

    @classmethod
    def of(cls, requests: Sequence[DecodedRequest], receipts: Sequence[str]) -> PendingSamples:
        """Return a batch of `requests`. `receipts` has the receipt of each request, in the same order."""
        rows = sum(request.rows for request in requests)
        return cls(pieces={}, watermarks={}, rows=rows, info={RECEIPTS: " ".join(receipts)}, requests=requests)

    def tables(self) -> dict[str, pa.Table]:
        """Return the samples of all requests as rows of `samples`."""
        return {"samples": samples_table(self.requests)}

    def parts(self) -> Sequence[PendingBatch]:
        """Return a batch for each request."""
        pairs = zip(self.requests, self.info[RECEIPTS].split(), strict=True)
        return [PendingSamples.of([request], [receipt]) for request, receipt in pairs]

    def as_it_came(self) -> object:
        """Return the samples of each request as plain lists, which can be written to the quarantine."""
        return [
            {
                "target": [series.target for series in request.series],
                "metric": [series.metric for series in request.series],
                "labels": [series.labels for series in request.series],
                "time_ms": request.times_ms.tolist(),
                "value": request.values.tolist(),
            }
            for request in self.requests
        ]


@dataclass(slots=True, kw_only=True)
class SampleBatcher(FlushClock):
    """Remote write requests that wait for a commit. Callers pass the current time, in seconds."""

    _requests: list[DecodedRequest] = field(default_factory=list)
    _receipts: list[str] = field(default_factory=list)

    def add(self, request: DecodedRequest, receipt: str, now: float) -> None:
        """Add a request.

        A request without samples is added too: its response also waits for the commit of the earlier requests.
        """
        self._requests.append(request)
        self._receipts.append(receipt)
        self._rows += request.rows
        self._opened(now)

    def take(self) -> PendingSamples:
        """Return all waiting requests as a batch. Its rows count as pending until `release` is called."""
        batch = PendingSamples.of(tuple(self._requests), self._receipts)
        self._requests, self._receipts = [], []
        self._taken()
        return batch


def samples_table(requests: Sequence[DecodedRequest]) -> pa.Table:
    """Return the samples of `requests` as rows of `samples`. A staleness marker becomes a null value."""
    if not requests:
        return samples_schema().empty_table()
    series = list(itertools.chain.from_iterable(request.series for request in requests))
    values = np.concatenate([request.values for request in requests])
    is_stale = values.view(np.int64) == STALE_BITS
    times_ms = np.concatenate([request.times_ms for request in requests])
    columns = [
        constant(NO_RUN, len(series)),
        pa.array(times_ms * 1000).cast(TIME),
        constant(FROM_PROMETHEUS, len(series)),
        pa.array([one.target for one in series], pa.string()).dictionary_encode(),
        pa.array([one.metric for one in series], pa.string()).dictionary_encode(),
        pa.array([one.labels for one in series], pa.string()).dictionary_encode(),
        pa.array(values, mask=is_stale if is_stale.any() else None),
    ]
    return pa.Table.from_arrays(columns, schema=samples_schema())


class Version(enum.StrEnum):
    """A version of remote write. The value is the name of its message."""

    V1 = "prometheus.WriteRequest"
    V2 = "io.prometheus.write.v2.Request"


_SUPPORTED: Final = (
    f"send remote write 1.0 ({Version.V1}) or 2.0 ({Version.V2}) with Content-Type: application/x-protobuf and"
    " Content-Encoding: snappy"
)


async def answer(receiver: RemoteWrite, counts: ServiceMetrics, request: web.Request) -> web.Response:
    """Return status 204 after the samples are stored, or status 503 if the sender should retry.

    Raises RegistrationError if the request is malformed, too large or in an unsupported format.
    """
    try:
        version = _version(request)
        written = await receiver.take(*await _body(receiver, request), version)
    except BusyError as error:
        # 503 and not 429: unless it is configured otherwise, Prometheus drops a request after status 429.
        counts.count(REMOTE_WRITE_REQUESTS, 1, "busy")
        return web.Response(status=503, text=str(error), headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
    except DecodeError as error:
        request[OUTCOME] = "malformed"
        counts.count(REMOTE_WRITE_REQUESTS, 1, request[OUTCOME])
        raise RegistrationError(400, str(error)) from error
    except RegistrationError as error:
        request[OUTCOME] = "too_large" if error.status == 413 else "unsupported"
        counts.count(REMOTE_WRITE_REQUESTS, 1, request[OUTCOME])
        raise
    return web.Response(status=204, headers=written_headers(request, written))


def written_headers(request: web.Request, samples: int = 0) -> dict[str, str]:
    """Return the headers with the numbers of stored items, which version 2.0 requires in each response 2xx or 4xx.

    A request of version 1.0 gets no such headers. Histograms and exemplars are never stored.
    """
    if _message(request) in {None, Version.V1}:
        return {}
    counts = {"Samples": samples, "Histograms": 0, "Exemplars": 0}
    return {_WRITTEN.format(kind): str(count) for kind, count in counts.items()}


def _message(request: web.Request) -> str | None:
    """Return the parameter `proto` of Content-Type, or None if there is no such parameter."""
    header = email.message.Message()
    header["Content-Type"] = request.headers.get("Content-Type", "")
    message = header.get_param("proto")
    return None if message is None else str(message)


def _version(request: web.Request) -> Version:
    """Return the version of a request. Raises RegistrationError if its format is not supported."""
    message = _message(request)
    if request.content_type != "application/x-protobuf" or message not in {None, *Version}:
        raise RegistrationError(415, f"{printable(message or request.content_type)} is not supported: {_SUPPORTED}")
    encoding = request.headers.get("Content-Encoding", "snappy").lower()
    if encoding != "snappy":
        raise RegistrationError(415, f"Content-Encoding {printable(encoding)} is not supported: {_SUPPORTED}")
    return Version(message or Version.V1)


async def _body(receiver: RemoteWrite, request: web.Request) -> tuple[bytes, int]:
    """Return the body of the request, and the number of bytes of memory that remain reserved for the body."""
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
            raise RegistrationError(413, f"the request exceeds [remote_write] max_bytes ({limit} bytes)")
    return bytes(body)


class RemoteWrite:
    """Receiver of remote write requests. It runs on the event loop; threads decode requests and store batches."""

    def __init__(
        self,
        section: RemoteWriteSection,
        store: Writer,
        counts: ServiceMetrics,
        *,
        on_commit: Callable[[PendingBatch, Commit], None],
        clock: Callable[[], float],
        aside: Quarantine | None = None,
        reader: WriteReader | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._section = section
        self._store = store
        self._counts = counts
        self._clock = clock
        self._after_commit = on_commit
        self._answer_seconds = answer_seconds
        self._reader = reader or WriteReader()
        self._reader_lock = asyncio.Lock()
        self._batcher = SampleBatcher(
            flush_rows=FLUSH_ROWS,
            flush_after_seconds=section.hold_seconds,
            max_pending_rows=section.max_pending_samples,
        )
        self._flusher = Flusher(store, self._batcher, on_commit=self._on_commit, clock=clock, aside=aside)
        self.senders = Senders(clock)
        self._open: dict[str, asyncio.Future[int]] = {}  # by key of the receipt; the result is the number of samples
        self._decoded: dict[str, DecodedRequest] = {}  # by key of the receipt, until the commit
        self._unstored: Counter[str] = Counter()  # repeated samples that are in quarantine, by key of the receipt
        self._stored: dict[str, int] = {}  # numbers of samples by key of the receipt, the oldest first
        self._reading: set[asyncio.Task[None]] = set()
        self._reserved_bytes = 0
        self._is_closed = False
        self._warned: set[str] = set()  # reasons

    @property
    def max_bytes(self) -> int:
        """The size limit of a request in bytes, both compressed and uncompressed."""
        return self._section.max_bytes

    @property
    def pending_rows(self) -> int:
        """The number of accepted samples that are not committed yet."""
        return self._batcher.pending_rows

    @property
    def trouble(self) -> str | None:
        """The error of the last commit attempt, or None if it succeeded."""
        return self._flusher.trouble

    async def begin(self) -> None:
        """Read the receipts of the newest commits before the first request.

        A previous process may have been killed after a commit and before the response, so that the sender repeats the
        request.
        """
        try:
            found = await asyncio.to_thread(self._store.commit_info, RECEIPTS, _COMMITS_READ)
        except StoreError as error:
            log.warning(
                "remote write: cannot read the newest commits; repeated requests may be stored twice: %s", error
            )
            return
        for receipts in reversed(found):
            self._remember(dict(map(_receipt_parts, receipts.split())))

    async def run(self) -> None:
        """Store accepted samples until this coroutine is cancelled.

        Raises ShardLostError if another service has taken over the shard of this service.
        """
        await self._flusher.run()

    async def finish(self) -> None:
        """Reject new requests, and return after all accepted samples are stored."""
        self._is_closed = True
        await self._flusher.commit_now()

    def close(self) -> None:
        """Reject new requests and those that wait for a commit, so that none of them delays the exit of the service."""
        self._is_closed = True
        for waiting in self._open.values():
            _fail(waiting, BusyError("the service was stopped before the samples were stored"))

    def reserve(self, size: int | None) -> int:
        """Reserve memory for a body of `size` bytes before it is received, and return the number of reserved bytes.

        If `size` is None, reserve `max_bytes`. Raises RegistrationError if the body is too large, and BusyError if
        there is no capacity.
        """
        if size is not None and size > self.max_bytes:
            raise RegistrationError(
                413, f"the request has {size} bytes and exceeds [remote_write] max_bytes ({self.max_bytes} bytes)"
            )
        reserved = self.max_bytes if size is None else size
        self._check_capacity()
        if self._reserved_bytes + reserved > _MAX_INCOMING_BODIES * self.max_bytes:
            raise BusyError("too many requests are being received at the same time; send the request again")
        self._reserved_bytes += reserved
        return reserved

    def release(self, reserved: int) -> None:
        """Release reserved memory; `reserved` is the number of bytes."""
        self._reserved_bytes -= reserved

    async def take(self, body: bytes, reserved: int = 0, version: Version = Version.V1) -> int:
        """Store the samples of `body`; return after the commit.

        Returns the number of samples that are stored; for version 1.0, the number is not known in each case.

        Raises DecodeError if the body is invalid, and BusyError if the sender should retry. The `reserved` bytes are
        released after decoding; from then on, the limit of pending samples applies.
        """
        waiting = self._begin(body, reserved, version)
        del body  # do not keep a large body in memory while the store is slow
        if isinstance(waiting, int):
            self._counts.count(REMOTE_WRITE_REQUESTS, 1, "repeated")
            return waiting
        done, _ = await asyncio.wait([waiting], timeout=self._answer_seconds)
        if not done:
            raise BusyError(
                f"the samples are accepted but not stored yet: {self.trouble or 'the store is slow'};"
                " send the request again"
            )
        written = waiting.result()
        self._counts.count(REMOTE_WRITE_REQUESTS, 1, "ok")
        return written

    def _begin(self, body: bytes, reserved: int, version: Version) -> asyncio.Future[int] | int:
        """Return a future that completes when `body` is stored.

        If the same body was stored before, return its number of stored samples.
        """
        # The same bytes may be valid requests of both versions, with different samples.
        person = b"" if version is Version.V1 else b"2.0"
        key = hashlib.blake2b(body, digest_size=12, person=person).hexdigest()
        if key in self._stored or key in self._open:
            self.release(reserved)
            return self._open[key] if key in self._open else self._stored[key]
        try:
            self._check_capacity()
        except BusyError:
            self.release(reserved)
            raise
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._open[key] = waiting
        # A separate task, not the handler of the request, which is cancelled when the sender disconnects: the reader
        # detects decoded samples as repeated from then on, so they must also be stored.
        gathering = functools.partial(self._gather, body, key, waiting, version)
        task = start_task("decoding a remote-write request", gathering)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        task.add_done_callback(lambda _: self.release(reserved))
        return waiting

    async def _gather(self, body: bytes, key: str, waiting: asyncio.Future[int], version: Version) -> None:
        try:
            async with self._reader_lock:
                decoded = await asyncio.to_thread(self._decode_body, body, version)
            self._check_open()  # `close` may have been called meanwhile
            receipt = key if version is Version.V1 else f"{key}:{decoded.written}"
            self._batcher.add(decoded, receipt, self._clock())
            self._decoded[key] = decoded
            self._count(decoded)
        except BaseException as error:
            del self._open[key]
            _fail(
                waiting,
                error if isinstance(error, Exception) else BusyError("decoding was cancelled; send the request again"),
            )
            if not isinstance(error, (BusyError, DecodeError, RegistrationError)):
                raise

    def _decode_body(self, body: bytes, version: Version) -> DecodedRequest:
        data = unpacked(body, self.max_bytes)
        if version is Version.V1:
            return self._reader.read(data)
        return self._reader.read_2(data, _MAX_EXPANSION * self.max_bytes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BusyError("the service is stopping; send the request again")

    def _check_capacity(self) -> None:
        self._check_open()
        if self._batcher.is_full or len(self._open) >= _MAX_WAITING_REQUESTS:
            raise BusyError(
                f"samples arrive faster than they are stored: {self.trouble or 'the store is slow'};"
                " send the request again"
            )

    def _count(self, decoded: DecodedRequest) -> None:
        self._counts.count(REMOTE_WRITE_SAMPLES, decoded.rows)
        for reason, count in decoded.dropped.items():
            self._counts.count(REMOTE_WRITE_DROPPED, count, reason)
            if reason in _WARNINGS and reason not in self._warned:
                self._warned.add(reason)
                log.warning(
                    "remote write: %s; logged once, counted in rankscope_ingest_remote_write_dropped_total",
                    _WARNINGS[reason],
                )

    def _on_commit(self, batch: PendingBatch, commit: Commit) -> None:
        lost = 0
        if batch.rows and not commit.rows.get("samples"):  # a quarantined request is alone in its batch
            lost = batch.rows
            self._forget(batch)
        stored = {}
        for key, samples in map(_receipt_parts, batch.info[RECEIPTS].split()):
            stored[key] = max(0, samples - lost - self._unstored.pop(key, 0))
            del self._decoded[key]
        self._remember(stored)
        for key, samples in stored.items():
            waiting = self._open.pop(key)
            if not waiting.done():
                waiting.set_result(samples)
        self._after_commit(batch, commit)

    def _forget(self, batch: PendingBatch) -> None:
        """Note that the samples of `batch` are in quarantine, also for open requests that repeat them."""
        assert isinstance(batch, PendingSamples)
        lost = frozenset[object]().union(*(request.forget() for request in batch.requests))
        for key, request in self._decoded.items():
            self._unstored[key] += sum(repeat in lost for repeat in request.repeats)

    def _remember(self, stored: Mapping[str, int]) -> None:
        self._stored.update(stored)
        for old in list(self._stored)[: max(0, len(self._stored) - MAX_RECEIPTS)]:
            del self._stored[old]


def _receipt_parts(receipt: str) -> tuple[str, int]:
    """Return the key of a receipt and its number of samples, which is 0 in receipts of version 1.0."""
    key, _, samples = receipt.partition(":")
    return key, int(samples or 0)


def _fail(waiting: asyncio.Future[int], error: Exception) -> None:
    """Set `error` as the result of the future `waiting`, so that the request that awaits the future fails.

    The error is marked as retrieved, so that asyncio does not log it if no request waits.
    """
    if not waiting.done():
        waiting.set_exception(error)
        waiting.exception()
