"""Who is polled: a loop for each target, begun when somebody hears of it and forgotten when it is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rankscope_ingest.channel.loop import TargetLoop
from rankscope_ingest.target import Target

log = logging.getLogger(__name__)


class Following:
    """The loops of all targets. What they bring goes where `make_loop` sends it; `watermark` is asked of the store."""

    def __init__(self, make_loop: Callable[[Target], TargetLoop], watermark: Callable[[str], Awaitable[int]]) -> None:
        self._make_loop = make_loop
        self._watermark = watermark
        self._loops: dict[str, TargetLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._poked_early: set[str] = set()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Return what is at work."""
        return list(self._tasks.values())

    def __len__(self) -> int:
        """Return how many are polled."""
        return len(self._loops)

    def follow(self, target: Target) -> Target:
        """See to it that somebody polls `target`."""
        task = self._tasks.get(target.incarnation)
        if task is None or task.done():
            task = self._tasks[target.incarnation] = asyncio.create_task(self._poll(target))
            task.add_done_callback(_tell_of_faults)
        return target

    def poke(self, incarnation: str) -> None:
        """Have a target polled at once, or as soon as its loop begins."""
        if loop := self._loops.get(incarnation):
            loop.poke()
        else:
            self._poked_early.add(incarnation)

    async def loop_of(self, target: Target) -> TargetLoop:
        """Return the loop of `target`, which goes on where the store's watermark stands."""
        if target.incarnation not in self._loops:
            mark = await self._watermark(target.incarnation)
            # Of a process that was taken for dead, more may have been taken than is stored yet.
            target.cursor, target.committed = max(target.cursor, mark), max(target.committed, mark)
            self._loops[target.incarnation] = self._make_loop(target)
            if target.incarnation in self._poked_early:
                self.poke(target.incarnation)
        self._poked_early.discard(target.incarnation)
        return self._loops[target.incarnation]

    async def _poll(self, target: Target) -> None:
        loop = await self.loop_of(target)
        await loop.run()
        # Gone, as thousands may be in the life of a service. One that comes back begins with a loop of its own.
        del self._loops[target.incarnation], self._tasks[target.incarnation]


def _tell_of_faults(task: asyncio.Task[None]) -> None:
    """Log a loop that ended by a fault of ours; the rank's next heartbeat starts it anew where it stood."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a target loop failed: %r", error, exc_info=error)
