"""Acts on attempts that stand still: asks their ranks, sends messages, says when it is over. `stalls` decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

from rankscope_ingest.alerting.announcer import Announcer
from rankscope_ingest.alerting.messages import goes_on
from rankscope_ingest.channel.fetch import Fetcher
from rankscope_ingest.collector import Collector
from rankscope_ingest.hangs.stack_requests import RankAnswer, ask
from rankscope_ingest.lifecycle.lives import AttemptKey
from rankscope_ingest.target import Target


class StallWatch:
    """Lives on the event loop; `spawn` has something done in the background."""

    def __init__(
        self,
        collector: Collector,
        announcer: Announcer,
        fetcher: Fetcher,
        *,
        targets: Callable[[], Iterable[Target]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._collector = collector
        self._announcer = announcer
        self._fetcher = fetcher
        self._targets = targets
        self._spawn = spawn

    def look(self) -> None:
        """Do what is due."""
        news = self._collector.look_at_stalls()
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
                self._collector.no_stacks(key, answer.rank, answer.error)
