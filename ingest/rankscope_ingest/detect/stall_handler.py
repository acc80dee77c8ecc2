"""Request stacks from ranks concurrently, and handle stalled runs.

A rank that does not respond does not delay the other requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

from rankscope_ingest.base.errors import FetchError, RegistrationError
from rankscope_ingest.detect.run_monitor import RunMonitor
from rankscope_ingest.notify.announcer import Announcer
from rankscope_ingest.notify.messages import resolved_message
from rankscope_ingest.runs.models import AttemptKey, Target

MAX_REQUESTS: Final = 64
"""Maximum number of ranks whose stacks are requested at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """Response of one rank to a request for its stacks, or the reason why there is no response."""

    rank: int
    host: str
    pid: int
    document: dict[str, Any] | None = None
    error: str | None = None

    def to_document(self) -> dict[str, Any]:
        """Return the entry of this rank in the JSON response to POST /api/v1/stacks."""
        process = {"rank": self.rank, "host": self.host, "pid": self.pid}
        return process | ({"error": self.error} if self.document is None else self.document)


def parse_stacks_request(body: bytes) -> tuple[str, list[int] | None]:
    """Return the run and the requested ranks of a POST /api/v1/stacks body.

    The ranks are None if the stacks of all ranks are requested. Raises RegistrationError with an example of a valid
    body if `body` is malformed.
    """
    try:
        document = json.loads(body)
        run, ranks = document["run"], document.get("ranks")
        good = isinstance(run, str) and (ranks is None or all(type(rank) is int for rank in ranks))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        good = False
    if not good:
        raise RegistrationError(
            400,
            'send a JSON object such as {"run": "…", "ranks": [0, 1]}; without "ranks", all ranks are asked for stacks',
        )
    return run, ranks


async def request_stacks(
    fetch: Callable[[str], Awaitable[dict[str, Any]]], targets: Iterable[Target], ranks: Collection[int] | None = None
) -> list[RankAnswer]:
    """Request the stacks of the live targets concurrently; return the responses in ascending order of the ranks.

    `ranks` are the ranks from which stacks are requested; None means all live ranks. `fetch` sends POST /stacks to the
    URL of a rank and returns the response. If `fetch` raises FetchError, the error becomes the result of the rank.
    """
    limit = asyncio.Semaphore(MAX_REQUESTS)

    async def request(target: Target) -> RankAnswer:
        process = target.registration
        document = error = None
        try:
            async with limit:
                document = await fetch(process.url)
        except FetchError as failure:
            error = _NO_RESPONSE if failure.reason == "timeout" else str(failure)
        return RankAnswer(rank=process.rank, host=process.host, pid=process.pid, document=document, error=error)

    live = [target for target in targets if not target.is_gone and not target.is_dead]
    chosen = [target for target in live if ranks is None or target.registration.rank in ranks]
    return sorted(await asyncio.gather(*map(request, chosen)), key=lambda answer: answer.rank)


_NO_RESPONSE: Final = "no response: C code may hold its interpreter (docs/hangs.md describes how to look at it)"


class StallHandler:
    """Handles stalled attempts: requests the stacks of their ranks and sends notifications. Runs on the event loop."""

    def __init__(
        self,
        monitor: RunMonitor,
        announcer: Announcer,
        fetch: Callable[[str], Awaitable[dict[str, Any]]],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """Create a handler for the stalled attempts of `monitor`, with notifications sent by `announcer`.

        `fetch` requests the stacks from the rank at a URL. `spawn` starts a background task.
        """
        self._monitor = monitor
        self._announcer = announcer
        self._fetch = fetch
        self._spawn = spawn

    def check(self) -> None:
        """Check all attempts for stalls and start the requests for stacks and the notifications that are due."""
        actions = self._monitor.stalls.check(self._monitor.runs.attempts(), self._monitor.clock())
        for key, ranks in actions.to_request:
            self._spawn(self._collect_stacks(key, ranks))
        for incident in actions.due:
            self._spawn(self._announcer.announce(incident))
        for incident, has_continued in actions.over:
            notice = resolved_message(incident, has_continued=has_continued, place=self._announcer.place())
            self._spawn(self._announcer.resolve(incident, notice))

    async def request(self, run: str, attempt: int, ranks: Collection[int] | None) -> list[RankAnswer]:
        """Request the stacks of the live ranks of an attempt; return one result per rank.

        `ranks` are the ranks from which stacks are requested; None means all live ranks.
        """
        targets = [target for target in self._monitor.registry.targets if target.attempt_key == (run, attempt)]
        return await request_stacks(self._fetch, targets, ranks)

    async def _collect_stacks(self, key: AttemptKey, ranks: Collection[int]) -> None:
        # Stacks also arrive as events in the records, and only these are evaluated.
        for answer in await self.request(*key, ranks):
            if answer.error is not None:
                self._monitor.stalls.add_refusal(key, answer.rank, answer.error, self._monitor.clock())
