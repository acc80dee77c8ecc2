"""Collect poll responses, scrapes and rows of the service in batches, and commit one batch at a time in a thread.

`Batcher` performs no I/O. The rows of a batch count as pending until its commit. A failed batch is retried unchanged
and before the next one. Rows of an incarnation are therefore never reordered, and the watermark is always the end of a
sequence of records without gaps.

A commit that failed for the service may nevertheless be complete in the store. The store detects this when the same
batch is appended again. A failed batch is therefore never merged with later rows: in a merged batch, rows without a
sequence number (seq) would be stored twice. Rows that the store rejects as invalid would be rejected at every retry.
They are moved to quarantine, and all other rows are stored.

A rejected batch is committed in parts: each is one poll response of one rank, or one table of the service. Before the
watermark advances past a part that is rejected again, the part is written to a folder next to the data, which no query
reads. An event in the store, a counter and a log message report the quarantine.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import math
import pickle
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import EventType, Severity
from rankscope_ingest.base.background import FAULTS, WakeUp
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.pipeline.rows import Stamp, event_row
from rankscope_ingest.record_channel.bodies import ValidBody, decode, plain_text
from rankscope_ingest.scrape.sample_table import Grid, Scrape
from rankscope_storage.api.store import Batch, Commit, Writer
from rankscope_storage.base.errors import BatchError, RepeatedError, ShardLostError, StoreError
from rankscope_storage.base.escaping import path_segment
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.location import Location
from rankscope_storage.files.filesystem import Content, bytes_content, filesystem

SAMPLES_A_ROW: Final = 3
"""Number of samples of exporters that together count as one row in the decision whether a batch is full.

The number is high because larger flushes are cheaper: each flush stores the names of all series again. The cost per
sample of a flush with five scrapes is one third lower than that of a flush with three scrapes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingBatch:
    """The content of one commit, as received. The flush thread decodes the poll responses and builds the tables."""

    pieces: Mapping[str, tuple[pa.Table, ...]]
    bodies: tuple[ValidBody, ...] = ()
    scrapes: tuple[Scrape, ...] = ()
    grid: Grid = field(default_factory=Grid)  # caches the series names of previous batches
    watermarks: Mapping[str, int]
    rows: int
    info: Mapping[str, str] = field(default_factory=dict)  # stored in the information of the commit

    def as_it_came(self) -> object:
        """Return the undecoded content of the batch. This content is written to quarantine if it cannot be decoded."""
        return self

    def parts(self) -> Sequence[PendingBatch]:
        """Divide the batch into the smallest batches that can be stored one after another.

        Each poll response is in one batch, together with the rows of the service that have the seq of one of its
        records, such as gap events. If these rows came later, the store would drop them as already stored. Rows without
        a seq are in further batches, one for each table.
        """
        found, pieces = [], [(dataset, table) for dataset, tables in self.pieces.items() for table in tables]
        pieces += [("samples", scrape.table()) for scrape in self.scrapes]
        for body in self.bodies:
            beside, rest = [], []
            for dataset, table in pieces:
                own = _of(table, body.context.incarnation, body.last)
                beside.append((dataset, table.filter(own)))
                rest.append((dataset, table.filter(pc.invert(own))))
            pieces = [(dataset, table) for dataset, table in rest if table.num_rows]
            found.append(_part(self, beside, (body,), {body.context.incarnation: body.last}))
        known = {name for part in found for name in part.watermarks}
        left = {name: seq for name, seq in self.watermarks.items() if name not in known}
        numbered = [(dataset, table.filter(_numbered(table))) for dataset, table in pieces]
        if left or any(table.num_rows for _, table in numbered):
            found.append(_part(self, numbered, (), left))
        return found + [
            _part(self, [(dataset, others)], (), {})
            for dataset, table in pieces
            if (others := table.filter(pc.invert(_numbered(table)))).num_rows
        ]

    def tables(self) -> dict[str, pa.Table]:
        """Decode the content of the batch; return a mapping from dataset to table."""
        tables = decode(self.bodies) if self.bodies else {}
        for dataset, pieces in self.pieces.items():
            decoded = [plain_text(tables[dataset])] if dataset in tables else []
            tables[dataset] = pa.concat_tables([*decoded, *pieces])
        if self.scrapes:
            scraped = self.grid.table(self.scrapes)
            tables["samples"] = pa.concat_tables([scraped, tables["samples"]]) if "samples" in tables else scraped
        return tables


