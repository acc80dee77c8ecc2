"""Works that go on as long as the service does: a fault in one of them must end neither it nor the service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final


class WakeUp:
    """Rings for one task that waits."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self._is_rung = False

    def set(self) -> None:
        """End the wait that goes on, or the next one if there is none."""
        self._is_rung = True
        self._over.set()

    def clear(self) -> None:
        """Take back a ring that nobody has heard."""
        self._is_rung = False
        self._over.clear()

    async def wait(self, seconds: float) -> bool:
        """Return once it rings, or after `seconds`, which may be infinite; whether it rang."""
        timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), self._over.set)
        try:
            await self._over.wait()
        finally:
            timer.cancel()
        is_rung = self._is_rung
        self.clear()
        return is_rung


AGAIN_SECONDS: Final = 1.0

LATELY_SECONDS: Final = 30.0
_LONGEST_TEXT: Final = 300

_MOST_TOLD: Final = 100
"""Faults that are remembered: their text may hold numbers that change."""

log = logging.getLogger(__name__)


class BackgroundFaults:
    """Which works failed lately: what fails whenever it begins anew is not done at all, which people must know."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: dict[str, tuple[float, str]] = {}
        self._logged: set[tuple[str, str]] = set()

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Call one of several works that do not depend on each other.

        An error is noted, and logged once, so that the works after it are called as well.
        """
        try:
            work()
        except Exception as error:
            text = repr(error)
            self.note(what, text[:_LONGEST_TEXT])
            if (what, text) not in self._logged:
                log.exception("unexpected error in %s; it is tried again", what)
            self._logged = {*self._logged, (what, text)} if len(self._logged) < _MOST_TOLD else {(what, text)}

    def note(self, what: str, text: str) -> None:
        """Note that a work failed."""
        self._latest[what] = (self._clock(), text)

    def recent(self) -> str | None:
        """Return what failed within the last half minute, or None."""
        now = self._clock()
        lately = [f"{what}: {text}" for what, (at, text) in self._latest.items() if now - at < LATELY_SECONDS]
        return f"works of the service fail, see its log: {'; '.join(lately)}" if lately else None


async def run_forever(
    what: str,
    work: Callable[[], Awaitable[None]],
    faults: BackgroundFaults | None = None,
    *,
    again_seconds: float = AGAIN_SECONDS,
) -> None:
    """Do `work` until it returns or is cancelled. When it raises, begin anew soon after; a fault is told once."""
    told: set[str] = set()
    while True:
        try:
            await work()
        except Exception as error:  # whatever it is, rows must still be fetched and stored
            text = repr(error)
            if faults is not None:
                faults.note(what, text[:_LONGEST_TEXT])
            if text not in told:
                log.exception("%s failed in a way nobody thought of; it begins anew", what)
            told = {*told, text} if len(told) < _MOST_TOLD else {text}
            await asyncio.sleep(again_seconds)
        else:
            return


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they ended; how they ended is nobody's concern any more."""
    listed = list(tasks)
    for task in listed:
        task.cancel()
    await asyncio.gather(*listed, return_exceptions=True)
