"""The disk side of a rank: its own spool, and the spools of dead processes that it serves. Off without a folder.

Nothing here raises into the server: an error of the disk is counted, and the record takes its usual way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from http import HTTPStatus

from rankscope_contract.protocol.channel import (
    ARROW_STREAM,
    FIRST_HEADER,
    HEAD_HEADER,
    INCARNATION_HEADER,
    LAST_HEADER,
    LOST_HEADER,
    RING_FILL_HEADER,
    ROWS_HEADER,
    STATE_DRAINING,
    STATE_HEADER,
    Registration,
)
from rankscope_contract.spool import Orphan, Stretch
from rankscope_contract.spool.layout import service_name
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.serving.http_server import Answer
from rankscope_exporter.serving.orphan_recovery import OrphanRecovery
from rankscope_exporter.serving.registration import Client
from rankscope_exporter.serving.ring import record_bytes
from rankscope_exporter.serving.spool import Spool
from rankscope_exporter.serving.spool_writer import BEHIND, SpoolWriter


def stretch_answer(stretch: Stretch, standing: Mapping[str, str], after: int) -> Answer:
    """Return records from a disk; what is missing before them is missing for good."""
    headers = {
        **standing,
        FIRST_HEADER: str(stretch.first),
        LAST_HEADER: str(stretch.last),
        ROWS_HEADER: str(stretch.rows),
    }
    if stretch.first > after + 1:
        headers[LOST_HEADER] = f"{after + 1}-{stretch.first - 1}"
    return Answer(HTTPStatus.OK, (stretch.data,), ARROW_STREAM, headers)


def orphan_answer(
    orphan: Orphan, standing: Mapping[str, str], after: int, committed: int | None, max_bytes: int
) -> Answer:
    """Answer for a dead process as it would have answered while it drained: 503 says that a store has everything.

    `committed` is what the holder of the lease has durably, None from anybody else.
    """
    try:
        if committed is not None:
            orphan.commit(committed)
        stretch = orphan.after(after, max_bytes)
    except OSError as error:
        return Answer.text(HTTPStatus.INTERNAL_SERVER_ERROR, f"{orphan.folder}: {error.strerror or error}")
    headers = {
        **standing,
        INCARNATION_HEADER: orphan.incarnation,
        HEAD_HEADER: str(orphan.head),
        RING_FILL_HEADER: "1.000",
        STATE_HEADER: STATE_DRAINING,
    }
    if stretch is not None:
        return stretch_answer(stretch, headers, after)
    if not orphan.is_done:
        return Answer(HTTPStatus.NO_CONTENT, headers=headers)
    return Answer(HTTPStatus.SERVICE_UNAVAILABLE, (b"drained: everything is committed\n",), headers=headers)


ELDERS_FIRST_SECONDS = 2.0
"""How long our own registration waits for those of dead processes: attempts are numbered as launches are heard of."""


class Persistence:
    """Keeps records until a store has them, also beyond the life of a process."""

    def __init__(
        self,
        config: ServeConfig,
        incarnation: str,
        describe: Callable[[], Registration],
        *,
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
    ) -> None:
        self._root = config.spool_dir
        self._service = None if config.ingest_url is None else service_name(config.ingest_url)
        self._incarnation = incarnation
        self._on_fault = on_fault
        self._orphans: OrphanRecovery | None = None
        self._spool: Spool | None = None
        self._writer: SpoolWriter | None = None
        if config.spool_dir is not None:
            self._spool = Spool(
                config.spool_dir,
                incarnation,
                max_bytes=config.spool_bytes,
                sync=config.spool_sync,
                service=self._service,
            )
            self._writer = SpoolWriter(self._spool, describe, on_fault=on_fault, meter=meter)

    @property
    def folder(self) -> str | None:
        """Return where records outlive this process, None where they do not, or the newest may not."""
        if self._spool is None or self._writer is None or not self._spool.is_open or self._writer.is_hanging:
            return None
        return str(self._spool.folder)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Return how many records were not kept, by reason; nothing where nothing was to be kept."""
        if self._spool is None or self._writer is None:
            return {}
        return {**self._spool.dropped, BEHIND: self._writer.behind}

    def serve_orphans(self, client: Client, url: Callable[[], str | None]) -> None:
        """Begin to look for what dead processes left, and to register it."""
        if self._root is not None:
            self._orphans = OrphanRecovery(
                self._root, self._incarnation, client, url, service=self._service, on_fault=self._on_fault
            )
            self._orphans.start()

    def wait_for_older_launches(self) -> None:
        """Wait, not for long, until those that were found have been registered."""
        if self._orphans is not None:
            self._orphans.wait_looked(ELDERS_FIRST_SECONDS)

    def keep(self, seq: int, record: StepRecord) -> None:
        """Put a record on disk before anybody can hear of it, so that whatever was seen outlives this process.

        A disk that hangs is waited for once and not for long; the record then goes on without it.
        Raises ValueError for what the ring would refuse: a seq must stand on disk only once.
        """
        if self._writer is not None:
            self._writer.keep(seq, record, record_bytes(record))

    def commit(self, seq: int) -> None:
        """Note that a store has everything up to `seq`."""
        if self._writer is not None:
            self._writer.commit(seq)

    def holds(self, seq: int) -> bool:
        """Return whether a record is on disk."""
        return self._spool is not None and self._spool.holds(seq)

    def after(self, cursor: int, max_bytes: int, first_in_ring: int) -> Stretch | None:
        """Return records above `cursor` that have left the ring and that only the disk still has."""
        if self._spool is None or cursor + 1 >= first_in_ring:
            return None
        try:
            stretch = self._spool.after(cursor, max_bytes)
        except OSError as error:
            self._on_fault("spool", error)
            return None
        return stretch if stretch is not None and stretch.first < first_in_ring else None

    def plan(self, plan_id: str) -> str | None:
        """Return the text of a plan that a record on disk uses."""
        sources = (source for source in (self._spool, self._orphans) if source is not None)
        return next((text for source in sources if (text := source.plan(plan_id)) is not None), None)

    def orphan(self, incarnation: str) -> Orphan | None:
        """Return the spool of a dead process that was taken over."""
        return None if self._orphans is None else self._orphans.get(incarnation)

    def finished(self, orphan: Orphan) -> None:
        """Note that its reader was told that a spool is drained."""
        if self._orphans is not None:
            self._orphans.finished(orphan)

    def close(self) -> None:
        """Leave what no store has to whoever comes next."""
        with contextlib.ExitStack() as stack:  # closes both, in reverse order, and then raises what one raised
            if self._writer is not None:
                stack.callback(self._writer.close)
            if self._orphans is not None:
                stack.callback(self._orphans.stop)

    def abandon(self) -> None:
        """In a forked child: let go of what was inherited, and change nothing on disk."""
        with contextlib.ExitStack() as stack:  # as in close()
            if self._spool is not None:
                stack.callback(self._spool.abandon)
            if self._orphans is not None:
                stack.callback(self._orphans.abandon)
