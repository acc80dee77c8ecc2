"""Who is polled: a loop for each target, begun when somebody hears of it and forgotten when it is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from rankscope_contract.protocol.channel import NOTHING, Registration
from rankscope_ingest.base.config import StaticTarget
from rankscope_ingest.base.errors import FetchError, RegistrationError
from rankscope_ingest.record_channel.client import Fetcher, OtherProcess
from rankscope_ingest.record_channel.loop import TargetLoop
from rankscope_ingest.runs.target import Health, Target

log = logging.getLogger(__name__)


class Pollers:
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


_NOBODY: Final = "-"
"""An incarnation that no process has: the refusal names the one that answers."""


async def watch(
    static: StaticTarget,
    fetcher: Fetcher,
    accept: Callable[[Registration], Target],
    *,
    poll_seconds: float,
) -> None:
    """Keep looking who answers at the address, and have each new process followed; runs until cancelled."""
    target: Target | None = None
    while True:
        if target is None or target.health in {Health.GONE, Health.FAILING}:
            try:
                incarnation = await incarnation_at(static, fetcher)
                if target is None or target.incarnation != incarnation:
                    target = accept(registration_of(static, incarnation))
            except (FetchError, RegistrationError) as error:
                log.info("static target cannot be read yet: %s", error, extra={"target": static.url})
        await asyncio.sleep(poll_seconds)


async def incarnation_at(static: StaticTarget, fetcher: Fetcher) -> str:
    """Return the incarnation at the address. Raises FetchError."""
    answer = await fetcher.records(
        static.url, incarnation=_NOBODY, after=NOTHING, committed=NOTHING, lease=None, max_bytes=1
    )
    if isinstance(answer, OtherProcess):
        return answer.incarnation
    raise FetchError("garbage", f"{static.url} does not say which process it is")


def registration_of(static: StaticTarget, incarnation: str) -> Registration:
    """Return what the process would have said, as far as the configuration tells."""
    return Registration(
        run=static.run,
        rank=static.rank,
        world_size=max(static.world_size, static.rank + 1),
        local_rank=0,
        host=static.url.partition("://")[2],
        pid=0,
        incarnation=incarnation,
        launch_id=static.launch_id,
        url=static.url,
    )
