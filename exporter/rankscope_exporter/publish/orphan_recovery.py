"""Serves spools that dead processes left in the spool folder of this rank, until a store has all their records.

The rank serves only spools that name the service of this rank, and spools that name no service. It registers each spool
with the identity of the dead process and with its own URL, and answers polls for it on the same record channel. One
daemon thread handles all spools. The file lock of a spool ensures that only one rank, or the service, serves it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa

from rankscope_contract.wire.channel import STATE_DRAINING
from rankscope_contract.wire.spool import Orphan, SpoolError, SpoolReader, folders, read_service
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.publish.registration import RefusedError, ServiceClient, UnreachableError, retry_seconds
from rankscope_exporter.publish.spool import needed_plans

log = logging.getLogger(__name__)

OLDER_LAUNCHES_SECONDS: Final = 2.0
"""Maximum seconds for which this rank delays its registration until spools of dead processes are registered.

The service numbers the attempts of a run in the order in which they register, so earlier attempts must register first.
"""

SCAN_SECONDS: Final = 30.0
"""Seconds between two searches of the spool folder. Another rank of this host may have died since the last search."""

HEARTBEAT_SECONDS: Final = 0.5
"""Seconds between two registrations of a dead process.

The reply contains the committed sequence number, so a short interval lets the rank delete committed records soon.
"""

AT_ONCE: Final = 16
"""Maximum number of spools that are served at the same time.

Each spool needs an open file in the training process, and after many crashes the folder may contain thousands.
"""

FINISH_SECONDS: Final = 5.0
"""Seconds for which a spool remains after its last record was committed.

