"""Read the spools of dead processes in folders that this service can access.

A process locks its spool while it runs; a free lock therefore means that the process is dead. The service claims such a
spool and polls it like a draining rank, with the folder as its URL. The last received sequence number, the watermark
and the batches are therefore handled as for other targets. File operations run in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

import pyarrow as pa

from rankscope_contract.model.events import RunState
from rankscope_contract.wire.channel import STATE_DRAINING, STATE_RUNNING, Registration
from rankscope_contract.wire.spool import LOCK_NAME, Orphan, SpoolError, SpoolReader, folders
from rankscope_ingest.base.addresses import Address
from rankscope_ingest.base.background import start_task
from rankscope_ingest.base.errors import DecodeError, FetchError, RegistrationError
from rankscope_ingest.record_channel.bodies import plan_ids
from rankscope_ingest.record_channel.client import Answer, Body, Drained, NothingNew, RingStatus, open_stream
from rankscope_ingest.record_channel.loop import RecordSource
from rankscope_ingest.runs.models import Attempt, Health, Target
from rankscope_ingest.runs.tracker import RunTracker
from rankscope_ingest.targets.registry import Accepted, Registry, check_registration

log = logging.getLogger(__name__)

SERVICE: Final = "service"
"""Value of `served_by` in the registration of a dead process whose spool this service reads.

If a rank reads the spool, the value is the incarnation id of that rank.
"""

MAX_CLAIMED: Final = 64
"""Maximum number of spools that are claimed at the same time.

