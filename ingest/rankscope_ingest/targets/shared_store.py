"""The other services of a store: their addresses, and the ranks that register with them.

Services that share a store exchange nothing: each one reads the log and the rows of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankscope_ingest.base.background import ReadBudget
from rankscope_ingest.base.config import StoreSection
from rankscope_ingest.base.errors import OtherServiceError, RegistrationError
from rankscope_storage.base.errors import ShardLostError, StoreError
from rankscope_storage.connection import connect
from rankscope_storage.log.services import LEASE_SECONDS, RENEW_SECONDS, Membership
from rankscope_storage.writer.writer import Writer

log = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 1.0
"""Shortest time between two reads of the log for the addresses of other services."""
_RANKS_SECONDS: Final = 5.0
# The event of a registration names the page of the rank; a dead process, whose spool is read, has none.
_RANKS: Final = """\
SELECT run, rank, details->>'$.url' AS url FROM events
WHERE type = 'launch' AND ts_origin = 'ingest' AND rank IS NOT NULL AND (run, attempt) IN (
    SELECT (run, attempt) FROM attempts
    WHERE source_kind = 'live' AND state NOT IN ('completed', 'stopped', 'failed'))
  AND incarnation NOT IN (SELECT incarnation FROM events WHERE type = 'exit' AND incarnation IS NOT NULL)
QUALIFY ordinal = max(ordinal) OVER (PARTITION BY run, rank) AND url IS NOT NULL ORDER BY run, rank"""


class SharedStore:
    """The services that share the store of `section`, as of the last renewal of this one."""

    def __init__(self, section: StoreSection, writer: Writer) -> None:
        self._path = section.path
        self.shard = section.owned
        self._writer = writer
        self._is_asked = asyncio.Event()  # a rank waits for the service of another shard, which may have started
        self._budget = ReadBudget(_RANKS_SECONDS, clock=time.monotonic)
        self._ranks: Sequence[Mapping[str, Any]] = ()
        self.membership = Membership(addresses={}, is_maintaining=not writer.is_renewed, version=0)
        self.trouble: str | None = None
        """The error of the last renewal, or None if it succeeded."""

    async def run(self, url: str) -> None:
        """Publish the address `url` of this service, and renew it until this coroutine is cancelled.

        Raises ShardLostError if another service has taken over the shard, or if the number of services was changed.
        """
        self._writer.join(url)
        while self._writer.is_renewed:
            try:
                self.membership, self.trouble = await asyncio.to_thread(self._writer.renew), None
            except ShardLostError:
                raise
            except StoreError as error:
                self.membership = Membership(addresses={}, is_maintaining=False, version=self.membership.version)
                self.trouble = f"the address of this service cannot be renewed in the store: {error}"
                log.warning("%s; retrying", self.trouble)
            self._is_asked.clear()
            await asyncio.sleep(_PAUSE_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_asked.wait(), RENEW_SECONDS / 2)
        await asyncio.Event().wait()

    def check_owner(self, run: str, path: str) -> None:
        """Raise OtherServiceError with the address for `path` if another service owns `run`.

        Raises RegistrationError with status 503 if the service of its shard is dead or unknown.
        """
        owner = self.shard.of(run)
        if owner == self.shard:
            return
        if (url := self.membership.addresses.get(owner.number)) is None:
            self._is_asked.set()
            raise RegistrationError(
                503,
                f"the run {run!r} belongs to the shard {owner}, which has no service at present: start it. A service "
                f"without a commit for {LEASE_SECONDS:.0f} s counts as dead",
            )
        raise OtherServiceError(
            f"the run {run!r} belongs to the shard {owner}, whose service is {url}: send the request there",
            location=url + path,
            shard=str(owner),
        )

    async def other_ranks(self) -> Sequence[Mapping[str, Any]]:
        """Return run, rank and URL of each rank of an active attempt that belongs to another shard."""
        if self.shard.count > 1 and self._budget.is_due:
            try:
                await asyncio.to_thread(self._read)
            except (StoreError, OSError) as error:
                log.warning("ranks of other services cannot be read from the store, retrying: %s", error)
        return self._ranks

    def _read(self) -> None:
        with self._budget.reading(), connect(self._path, single_threaded=True) as connection:
            rows = connection.query(_RANKS).to_pylist()
        self._ranks = [row for row in rows if not self.shard.owns(row["run"])]
