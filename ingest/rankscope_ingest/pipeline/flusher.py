"""Commit batches one at a time in a thread, and retry a failed batch.

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
import hashlib
import json
import logging
import pickle
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.events import EventType, Severity
from rankscope_ingest.base.background import FAULTS, WakeUp
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.pipeline.batcher import FlushClock, PendingBatch
from rankscope_ingest.pipeline.rows import Stamp, event_row
from rankscope_storage.api.store import Batch, Commit, Writer
from rankscope_storage.base.errors import BatchError, ShardLostError, StoreError
from rankscope_storage.base.escaping import path_segment
from rankscope_storage.base.fsync import make_folders, sync_to_disk

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

    def __init__(self, store: Path, *, stamp: Callable[[], Stamp], count: Callable[[int], None]) -> None:
        self._store = store
        self._stamp = stamp
        self._count = count

    def keep(self, batch: PendingBatch, why: str) -> Path:
        """Write the rejected rows to disk and return their folder.

        If the same rows are written again, the name of the folder is the same.
        """
        folder = self._store / FOLDER / _name(batch)
        make_folders(folder, self._store, sync_to_disk)
        try:
            tables = batch.tables()
        except Exception:  # the reason for quarantine: keep the batch as received
            log.exception("unexpected error in decoding a batch; its undecoded content is written to quarantine")
            (folder / "as_it_came.pickle").write_bytes(pickle.dumps(batch.as_it_came()))
        else:
            for dataset, table in tables.items():
                with pa.ipc.new_file(folder / f"{dataset}.arrow", table.schema) as file:
                    file.write_table(table.unify_dictionaries())
        report = {"error": why, "rows": batch.rows, "watermarks": dict(batch.watermarks), "info": dict(batch.info)}
        (folder / "why.json").write_text(json.dumps(report, indent=2) + "\n")
        for path in (*folder.iterdir(), folder):
            sync_to_disk(path)
        return folder

    def report(self, batch: PendingBatch, why: str, folder: Path) -> dict[str, pa.Table]:
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
        return self._appender.append(flight.batch)

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
