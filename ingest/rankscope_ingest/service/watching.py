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


class WatchedLogs:
    """Follows the logs in the configuration while the service runs, and writes their rows with its store writer."""

    def __init__(
        self,
        config: ServiceConfig,
        writer: Writer,
        notifiers: Sequence[Notifier],
        hooks: Hooks,
    ) -> None:
        self._config = config
        self._writer = writer
        self._notifiers = notifiers
        self._hooks = replace(hooks, on_change=self._changed)
        self._states: dict[str, str] = {}  # by address

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the logs in the body of the context. At its end, store pending rows and send pending messages."""
        if not self._config.watch:
            yield
            return
        stop = asyncio.Event()
        task = start_task("following logs", lambda: self._follow(stop), is_repeated=True)
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait([task], timeout=2 * FINISH_SECONDS)
            await cancel([task])

    def _changed(self, status: LogStatus) -> None:
        """Print a line if the state of a log has changed."""
        if status.state != self._states.get(status.address):
            self._states[status.address] = status.state
            level = logging.INFO if status.is_normal else logging.WARNING
            log.log(level, "%s  %s  %s", status.run, status.state, status.unreadable or status.reason)

    async def _follow(self, stop: asyncio.Event) -> None:
        for section, name in zip(self._config.watch, run_names(self._config.watch), strict=True):
            log.info("following %s as the run %s, every %g s", section.log, name, section.poll_seconds)
        async with watching(
            self._config.watch,
            self._writer,
            Path(self._config.store.path),
            self._notifiers,
            hooks=self._hooks,
            is_alone=False,
            finish_seconds=FINISH_SECONDS,
        ) as session:
            await session.run(stop)
