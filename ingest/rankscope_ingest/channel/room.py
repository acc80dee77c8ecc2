"""How many bodies are asked for at once: no more than there is room for, though a thousand ranks have a full ring each.

What waits for the store is counted when it arrives; a thousand answers may be on their way by then. So room is taken
before a rank is asked, for as many rows as its records have had so far; a rank for which there is none waits its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

_FIRST_SHARE: Final = 16
"""As long as no body has arrived, and nobody knows how many rows a record has, each may fill a 16th of the room."""


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
        """Note how large a body was."""
        self._records += records
        self._rows += rows
        self._bytes += size

    @contextlib.asynccontextmanager
    async def taken(self, records: int) -> AsyncIterator[bool]:
        """Wait until there is room for the answer of a rank that is `records` behind, and keep it meanwhile.

        False where the rows that arrived have filled all of it: then a commit has to be waited for.
        """
        wanted = self._expected(records)
        while self._taken and self._taken + wanted > self._free_rows() > 0:
            await self._turn()
        if self._free_rows() <= 0:
            self._next()
            yield False
            return
        self._taken += wanted
        self._next()
        try:
            yield True
        finally:
            self._taken -= wanted
            self._next()

    def _expected(self, records: int) -> int:
        if not self._records:
            return self._max_rows // _FIRST_SHARE
        at_most = max(1, self._max_bytes * self._records // max(1, self._bytes))
        return min(max(1, records), at_most) * self._rows // self._records

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