def _part(batch: PendingBatch, pieces: list[tuple[str, pa.Table]], bodies: Any, watermarks: Any) -> PendingBatch:
    kept: dict[str, tuple[pa.Table, ...]] = {}
    for dataset, table in pieces:
        if table.num_rows:
            kept[dataset] = (*kept.get(dataset, ()), table)
    rows = sum(body.rows for body in bodies) + sum(table.num_rows for tables in kept.values() for table in tables)
    return PendingBatch(pieces=kept, bodies=bodies, watermarks=watermarks, rows=rows, info=batch.info)


def _numbered(table: pa.Table) -> pa.ChunkedArray:
    """Return a boolean mask of the rows that have a sequence number (seq), and thus belong to a record of a process."""
    if "seq" not in table.column_names or "incarnation" not in table.column_names:
        return pa.chunked_array([pa.repeat(pa.scalar(False), table.num_rows)])
    return pc.and_(pc.is_valid(table["seq"]), pc.is_valid(table["incarnation"]))


def _of(table: pa.Table, incarnation: str, last: int) -> pa.ChunkedArray:
    numbered = _numbered(table)
    if not pc.any(numbered).as_py():
        return numbered
    of_process = pc.equal(table["incarnation"].cast(pa.string()), incarnation)
    return pc.fill_null(pc.and_kleene(pc.and_(of_process, numbered), pc.less_equal(table["seq"], last)), False)


@dataclass(slots=True, kw_only=True)
class FlushClock:
    """Counts pending rows and decides when the next flush is due. Rows are pending until their commit.

    `rest_seconds` returns the time until the batch becomes due because of its age. The flusher is notified of every
    event that can make a batch due earlier: a batch starts, a batch is full, or a flush is requested.
    """

    flush_rows: int
    flush_after_seconds: float
    max_pending_rows: int
    _notify: Callable[[], None] = field(default=lambda: None, repr=False)
    _rows: int = 0
    _samples: int = 0  # of the rows, the samples of exporters
    _rows_in_flight: int = 0
    _opened_at: float | None = None
    _wanted: bool = False

    @property
    def pending_rows(self) -> int:
        """Return the number of rows that are received but not committed yet."""
        return self._rows + self._rows_in_flight

    @property
    def is_empty(self) -> bool:
        """Return whether the current batch is empty. An earlier batch may still be waiting for its commit."""
        return self._opened_at is None

    @property
    def is_full(self) -> bool:
        """Return whether polls and scrapes must wait because too many rows are pending."""
        return self.pending_rows >= self.max_pending_rows

    def free_rows(self) -> int:
        """Return how many more rows may become pending before polls and scrapes must wait."""
        return self.max_pending_rows - self.pending_rows

    def notify(self, flusher: Callable[[], None]) -> None:
        """Set the function to call when the batch may be due earlier than the last result of `rest_seconds`."""
        self._notify = flusher

    def want_flush(self) -> None:
        """Request a flush as soon as an earlier batch is committed."""
        if not self.is_empty:
            self._wanted = True
            self._notify()

    def due(self, now: float) -> str | None:
        """Return the reason why the current batch must be flushed now, or None if a flush is not due.

        The reason is "rows" if the batch is full, "age" if it is old enough, and "wanted" if a flush was requested.
        """
        if self._opened_at is None:
            return None
        if self._is_filled:
            return "rows"
        if self._wanted:
            return "wanted"
        return "age" if now - self._opened_at >= self.flush_after_seconds else None

    def rest_seconds(self, now: float) -> float:
        """Return the seconds until the current batch is due: infinity without a batch."""
        if self._opened_at is None:
            return math.inf
        return 0.0 if self._is_filled or self._wanted else self._opened_at + self.flush_after_seconds - now

    def take(self) -> PendingBatch:
        """Return the current batch and start an empty one.

        The rows of the returned batch count as pending until `release` is called for this batch.
        """
        raise NotImplementedError

    def release(self, batch: PendingBatch) -> None:
        """Subtract the rows of a committed batch from the pending rows."""
        self._rows_in_flight -= batch.rows

    @property
    def _weight(self) -> int:
        return self._rows - self._samples + self._samples // SAMPLES_A_ROW

    @property
    def _is_filled(self) -> bool:
        return self._weight >= self.flush_rows or self._rows >= self.max_pending_rows

    def _opened(self, now: float) -> None:
        """Start a batch if there is none; notify the flusher if a batch starts or is full."""
        is_first = self._opened_at is None
        if is_first:
            self._opened_at = now
        if is_first or self._is_filled:
            self._notify()

    def _taken(self) -> None:
        """Count the rows of the current batch as rows that are being committed.

        Rows that are added later start another batch.
        """
        self._rows_in_flight += self._rows
        self._rows, self._samples, self._opened_at, self._wanted = 0, 0, None, False


