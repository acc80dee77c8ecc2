"""Tags and notes of runs, read from the store on request, at most once every few seconds."""

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

REFRESH_SECONDS: Final = 5.0
TIMEOUT_SECONDS: Final = 1.0
"""Maximum time in seconds to wait for the store. After this time, the tags and notes of the previous read are shown."""

# The same as in the view `runs`, without the versions that have no tags and no note, which are nearly all.
_LABELS: Final = """\
SELECT run, max_by(tags, ts) FILTER (tags IS NOT NULL) AS tags, max_by(note, ts) FILTER (note IS NOT NULL) AS note
FROM runs_history WHERE tags IS NOT NULL OR note IS NOT NULL GROUP BY run"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Labels:
    """Tags and note of one run."""

    tags: Mapping[str, str]
    note: str | None


NONE: Final = Labels({}, None)


class LabelReader:
    """Tags and notes of all runs of the store at `path`. The queries run in a separate thread."""

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-labels")
        self._connection: Connection | None = None
        self._budget = ReadBudget(REFRESH_SECONDS, clock=clock)
        self._query: asyncio.Future[None] | None = None
        self.labels: Mapping[str, Labels] = {}

    async def fresh(self) -> Mapping[str, Labels]:
        """Return the current tags and notes by run.

        If the store does not respond in time, return the tags and notes of the previous read.
        """
        if self._query is None and self._budget.is_due:
            self._query = asyncio.get_running_loop().run_in_executor(self._thread, self._read)
        if self._query is not None:
            await asyncio.wait([self._query], timeout=TIMEOUT_SECONDS)
            if self._query.done():
                if error := self._query.exception():
                    log.warning("tags of runs cannot be read, retrying at the next request: %s", error)
                self._query = None
        return self.labels

    def close(self) -> None:
        """Close the connection after the current query."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

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
