"""Spools of dead processes that lie where this service can read them: found by their free locks, read like ranks.

A spool that is held answers under the URL of its folder as its process would have answered while it drained, so that
cursor, watermark and batches are those of any other target. What it says of files and locks happens in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

import pyarrow as pa

from rankscope_contract.protocol.channel import STATE_DRAINING, Registration
from rankscope_contract.spool import Orphan, SpoolError
from rankscope_contract.spool.layout import folders
from rankscope_ingest.base.errors import DecodeError, FetchError, RegistrationError
from rankscope_ingest.network.dialing import Address
from rankscope_ingest.record_channel.arrow_guard import open_stream
from rankscope_ingest.record_channel.client import Answer, Body, Drained, NothingNew, RingStatus
from rankscope_ingest.record_channel.loop import Source
from rankscope_ingest.record_channel.validate import plan_ids
from rankscope_ingest.runs.target import Health, Target
from rankscope_ingest.targets.registry import Accepted, Registry, check_registration

log = logging.getLogger(__name__)

SERVICE: Final = "service"
"""Who reads the spool, where another exporter would name its incarnation."""

AT_ONCE: Final = 64
"""Each that is held costs an open file and a target; after a night without a service thousands may lie there."""


class Spools:
    """What is held, and all else as `http` answers. Implements `Source`."""

    def __init__(self, roots: Iterable[str], http: Source) -> None:
        self._roots = [Path(root) for root in roots]
        self._http = http
        self._held: dict[str, Orphan] = {}
        self._put_off: set[str] = set()  # given back once: all others come first
        self._done: set[str] = set()  # drained, and could not be removed
        self._told: set[str] = set()

    async def find(self) -> list[Registration]:
        """Take spools that are free, as many as there is room for; return as whom to follow them, the oldest first."""
        found: list[Orphan] = []
        for root in self._roots:
            found += await asyncio.to_thread(self._look, root, AT_ONCE - len(self._held) - len(found))
        self._held |= {_url(orphan): orphan for orphan in found}
        taken = [replace(o.registration, url=_url(o), state=STATE_DRAINING, head=o.head, phase=None) for o in found]
        return [replace(who, served_by=SERVICE) for who in sorted(taken, key=lambda who: who.started_at)]

    def held(self) -> list[tuple[str, str]]:
        """Return incarnation and URL of each spool that is held."""
        return [(orphan.incarnation, url) for url, orphan in self._held.items()]

    def unfreeze_gc(self, url: str, why: str) -> None:
        """Give a spool back, to be found again."""
        if orphan := self._held.pop(url, None):
            orphan.release()
            self._put_off.add(orphan.incarnation)
            self._tell(f"{orphan.folder} is not read now: {why}")

    async def remove(self, url: str) -> None:
        """Delete a spool of which the store has everything."""
        if orphan := self._held.pop(url, None):
            await asyncio.to_thread(self._remove, orphan)

    def close(self) -> None:
        """Give back what is not drained yet."""
        for orphan in self._held.values():
            orphan.release()
        self._held.clear()

    async def records(
        self, url: str, *, incarnation: str, after: int, committed: int, lease: str | None, max_bytes: int
    ) -> Answer:
        """Answer from a spool, or have the rank asked. Raises FetchError."""
        orphan = self._held.get(url)
        if orphan is None:
            return await self._http.records(
                url, incarnation=incarnation, after=after, committed=committed, lease=lease, max_bytes=max_bytes
            )
        try:
            answer = await asyncio.to_thread(self._read, orphan, after, committed, max_bytes)
        except OSError as error:
            raise FetchError("spool", f"{orphan.folder}: {error.strerror or error}") from error
        if isinstance(answer, Drained):
            await self.remove(url)
            log.info("%s is drained: %d records are stored", orphan.folder, orphan.committed + 1)
        return answer

    async def plan(self, url: str, plan_id: str) -> str:
        """Return the text of a plan. Raises FetchError."""
        orphan = self._held.get(url)
        if orphan is None:
            return await self._http.plan(url, plan_id)
        text = await asyncio.to_thread(orphan.reader.plan, plan_id)
        if text is None:
            raise FetchError("spool", f"{orphan.folder} has no plan {plan_id}: its numbers have no names")
        return text

    def _read(self, orphan: Orphan, after: int, committed: int, max_bytes: int) -> Answer:
        orphan.commit(committed)
        stretch = orphan.after(after, max_bytes)
        ring = RingStatus(head=orphan.head, ring_fill=1.0, is_draining=True)
        if stretch is None:
            return Drained() if orphan.is_done else NothingNew(ring)
        return Body(data=stretch.data, first=stretch.first, last=stretch.last, rows=stretch.rows, ring=ring)

    def _look(self, root: Path, room: int) -> list[Orphan]:
        if room <= 0:
            return []
        try:
            candidates = sorted(folders(root), key=lambda folder: folder.name in self._put_off)
        except FileNotFoundError:
            return []  # no rank has made it yet
        except OSError as error:
            self._tell(f"[spool] folders: {root} cannot be read: {error.strerror or error}")
            return []
        free = (orphan for folder in candidates if (orphan := self._take(folder)) is not None)
        return list(islice(free, room))

    def _take(self, folder: Path) -> Orphan | None:
        if folder.name in self._done or folder.absolute().as_uri() in self._held:
            return None
        try:
            return Orphan.take(folder, _needed_plans)
        except (SpoolError, OSError) as error:
            self._tell(f"a spool is passed over: {error}")
            return None

    def _remove(self, orphan: Orphan) -> None:
        try:
            orphan.remove()
        except OSError as error:
            self._done.add(orphan.incarnation)
            self._tell(f"{orphan.folder} is stored and cannot be removed: {error.strerror or error}")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)


def _url(orphan: Orphan) -> str:
    return orphan.folder.absolute().as_uri()


def _needed_plans(stream: bytes) -> tuple[str, ...] | None:
    try:
        return plan_ids(open_stream(stream))
    except (DecodeError, pa.ArrowException):
        return None


START_SECONDS: Final = 10.0
"""How long the start of the service waits for the first look."""


class Knowledge(Protocol):
    """What the service knows, as far as it is needed here."""

    registry: Registry

    def accept(self, registration: Registration, addresses: tuple[Address, ...]) -> Accepted:
        """Take a registration. Raises RegistrationError."""
        ...


class SpoolScanner:
    """`watermark` asks the store how far it has a process, `follow` sees to it that a target is polled, at once."""

    def __init__(
        self,
        spools: Spools,
        knowledge: Knowledge,
        *,
        watermark: Callable[[str], Awaitable[int]],
        follow: Callable[[Target], None],
    ) -> None:
        self._spools = spools
        self._knowledge = knowledge
        self._watermark = watermark
        self._follow = follow
        self._first: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Look for the first time; a disk that does not answer must not keep the service from starting."""
        self._first = asyncio.create_task(self.look())
        done, _ = await asyncio.wait([self._first], timeout=START_SECONDS)
        if not done:
            log.warning("[spool] folders: the disk does not answer, the service starts without it")

    async def run(self, scan_seconds: float) -> None:
        """Look until cancelled."""
        if self._first is not None:
            await self._first
        while True:
            await asyncio.sleep(scan_seconds)
            await self.look()

    async def look(self) -> None:
        """Follow what is found, delete what the store has, and leave what belongs to a process that lives after all."""
        try:
            await self._look()
        except (
            Exception
        ):  # what lies on a disk may be anything, and must neither end the service nor keep it from starting
            log.exception("looking for spools failed; it is tried again")

    async def _look(self) -> None:
        for who in await self._spools.find():
            try:
                await self._adopt(who)
            except Exception as error:  # one spool that cannot be followed must not keep back the others
                log.exception("unexpected error in following the spool %s; it is tried again", who.url)
                self._spools.unfreeze_gc(who.url, repr(error))
        for incarnation, url in self._spools.held():
            if (target := self._knowledge.registry.get(incarnation)) is not None:
                self._look_after(target, url)

    def _look_after(self, target: Target, url: str) -> None:
        if target.registration.url != url:
            self._spools.unfreeze_gc(url, "its process lives. Does the file system carry locks between hosts?")
        elif target.is_gone:
            self._spools.unfreeze_gc(url, f"it could not be read ({target.last_error}); it is tried again")
        elif target.health is not Health.FAILING:
            self._knowledge.accept(target.registration, ())  # a heartbeat: it may have to wait for the store

    async def _adopt(self, who: Registration) -> None:
        try:
            check_registration(who)
            known = self._knowledge.registry.get(who.incarnation)
            if known is not None:
                # A rank that does not register has its identity from our configuration, and so have its rows.
                named = known.registration
                who = replace(who, run=named.run, rank=named.rank, launch_id=named.launch_id)
            elif await self._watermark(who.incarnation) >= who.head:
                await self._spools.remove(who.url)
                return
            target = self._knowledge.accept(who, ()).target
        except RegistrationError as error:
            self._spools.unfreeze_gc(who.url, str(error))
            return
        log.info("records of a dead process are read from disk", extra={"target": target.name, "url": who.url})
        self._follow(target)
