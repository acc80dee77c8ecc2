"""The outcomes of all deliveries of notifications, and the messages that were not delivered yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_storage.base.service_catalogue import NOTIFICATION_ATTEMPTS, NOTIFICATIONS


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
