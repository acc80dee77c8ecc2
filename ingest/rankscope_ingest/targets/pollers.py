"""Run one poll loop per target. The loop starts when the target registers, and is deleted when the target is gone."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from rankscope_contract.protocol.channel import NOTHING, Registration
from rankscope_ingest.base.background import start_task
from rankscope_ingest.base.config import StaticTarget
from rankscope_ingest.base.errors import FetchError, RegistrationError
from rankscope_ingest.record_channel.client import Fetcher, OtherProcess
from rankscope_ingest.record_channel.loop import TargetLoop
from rankscope_ingest.runs.target import Health, Target

log = logging.getLogger(__name__)


class Pollers:
    """The poll loops of all targets.

    `make_loop` creates the loop of a target. `watermark` returns the last stored sequence number of an incarnation.
    """

    def __init__(self, make_loop: Callable[[Target], TargetLoop], watermark: Callable[[str], Awaitable[int]]) -> None:
        self._make_loop = make_loop
        self._watermark = watermark
        self._loops: dict[str, TargetLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._poked_early: set[str] = set()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the asyncio tasks of all poll loops."""
        return list(self._tasks.values())

    def __len__(self) -> int:
        """Return the number of polled targets."""
        return len(self._loops)

    def follow(self, target: Target) -> Target:
        """Start the poll loop of `target` unless it is already running. Return `target`."""
        task = self._tasks.get(target.incarnation)
        if task is None or task.done():
            polling = functools.partial(self._poll, target)
            self._tasks[target.incarnation] = start_task("polling a rank", polling, is_repeated=True)
        return target

    def poke(self, incarnation: str) -> None:
        """Poll the target with this incarnation immediately, or as soon as its poll loop has started."""
        if loop := self._loops.get(incarnation):
            loop.poke()
        else:
            self._poked_early.add(incarnation)

    async def loop_of(self, target: Target) -> TargetLoop:
        """Return the poll loop of `target`.

        If there is no loop yet, create one that requests the records after the last stored sequence number.
        """
        if target.incarnation not in self._loops:
            mark = await self._watermark(target.incarnation)
            # For a process that was declared dead, received records may not be committed yet.
            target.cursor, target.committed = max(target.cursor, mark), max(target.committed, mark)
            self._loops[target.incarnation] = self._make_loop(target)
            if target.incarnation in self._poked_early:
                self.poke(target.incarnation)
        self._poked_early.discard(target.incarnation)
        return self._loops[target.incarnation]

    async def _poll(self, target: Target) -> None:
        loop = await self.loop_of(target)
        await loop.run()
        # The target is gone. A service can see thousands of them. If the process returns, it gets a new loop.
        del self._loops[target.incarnation], self._tasks[target.incarnation]


_NO_INCARNATION: Final = "-"
"""An incarnation id that no process has.

A rank rejects a request with this id, and its response contains the incarnation id of the rank.
"""


async def watch(
    static: StaticTarget,
    fetcher: Fetcher,
    accept: Callable[[Registration], Target],
    *,
    poll_seconds: float,
) -> None:
    """Poll the address of a static target, which is a rank with a configured address, until cancelled.

    Pass each new process at the address to `accept`.
    """
    target: Target | None = None
    while True:
        if target is None or target.health in {Health.GONE, Health.FAILING}:
            try:
                incarnation = await incarnation_at(static, fetcher)
                if target is None or target.incarnation != incarnation:
                    target = accept(registration_of(static, incarnation))
            except (FetchError, RegistrationError) as error:
                log.info(
                    "static target cannot be polled yet, retrying in %g s: %s",
                    poll_seconds,
                    error,
                    extra={"target": static.url},
                )
        await asyncio.sleep(poll_seconds)


async def incarnation_at(static: StaticTarget, fetcher: Fetcher) -> str:
    """Return the incarnation of the process at the configured address of a rank (a static target).

    Raises FetchError if the process does not respond or does not report its incarnation.
    """
    answer = await fetcher.records(
        static.url, incarnation=_NO_INCARNATION, after=NOTHING, committed=NOTHING, lease=None, max_bytes=1
    )
    if isinstance(answer, OtherProcess):
        return answer.incarnation
    raise FetchError("garbage", f"{static.url} does not report its incarnation")


def registration_of(static: StaticTarget, incarnation: str) -> Registration:
    """Return a registration for the process at the configured address of a rank (a static target).

    Run, rank, world size and launch id come from the configuration.
    """
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
