"""Spools that dead processes left in our folder: this rank takes them over and speaks for them until a store has all.

Only those for the service of this rank, and those that name none. Each is registered under its own old identity with
our address, and read over the same record channel. One daemon thread does it for all of them; the lock of a spool
decides between ranks, and against the service.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from rankscope_contract.protocol.channel import STATE_DRAINING, Registration
from rankscope_contract.spool import Orphan, SpoolError
from rankscope_contract.spool.layout import folders, read_service
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.serving.registration import Client, retry_seconds
from rankscope_exporter.serving.service_client import RefusedError, UnreachableError
from rankscope_exporter.serving.spool import needed_plans

log = logging.getLogger(__name__)

SCAN_SECONDS: Final = 30.0
"""How often the folder is looked through again: another rank of this host may have died meanwhile."""

HEARTBEAT_SECONDS: Final = 0.5
"""A drain is short, and what the reply says is committed can be deleted."""

AT_ONCE: Final = 16
"""Each that is held costs the training process an open file; after a night of crashes thousands may lie there."""

FINISH_SECONDS: Final = 5.0
"""How long a spool that is stored stays, so that its reader hears from us, and not by our silence, that it is done."""


class OrphanRecovery:
    """What this process serves for dead ones. Methods may be called from any thread."""

    def __init__(
        self,
        root: str,
        own_incarnation: str,
        client: Client,
        url: Callable[[], str | None],
        *,
        service: str | None = None,
        on_fault: Callable[[str, BaseException], None],
    ) -> None:
        self._root = Path(root)
        self._own = own_incarnation
        self._service = service
        self._client = client
        self._url = url
        self._on_fault = on_fault
        self._changed = threading.Lock()
        self._taken: dict[str, Orphan] = {}
        self._waiting: list[Path] = []  # found, and not tried yet
        self._put_off: set[str] = set()  # the service refused them once: all others come first
        self._done_since: dict[str, float] = {}
        self._told: set[str] = set()
        self._stopping = threading.Event()
        self._looked = threading.Event()
        self._thread = OwnThread(target=self._run, name="rankscope-spool")

    def start(self) -> None:
        """Begin to look, and to register what is found."""
        self._thread.start()

    def wait_looked(self, timeout_seconds: float) -> None:
        """Wait until the first look is over: an older launch should be known to the service before ours is."""
        self._looked.wait(timeout_seconds)

    def stop(self) -> None:
        """Give up the spools that are not drained yet; they wait for the next rank or for a service."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)
        with self._changed:
            left, self._taken = list(self._taken.values()), {}
        for orphan in left:
            orphan.release()

    def abandon(self) -> None:
        """In a forked child: close what was inherited. Takes no lock, since its owner may be gone."""
        for orphan in list(self._taken.values()):
            orphan.release()
        self._taken = {}

    def get(self, incarnation: str) -> Orphan | None:
        """Return the spool of a dead process that was taken over."""
        with self._changed:
            return self._taken.get(incarnation)

    def plan(self, plan_hash: str) -> str | None:
        """Return the text of a plan that one of them uses."""
        with self._changed:
            known = list(self._taken.values())
        return next((text for orphan in known if (text := orphan.reader.plan(plan_hash)) is not None), None)

    def finished(self, orphan: Orphan) -> None:
        """Delete a spool that a store has all of; a second call does nothing."""
        with self._changed:
            if self._taken.pop(orphan.incarnation, None) is None:
                return
        self._done_since.pop(orphan.incarnation, None)
        try:
            orphan.remove()
        except OSError as error:
            self._tell(f"{orphan.folder} is stored and cannot be removed: {error.strerror or error}")

    def _run(self) -> None:
        failures = 0
        due = 0.0
        while not self._stopping.is_set():
            try:
                if time.monotonic() >= due:
                    self._look()
                    due = time.monotonic() + SCAN_SECONDS
                self._fill()
                heard = self._register_all()
            except Exception as error:  # noqa: BLE001 - the thread's edge: told to the façade, and tried again
                self._on_fault("spools of dead processes", error)
                heard = False
            self._looked.set()
            failures = 0 if heard else failures + 1
            pause = HEARTBEAT_SECONDS if heard else retry_seconds(failures)
            self._stopping.wait(pause if self._taken or self._waiting else max(0.0, due - time.monotonic()))

    def _look(self) -> None:
        """Note what lies there."""
        try:
            found = folders(self._root)
        except OSError as error:
            self._tell(f"{self._root} cannot be read: {error.strerror or error}")
            return
        others = [folder for folder in found if folder.name != self._own]
        self._waiting = sorted(others, key=lambda folder: folder.name in self._put_off)

    def _fill(self) -> None:
        """Take what is free, as long as there is room."""
        while self._waiting and len(self._taken) < AT_ONCE:
            self._take(self._waiting.pop(0))

    def _take(self, folder: Path) -> None:
        with self._changed:
            if folder.name in self._taken or self._stopping.is_set() or not self._is_for_our_service(folder):
                return
            try:
                orphan = Orphan.take(folder, needed_plans)
            except (SpoolError, OSError) as error:
                self._tell(f"passed over: {error}")
                return
            if orphan is not None:
                self._taken[orphan.incarnation] = orphan
                log.info("%s: records of a dead process are served from here", folder)

    def _is_for_our_service(self, folder: Path) -> bool:
        """Return whether its records may go to the service we know: another one's store is not theirs."""
        service = read_service(folder)
        return service is None or self._service is None or service == self._service

    def _register_all(self) -> bool:
        """Speak for each of them once, the oldest first; return whether the service heard them all."""
        with self._changed:
            waiting = sorted(self._taken.values(), key=lambda orphan: orphan.registration.started_at)
        heard = True
        for orphan in waiting:
            if self.get(orphan.incarnation) is not orphan:
                continue  # its reader has heard meanwhile that it is done
            try:
                self._register(orphan)
            except RefusedError as error:  # the others may be welcome
                self._tell(f"records of {orphan.folder} wait for the service: {error}")
                self._give_way(orphan)
                heard = False
            except UnreachableError as error:
                self._tell(f"records of dead processes in {self._root} wait for the service: {error}")
                return False
        return heard

    def _register(self, orphan: Orphan) -> None:
        reply = self._client.register(self._describe(orphan, self._url() or ""))
        orphan.lease = reply.lease
        orphan.commit(reply.committed)
        if not orphan.is_done:
            return
        done_since = self._done_since.setdefault(orphan.incarnation, time.monotonic())
        if time.monotonic() - done_since >= FINISH_SECONDS:
            self.finished(orphan)

    def _give_way(self, orphan: Orphan) -> None:
        """Make room for others that wait, should there be any."""
        self._put_off.add(orphan.incarnation)
        if self._waiting:
            with self._changed:
                self._taken.pop(orphan.incarnation, None)
            orphan.release()
            self._waiting.append(orphan.folder)

    def _describe(self, orphan: Orphan, url: str) -> Registration:
        return replace(
            orphan.registration, url=url, state=STATE_DRAINING, head=orphan.head, phase=None, served_by=self._own
        )

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)
