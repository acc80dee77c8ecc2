"""The last records of this rank, bounded in number and bytes, each under its sequence number. No encoding, no network.

What the ring overwrites before a store committed it is lost unless a spool keeps it; what is lost is counted here and
told to whoever asks for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from rankscope_contract.protocol.channel import NOTHING
from rankscope_exporter.records.step_record import NamedPlan, StepRecord
from rankscope_exporter.serving.config import MIN_RING_RECORDS

_PLANS_KEPT: Final = 64
_RECORD_BYTES: Final = 256  # fixed columns and the objects around them
_ROW_BYTES: Final = 200  # one scalar, event, feature, …: generous, so that bounds are kept


class CursorError(ValueError):
    """A cursor points above the newest record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A run of records and where it stands. `lost` names the first and last seq that were asked for but are gone."""

    first: int
    records: tuple[StepRecord, ...]
    lost: tuple[int, int] | None

    @property
    def last(self) -> int:
        """Return the seq of the newest record in the window; `first - 1` without any."""
        return self.first + len(self.records) - 1


class Ring:
    """Sequence numbers from 0, one writer, any number of readers. All methods may be called from any thread."""

    def __init__(self, max_records: int, max_bytes: int, is_kept: Callable[[int], bool] | None = None) -> None:
        """`is_kept(seq)` says whether a record is on disk as well: what is overwritten here is then not lost."""
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._is_kept = is_kept or (lambda _seq: False)
        self._changed = threading.Condition()
        self._entries: deque[tuple[StepRecord, int]] = deque()
        self._plans: dict[str, NamedPlan] = {}
        self._head = NOTHING
        self._committed = NOTHING
        self._bytes = 0
        self._uncommitted_bytes = 0
        self._overrun = 0

    def append(self, record: StepRecord) -> int:
        """Store `record` and return its seq. Raises ValueError when its statistics do not fit their plan."""
        size = record_bytes(record)
        with self._changed:
            self._head += 1
            self._entries.append((record, size))
            self._bytes += size
            self._uncommitted_bytes += size
            if record.statistics is not None:
                self._remember(record.statistics.plan)
            while self._is_over():
                self._drop_oldest()
            return self._head

    def after(self, cursor: int, max_bytes: int) -> Window:
        """Return records newer than `cursor`, oldest first: at least one if there is one, else up to `max_bytes`.

        Bytes are counted before compression. Raises CursorError when `cursor` is above the newest record.
        """
        with self._changed:
            if cursor > self._head:
                raise CursorError(f"after={cursor} is above the newest record {self._head}")
            first = self._first
            start = max(cursor + 1, first)
            # Copy references under the lock, encode outside it: a slow reader must not hold up the publisher.
            entries = tuple(islice(self._entries, start - first, None))
        lost = (cursor + 1, start - 1) if cursor + 1 < start else None
        return Window(first=start, records=_within(entries, max_bytes), lost=lost)

    def commit(self, seq: int) -> None:
        """Note that everything up to `seq` is durable; never moves back. Raises CursorError above the newest record."""
        with self._changed:
            if seq > self._head:
                raise CursorError(f"committed={seq} is above the newest record {self._head}")
            if seq <= self._committed:
                return
            fresh = islice(self._entries, max(self._committed + 1 - self._first, 0), max(seq + 1 - self._first, 0))
            self._uncommitted_bytes -= sum(size for _, size in fresh)
            self._committed = seq
            self._changed.notify_all()

    def wait_committed(self, timeout_seconds: float, stop: Callable[[], bool] = lambda: False) -> int:
        """Wait until all records are committed, `stop()` holds or time is over; return how many are not committed."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._uncommitted and not stop():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 0.1))  # `stop` has no way to notify
            return self._uncommitted

    def plan(self, plan_hash: str) -> NamedPlan | None:
        """Return a plan that a record of the ring uses, or used not long ago."""
        with self._changed:
            return self._plans.get(plan_hash)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> int:
        """Return the newest seq, NOTHING before the first record."""
        return self._head

    @property
    def first(self) -> int:
        """Return the oldest seq still held; head + 1 when empty."""
        with self._changed:
            return self._first

    @property
    def committed(self) -> int:
        """Return the newest seq known to be durable."""
        return self._committed

    @property
    def uncommitted(self) -> int:
        """Return how many records of the ring no store has committed."""
        with self._changed:
            return self._uncommitted

    @property
    def overrun(self) -> int:
        """Return how many records were overwritten before they were committed, and are not on disk either."""
        return self._overrun

    @property
    def fill(self) -> float:
        """Return how much of the room before the next loss is used, 0 … 1."""
        with self._changed:
            waiting = self._uncommitted
            by_bytes = min(self._uncommitted_bytes / self._max_bytes, waiting / MIN_RING_RECORDS)
            return min(1.0, max(waiting / self._max_records, by_bytes))

    @property
    def _first(self) -> int:
        return self._head + 1 - len(self._entries)

    @property
    def _uncommitted(self) -> int:
        return self._head - max(self._committed, self._first - 1)

    def _is_over(self) -> bool:
        kept = len(self._entries)
        return kept > self._max_records or (self._bytes > self._max_bytes and kept > MIN_RING_RECORDS)

    def _drop_oldest(self) -> None:
        if self._first > self._committed:
            self._overrun += not self._is_kept(self._first)
            self._uncommitted_bytes -= self._entries[0][1]
        _, size = self._entries.popleft()
        self._bytes -= size

    def _remember(self, plan: NamedPlan) -> None:
        self._plans.pop(plan.hash, None)
        self._plans[plan.hash] = plan  # newest last
        if len(self._plans) <= _PLANS_KEPT:
            return
        in_use = {record.statistics.plan.hash for record, _ in self._entries if record.statistics is not None}
        for old in list(self._plans)[:-_PLANS_KEPT]:
            if old not in in_use:
                del self._plans[old]


def record_bytes(record: StepRecord) -> int:
    """Return about how many bytes `record` takes uncompressed. Raises ValueError for statistics that fit no plan."""
    rows = len(record.scalars) + len(record.events) + len(record.features) + len(record.collectives)
    texts = sum(len(event.message) + len(event.details or "") for event in record.events)
    texts += sum(len(row.get("stack") or "") for row in record.modules)
    counts = sum(8 * len(row.get("counts") or ()) for row in record.histograms)
    rows += len(record.modules) + len(record.histograms) + len(record.hashes)
    statistics = record.statistics
    if statistics is None:
        return _RECORD_BYTES + rows * _ROW_BYTES + texts + counts
    plan = statistics.plan.plan
    entries = len(plan.entries)
    wanted = (len(plan.value_ops) * entries, len(plan.count_ops) * entries)
    if (len(statistics.values), len(statistics.counts)) != wanted:
        raise ValueError(
            f"statistics of step {record.step}: {len(statistics.values)} values and {len(statistics.counts)} counts,"
            f" but the plan of {entries} entries needs {wanted[0]} and {wanted[1]}"
        )
    return _RECORD_BYTES + rows * _ROW_BYTES + texts + counts + 4 * wanted[0] + 8 * wanted[1]


def _within(entries: tuple[tuple[StepRecord, int], ...], max_bytes: int) -> tuple[StepRecord, ...]:
    taken: list[StepRecord] = []
    total = 0
    for record, size in entries:
        total += size
        if taken and total > max_bytes:
            break
        taken.append(record)
    return tuple(taken)
