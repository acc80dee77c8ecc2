"""Records on disk: the spool of this rank and the spools of dead processes that this rank serves.

No method raises a disk error into the server. Such an error is counted, and the record is served from the ring.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from rankscope_contract.protocol.channel import Registration
from rankscope_contract.spool import Orphan, Stretch
from rankscope_contract.spool.layout import service_name
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.serving.orphan_recovery import OrphanRecovery
from rankscope_exporter.serving.registration import Client
from rankscope_exporter.serving.ring import record_bytes
from rankscope_exporter.serving.spool import Spool
from rankscope_exporter.serving.spool_writer import BEHIND, SpoolWriter

OLDER_LAUNCHES_SECONDS = 2.0
"""Longest wait of a rank's own registration for those of dead processes: the service numbers attempts in the order in
which they register."""


class Persistence:
    """A rank without a spool folder: stores nothing on disk. `SpoolPersistence` is used when `spool_dir` is set."""

    @property
    def folder(self) -> str | None:
        """Return the folder that keeps all records after the process exits; None if some of them may be missing."""
        return None

    @property
    def dropped(self) -> Mapping[str, int]:
        """Return the number of records that were not spooled, by reason."""
        return {}

    def serve_orphans(self, client: Client, url: Callable[[], str | None]) -> None:
        """Start to search for spools of dead processes, and register them with the service."""

    def wait_for_older_launches(self) -> None:
        """Wait until the spools found so far have been registered, at most OLDER_LAUNCHES_SECONDS."""

    def write(self, seq: int, record: StepRecord) -> None:
        """Write `record` to the spool before it enters the ring: each record that a reader gets survives this process.

        Blocks for at most 0.5 s. If the write takes longer, the record is published before it is on disk, and later
        calls return immediately until the disk has caught up. One thread at a time.
        Raises ValueError if the statistics do not match the plan. The ring would reject such a record and use its
        sequence number again, so the spool would contain this number twice.
        """

    def commit(self, seq: int) -> None:
        """Note that a store contains all records up to `seq`."""

    def holds(self, seq: int) -> bool:  # noqa: ARG002 - the signature of the spool
        """Return whether a record is on disk."""
        return False

    def after(self, cursor: int, max_bytes: int, first_in_ring: int) -> Stretch | None:  # noqa: ARG002 - as above
        """Return records above `cursor` that are no longer in the ring, read from disk; None if there are none."""
        return None

    def plan(self, plan_hash: str) -> str | None:  # noqa: ARG002 - as above
        """Return the text of a plan that a record on disk uses; None if no record uses it."""
        return None

    def orphan(self, incarnation: str) -> Orphan | None:  # noqa: ARG002 - as above
        """Return the spool of a dead process that this rank serves; None if it serves none of this name."""
        return None

    def finished(self, orphan: Orphan) -> None:
        """Delete the spool of a dead process whose reader has received the answer that all records are committed."""

    def close(self) -> None:
        """Stop the threads. Uncommitted records remain on disk for the next rank or a service."""

    def abandon(self) -> None:
        """Release inherited files in a forked child. Changes nothing on disk."""


class SpoolPersistence(Persistence):
    """Writes each record to the spool folder, and serves the spools that dead processes left in the same folder."""

    def __init__(
        self,
        root: str,
        config: ServeConfig,
        incarnation: str,
        describe: Callable[[], Registration],
        *,
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
    ) -> None:
        self._root = root
        self._service = None if config.ingest_url is None else service_name(config.ingest_url)
        self._incarnation = incarnation
        self._on_fault = on_fault
        self._orphans: OrphanRecovery | None = None
        self._spool = Spool(
            root, incarnation, max_bytes=config.spool_bytes, sync=config.spool_sync, service=self._service
        )
        self._writer = SpoolWriter(self._spool, describe, on_fault=on_fault, meter=meter)

    @property
    def folder(self) -> str | None:
        """Return the folder of the spool; None while the spool is not open or the disk does not respond."""
        return str(self._spool.folder) if self._spool.is_open and not self._writer.is_hanging else None

    @property
    def dropped(self) -> Mapping[str, int]:
        """Return the number of records that were not spooled, by reason."""
        return {**self._spool.dropped, BEHIND: self._writer.behind}

    def serve_orphans(self, client: Client, url: Callable[[], str | None]) -> None:
        """Start the thread that searches for spools of dead processes and registers them with the service."""
        self._orphans = OrphanRecovery(
            self._root, self._incarnation, client, url, service=self._service, on_fault=self._on_fault
        )
        self._orphans.start()

    def wait_for_older_launches(self) -> None:
        """Wait until the first search for spools has registered its results, at most OLDER_LAUNCHES_SECONDS."""
        if self._orphans is not None:
            self._orphans.wait_searched(OLDER_LAUNCHES_SECONDS)

    def write(self, seq: int, record: StepRecord) -> None:
        """Write `record` to the spool; see `Persistence.write`. Raises ValueError for statistics that fit no plan."""
        self._writer.write(seq, record, record_bytes(record))

    def commit(self, seq: int) -> None:
        """Note that a store contains all records up to `seq`; the spool thread deletes files without other records."""
        self._writer.commit(seq)

    def holds(self, seq: int) -> bool:
        """Return whether a record is on disk."""
        return self._spool.holds(seq)

    def after(self, cursor: int, max_bytes: int, first_in_ring: int) -> Stretch | None:
        """Return records above `cursor` that are on disk and no longer in the ring; None also after a disk error."""
        if cursor + 1 >= first_in_ring:
            return None
        try:
            stretch = self._spool.after(cursor, max_bytes)
        except OSError as error:
            self._on_fault("spool", error)
            return None
        return stretch if stretch is not None and stretch.first < first_in_ring else None

    def plan(self, plan_hash: str) -> str | None:
        """Return the text of a plan that a record on disk uses, also one of a dead process; None if there is none."""
        text = self._spool.plan(plan_hash)
        return self._orphans.plan(plan_hash) if text is None and self._orphans is not None else text

    def orphan(self, incarnation: str) -> Orphan | None:
        """Return the spool of a dead process that this rank serves; None if it serves none of this name."""
        return None if self._orphans is None else self._orphans.get(incarnation)

    def finished(self, orphan: Orphan) -> None:
        """Delete the spool of a dead process; its reader has received the answer that all records are committed."""
        if self._orphans is not None:
            self._orphans.finished(orphan)

    def close(self) -> None:
        """Stop the threads. Uncommitted records remain on disk for the next rank or a service."""
        with contextlib.ExitStack() as stack:  # closes both in reverse order, then raises the first error
            stack.callback(self._writer.close)
            if self._orphans is not None:
                stack.callback(self._orphans.stop)

    def abandon(self) -> None:
        """Release inherited files in a forked child. Changes nothing on disk."""
        with contextlib.ExitStack() as stack:  # as in close()
            stack.callback(self._spool.abandon)
            if self._orphans is not None:
                stack.callback(self._orphans.abandon)


def persistence_of(
    config: ServeConfig,
    incarnation: str,
    describe: Callable[[], Registration],
    *,
    on_fault: Callable[[str, BaseException], None],
    meter: CpuMeter,
) -> Persistence:
    """Return the persistence that `config` asks for: a spool if `spool_dir` is set, otherwise none."""
    if config.spool_dir is None:
        return Persistence()
    return SpoolPersistence(config.spool_dir, config, incarnation, describe, on_fault=on_fault, meter=meter)