In this time the client can still receive the answer that no record is left.
"""


@dataclass(eq=False)
class OrphanRecovery:
    """The spools of dead processes that this process serves. Methods may be called from any thread."""

    root: Path
    own_incarnation: str
    client: ServiceClient
    service: str
    on_fault: Callable[[str, BaseException], None]

    def __post_init__(self) -> None:
        self._changed = threading.Lock()
        self._orphans: dict[str, Orphan] = {}
        self._waiting: list[Path] = []  # found by the search, not yet served
        self._refused: set[str] = set()  # the service refused them once: they are tried after all others
        self._done_since: dict[str, float] = {}
        self._logged: set[str] = set()
        self._stopping = threading.Event()
        self._searched = threading.Event()
        self._thread = OwnThread(target=self._run, name="rankscope-spool", on_fault=self.on_fault)

    def start(self, url: str) -> None:
        """Start the thread, which registers the spools with the `url` of this rank."""
        self._url = url
        self._thread.start()

    def wait_searched(self) -> None:
        """Wait at most 2 s until the spools that the first search found are registered with the service."""
        self._searched.wait(OLDER_LAUNCHES_SECONDS)

    def stop(self) -> None:
        """Stop the thread and release the spools, so that another process on this host or a service can serve them."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)
        with self._changed:
            left, self._orphans = list(self._orphans.values()), {}
        for orphan in left:
            orphan.release()

    def abandon(self) -> None:
        """Close the inherited files in a forked child. Takes no lock: the child may lack the thread that holds it."""
        for orphan in list(self._orphans.values()):
            orphan.release()
        self._orphans = {}

    def get(self, incarnation: str) -> Orphan | None:
        """Return the spool of the dead process `incarnation`; None if this rank does not serve it."""
        with self._changed:
            return self._orphans.get(incarnation)

    def plan(self, plan_hash: str) -> str | None:
        """Return the JSON text of a plan if a record in one of the spools uses it."""
        with self._changed:
            served = list(self._orphans.values())
        return next((text for orphan in served if (text := orphan.reader.plan(plan_hash)) is not None), None)

    def finished(self, orphan: Orphan) -> None:
        """Delete the spool `orphan` of a dead process.

        Called when all its records are committed. A second call has no effect.
        """
        with self._changed:
            if self._orphans.pop(orphan.incarnation, None) is None:
                return
        self._done_since.pop(orphan.incarnation, None)
        try:
            orphan.remove()
        except OSError as error:
            what = "cannot delete this folder of committed records"
            self._log_once(f"{orphan.folder}: {what}: {error.strerror or error}")

    def _run(self) -> None:
        failures = 0
        due = 0.0
        while not self._stopping.is_set():
            try:
                if time.monotonic() >= due:
                    self._search()
                    due = time.monotonic() + SCAN_SECONDS
                while self._waiting and len(self._orphans) < AT_ONCE:
                    self._take(self._waiting.pop(0))
                is_registered = self._register_all()
            except Exception as error:  # noqa: BLE001 - top of the thread: reported, and tried again
                self.on_fault("serving spools of dead processes", error)
                is_registered = False
            self._searched.set()
            failures = 0 if is_registered else failures + 1
            pause = HEARTBEAT_SECONDS if is_registered else retry_seconds(failures)
            self._stopping.wait(pause if self._orphans or self._waiting else max(0.0, due - time.monotonic()))

    def _search(self) -> None:
        try:
            found = folders(self.root)
        except FileNotFoundError:  # no process has written records yet
            return
        except OSError as error:
            self._log_once(f"the spool folder {self.root} cannot be read: {error.strerror or error}")
            return
        others = [folder for folder in found if folder.name != self.own_incarnation]
        self._waiting = sorted(others, key=lambda folder: folder.name in self._refused)

    def _take(self, folder: Path) -> None:
        """Lock and serve the spool in `folder`.

        Does nothing if the process that wrote the spool is alive, or if its records belong to a different service than
        that of this rank.
        """
        with self._changed:
            if folder.name in self._orphans or self._stopping.is_set():
                return
            service = read_service(folder)
            if service is not None and service != self.service:
                return  # the store of another service owns these records
            try:
                orphan = Orphan.take(SpoolReader(folder, pa, needed_plans))
            except (SpoolError, OSError) as error:
                self._log_once(f"spool skipped: {error}")
                return
            if orphan is not None:
                self._orphans[orphan.incarnation] = orphan
                log.info("%s: this rank now serves the records that a dead process left in this folder", folder)

    def _register_all(self) -> bool:
        """Send one registration for each spool, the oldest first. Return whether the service accepted all of them."""
        with self._changed:
            waiting = sorted(self._orphans.values(), key=lambda orphan: orphan.registration.started_at)
        is_accepted = True
        for orphan in waiting:
            if self.get(orphan.incarnation) is not orphan:
                continue  # finished in the meantime
            try:
                self._register(orphan)
            except RefusedError as error:  # the service may accept the others
                self._log_once(f"the service refused the records of {orphan.folder}, retrying: {error}")
                self._give_way(orphan)
                is_accepted = False
            except UnreachableError as error:
                what = f"records of dead processes in {self.root}"
                self._log_once(f"the service cannot be reached for {what}, retrying: {error}")
                return False
        return is_accepted

    def _register(self, orphan: Orphan) -> None:
        changed = replace(
            orphan.registration,
            url=self._url,
            served_by=self.own_incarnation,
            state=STATE_DRAINING,
            head=orphan.head,
            phase=None,
        )
        reply = self.client.register(changed)
        orphan.lease = reply.lease
        orphan.commit(reply.committed)
        if not orphan.is_done:
            return
        done_since = self._done_since.setdefault(orphan.incarnation, time.monotonic())
        if time.monotonic() - done_since >= FINISH_SECONDS:
            self.finished(orphan)

    def _give_way(self, orphan: Orphan) -> None:
        """Release a spool that the service has refused, and append it to the queue of spools that wait to be served.

        Another spool of this queue can then be served instead. If the queue is empty, the refused spool is not
        released.
        """
        self._refused.add(orphan.incarnation)
        if self._waiting:
            with self._changed:
                self._orphans.pop(orphan.incarnation, None)
            orphan.release()
            self._waiting.append(orphan.folder)

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s", text)
