"""Count each lost record once, and subtract the record from the count if it arrives later.

This module returns rows; the caller adds them to the batch. `Target.given_up` is the seq of the last record that was
counted as lost when the process was found dead. Records up to this seq can still arrive: from a process that was only
temporarily unreachable, or from the spool of the process, possibly after a restart of this service.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rankscope_contract.model.events import EventType
from rankscope_ingest.live.progress import RunMeter
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.pipeline.rows import Row, Stamp, found_row, gap_row
from rankscope_ingest.record_channel.bodies import ValidBody
from rankscope_ingest.runs.models import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The records of a dead process that were counted as lost: their last sequence number, and how many they are."""

    last: int
    records: int


class LostRecords:
    """Counts the lost records of all targets of one service."""

    def __init__(
        self,
        metrics: ServiceMetrics,
        meter: Callable[[Target], RunMeter],
        stamp: Callable[[], Stamp],
        given_up: Mapping[str, GivenUp],
    ) -> None:
        """Set the dependencies.

        `meter` returns the progress counters of a target's attempt. `stamp` returns the time and arrival number of a
        new row. `given_up` contains the records that were counted as lost before this service started, by incarnation
        id.
        """
        self._metrics = metrics
        self._meter = meter
        self._stamp = stamp
        self._given_up = dict(given_up)
        self._accounts: dict[str, RunMeter] = {}  # meters that already include the lost records, by incarnation

    def recall(self, target: Target) -> None:
        """Set on a new target how many of its records were counted as lost earlier, and the last seq of these records.

        Records are counted as lost when the service finds their process dead.
        """
        if known := self._given_up.get(target.incarnation):
            target.given_up = known.last
            target.records_lost += known.records
            meter = self._meter(target)
            if meter is not self._accounts.get(target.incarnation):
                meter.records_lost += known.records

    def forget(self, target: Target) -> None:
        """Remove a target, but keep the number of its lost records.

        The number is kept because the process of the target may become reachable again after hours.
        """
        if target.given_up > target.cursor:
            self._given_up[target.incarnation] = GivenUp(last=target.given_up, records=target.given_up - target.cursor)
            self._accounts[target.incarnation] = self._meter(target)
        else:
            self._given_up.pop(target.incarnation, None)

    def of_body(self, target: Target, body: ValidBody, events: Iterable[Row]) -> list[Row]:
        """Return rows of `events` for missing records and for lost records that have arrived.

        Missing records are those that `body` skips: their sequence numbers are above that of the last record received
        from `target` earlier and below that of the last record of `body`. Records that the rank itself reports as lost
        in its `events` are counted, too: the rank has not published them, so no sequence number is missing.
        """
        if reported := int(sum(row["value"] or 0 for row in events if row["type"] == EventType.GAP)):
            self._add(target, reported)
            self._metrics.lost(target.registration.run, reported)
        reason = "neither the spool nor a store has them" if target.is_dead else "the ring had overwritten them"
        rows = [self._lost(target, first, last, reason) for first, last in body.missing]
        if target.given_up > target.cursor:
            rows.append(self._found(target, target.cursor + 1, min(body.last, target.given_up)))
        return rows

    def of_unread(self, target: Target, reason: str) -> list[Row]:
        """Return a list with a row of `events` that reports as lost the unpolled records of a dead process.

        Records that the process had not published at its latest sign of life count, too. The list is empty if the
        service has polled all of them.
        """
        first, last = max(target.cursor, target.given_up) + 1, max(target.head, target.expected)
        if last < first:
            return []
        target.given_up = last
        # Without a seq: the watermark must remain below these records, in case they arrive later.
        return [self._lost(target, first, last, reason) | {"seq": None}]

    def _lost(self, target: Target, first: int, last: int, reason: str) -> Row:
        records = last - first + 1
        self._add(target, records)
        self._metrics.lost(target.registration.run, records)
        log.warning("%d records lost: %s", records, reason, extra={"target": target.name, "first": first, "last": last})
        return gap_row(target, first, last, reason, self._stamp())

    def _found(self, target: Target, first: int, last: int) -> Row:
        records = last - first + 1
        self._add(target, -records)
        log.info("%d records that were counted as lost have arrived", records, extra={"target": target.name})
        return found_row(target, first, last, self._stamp())

    def _add(self, target: Target, records: int) -> None:
        target.records_lost += records
        self._meter(target).records_lost += records
