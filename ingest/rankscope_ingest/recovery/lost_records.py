"""Records that cannot be had: each is counted once, and taken back should it arrive after all. Makes rows, writes none.

`Target.given_up` is the last seq that was counted as lost with its process. Records up to there may still come: from
a process that was only out of reach, or from its spool, maybe after this service was started anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rankscope_ingest.record_channel.validate import ValidBody
from rankscope_ingest.reporting.progress import RunMeter
from rankscope_ingest.reporting.rows import Row, Stamp, found_row, gap_row
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.runs.target import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """What the store says was lost with a process: the last seq, and how many records."""

    last: int
    records: int


class LostRecords:
    """The account of one service. `meter` gives the figures of a target's attempt, `stamp` a moment for a row."""

    def __init__(
        self,
        metrics: ServiceMetrics,
        meter: Callable[[Target], RunMeter],
        stamp: Callable[[], Stamp],
        given_up: Mapping[str, GivenUp],
    ) -> None:
        self._metrics = metrics
        self._meter = meter
        self._stamp = stamp
        self._given_up = dict(given_up)
        self._accounts: dict[str, RunMeter] = {}  # where what is given up stands already

    def recall(self, target: Target) -> None:
        """Carry over what was counted as lost with the process of a new target: by a former service, or long ago."""
        if known := self._given_up.get(target.incarnation):
            target.given_up = known.last
            target.records_lost += known.records
            meter = self._meter(target)
            if meter is not self._accounts.get(target.incarnation):
                meter.records_lost += known.records

    def forget(self, target: Target) -> None:
        """Keep of a target that is forgotten what was counted as lost with it: a host may be back after hours."""
        if target.given_up > target.cursor:
            self._given_up[target.incarnation] = GivenUp(last=target.given_up, records=target.given_up - target.cursor)
            self._accounts[target.incarnation] = self._meter(target)
        else:
            self._given_up.pop(target.incarnation, None)

    def of_body(self, target: Target, body: ValidBody) -> list[Row]:
        """Return what a body says of records that are missing before or in it, and of such that are found."""
        why = "neither the spool nor a store has them" if target.is_dead else "the ring had overwritten them"
        rows = [self._gap(target, first, last, why) for first, last in body.missing]
        if target.given_up > target.cursor:
            rows.append(self._found(target, target.cursor + 1, min(body.last, target.given_up)))
        return rows

    def of_vanished(self, target: Target) -> list[Row]:
        """Return what is lost with a process that vanished: what it had published and nobody fetched."""
        return self._rest(target, "the process vanished before they were fetched")

    def of_drained(self, target: Target) -> list[Row]:
        """Return what a spool that was read to its end did not hold, though the process had said to have it."""
        return self._rest(target, "the process died, and its spool does not have them")

    def _rest(self, target: Target, why: str) -> list[Row]:
        first = max(target.cursor, target.given_up) + 1
        if target.head < first:
            return []
        target.given_up = target.head
        # Without a seq: the watermark must stay below these records, in case they arrive after all.
        return [self._gap(target, first, target.head, why) | {"seq": None}]

    def _gap(self, target: Target, first: int, last: int, why: str) -> Row:
        lost = last - first + 1
        target.records_lost += lost
        self._meter(target).records_lost += lost
        self._metrics.lost(target.registration.run, lost)
        log.warning("%d records lost: %s", lost, why, extra={"target": target.name, "first": first, "last": last})
        return gap_row(target, first, last, why, self._stamp())

    def _found(self, target: Target, first: int, last: int) -> Row:
        found = last - first + 1
        target.records_lost -= found
        self._meter(target).records_lost -= found
        log.info("%d records that were taken for lost arrived", found, extra={"target": target.name})
        return found_row(target, first, last, self._stamp())
