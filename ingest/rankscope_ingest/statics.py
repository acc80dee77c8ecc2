"""Ranks that do not register: found at the addresses in the configuration, process after process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from rankscope_contract.channel import NOTHING, Registration
from rankscope_ingest.channel.fetch import Fetcher, OtherProcess
from rankscope_ingest.config import StaticTarget
from rankscope_ingest.errors import FetchError, RegistrationError
from rankscope_ingest.target import Health, Target

log = logging.getLogger(__name__)

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
                incarnation = await who_answers(static, fetcher)
                if target is None or target.incarnation != incarnation:
                    target = accept(registration_of(static, incarnation))
            except (FetchError, RegistrationError) as error:
                log.info("static target cannot be read yet: %s", error, extra={"target": static.url})
        await asyncio.sleep(poll_seconds)


async def who_answers(static: StaticTarget, fetcher: Fetcher) -> str:
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
