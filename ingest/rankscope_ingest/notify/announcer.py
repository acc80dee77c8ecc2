"""Send one notification for each incident, and count the outcomes of all deliveries.

The incident is committed first; then the message is sent; then it is stored that the message was sent. The docstring of
`detect.incidents` explains this order.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_contract.model.events import Severity
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.runs import text
from rankscope_ingest.runs.incident import MUTED, NOTIFIED, OPENED, UNDELIVERED, Incident
from rankscope_storage.base.service_catalogue import NOTIFICATION_ATTEMPTS, NOTIFICATIONS
from rankscope_storage.runs.silences import Silences

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = (0.5, 2.0, 8.0, 30.0, 60.0, 120.0)
COMMIT_WAIT_SECONDS: Final = 0.5
"""Maximum time in seconds to wait for the commit of an incident before its message is sent.

Before the incident is committed, it waits 1 s for further events with the same cause. A message is therefore sent
within 2 s even if the store is slow. If the service is killed before the commit, the next one polls the records of the
incident again and sends the message again.
"""

AT_A_TIME: Final = 2
"""Largest number of messages that are sent to one receiver at a time: a message that waits must not time out."""
LIST_SECONDS: Final = 60.0
"""Time for which an incident above the limit of messages waits for others, to be listed with them in one message."""


class NotifyError(IngestError):
    """A notifier could not deliver a message, for the reason in the text. The sender of the message may try again.

    The text does not name the receiver and contains no secret of its URL.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One notification. All notifications about the same incident have the same `key`."""

    key: str
    title: str
    body: str
    severity: str


def incident_message(
    incident: Incident,
    *,
    is_repeated: bool = False,
    open_seconds: float | None = None,
    place: text.Place = text.NO_PLACE,
) -> Message:
    """Return the notification of `incident`, with the command and the page of `place`.

    If `is_repeated`, the text states that it may have been delivered before. With `open_seconds`, it is a reminder of
    an incident that began so many seconds ago.
    """
    title = text.title(incident, open_seconds=open_seconds)
    body = text.body(incident, is_repeated=is_repeated, place=place)
    return Message(key=incident.key, title=title, body=body, severity=incident.severity)


def list_message(incidents: Sequence[Incident], *, is_repeated: bool, place: text.Place = text.NO_PLACE) -> Message:
    """Return the notification that lists `incidents`, all of one run and severity."""
    body = text.list_body(incidents, is_repeated=is_repeated, place=place)
    key, severity = f"{incidents[0].key}:list", incidents[0].severity
    return Message(key=key, title=text.list_title(incidents), body=body, severity=severity)


def resolved_message(
    incident: Incident, *, has_continued: bool, ended_at: float | None = None, place: text.Place = text.NO_PLACE
) -> Message:
    """Return the notification that an incident is over, with the command of `place`.

    `has_continued` is true if training continues, and false if the run ended. `ended_at` is the time of the end in
    monotonic seconds.
    """
    ending = text.Ending(has_continued=has_continued)
    if ended_at is not None:
        at = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=time.monotonic() - ended_at)
        ending = text.Ending(has_continued=has_continued, at=at, seconds=ended_at - incident.began_at)
    title, body = text.resolved_title(incident, ending), text.resolved_body(incident, ending, place=place)
    return Message(key=f"{incident.key}:resolved", title=title, body=body, severity=Severity.INFO)


class Notifier(Protocol):
    """Delivers messages to one URL."""

    @property
    def label(self) -> str:
        """Return the URL with secrets removed, for log messages."""

    async def send(self, message: Message) -> None:
        """Deliver `message`. Raises NotifyError if the delivery fails."""


def receiver_names(notifiers: Sequence[Notifier]) -> list[str]:
    """Return the labels of `notifiers`, with a number after each label that occurs more than once.

    Examples are two addresses of one host, and two topics, which are secret.
    """
    labels = [notifier.label for notifier in notifiers]
    seen: Counter[str] = Counter()
    names = []
    for label in labels:
        seen[label] += 1
        names.append(label if labels.count(label) == 1 else f"{label}, address {seen[label]}")
    return names


@dataclass(slots=True)
class _Failure:
    """Messages that one receiver has not got: their number, the time of the first failure, and the latest reason."""

    messages: int
    since: float
    reason: str


@dataclass(slots=True)
class Deliveries:
    """Counts attempts and outcomes, and keeps failures: those of messages that wait for a further attempt, and others.

    The others are kept until a later message reaches the same receiver. `count` increases a counter of the service for
    one value of its label. `clock` returns monotonic seconds.
    """

    count: Callable[[MetricSpec, str], None] = lambda *_: None
    clock: Callable[[], float] = time.monotonic
    _waiting: dict[tuple[str, str], _Failure] = field(default_factory=dict)  # by receiver and key of the message
    _lost: dict[str, _Failure] = field(default_factory=dict)  # by receiver

    def finished(self, outcome: str) -> None:
        """Count a notification by its final outcome: `sent`, `failed` or `muted`."""
        self.count(NOTIFICATIONS, outcome)

    def delivered(self, receiver: str, key: str) -> None:
        """Count a successful attempt, and forget the earlier messages that `receiver` did not get."""
        self.count(NOTIFICATION_ATTEMPTS, "sent")
        self._waiting.pop((receiver, key), None)
        self._lost.pop(receiver, None)

    def failed(self, receiver: str, key: str, reason: str, *, is_last: bool) -> None:
        """Count an attempt that failed. `receiver` is the label of its notifier, and `key` that of the message.

        After the last attempt, the message does not wait any more.
        """
        self.count(NOTIFICATION_ATTEMPTS, "failed")
        earlier = self._waiting.pop((receiver, key), None)  # the latest failure is last
        since, text = self.clock() if earlier is None else earlier.since, f"{reason} ({receiver})"
        if is_last:
            lost = self._lost.pop(receiver, _Failure(0, since, text))
            self._lost[receiver] = _Failure(lost.messages + 1, lost.since, text)
        else:
            self._waiting[receiver, key] = _Failure(1, since, text)

    def trouble(self) -> str | None:
        """Return the number of messages that were not delivered, with the latest reason; None without such messages."""
        if self._waiting:
            messages = len({key for _, key in self._waiting})
            since, reason = self._latest(self._waiting.values())
            return f"{messages} message{'s wait' if messages > 1 else ' waits'} since {since}: {reason}"
        if self._lost:
            messages = max(failure.messages for failure in self._lost.values())
            since, reason = self._latest(self._lost.values())
            subject = f"{messages} message{'s were' if messages > 1 else ' was'}"
            return f"{subject} not delivered, the first {since} ago: {reason}"
        return None

    def _latest(self, failures: Iterable[_Failure]) -> tuple[str, str]:
        """Return the time since the first of `failures`, and the reason of the latest one."""
        listed = list(failures)
        return f"{self.clock() - min(failure.since for failure in listed):.0f} s", listed[-1].reason


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
        silences: Silences | None = None,
    ) -> None:
        """Set the functions that the announcer calls, the store and pages that messages name, and the silences.

        `record` adds a row with a state of an incident, such as opened, to the batch, and `commit` commits the batch.
        `deliveries` counts the attempts and their outcomes.
        """
        self._notifiers = notifiers
        self._receivers = receiver_names(notifiers)
        self._free = [asyncio.Semaphore(AT_A_TIME) for _ in notifiers]
        self._record = record
        self._commit = commit
        self._deliveries = deliveries
        self._retry_seconds = retry_seconds
        self.place = place
        self._silences = silences
        self._asking = asyncio.Lock()
        self._lists: dict[tuple[str, str, bool], list[Incident]] = {}
        self._are_lists_due = asyncio.Event()

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
            listed = await self._listed_with(incident, is_repeated=is_repeated) if incident.is_listed else [incident]
            await self._tell(listed, is_repeated=is_repeated)

    async def _listed_with(self, incident: Incident, *, is_repeated: bool) -> list[Incident]:
        """Wait, if `incident` is the first one of a list, and return the list; return [] for all others of the list."""
        key = incident.first.run, incident.severity, is_repeated
        waiting = self._lists.setdefault(key, [])
        waiting.append(incident)
        if waiting[1:]:
            return []
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._are_lists_due.wait(), LIST_SECONDS)
        return self._lists.pop(key)

    def send_lists(self) -> None:
        """Send the lists of incidents that wait for further ones now."""
        self._are_lists_due.set()
        self._are_lists_due = asyncio.Event()

    async def _tell(self, incidents: Sequence[Incident], *, is_repeated: bool) -> None:
        """Send one message about `incidents`, except for those that are silenced, and store the outcome of each."""
        told, states = await self._not_silenced(incidents), {}
        if told:
            first, place = told[0], self.place()
            message = list_message(told, is_repeated=is_repeated, place=place)
            if not first.is_listed:
                message = incident_message(first, is_repeated=is_repeated, place=place)
            states = dict.fromkeys((one.key for one in told), NOTIFIED if await self._send(message) else UNDELIVERED)
        for one in incidents:
            self._record(one, states.get(one.key, MUTED))
        await self._commit_soon()

    async def _not_silenced(self, incidents: Sequence[Incident]) -> list[Incident]:
        """Return `incidents` without those that a user has silenced, which are counted."""
        if self._silences is None or not self._notifiers:
            return list(incidents)
        covers = self._silences.covers
        async with self._asking:  # one thread at a time waits for a read of the store
            found = [one for one in incidents if not await asyncio.to_thread(covers, one.first.run, one.first.rule)]
        for _ in range(len(incidents) - len(found)):
            self._deliveries.finished(MUTED)
        return found

    async def remind(self, incident: Incident, open_seconds: float) -> None:
        """Send the message about an open incident again, and store that it was sent."""
        if self._notifiers and await self._not_silenced([incident]):
            message = incident_message(incident, open_seconds=open_seconds, place=self.place())
            self._record(incident, NOTIFIED if await self._send(message) else UNDELIVERED)
            await self._commit_soon()

    async def tell_end(self, incident: Incident, notice: Message) -> None:
        """Send the notification `notice` about the end of `incident`, unless it is silenced."""
        if await self._not_silenced([incident]):
            await self._send(notice)

    async def _commit_soon(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_WAIT_SECONDS):
                await self._commit()

    async def _send(self, notice: Message) -> bool:
        """Send the notification `notice` to all notifiers concurrently; return whether all of them delivered it."""
        receivers = zip(self._notifiers, self._receivers, self._free, strict=True)
        return all(await asyncio.gather(*(self._deliver(notice, *receiver) for receiver in receivers)))

    async def _deliver(self, notice: Message, notifier: Notifier, receiver: str, free: asyncio.Semaphore) -> bool:
        for wait in (*self._retry_seconds, None):
            try:
                async with free:
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
