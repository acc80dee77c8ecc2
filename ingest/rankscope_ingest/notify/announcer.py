"""Tell people about an incident once: make it durable, send it, note that it was sent. `incidents` says why so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from rankscope_ingest.notify.incident import Incident
from rankscope_ingest.notify.notifiers import Message, Notifier, NotifyError
from rankscope_ingest.notify.text import message

log = logging.getLogger(__name__)

OPENED: Final = "opened"
NOTIFIED: Final = "notified"
UNDELIVERED: Final = "undelivered"
MUTED: Final = "muted"
RESOLVED: Final = "resolved"

RETRY_SECONDS: Final = (0.5, 2.0, 8.0, 30.0, 60.0, 120.0)
COMMIT_WAIT_SECONDS: Final = 0.5
"""A bad store must not keep people from hearing of a bad loss: with 1 s of gathering they hear of it within 2 s."""


class Announcer:
    """Sends incidents to all notifiers. `record` notes a state; `commit` makes everything noted durable."""

    def __init__(
        self,
        notifiers: Sequence[Notifier],
        *,
        record: Callable[[Incident, str], None],
        commit: Callable[[], Awaitable[None]],
        count: Callable[[str], None],
        retry_seconds: Sequence[float] = RETRY_SECONDS,
    ) -> None:
        self._notifiers = notifiers
        self._record = record
        self._commit = commit
        self._count = count
        self._retry_seconds = retry_seconds

    async def announce(self, incident: Incident, *, again: bool = False) -> None:
        """Record and send `incident`; one that is muted is only recorded."""
        if not again:
            self._record(incident, MUTED if incident.is_muted else OPENED)
            await self._commit_soon()
        if incident.is_muted:
            self._count(MUTED)
            return
        if not self._notifiers:
            self._record(incident, NOTIFIED)  # nobody is to be told by us; a restart has nothing to catch up on
            return
        text = message(incident, again=again)
        delivered = await asyncio.gather(*(self._deliver(notifier, text) for notifier in self._notifiers))
        self._record(incident, NOTIFIED if all(delivered) else UNDELIVERED)
        await self._commit_soon()

    async def tell_end(self, incident: Incident, text: Message | None) -> None:
        """Record that `incident` is over, and send `text` about it where there is one."""
        self._record(incident, RESOLVED)
        if text is not None:
            await asyncio.gather(*(self._deliver(notifier, text) for notifier in self._notifiers))

    async def _commit_soon(self) -> None:
        try:
            async with asyncio.timeout(COMMIT_WAIT_SECONDS):
                await self._commit()
        except TimeoutError:
            log.warning("the store is slow: a notification goes out before its incident is durable")

    async def _deliver(self, notifier: Notifier, text: Message) -> bool:
        for wait in (*self._retry_seconds, None):
            try:
                await notifier.send(text)
            except NotifyError as error:
                log.warning("notification failed: %s", error)
                if wait is not None:
                    await asyncio.sleep(wait)
            else:
                self._count("sent")
                return True
        self._count("failed")
        return False