@dataclass(slots=True, kw_only=True)
class Batcher(FlushClock):
    """The current batch: poll responses of ranks, scrapes of exporters, and rows that the service creates."""

    _pieces: dict[str, list[pa.Table]] = field(default_factory=lambda: defaultdict(list))
    _bodies: list[ValidBody] = field(default_factory=list)
    _scrapes: list[Scrape] = field(default_factory=list)
    _grid: Grid = field(default_factory=Grid)
    _watermarks: dict[str, int] = field(default_factory=dict)

    def add_body(self, body: ValidBody, now: float) -> None:
        """Add a poll response. When it is committed, its last seq becomes the watermark of the process that sent it."""
        self._bodies.append(body)
        self._rows += body.rows
        self.add({}, now, watermarks={body.context.incarnation: body.last})

    def add_scrape(self, scrape: Scrape, now: float) -> None:
        """Add the samples of one scrape to the batch."""
        self._scrapes.append(scrape)
        self._rows += scrape.rows
        self._samples += scrape.rows
        self.add({}, now)

    def add(self, tables: Mapping[str, pa.Table], now: float, *, watermarks: Mapping[str, int] | None = None) -> None:
        """Add tables of rows by dataset, and the watermarks that apply after the commit of these rows.

        A watermark is the last committed sequence number of an incarnation.
        """
        for dataset, table in tables.items():
            if table.num_rows:
                self._pieces[dataset].append(table)
                self._rows += table.num_rows
        self._watermarks.update(watermarks or {})
        # A body without rows still moves a watermark. Its records would otherwise be requested again after a restart.
        if self._pieces or self._watermarks or self._scrapes:
            self._opened(now)

    def take(self) -> PendingBatch:
        """Return the current batch and start an empty one.

        The rows of the returned batch count as pending until `release` is called for this batch.
        """
        batch = PendingBatch(
            pieces={dataset: tuple(pieces) for dataset, pieces in self._pieces.items()},
            bodies=tuple(self._bodies),
            scrapes=tuple(self._scrapes),
            grid=self._grid,
            watermarks=dict(self._watermarks),
            rows=self._rows,
        )
        self._pieces, self._bodies, self._scrapes, self._watermarks = defaultdict(list), [], [], {}
        self._taken()
        return batch


log = logging.getLogger(__name__)

FOLDER: Final = "_quarantine"
"""Name of the quarantine folder, which is inside the folder of the store.

Readers of Delta tables, vacuum and retention ignore names that start with an underscore.
"""


class Quarantine:
    """Quarantine folder of a store.

    The flush thread writes rejected rows to the folder with `keep`. The event loop counts and logs these rows with
    `report`.
    """

    def __init__(self, store: Location, *, stamp: Callable[[], Stamp], count: Callable[[int], None]) -> None:
        self._store = store
        self._stamp = stamp
        self._count = count

    def keep(self, batch: PendingBatch, why: str) -> Location:
        """Write the rejected rows to disk and return their folder.

        If the same rows are written again, the name of the folder is the same.
        """
        folder = self._store / FOLDER / _name(batch)

        def put(name: str, write: Content) -> None:
            filesystem(self._store).put(self._store, folder / name, write, sync_to_disk)

        try:
            tables = batch.tables()
        except Exception:  # the reason for quarantine: keep the batch as received
            log.exception("unexpected error in decoding a batch; its undecoded content is written to quarantine")
            put("as_it_came.pickle", bytes_content(pickle.dumps(batch.as_it_came())))
        else:
            for dataset, table in tables.items():
                put(f"{dataset}.arrow", functools.partial(_write_arrow, table.unify_dictionaries()))
        report = {"error": why, "rows": batch.rows, "watermarks": dict(batch.watermarks), "info": dict(batch.info)}
        put("why.json", bytes_content(f"{json.dumps(report, indent=2)}\n".encode()))
        return folder

    def report(self, batch: PendingBatch, why: str, folder: Location) -> dict[str, pa.Table]:
        """Count and log rows that were moved to quarantine.

        Return a row of `events` for the store, if the rows belong to a run.
        """
        self._count(batch.rows)
        message = f"{batch.rows} rows cannot be stored and were moved to quarantine in {folder}: {why}"
        log.error(
            "%s. The folder has one Arrow file for each dataset: read them with pyarrow.ipc.open_file, correct and "
            "import them, or delete the folder. Please report the content of why.json",
            message,
            extra={"rows": batch.rows},
        )
        owner = _owner(batch)
        if owner is None:
            return {}
        details, columns = (
            {"folder": str(folder), "rows": batch.rows, "error": why},
            owner | {"value": float(batch.rows)},
        )
        row = event_row(self._stamp(), EventType.FAULT, Severity.CRITICAL, message, details, **columns)
        return {"events": rows_table("events", [row])}


