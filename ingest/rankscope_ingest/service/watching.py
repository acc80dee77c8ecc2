"""The followed logs of the service: the sections [[watch]] of its configuration."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from rankscope_ingest.base.background import BackgroundFaults, cancel
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.notify.deliveries import Deliveries
from rankscope_ingest.notify.notifiers import Notifier
from rankscope_ingest.watch.session import Hooks, watching
from rankscope_storage.api.store import Writer

RETRY_SECONDS: Final = 10.0
FINISH_SECONDS: Final = 5.0


class WatchedLogs:
    """Follows the logs in the configuration while the service runs, and writes their rows with its store writer."""

    def __init__(
        self,
        config: ServiceConfig,
        writer: Writer,
        notifiers: Sequence[Notifier],
        faults: BackgroundFaults,
        *,
        deliveries: Deliveries,
    ) -> None:
        """`deliveries` counts the notifications, together with those of the service."""
        self._config = config
        self._writer = writer
        self._notifiers = notifiers
        self._faults = faults
        self._hooks = Hooks(deliveries=deliveries)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the logs in the body of the context. At its end, store pending rows and send pending messages."""
        if not self._config.watch:
            yield
            return
        stop = asyncio.Event()
        task = asyncio.create_task(self._follow(stop))
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait([task], timeout=2 * FINISH_SECONDS)
            await cancel([task])

    async def _follow(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
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
            except Exception as error:  # noqa: BLE001 - it is logged and reported; the service continues
                self._faults.report("following logs", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), RETRY_SECONDS)
