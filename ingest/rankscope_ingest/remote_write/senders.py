"""Record which senders of remote write get only refusals: a sender drops refused samples, and its samples are lost.

The module logs one line per such sender, and lists the senders for the status page. It does no I/O apart from logging.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

FORGIVEN_SECONDS: Final = 60.0
"""A sender is listed if none of its requests was accepted in this time before a refused one.

Some senders repeat a refused request in another format, and others send a single malformed request.
"""

SHOWN_SECONDS: Final = 3600.0  # after its last request, a sender is no longer listed
_MAX_SENDERS: Final = 256
_LINE_SECONDS: Final = 1.0  # between two lines: programs may send any number of values of User-Agent
_MAX_REASON: Final = 300
_MAX_AGENT: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSender:
    """A sender of which all requests are refused. `requests` is their number since the last accepted request."""

    name: str  # address and User-Agent
    reason: str  # of the last refusal
    requests: int
    last_request_ago_seconds: float


@dataclass(slots=True)
class _Sender:
    accepted_at: float | None = None
    refused_at: float = 0.0
    requests: int = 0
    reason: str = ""
    is_refused: bool = False
    is_logged: bool = False


class Senders:
    """The latest senders of remote write, by address and User-Agent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._senders: dict[tuple[str, str], _Sender] = {}  # in the order of their last request
        self._logged_at = -_LINE_SECONDS

    def accepted(self, address: str, user_agent: str) -> None:
        """Record an accepted request. A sender that was logged as refused gets one more line."""
        sender = self._latest(address, user_agent)
        if sender.is_logged:
            log.info("remote write: requests of %s are accepted now", _name(address, user_agent))
        self._senders[address, user_agent[:_MAX_AGENT]] = _Sender(accepted_at=self._clock())

    def refused(self, address: str, user_agent: str, reason: str) -> None:
        """Record a refused request with its reason. Log it once if the sender gets only refusals."""
        now, sender = self._clock(), self._latest(address, user_agent)
        sender.requests += 1
        sender.refused_at, sender.reason = now, printable(reason[:_MAX_REASON])
        sender.is_refused = sender.accepted_at is None or now - sender.accepted_at >= FORGIVEN_SECONDS
        if sender.is_refused and not sender.is_logged and now - self._logged_at >= _LINE_SECONDS:
            sender.is_logged, self._logged_at = True, now
            log.warning(
                "remote write: all requests of %s are refused, its samples are lost: %s;"
                " logged once, counted in rankscope_ingest_remote_write_requests_total",
                _name(address, user_agent),
                sender.reason,
            )

    def listed(self) -> list[RefusedSender]:
        """Return the senders that get only refusals and sent a request within the last hour, the latest first."""
        now = self._clock()
        return [
            RefusedSender(
                name=_name(*key),
                reason=sender.reason,
                requests=sender.requests,
                last_request_ago_seconds=round(now - sender.refused_at, 3),
            )
            for key, sender in reversed(self._senders.items())
            if sender.is_refused and now - sender.refused_at < SHOWN_SECONDS
        ]

    def _latest(self, address: str, user_agent: str) -> _Sender:
        key = address, user_agent[:_MAX_AGENT]
        sender = self._senders[key] = self._senders.pop(key, _Sender())
        if len(self._senders) > _MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        return sender


def _name(address: str, user_agent: str) -> str:
    return f"{address} ({printable(user_agent[:_MAX_AGENT])})" if user_agent else address


def printable(text: str) -> str:
    """Return `text`, which is from a header, with escapes instead of characters that are not printable."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
