"""Ask ranks where they stand, all at once. A rank that does not answer costs its own line, and delays no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rankscope_ingest.base.errors import FetchError, RegistrationError
from rankscope_ingest.detect.run_monitor import RunMonitor
from rankscope_ingest.notify.announcer import Announcer
from rankscope_ingest.notify.text import goes_on
from rankscope_ingest.record_channel.client import Fetcher
from rankscope_ingest.runs.models import AttemptKey
from rankscope_ingest.runs.target import Target

AT_ONCE: Final = 64


class Asker(Protocol):
    """What asking one rank takes."""

    async def stacks(self, url: str) -> dict[str, Any]:
        """Return what a rank answers to POST /stacks. Raises FetchError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """What one rank answered, or why it did not."""

    rank: int
    host: str
    pid: int
    document: dict[str, Any] | None = None
    error: str | None = None

    def to_document(self) -> dict[str, Any]:
        """Return the entry of this rank in the answer of POST /api/v1/stacks."""
        who = {"rank": self.rank, "host": self.host, "pid": self.pid}
        return who | ({"error": self.error} if self.document is None else self.document)


def parse_stacks_request(body: bytes) -> tuple[str, list[int] | None]:
    """Return the run and the ranks asked for, None for all. Raises RegistrationError with the form that is wanted."""
    try:
        document = json.loads(body)
        run, ranks = document["run"], document.get("ranks")
        good = isinstance(run, str) and (ranks is None or all(type(rank) is int for rank in ranks))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        good = False
    if not good:
        raise RegistrationError(400, 'ask with a JSON object such as {"run": "…", "ranks": [0, 1]}; no ranks: all')
    return run, ranks


async def ask(asker: Asker, targets: Iterable[Target], ranks: Collection[int] | None = None) -> list[RankAnswer]:
    """Ask the live ones among `targets`, or those of them named in `ranks`; return their answers by rank."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(target: Target) -> RankAnswer:
        who = target.registration
        try:
            async with limit:
                document = await asker.stacks(who.url)
        except FetchError as error:
            return RankAnswer(rank=who.rank, host=who.host, pid=who.pid, error=_words(error))
        return RankAnswer(rank=who.rank, host=who.host, pid=who.pid, document=document)

    asked = [target for target in targets if not target.is_gone and not target.is_dead]
    chosen = [target for target in asked if ranks is None or target.registration.rank in ranks]
    return sorted(await asyncio.gather(*map(one, chosen)), key=lambda answer: answer.rank)


def _words(error: FetchError) -> str:
    if error.reason == "timeout":
        return "it does not answer: its interpreter may be held by C code (docs/hangs.md names ways to look)"
    return str(error)


class StallHandler:
    """Lives on the event loop; `spawn` has something done in the background."""

    def __init__(
        self,
        collector: RunMonitor,
        announcer: Announcer,
        fetcher: Fetcher,
        *,
        targets: Callable[[], Iterable[Target]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._monitor = collector
        self._announcer = announcer
        self._fetcher = fetcher
        self._targets = targets
        self._spawn = spawn

    def look(self) -> None:
        """Do what is due."""
        news = self._monitor.check_stalls()
        for key, ranks in news.to_ask:
            self._spawn(self._have_stacks_taken(key, ranks))
        for incident in news.due:
            self._spawn(self._announcer.announce(incident))
        for incident, went_on in news.over:
            self._spawn(self._announcer.tell_end(incident, goes_on(incident) if went_on else None))

    async def ask(self, run: str, attempt: int, ranks: Collection[int] | None) -> list[RankAnswer]:
        """Have the live ranks of an attempt, or those named, say where they stand."""
        targets = [each for each in self._targets() if (each.registration.run, each.attempt) == (run, attempt)]
        return await ask(self._fetcher, targets, ranks)

    async def _have_stacks_taken(self, key: AttemptKey, ranks: Collection[int]) -> None:
        # What they answer comes as events of their records as well, and that is what counts.
        for answer in await self.ask(*key, ranks):
            if answer.error is not None:
                self._monitor.no_stacks(key, answer.rank, answer.error)
