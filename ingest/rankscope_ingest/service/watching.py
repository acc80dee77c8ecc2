"""The followed logs of the service: the sections [[watch]] of its configuration."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rankscope_ingest.base.background import cancel, start_task
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.notify.notifiers import Notifier
from rankscope_ingest.watch.session import run_names, watching
from rankscope_ingest.watch.watcher import Hooks, LogStatus
from rankscope_storage.api.store import Writer

log = logging.getLogger(__name__)

FINISH_SECONDS: Final = 5.0


@contextlib.asynccontextmanager
async def following(
    config: ServiceConfig, writer: Writer, notifiers: Sequence[Notifier], hooks: Hooks
) -> AsyncIterator[None]:
    """Follow the logs in the configuration in the body of the context, and write their rows with `writer`.

    At its end, pending rows are stored and pending messages are sent.
    """
    if not config.watch:
        yield
        return
    stop, states = asyncio.Event(), dict[str, str]()  # states by address

    def changed(status: LogStatus) -> None:
        """Print a line if the state of a log has changed."""
        if status.state != states.get(status.address):
            states[status.address] = status.state
            level = logging.INFO if status.is_normal else logging.WARNING
            log.log(level, "%s  %s  %s", status.run, status.state, status.unreadable or status.reason)

    async def follow() -> None:
        for section, name in zip(config.watch, run_names(config.watch), strict=True):
            log.info("following %s as the run %s, every %g s", section.log, name, section.poll_seconds)
        async with watching(
            config.watch,
            writer,
            Path(config.store.path),
            notifiers,
            hooks=replace(hooks, on_change=changed),
            is_alone=False,
            finish_seconds=FINISH_SECONDS,
        ) as session:
            await session.run(stop)

    task = start_task("following logs", follow, is_repeated=True)
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait([task], timeout=2 * FINISH_SECONDS)
        await cancel([task])
