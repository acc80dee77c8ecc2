"""Tags and notes of runs, read from the store when somebody asks how things stand, and never more often than needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from rankscope_ingest.base.background import ReadBudget
from rankscope_storage.base.errors import StoreError
from rankscope_storage.connection import Connection, connect
from rankscope_storage.runs.tags import parse_tags

LOOK_SECONDS: Final = 5.0
PATIENCE_SECONDS: Final = 1.0
"""A store that does not answer for so long is not waited for: what was known before is shown."""

# As the view `runs` has them, without looking at the versions that say nothing of labels, which are nearly all.
_LABELS: Final = """\
SELECT run, max_by(tags, ts) FILTER (tags IS NOT NULL) AS tags, max_by(note, ts) FILTER (note IS NOT NULL) AS note
FROM runs_history WHERE tags IS NOT NULL OR note IS NOT NULL GROUP BY run"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Labels:
    """What people say about one run."""

    tags: Mapping[str, str]
    note: str | None


NONE: Final = Labels({}, None)


class LabelReader:
    """The labels of all runs of the store at `path`; a thread of its own holds the connection."""

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-labels")
        self._connection: Connection | None = None
        self._budget = ReadBudget(LOOK_SECONDS, clock=clock)
        self._look: asyncio.Future[None] | None = None
        self.labels: Mapping[str, Labels] = {}

    async def fresh(self) -> Mapping[str, Labels]:
        """Return the labels as they are, or where the store is slow as they were a moment ago."""
        if self._look is None and self._budget.is_due:
            self._look = asyncio.get_running_loop().run_in_executor(self._thread, self._read)
        if self._look is not None:
            await asyncio.wait([self._look], timeout=PATIENCE_SECONDS)
            if self._look.done():
                self._note(self._look)
                self._look = None
        return self.labels

    def close(self) -> None:
        """Close the connection behind what is under way."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _note(self, look: asyncio.Future[None]) -> None:
        if error := look.exception():
            log.warning("labels of runs cannot be read, it is tried again: %s", error)

    def _read(self) -> None:
        try:
            with self._budget.reading():
                self._connection = self._connection or connect(self._path, single_threaded=True)
                rows = self._connection.query(_LABELS).to_pylist()
        except (StoreError, OSError):
            self._close()
            raise
        self.labels = {row["run"]: Labels(parse_tags(row["tags"]), row["note"] or None) for row in rows}

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
