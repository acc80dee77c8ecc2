"""A wait that ends by itself, or when somebody ends it: what each loop of the service does most of its time.

`asyncio.timeout` tells that time is over by cancelling the task and catching what that raises, which takes longer than
most of what is done afterwards; here a timer of the event loop rings as anybody else does.
"""

from __future__ import annotations

import asyncio


class Alarm:
    """Rings for one task that waits."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self._is_rung = False

    def ring(self) -> None:
        """End the wait that goes on, or the next one if there is none."""
        self._is_rung = True
        self._over.set()

    def hush(self) -> None:
        """Take back a ring that nobody has heard."""
        self._is_rung = False
        self._over.clear()

    async def wait(self, seconds: float) -> bool:
        """Return once it rings, or after `seconds`, which may be infinite; whether it rang."""
        timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), self._over.set)
        try:
            await self._over.wait()
        finally:
            timer.cancel()
        is_rung = self._is_rung
        self.hush()
        return is_rung
