"""Send one notification for each incident.

The incident is committed first; then the message is sent; then it is stored that the message was sent. The docstring of
`detect.incidents` explains this order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

from rankscope_ingest.notify.deliveries import Deliveries
from rankscope_ingest.notify.messages import Message, NotifyError, incident_message
from rankscope_ingest.notify.notifiers import Notifier, receiver_names
from rankscope_ingest.runs import text
from rankscope_ingest.runs.incident import MUTED, NOTIFIED, OPENED, RESOLVED, UNDELIVERED, Incident

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = (0.5, 2.0, 8.0, 30.0, 60.0, 120.0)
COMMIT_WAIT_SECONDS: Final = 0.5
"""Maximum time in seconds to wait for the commit of an incident before its message is sent.

Before the incident is committed, it waits 1 s for further events with the same cause. A message is therefore sent
within 2 s even if the store is slow. If the service is killed before the commit, the next one polls the records of the
incident again and sends the message again.
"""


class Announcer:
    """Sends incidents to all notifiers, and stores whether each incident was sent."""

    def __init__(
        self,
        notifiers: Sequence[Notifier],
        *,
        record: Callable[[Incident, str], None],
        commit: Callable[[], Awaitable[None]],
        deliveries: Deliveries,
        retry_seconds: Sequence[float] = RETRY_SECONDS,
        place: Callable[[], text.Place] = text.Place,
    ) -> None:
        """Set the functions that the announcer calls, and the store and pages that messages name.

        `record` adds a row with a state of an incident, such as opened, to the batch, and `commit` commits the batch.
        `deliveries` counts the attempts and their outcomes.
        """
        self._notifiers = notifiers
        self._receivers = receiver_names(notifiers)
        self._record = record
        self._commit = commit
        self._deliveries = deliveries
        self._retry_seconds = retry_seconds
        self.place = place

    def announce(self, incident: Incident, *, is_repeated: bool = False) -> Coroutine[Any, Any, None]:
        """Store `incident` before any later state of it, and return the coroutine that commits and sends it.

        A muted incident is stored but not sent. If `is_repeated` is true, the incident is already in the store and is
        only sent.
        """
        is_new = not is_repeated or not self._notifiers  # if this service sends nothing, no later one does
        if is_new:
            self._record(incident, MUTED if incident.is_muted or not self._notifiers else OPENED)
        return self._commit_and_send(incident, is_new=is_new, is_repeated=is_repeated)

    async def _commit_and_send(self, incident: Incident, *, is_new: bool, is_repeated: bool) -> None:
        if is_new:
            await self._commit_soon()
        if incident.is_muted:
            self._deliveries.finished(MUTED)
        elif self._notifiers:
            is_delivered = await self._send(incident_message(incident, is_repeated=is_repeated, place=self.place()))
            self._record(incident, NOTIFIED if is_delivered else UNDELIVERED)
            await self._commit_soon()

    async def resolve(self, incident: Incident, notice: Message) -> None:
        """Store that `incident` is resolved, and send the notification `notice` about it."""
        self._record(incident, RESOLVED)
        await self._send(notice)

    async def _commit_soon(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_WAIT_SECONDS):
                await self._commit()

    async def _send(self, notice: Message) -> bool:
        """Send the notification `notice` to all notifiers concurrently; return whether all of them delivered it."""
        receivers = zip(self._notifiers, self._receivers, strict=True)
        return all(await asyncio.gather(*(self._deliver(notifier, name, notice) for notifier, name in receivers)))

    async def _deliver(self, notifier: Notifier, receiver: str, notice: Message) -> bool:
        for wait in (*self._retry_seconds, None):
            try:
                await notifier.send(notice)
            except NotifyError as error:
                self._deliveries.failed(receiver, notice.key, str(error), is_last=wait is None)
                follows = "no further attempt" if wait is None else f"retrying in {wait:g} s"
                log.warning("notification failed: %s (%s), %s", error, receiver, follows)
                if wait is not None:
                    await asyncio.sleep(wait)
            else:
                self._deliveries.delivered(receiver, notice.key)
                self._deliveries.finished("sent")
                return True
        self._deliveries.finished("failed")
        return False
