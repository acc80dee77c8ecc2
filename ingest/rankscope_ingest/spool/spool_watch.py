"""Looks for spools of dead processes at the start and ever so often, and has them followed like ranks that drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, Protocol

from rankscope_contract.channel import Registration
from rankscope_ingest.errors import RegistrationError
from rankscope_ingest.registry import Accepted, Registry, check_registration
from rankscope_ingest.spool.spools import Spools
from rankscope_ingest.target import Health, Target
from rankscope_ingest.web.networks import Address

log = logging.getLogger(__name__)

START_SECONDS: Final = 10.0
"""How long the start of the service waits for the first look."""


class Knowledge(Protocol):
    """What the service knows, as far as it is needed here."""

    registry: Registry

    def accept(self, registration: Registration, addresses: tuple[Address, ...]) -> Accepted:
        """Take a registration. Raises RegistrationError."""
        ...


class SpoolWatch:
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
                self._spools.let_go(who.url, repr(error))
        for incarnation, url in self._spools.held():
            if (target := self._knowledge.registry.get(incarnation)) is not None:
                self._look_after(target, url)

    def _look_after(self, target: Target, url: str) -> None:
        if target.registration.url != url:
            self._spools.let_go(url, "its process lives. Does the file system carry locks between hosts?")
        elif target.is_gone:
            self._spools.let_go(url, f"it could not be read ({target.last_error}); it is tried again")
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
            self._spools.let_go(who.url, str(error))
            return
        log.info("records of a dead process are read from disk", extra={"target": target.name, "url": who.url})
        self._follow(target)
