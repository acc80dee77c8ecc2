"""How much is asked for at once: no more than there is room for, though a thousand ranks have a full ring each.

What waits for the store is counted when it arrives; a thousand answers may be on their way by then. So room is taken
before a rank is asked, and it is asked for no more than that: what it was last known to have may be long ago. A rank
for which there is none waits its turn.

A rank that hangs holds what it was given until its time is over. One that did not answer the last time is asked for one
record alone, and all of these together have a quarter of the room: hundreds may hang, and the others are read on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

_SHARE: Final = 16
"""Each may fill a 16th of what is left of half the room: it may have more to say by now than it was known to have. The
other half is for what they are known to have, so that some hundred that hang do not take all of it."""

_DOUBTFUL_SHARE: Final = 4


@dataclass(slots=True, kw_only=True)
class _Lane:
    """Room that was taken by ranks of one kind, of `most` rows, and those of them that wait for more."""

    most: float = math.inf
    taken: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class PollBudget:
    """Room for rows that were asked for. `free_rows` is what the rows that arrived have left of it."""

    def __init__(self, free_rows: Callable[[], int], *, max_rows: int, max_bytes: int) -> None:
        self._free_rows = free_rows
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._records = self._rows = self._bytes = 0  # of all bodies so far
        self._trusted, self._doubtful = _Lane(), _Lane(most=max_rows / _DOUBTFUL_SHARE)

    def learn(self, *, records: int, rows: int, size: int) -> None:
        """Note what a body had; `size` is its bytes before compression, in which a rank counts."""
        self._records += records
        self._rows += rows
        self._bytes += size

    @contextlib.asynccontextmanager
    async def taken(self, records: int, *, is_doubtful: bool = False) -> AsyncIterator[int]:
        """Wait until there is room for what a rank that was `records` behind had; keep room for its answer meanwhile.

        One that `is_doubtful`, for it did not answer the last time, is asked for one record. Yields for how many bytes
        to ask; 0 where the rows that arrived have filled all room: wait for a commit then.
        """
        lane = self._doubtful if is_doubtful else self._trusted
        least = self._expected(1 if is_doubtful else records)
        while self._must_wait(lane, least):
            await self._turn(lane)
        if self._free_rows() <= 0:
            self._next()
            yield 0
            return
        spare = 0 if is_doubtful else (self._free_rows() // 2 - self._taken) // _SHARE
        rows = max(least, min(spare, self._at_most()))
        lane.taken += rows
        self._next()
        try:
            yield self._size(rows)
        finally:
            lane.taken -= rows
            self._next()

    @property
    def _taken(self) -> int:
        return self._trusted.taken + self._doubtful.taken

    def _must_wait(self, lane: _Lane, rows: int) -> bool:
        """Whether somebody has to give room back before `rows` can be asked for; one alone may bring any number."""
        if lane.taken and lane.taken + rows > lane.most:
            return True
        return self._taken > 0 and self._taken + rows > self._free_rows() > 0

    def _expected(self, records: int) -> int:
        """Return how many rows an answer of `records` has: no more than those of a whole answer, or of one record."""
        if not self._records:
            return self._max_rows // _SHARE
        of_one = self._rows // self._records
        return max(of_one, min(max(1, records) * self._rows // self._records, self._at_most()))

    def _at_most(self) -> int:
        """Return how many rows a whole answer has."""
        return self._max_bytes * self._rows // self._bytes if self._bytes else self._max_rows

    def _size(self, rows: int) -> int:
        """Return the bytes of so many rows."""
        return max(1, min(rows * self._bytes // self._rows, self._max_bytes)) if self._rows else self._max_bytes

    async def _turn(self, lane: _Lane) -> None:
        turn = asyncio.get_running_loop().create_future()
        lane.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._next()  # the turn may have been given already
            raise

    def _next(self) -> None:
        """Let those that have waited longest look again; when they are through, they let the next ones look."""
        for lane in (self._trusted, self._doubtful):
            while lane.waiting:
                turn = lane.waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    break
