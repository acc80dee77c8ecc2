"""Admission control of polls: the bytes requested from all ranks together are limited to the free memory.

Received rows are counted only when they arrive, and thousands of responses may be on their way. A poll therefore
reserves rows before its request, and requests only the number of bytes that these rows are expected to take. The limit
does not depend on the number of waiting records that a rank last reported, because that number may be out of date. A
poll waits if there is no capacity.

A rank that hangs holds its reservation until the timeout. A rank that missed its last poll is therefore asked for a
single record. All such ranks together have a quarter of the capacity, so that they do not block healthy ranks.
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
"""Divisor that determines how many rows a poll may reserve beyond the rows that are expected from its rank.

A rank may have more records than expected. A poll therefore reserves up to a 16th of half of the free capacity, if that
is more than the expected rows. The other half is only for expected rows, so that hundreds of hanging ranks cannot
reserve all capacity.
"""

_FAILING_SHARE: Final = 4


@dataclass(slots=True, kw_only=True)
class _Lane:
    """The reservations of one group of ranks (healthy or failing), and the polls of this group that wait for capacity.

    `reserved` is the number of reserved rows; its limit is `max_rows`.
    """

    max_rows: float = math.inf
    reserved: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class PollBudget:
    """Limits the number of rows that all polls together request.

    `free_rows` returns the number of further rows for which there is memory. `max_rows` is the total capacity in rows,
    and `max_bytes` the maximum size of a response.
    """

    def __init__(self, free_rows: Callable[[], int], *, max_rows: int, max_bytes: int) -> None:
        self._free_rows = free_rows
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._records = self._rows = self._bytes = 0  # of all bodies so far
        self._healthy, self._failing = _Lane(), _Lane(max_rows=max_rows / _FAILING_SHARE)

    @property
    def is_used_up(self) -> bool:
        """Return whether polls must wait for the next commit, because too many rows are waiting."""
        return self._free_rows() <= 0

    def learn(self, *, records: int, rows: int, size: int) -> None:
        """Update the average numbers of rows and bytes per record with a received body of `size` uncompressed bytes.

        The parameter `max_bytes` of a poll request also counts uncompressed bytes.
        """
        self._records += records
        self._rows += rows
        self._bytes += size

    @contextlib.asynccontextmanager
    async def reserved(self, records: int, *, is_failing: bool = False) -> AsyncIterator[int]:
        """Wait for capacity, reserve rows for a rank that has `records` records, and yield the bytes to request.

        `is_failing` states that the rank missed its last poll; only rows for a single record are then reserved. The
        yielded number of bytes is 0 if received rows use all capacity; the caller then waits for a commit.
        """
        lane = self._failing if is_failing else self._healthy
        least = self._expected(1 if is_failing else records)
        while self._must_wait(lane, least):
            await self._wait_in(lane)
        if self.is_used_up:
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
        """Return whether a poll must wait before it reserves `rows` rows.

        If no other poll has reserved rows, the poll need not wait, whatever the number of rows.
        """
        if lane.reserved and lane.reserved + rows > lane.max_rows:
            return True
        return self._reserved > 0 and self._reserved + rows > self._free_rows() > 0

    def _expected(self, records: int) -> int:
        """Return the expected number of rows of `records` records.

        The result is at least the number of rows of one record, and at most that of a response of maximum size.
        """
        if not self._records:
            return self._max_rows // _SPARE_SHARE
        per_record = self._rows // self._records
        return max(per_record, min(max(1, records) * self._rows // self._records, self._max_response_rows()))

    def _max_response_rows(self) -> int:
        """Return the expected number of rows in a response of the maximum size."""
        return self._max_bytes * self._rows // self._bytes if self._bytes else self._max_rows

    def _bytes_of(self, rows: int) -> int:
        """Return the expected number of bytes of `rows` rows, at most the maximum size of a response."""
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
        """Wake the longest waiting poll of healthy ranks and that of failing ranks.

        Each woken poll wakes the next poll of its group after it has checked the capacity.
        """
        for lane in (self._healthy, self._failing):
            while lane.waiting:
                turn = lane.waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    break
