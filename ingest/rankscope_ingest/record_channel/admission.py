"""Admission control of polls: limit the bytes that are requested from all ranks together to the free memory.

Received rows are counted when they arrive; up to then, thousands of responses may be on their way. A poll therefore
reserves rows before its request, and the request is limited to them, because the last known backlog of a rank may be
out of date. A poll waits if there is no capacity.

A rank that hangs holds its reservation until the timeout. A rank that missed its last poll is asked for a single
record, and all such ranks together have a quarter of the capacity, so that they do not block healthy ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

_SPARE_SHARE: Final = 16
"""A poll may reserve a 16th of the free half in addition to the expected rows, because the rank may have more records
by now. The other half is kept for expected rows, so that hundreds of hanging ranks cannot reserve everything."""

_FAILING_SHARE: Final = 4


@dataclass(slots=True, kw_only=True)
class _Lane:
    """Reserved rows of one group of ranks, at most `max_rows`, and the polls that wait for capacity."""

    max_rows: float = math.inf
    reserved: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class PollBudget:
    """Capacity for rows that polls request. `free_rows` returns the capacity that received rows leave."""

    def __init__(self, free_rows: Callable[[], int], *, max_rows: int, max_bytes: int) -> None:
        self._free_rows = free_rows
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._records = self._rows = self._bytes = 0  # of all bodies so far
        self._healthy, self._failing = _Lane(), _Lane(max_rows=max_rows / _FAILING_SHARE)

    def learn(self, *, records: int, rows: int, size: int) -> None:
        """Update the average sizes from a body of `size` uncompressed bytes, the unit of `max_bytes` in requests."""
        self._records += records
        self._rows += rows
        self._bytes += size

    @contextlib.asynccontextmanager
    async def reserved(self, records: int, *, is_failing: bool = False) -> AsyncIterator[int]:
        """Wait for capacity, reserve rows for a rank with a backlog of `records`, and yield the bytes to request.

        A rank that `is_failing` missed its last poll and gets a reservation for one record. The limit is 0 if received
        rows use all capacity; the caller then waits for a commit.
        """
        lane = self._failing if is_failing else self._healthy
        least = self._expected(1 if is_failing else records)
        while self._must_wait(lane, least):
            await self._wait_in(lane)
        if self._free_rows() <= 0:
            self._wake_next()
            yield 0
            return
        spare = 0 if is_failing else (self._free_rows() // 2 - self._reserved) // _SPARE_SHARE
        rows = max(least, min(spare, self._max_response_rows()))
        lane.reserved += rows
        self._wake_next()
        try:
            yield self._bytes_of(rows)
        finally:
            lane.reserved -= rows
            self._wake_next()

    @property
    def _reserved(self) -> int:
        return self._healthy.reserved + self._failing.reserved

    def _must_wait(self, lane: _Lane, rows: int) -> bool:
        """Return whether `rows` exceed the capacity; without other reservations any number is allowed."""
        if lane.reserved and lane.reserved + rows > lane.max_rows:
            return True
        return self._reserved > 0 and self._reserved + rows > self._free_rows() > 0

    def _expected(self, records: int) -> int:
        """Return the expected rows of `records`, at most those of a full response, at least those of one record."""
        if not self._records:
            return self._max_rows // _SPARE_SHARE
        per_record = self._rows // self._records
        return max(per_record, min(max(1, records) * self._rows // self._records, self._max_response_rows()))

    def _max_response_rows(self) -> int:
        """Return the number of rows of a response of `max_bytes`."""
        return self._max_bytes * self._rows // self._bytes if self._bytes else self._max_rows

    def _bytes_of(self, rows: int) -> int:
        """Return the average bytes of `rows`, at most `max_bytes`."""
        return max(1, min(rows * self._bytes // self._rows, self._max_bytes)) if self._rows else self._max_bytes

    async def _wait_in(self, lane: _Lane) -> None:
        turn = asyncio.get_running_loop().create_future()
        lane.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._wake_next()  # this poll may have been woken already
            raise

    def _wake_next(self) -> None:
        """Wake the poll that has waited longest in each lane; it wakes the next one after its own check."""
        for lane in (self._healthy, self._failing):
            while lane.waiting:
                turn = lane.waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    break
