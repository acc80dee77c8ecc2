"""Works that go on as long as the service does: a fault in one of them must end neither it nor the service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

AGAIN_SECONDS: Final = 1.0

_MOST_TOLD: Final = 100
"""Faults that are remembered: their text may hold numbers that change."""

log = logging.getLogger(__name__)


async def unending(what: str, work: Callable[[], Awaitable[None]], *, again_seconds: float = AGAIN_SECONDS) -> None:
    """Do `work` until it returns or is cancelled. When it raises, begin anew soon after; a fault is told once."""
    told: set[str] = set()
    while True:
        try:
            await work()
        except Exception as error:  # whatever it is, rows must still be fetched and stored
            text = repr(error)
            if text not in told:
                log.exception("%s failed in a way nobody thought of; it begins anew", what)
            told = {*told, text} if len(told) < _MOST_TOLD else {text}
            await asyncio.sleep(again_seconds)
        else:
            return
