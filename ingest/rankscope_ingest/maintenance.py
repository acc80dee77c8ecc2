"""The store's upkeep, now and then, beside the flushes: compaction by number of commits, clean-up by the clock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from rankscope_storage.errors import StoreError

log = logging.getLogger(__name__)

COMPACT_EVERY_COMMITS: Final = 50
MAINTAIN_SECONDS: Final = 1800.0
_CHECK_SECONDS: Final = 1.0


class Upkeep(Protocol):
    """The store as its upkeep sees it; both block, and appends go on meanwhile."""

    def compact(self) -> Any:
        """Merge small files."""
        ...

    def maintain(self) -> Any:
        """Write a checkpoint and remove what nobody needs any more."""
        ...


async def keep_in_order(store: Upkeep, commits: Callable[[], int]) -> None:
    """Compact and maintain `store` whenever that is due, until cancelled; `commits` counts the commits so far."""
    compacted_at, maintained_at = 0, time.monotonic()
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        try:
            if commits() - compacted_at >= COMPACT_EVERY_COMMITS:
                compacted_at = commits()
                await asyncio.to_thread(store.compact)
            if time.monotonic() - maintained_at >= MAINTAIN_SECONDS:
                maintained_at = time.monotonic()
                await asyncio.to_thread(store.maintain)
        except StoreError as error:
            log.warning("upkeep of the store failed, the next one tries again: %s", error)
        except Exception:  # of a library: rows are stored all the same
            log.exception("upkeep of the store failed in a way nobody thought of, the next one tries again")
