"""Ring buffer of the last records of this rank, limited in number and bytes. It does not send records.

A record that is overwritten before a store has committed it is lost, unless the spool has it. The ring counts lost
records and reports them to each reader with a cursor before them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from rankscope_contract.wire.channel import NOTHING
from rankscope_exporter.publish.serving_config import MIN_RING_RECORDS
from rankscope_exporter.publish.wire_encoder import EncodedRecord
from rankscope_exporter.records.plan import NamedPlan
from rankscope_exporter.records.record import StepRecord

_PLANS_KEPT: Final = 64


class CursorError(ValueError):
    """Error: the cursor of a request is above the sequence number of the newest record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive records of the ring, from sequence number `first` on.

    `lost` contains the first and the last sequence number of the requested records that the ring no longer has. It is
    None if the ring has all requested records.
    """

    first: int
    encoded: tuple[EncodedRecord, ...]
    lost: tuple[int, int] | None

    @property
    def records(self) -> tuple[StepRecord, ...]:
        return tuple(item.record for item in self.encoded)

    @property
    def last(self) -> int:
        return self.first + len(self.encoded) - 1


class Ring:
    """Ring of records with sequence numbers from 0 on.

    One thread writes and many threads read; any thread may call any method.
    """

    def __init__(self, max_records: int, max_bytes: int, is_kept: Callable[[int], bool] | None = None) -> None:
        """`is_kept(seq)` returns whether the record with the sequence number `seq` is on disk.

        An overwritten record that is on disk does not count as lost.
        """
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._is_kept = is_kept or (lambda _seq: False)
        self._changed = threading.Condition()
        self._records: deque[EncodedRecord] = deque()
        self._plans: dict[str, NamedPlan] = {}
        self.head = NOTHING
        """Sequence number of the newest record. Only `append` changes it."""
        self._committed = NOTHING
        self._bytes = 0
        self._uncommitted_bytes = 0
        self._overrun = 0

    def append(self, record: EncodedRecord) -> int:
        """Store `record` and return its sequence number."""
        with self._changed:
            self.head += 1
            self._records.append(record)
            self._bytes += record.size
            self._uncommitted_bytes += record.size
            if record.record.statistics is not None:
                self._remember(record.record.statistics.plan)
            while len(self._records) > self._max_records or (
                self._bytes > self._max_bytes and len(self._records) > MIN_RING_RECORDS
            ):
                self._drop_oldest()
            return self.head

    def after(self, cursor: int, max_bytes: int) -> Window:
        """Return the records after `cursor`, oldest first. Raises CursorError if `cursor` is above the newest record.

        The records have up to `max_bytes` bytes before compression. At least one record is returned if there is any
        after the cursor.
        """
        with self._changed:
            if cursor > self.head:
                raise CursorError(f"after={cursor} is above the sequence number of the newest record: {self.head}")
            first = self._first
            start = max(cursor + 1, first)
            # Copy references under the lock and join outside of it, so that a slow reader does not block `append`.
            records = tuple(islice(self._records, start - first, None))
        lost = (cursor + 1, start - 1) if cursor + 1 < start else None
        total, count = 0, 0
        for record in records:
            total += record.size
            if count and total > max_bytes:
                break
            count += 1
        return Window(first=start, encoded=records[:count], lost=lost)

    def commit(self, seq: int) -> None:
        """Mark records up to `seq` as committed; a lower `seq` than in an earlier call has no effect.

        Raises CursorError if `seq` is above the newest record.
        """
        with self._changed:
            if seq > self.head:
                raise CursorError(f"committed={seq} is above the sequence number of the newest record: {self.head}")
            if seq <= self._committed:
                return
            fresh = islice(self._records, max(self._committed + 1 - self._first, 0), max(seq + 1 - self._first, 0))
            self._uncommitted_bytes -= sum(record.size for record in fresh)
            self._committed = seq
            self._changed.notify_all()

    def wait_committed(self, timeout_seconds: float, stop: Callable[[], bool] = lambda: False) -> int:
        """Wait until a store has committed all records, `stop()` returns true, or `timeout_seconds` have passed.

        Return the number of uncommitted records.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._uncommitted and not stop():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 0.1))  # polls, since `stop` does not notify the condition
            return self._uncommitted

    def plan(self, plan_hash: str) -> NamedPlan | None:
        """Return the plan if a record of the ring uses it or recently used it."""
        with self._changed:
            return self._plans.get(plan_hash)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def first(self) -> int:
        """Return the oldest sequence number in the ring; head + 1 if the ring is empty."""
        with self._changed:
            return self._first

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def uncommitted(self) -> int:
        """Return the number of records in the ring that no store has committed."""
        with self._changed:
            return self._uncommitted

    @property
    def overrun(self) -> int:
        """Return the number of lost records: overwritten before the commit, and not on disk."""
        return self._overrun

    @property
    def fill(self) -> float:
        """Return the share of the ring that uncommitted records occupy; at 1, the next record overwrites one."""
        with self._changed:
            waiting = self._uncommitted
            by_bytes = min(self._uncommitted_bytes / self._max_bytes, waiting / MIN_RING_RECORDS)
            return min(1.0, max(waiting / self._max_records, by_bytes))

    @property
    def _first(self) -> int:
        return self.head + 1 - len(self._records)

    @property
    def _uncommitted(self) -> int:
        return self.head - max(self._committed, self._first - 1)

    def _drop_oldest(self) -> None:
        if self._first > self._committed:
            self._overrun += not self._is_kept(self._first)
            self._uncommitted_bytes -= self._records[0].size
        self._bytes -= self._records.popleft().size

    def _remember(self, plan: NamedPlan) -> None:
        self._plans.pop(plan.hash, None)
        self._plans[plan.hash] = plan  # the newest plan is last
        if len(self._plans) <= _PLANS_KEPT:
            return
        in_use = {item.record.statistics.plan.hash for item in self._records if item.record.statistics is not None}
        for old in list(self._plans)[:-_PLANS_KEPT]:
            if old not in in_use:
                del self._plans[old]
