"""How much is asked for at once: no more than there is room for, though a thousand ranks have a full ring each.

What waits for the store is counted when it arrives; a thousand answers may be on their way by then. So room is taken
before a rank is asked, and it is asked for no more than that: what it was last known to have may be long ago. A rank
for which there is none waits its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

_SHARE: Final = 16
"""Each may fill a 16th of the room that is left: it may have more to say by now than it was known to have."""


class Room:
    """Room for rows that were asked for. `free_rows` is what the rows that arrived have left of it."""

    def __init__(self, free_rows: Callable[[], int], *, max_rows: int, max_bytes: int) -> None:
        self._free_rows = free_rows
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._taken = 0
        self._records = self._rows = self._bytes = 0  # of all bodies so far
        self._waiting: deque[asyncio.Future[None]] = deque()

    def learn(self, *, records: int, rows: int, size: int) -> None:
        """Note what a body had; `size` is its bytes before compression, in which a rank counts."""
        self._records += records
        self._rows += rows
        self._bytes += size

    @contextlib.asynccontextmanager
    async def taken(self, records: int) -> AsyncIterator[int]:
        """Wait until there is room for what a rank that was `records` behind had; keep room for its answer meanwhile.

        Yields for how many bytes to ask; 0 where the rows that arrived have filled all room: wait for a commit then.
        """
        least = self._expected(records)
        while self._taken and self._taken + least > self._free_rows() > 0:
            await self._turn()
        if self._free_rows() <= 0:
            self._next()
            yield 0
            return
        rows = max(least, min((self._free_rows() - self._taken) // _SHARE, self._at_most()))
        self._taken += rows
        self._next()
        try:
            yield self._size(rows)
        finally:
            self._taken -= rows
            self._next()

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

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._next()  # the turn may have been given already
            raise

    def _next(self) -> None:
        """Let the one that has waited longest look again; when it is through, it lets the next one look."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