Each claimed spool needs an open file and a target, and there can be thousands of spools.
"""

START_SECONDS: Final = 10.0
"""Maximum time in seconds for which the first scan of the spool folders delays the start of the service."""


class Spools:
    """Finds the spools of dead processes in the folders `roots`, registers the processes as targets, and reads them.

    Implements the protocol `RecordSource`, from which poll loops request records. Requests for other targets are passed
    to `http`, which polls ranks over HTTP. Spools that this service cannot read are released.
    """

    def __init__(
        self,
        roots: Iterable[str],
        http: RecordSource,
        registry: Registry,
        *,
        accept: Callable[[Registration, tuple[Address, ...]], Accepted],
        watermark: Callable[[str], Awaitable[int]],
        follow: Callable[[Target], None],
        owns: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Set the dependencies.

        `accept` registers a process. `follow` starts polling a target immediately. `watermark` returns the seq of the
        last committed record of a process. `owns` returns whether this service stores a run.
        """
        self._owns = owns
        self._foreign: set[str] = set()  # incarnations of runs of other services
        self._roots = [Path(root) for root in roots]
        self._http = http
        self._registry = registry
        self._accept = accept
        self._watermark = watermark
        self._follow = follow
        self._first: asyncio.Task[None] | None = None
        self._claimed: dict[str, Orphan] = {}
        self._released: set[str] = set()  # incarnations that were released once: all others come first
        self._done: set[str] = set()  # drained, but could not be removed
        self._logged: set[str] = set()

    async def find(self) -> list[Registration]:
        """Claim free spools up to MAX_CLAIMED; return registrations for their processes, oldest first."""
        found: list[Orphan] = []
        for root in self._roots:
            found += await asyncio.to_thread(self._claim_in, root, MAX_CLAIMED - len(self._claimed) - len(found))
        self._claimed |= {_url(orphan): orphan for orphan in found}
        oldest_first = sorted(found, key=lambda orphan: orphan.registration.started_at)
        return [_draining(orphan) for orphan in oldest_first]

    def release(self, url: str, reason: str) -> None:
        """Release a claimed spool. A later scan can claim it again."""
        if orphan := self._claimed.pop(url, None):
            orphan.release()
            self._released.add(orphan.incarnation)
            self._warn_once(f"spool {orphan.folder} is skipped in this scan: {reason}")

    async def remove(self, url: str) -> None:
        """Delete a claimed spool. The caller must ensure that the store has all its records."""
        if orphan := self._claimed.pop(url, None):
            await asyncio.to_thread(self._remove, orphan)

    def close(self) -> None:
        """Release all claimed spools, so that another service or a rank can read them."""
        for orphan in self._claimed.values():
            orphan.release()
        self._claimed.clear()

    async def begin(self) -> None:
        """Run the first scan of the spool folders.

        If a disk does not respond, the method returns after START_SECONDS, and the scan continues in the background.
        """
        self._first = start_task("scanning for spools", self._scan)
        done, _ = await asyncio.wait([self._first], timeout=START_SECONDS)
        if not done:
            log.warning("[spool] folders: scan timed out after %g s, continuing in the background", START_SECONDS)

    async def scan(self) -> None:
        """Register new spools of dead processes, and delete spools whose records are all in the store.

        A claimed spool is released if its process is alive or reading it failed. A later scan can claim such a spool
        again.
        """
        if self._first is not None:
            await self._first
        await self._scan()

    async def _scan(self) -> None:
        for registration in await self.find():
            try:
                await self._adopt(registration)
            except Exception as error:  # one spool must not prevent the adoption of the others
                log.exception("unexpected error in registering the process of spool %s, retrying", registration.url)
                self.release(registration.url, repr(error))
        for url, orphan in list(self._claimed.items()):
            if (target := self._registry.get(orphan.incarnation)) is None:
                continue
            if target.registration.url != url:
                self.release(
                    url, "the process of the spool is alive. Does the file system support locks between hosts?"
                )
            elif target.is_gone:
                self.release(url, f"reading failed, retrying ({target.last_error})")
            elif target.health is not Health.FAILING:
                self._accept(target.registration, ())  # a heartbeat: the target may have to wait for the store

    async def _adopt(self, registration: Registration) -> None:
        try:
            check_registration(registration)
            known = self._registry.get(registration.incarnation)
            if known is not None:
                # A static target has the identity of the service's configuration, and so have its stored rows.
                named = known.registration
                registration = replace(registration, run=named.run, rank=named.rank, launch_id=named.launch_id)
            elif await self._watermark(registration.incarnation) >= registration.head:
                await self.remove(registration.url)
                return
            target = self._accept(registration, ()).target
        except RegistrationError as error:
            self.release(registration.url, str(error))
            return
        log.info("reading the spool of a dead process", extra={"target": target.name, "url": registration.url})
        self._follow(target)

    async def records(
        self, url: str, *, incarnation: str, after: int, committed: int, lease: str | None, max_bytes: int, notice: bool
    ) -> Answer:
        """Return the next records of a claimed spool, or of a rank over HTTP.

        Raises FetchError if they cannot be read.
        """
        orphan = self._claimed.get(url)
        if orphan is None:
            reads = {"after": after, "committed": committed, "max_bytes": max_bytes}
            return await self._http.records(url, incarnation=incarnation, lease=lease, notice=notice, **reads)
        try:
            answer = await asyncio.to_thread(_read, orphan, after, committed, max_bytes)
        except OSError as error:
            raise FetchError("spool", f"{orphan.folder}: {error.strerror or error}") from error
        if isinstance(answer, Drained):
            await self.remove(url)
            log.info("spool %s is drained: %d records are stored", orphan.folder, orphan.committed + 1)
        return answer

    async def plan(self, url: str, plan_id: str) -> str:
        """Return the JSON text of a plan from a claimed spool, or from a rank over HTTP.

        Raises FetchError if it is not available.
        """
        orphan = self._claimed.get(url)
        if orphan is None:
            return await self._http.plan(url, plan_id)
        text = await asyncio.to_thread(orphan.reader.plan, plan_id)
        if text is None:
            raise FetchError(
                "spool", f"{orphan.folder}: plan {plan_id} is missing, so the names of recorded statistics are unknown"
            )
        return text

    def _claim_in(self, root: Path, limit: int) -> list[Orphan]:
        if limit <= 0:
            return []
        try:
            candidates = sorted(folders(root), key=lambda folder: folder.name in self._released)
        except FileNotFoundError:
            return []  # no rank has created the folder yet
        except OSError as error:
            self._warn_once(f"[spool] folders: {root} cannot be read: {error.strerror or error}")
            return []
        free = (orphan for folder in candidates if (orphan := self._claim(folder)) is not None)
        return list(islice(free, limit))

    def _claim(self, folder: Path) -> Orphan | None:
        is_known = folder.name in self._done or folder.name in self._foreign
        if is_known or folder.absolute().as_uri() in self._claimed:
            return None
        try:
            orphan = Orphan.take(SpoolReader(folder, pa, _needed_plans))
        except (SpoolError, OSError) as error:
            self._warn_once(f"spool skipped: {error}")
            return None
        if orphan is None or self._owns(orphan.registration.run):
            return orphan
        orphan.release()
        self._foreign.add(folder.name)
        return None

    def _remove(self, orphan: Orphan) -> None:
        try:
            orphan.remove()
        except OSError as error:
            self._done.add(orphan.incarnation)
            self._warn_once(
                f"spool {orphan.folder} is stored in full but its folder cannot be removed: {error.strerror or error}"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s", text)


def _url(orphan: Orphan) -> str:
    return orphan.folder.absolute().as_uri()


def _draining(orphan: Orphan) -> Registration:
    return replace(
        orphan.registration,
        url=_url(orphan),
        state=STATE_RUNNING if (orphan.folder / LOCK_NAME).stat().st_size else STATE_DRAINING,
        head=orphan.head,
        phase=None,
        served_by=SERVICE,
    )


def _read(orphan: Orphan, after: int, committed: int, max_bytes: int) -> Answer:
    orphan.commit(committed)
    records = orphan.after(after, max_bytes)
    status = RingStatus(head=orphan.head, ring_fill=1.0, is_draining=True)
    if records is None:
        return Drained() if orphan.is_done else NothingNew(status)
    return Body(data=records.data, first=records.first, last=records.last, rows=records.rows, ring=status)


def _needed_plans(stream: bytes) -> tuple[str, ...] | None:
    try:
        return plan_ids(open_stream(stream))
    except (DecodeError, pa.ArrowException):
        return None


def register_orphan(runs: RunTracker, target: Target, now: float, wall: int, jumped: int = 0) -> Attempt:
    """Record that the spool of a dead process is available; return the attempt of the process.

    An available spool does not count as a sign of life. A process that was already considered dead remains dead; any
    other process is considered dead when its spool is drained. If a newer process runs as the same rank, nothing
    changes. `now` is in monotonic seconds, `wall` in UTC µs. `jumped` is the sum of the jumps of this clock, in µs.
    """
    attempt = runs.get(target.attempt_key)
    known = None if attempt is None else attempt.ranks.get(target.registration.rank)
    if attempt is not None and known is not None and known.incarnation != target.incarnation:
        return attempt
    before = None if known is None else replace(known)
    attempt = runs.registered(target.registration, target.attempt, target.liveness, wall, jumped)
    rank = attempt.ranks[target.registration.rank]
    if attempt.has_ended and attempt.settled_at is None:
        attempt.settled_at = now  # it ended under an earlier service; it is shown again for a while
    if before is not None and before.is_vanished:
        rank.is_vanished, rank.never_answered = True, before.never_answered
    elif attempt.state is RunState.FAILED and rank.exit_reason is None and not rank.is_closed:
        rank.vanish(now, wall - attempt.clock_offset)
        rank.silent_from = None  # unknown until its records are read
    return attempt


def drain_orphan(runs: RunTracker, target: Target, now: float, wall: int) -> None:
    """Record that all records of a dead process are read.

    If these records contain no exit report, the process is recorded as vanished after its last record. `now` is in
    monotonic seconds, `wall` in UTC µs.
    """
    attempt = runs.get(target.attempt_key)
    rank = None if attempt is None else attempt.ranks.get(target.registration.rank)
    if attempt is None or rank is None or rank.incarnation != target.incarnation:
        return
    if rank.exit_reason is not None or rank.is_closed:
        return
    if not rank.is_vanished:
        rank.vanish(now, wall - attempt.clock_offset)
        rank.silent_from = rank.silent_from if target.last_ts is None else target.last_ts
    elif rank.silent_from is None:
        rank.silent_from = target.last_ts
    attempt.note_activity()
