"""Record the senders of remote write with refused requests: a sender drops refused samples, which are lost.

The module logs one line per such sender, and lists the senders for the status page. Its middleware sees the final
response, whichever part of the service refuses a request. A request can be refused before its handler runs, for example
without a valid token, and a request to another path has no handler.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from rankscope_contract.model.redaction import MAX_NAME, redacted_text
from rankscope_contract.wire.channel import REMOTE_WRITE_PATH
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_storage.base.service_catalogue import REMOTE_WRITE_REQUESTS

log = logging.getLogger(__name__)

OUTCOME: Final = "remote_write_outcome"
"""Key of a request: the outcome that its handler has counted."""

_VERSION: Final = "X-Prometheus-Remote-Write-Version"
"""Header of all requests of Prometheus and vmagent. It identifies remote write that is sent to a wrong path."""

MIXED_SECONDS: Final = 300.0
"""A sender with accepted requests is listed until none of its requests was refused in this time."""

_MIXED_REFUSALS: Final = 3
"""A sender with accepted requests is listed from this number of refused requests on.

Some senders repeat a refused request in another format, and others send a single malformed request.
"""

SHOWN_SECONDS: Final = 3600.0  # after its last request, a sender without accepted requests is no longer listed
_MAX_SENDERS: Final = 256
_LINE_SECONDS: Final = 1.0  # between two lines: programs may send any number of values of User-Agent


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSender:
    """A sender with refused requests: all since the last accepted request, or some of its requests."""

    name: str  # address and User-Agent
    reason: str  # of the last refusal
    requests: int  # refused ones
    accepted_requests: int = 0  # 0 if all are refused
    last_request_ago_seconds: float

    @property
    def share(self) -> str:
        """Return which requests are refused, as a text: `all requests`, or `3 of 10 requests`."""
        if not self.accepted_requests:
            return "all requests"
        return f"{self.requests:,} of {self.requests + self.accepted_requests:,} requests"


@dataclass(slots=True)
class _Sender:
    name: str
    accepted: int = 0
    refused: int = 0
    refused_at: float = -math.inf
    reason: str = ""
    is_logged: bool = False

    def is_listed(self, now: float) -> bool:
        if not self.accepted:
            return now - self.refused_at < SHOWN_SECONDS
        return self.refused >= _MIXED_REFUSALS and now - self.refused_at < MIXED_SECONDS

    def shown(self, now: float) -> RefusedSender:
        return RefusedSender(
            name=self.name,
            reason=self.reason,
            requests=self.refused,
            accepted_requests=self.accepted,
            last_request_ago_seconds=round(now - self.refused_at, 3),
        )


class Senders:
    """The latest senders of remote write, by address and User-Agent.

    Several programs can have the same address and User-Agent. If all requests of one of them are refused, they are
    shown as a part of the requests of one sender.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._senders: dict[str, _Sender] = {}  # by name, in the order of their last request
        self._logged_at = -_LINE_SECONDS

    def accepted(self, address: str, user_agent: str) -> None:
        """Record an accepted request. A sender that was logged as refused gets one more line."""
        now, sender = self._clock(), self._latest(address, user_agent)
        if not sender.accepted or now - sender.refused_at >= MIXED_SECONDS:
            if sender.is_logged:
                log.info("remote write: requests of %s are accepted now", sender.name)
            sender = self._senders[sender.name] = _Sender(sender.name)
        sender.accepted += 1

    def refused(self, address: str, user_agent: str, reason: str) -> None:
        """Record a refused request with its reason. Log it once if the sender is listed."""
        now, sender = self._clock(), self._latest(address, user_agent)
        sender.refused += 1
        sender.refused_at, sender.reason = now, printable(reason)
        if sender.is_listed(now) and not sender.is_logged and now - self._logged_at >= _LINE_SECONDS:
            sender.is_logged, self._logged_at = True, now
            shown = sender.shown(now)
            log.warning(
                "remote write: %s of %s are refused, %s samples are lost: %s;"
                " logged once, counted in rankscope_ingest_remote_write_requests_total",
                shown.share,
                shown.name,
                "their" if shown.accepted_requests else "its",
                shown.reason,
            )

    def listed(self) -> list[RefusedSender]:
        """Return the senders with refused requests, the latest first."""
        now = self._clock()
        return [sender.shown(now) for sender in reversed(self._senders.values()) if sender.is_listed(now)]

    def _latest(self, address: str, user_agent: str) -> _Sender:
        name = f"{address} ({printable(user_agent)})" if user_agent else address
        sender = self._senders[name] = self._senders.pop(name, _Sender(name))
        if len(self._senders) > _MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        return sender


def printable(text: str) -> str:
    """Return `text`, which is from a header, cut, and without secrets and characters that are not printable."""
    shown = redacted_text(text, MAX_NAME)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def recording(senders: Senders, counts: ServiceMetrics) -> Any:
    """Return the outermost middleware of the service, which records accepted and refused remote write requests."""

    @web.middleware
    async def record(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        response = await handler(request)
        if not _is_write(request):
            return response
        sender = request.remote or "unknown address", request.headers.get("User-Agent", "")
        if response.status < 300:
            senders.accepted(*sender)
        elif response.status < 500 and request.transport is not None:  # None: the client has disconnected
            if OUTCOME not in request:
                counts.count(REMOTE_WRITE_REQUESTS, 1, "refused")
            senders.refused(*sender, _reason(request, response))
        return response

    return record


def _is_write(request: web.Request) -> bool:
    return (request.method == "POST" and request.path == REMOTE_WRITE_PATH) or _VERSION in request.headers


def _reason(request: web.Request, response: web.StreamResponse) -> str:
    if request.path != REMOTE_WRITE_PATH:
        return f"wrong path: send remote write to {REMOTE_WRITE_PATH}"  # the path of the request can contain a secret
    kind = str(request.get(OUTCOME, HTTPStatus(response.status).phrase.lower())).replace("_", " ")
    return f"{kind}: {response.text if isinstance(response, web.Response) else ''}"