def _write_arrow(table: pa.Table, target: Path | IO[bytes]) -> None:
    with pa.ipc.new_file(target, table.schema) as file:
        file.write_table(table)


def _name(batch: PendingBatch) -> str:
    """Return the name of the folder for the rows of a rejected batch, inside the quarantine folder.

    If the same records are received again after a restart, the name is the same.
    """
    for incarnation, last in batch.watermarks.items():
        return f"{path_segment(incarnation)}-{last}"
    for receipts in batch.info.values():  # of remote write requests
        return f"pushed-{hashlib.blake2b(receipts.encode(), digest_size=12).hexdigest()}"
    return f"service-{uuid.uuid4().hex}"


def _owner(batch: PendingBatch) -> dict[str, Any] | None:
    """Return run, attempt, rank and incarnation of the rejected rows, as columns of an event.

    Columns with an unknown value are left out. The result is None if not even the run is known.
    """
    for body in batch.bodies:
        where = body.context
        return {"run": where.run, "attempt": where.attempt, "rank": where.rank, "incarnation": where.incarnation}
    for tables in batch.pieces.values():
        for table in tables:
            runs = table["run"].drop_null().unique().to_pylist() if "run" in table.column_names else []
            if runs:
                return {"run": str(runs[0])}
    return None


RETRY_SECONDS: Final = (0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(slots=True, kw_only=True)
class _PendingCommit:
    """A batch that is being committed, and the callers that wait for the commit.

    `batch` is built once: the store recognises a batch that is appended again only if it is the same Python object.
    """

    pending: PendingBatch
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    batch: Batch | None = None
    is_quarantined: bool = False


class Flusher:
    """Commits the batches of a batcher.

    Runs on the event loop; a thread builds the tables and appends them to the store.
    """

    def __init__(
        self,
        appender: Writer,
        batcher: FlushClock,
        *,
        on_commit: Callable[[PendingBatch, Commit], None],
        clock: Callable[[], float],
        retry_seconds: tuple[float, ...] = RETRY_SECONDS,
        aside: Quarantine | None = None,
    ) -> None:
        self._aside = aside
        self._appender = appender
        self._batcher = batcher
        self._on_commit = on_commit
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-flush")
        self._wake_up = WakeUp()
        batcher.notify(self._wake_up.set)
        self._waiters: list[asyncio.Future[None]] = []  # for the current batch
        self._pending_commits: deque[_PendingCommit] = deque()  # several if a rejected batch was divided
        self._failures = 0
        self._retry_at = 0.0
        self.trouble: str | None = None

    async def watermark(self, incarnation: str) -> int:
        """Return the seq of the last committed record of a process. Retry until the store can be read.

        The query runs in the flush thread, so that the event loop need not wait for the lock of the store writer. The
        flush thread holds this lock during a commit.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await loop.run_in_executor(self._thread, self._appender.watermark, incarnation)
            except StoreError as error:
                # A failed read of the store must not cause a rank to be read from the beginning.
                log.warning("watermark cannot be read from the store, retrying: %s", error)
                await asyncio.sleep(self._retry_seconds[0])

    async def commit_now(self) -> None:
        """Wait until all rows that the batcher contains at the time of the call are committed.

        Failed commits are retried without a limit.
        """
        if self._batcher.is_empty and not self._pending_commits:
            return
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._pending_commits[-1].waiters if self._batcher.is_empty else self._waiters
        waiters.append(waiter)
        self._batcher.want_flush()
        await waiter

    async def run(self) -> None:
        """Flush due batches until this coroutine is cancelled.

        Raises ShardLostError if another service took over the shard.
        """
        try:
            while True:
                await self._wake_up.wait(self._rest_seconds(self._clock()))
                await self._flush_due()
        finally:
            # Do not wait: on an orderly stop nothing is in flight, and otherwise the store protects itself.
            self._thread.shutdown(wait=False)

    def _rest_seconds(self, now: float) -> float:
        return self._retry_at - now if self._pending_commits else self._batcher.rest_seconds(now)

    async def _flush_due(self) -> None:
        """Flush the next batch if one is due: a failed batch first, then the current batch."""
        now = self._clock()
        if self._pending_commits:
            if now >= self._retry_at:
                await self._flush(self._pending_commits[0])
        elif self._batcher.due(now) is not None:
            self._pending_commits.append(_PendingCommit(pending=self._batcher.take(), waiters=self._waiters))
            self._waiters = []
            await self._flush(self._pending_commits[0])

    async def _flush(self, flight: _PendingCommit) -> None:
        try:
            commit = await asyncio.get_running_loop().run_in_executor(self._thread, self._append, flight)
        except ShardLostError:
            raise
        except BatchError as error:
            await self._split_or_quarantine(flight, str(error))
            return
        except StoreError as error:
            self._retry_later(flight.pending, str(error))
            return
        except Exception as error:  # a defect must neither stop the service nor lose rows of other runs
            log.exception("unexpected error in the flush task")
            self._retry_later(flight.pending, f"{type(error).__name__}: {error}")
            return
        self._batcher.release(flight.pending)
        self._pending_commits.popleft()
        self._failures, self.trouble = 0, None
        FAULTS.get().attempt("handling a commit", lambda: self._on_commit(flight.pending, commit))
        for waiter in flight.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _append(self, flight: _PendingCommit) -> Commit:
        if flight.batch is None:
            pending = flight.pending
            flight.batch = Batch(tables=_tables(pending), watermarks=pending.watermarks, info=pending.info)
        try:
            return self._appender.append(flight.batch)
        except RepeatedError:
            if len(flight.pending.parts()) > 1:
                raise
            rows = {name: table.num_rows for name, table in flight.batch.tables.items()}
            return Commit(version=0, rows=rows, files=0, seconds=0.0)  # another service has stored them

    async def _split_or_quarantine(self, flight: _PendingCommit, why: str) -> None:
        """Store a rejected batch in parts. If it is one part, move it to quarantine and store an event about it."""
        if self._aside is None or flight.is_quarantined:
            self._retry_later(flight.pending, why)
            return
        parts = [_PendingCommit(pending=part) for part in flight.pending.parts()]
        if len(parts) > 1:
            parts[-1].waiters = flight.waiters
            self._pending_commits.popleft()
            self._pending_commits.extendleft(reversed(parts))
            return
        try:
            loop = asyncio.get_running_loop()
            folder = await loop.run_in_executor(self._thread, self._aside.keep, flight.pending, why)
        except Exception as error:  # noqa: BLE001 - for example a full disk: rows must be durable before they are given up
            self._retry_later(flight.pending, f"{why}; moving the rows to quarantine failed: {error}")
            return
        tables = self._aside.report(flight.pending, why, folder)
        flight.batch = Batch(tables=tables, watermarks=flight.pending.watermarks, info=flight.pending.info)
        flight.is_quarantined = True

    def _retry_later(self, batch: PendingBatch, why: str) -> None:
        self._retry_at = self._clock() + self._retry_seconds[min(self._failures, len(self._retry_seconds) - 1)]
        self._failures += 1
        self.trouble = f"commits fail: {why}"
        log.error("flush failed, rows are kept in memory and retried: %s", why, extra={"rows": batch.rows})


def _tables(pending: PendingBatch) -> dict[str, pa.Table]:
    """Build the tables of a batch.

    Raises BatchError if the batch cannot be decoded. The caller must not retry this batch unchanged, because decoding
    would fail again.
    """
    try:
        return pending.tables()
    except MemoryError:
        raise
    except Exception as error:
        log.exception("unexpected error in decoding a batch")
        raise BatchError(f"the batch cannot be decoded: {type(error).__name__}: {error}") from error
