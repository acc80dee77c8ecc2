"""Add the rows of polled records to the batch, and update the state of the service from the records.

The records change run states, stalls, divergences and incidents. `RecordSink` runs on the event loop, once for each
poll. It implements the protocol `RecordReceiver` of the polling loops.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from rankscope_contract.wire.channel import NOTHING, STATE_RUNNING
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.incidents import exit_reports, firings, latest_events, symptoms
from rankscope_ingest.detect.run_monitor import RunMonitor
from rankscope_ingest.record_channel.bodies import PlanColumns, ValidBody
from rankscope_ingest.runs.models import Health, Target
from rankscope_ingest.spools.orphan_spools import drain_orphan
from rankscope_storage.base.service_catalogue import BYTES_INGESTED, RECORDS_INGESTED, SCRAPE_FAILURES

log = logging.getLogger(__name__)


class RecordSink:
    """Updates the state of the run monitor `monitor` with polled records and with the results of polls."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor
        self.poll_budget = monitor.poll_budget
        self.ordinals: Callable[[int], int] = monitor.ordinals

    def on_answer(self, target: Target) -> None:
        """Record a successful poll of a target.

        A rank is draining while its process waits, before it exits, until its last records are committed. If a draining
        rank has uncommitted records, request an early flush.
        """
        target.liveness.note_sign(self._monitor.clock())
        target.gone_at = None
        if not target.is_dead:
            self._monitor.runs.answered(target.attempt_key, target.registration.rank, target.incarnation)
        if target.health is Health.DRAINING and target.committed < target.cursor:
            self._monitor.batcher.want_flush()

    def on_failure(self, target: Target, error: FetchError) -> None:
        """Record and log a failed poll of a target. A process that reported its exit is gone, if all of it was read."""
        monitor, identity = self._monitor, (target.attempt_key, target.registration.rank, target.incarnation)
        has_all = NOTHING < target.head <= target.cursor and not target.is_dead
        if has_all and error.reason == "refused" and not monitor.runs.is_live(*identity):
            self.on_drained(target)  # its answer to the last poll was lost
            return
        monitor.metrics.count(SCRAPE_FAILURES, 1, error.reason)
        if error.reason == "refused":
            target.liveness.note_refusal(monitor.clock())
        log.info("poll failed: %s", error, extra={"target": target.name, "reason": error.reason})

    def on_drained(self, target: Target) -> None:
        """Stop polling a rank, or the spool of a dead process, because all of its records are read and committed.

        Record that the process has ended. Published records that the spool of a dead process does not contain are
        counted as lost.
        """
        now = self._monitor.clock()
        target.leave(now)
        if not target.is_dead:
            self._monitor.runs.closed(target.attempt_key, target.registration.rank, target.incarnation)
            return
        if target.registration.state == STATE_RUNNING:  # the records were copied while the process was running
            target.liveness.last_sign = math.inf
            return
        drain_orphan(self._monitor.runs, target, now, self._monitor.wall())
        for row in self._monitor.losses.of_unread(
            target, "the process died, and its spool does not contain these records"
        ):
            self._monitor.add_event(row)

    def on_replaced(self, target: Target, incarnation: str) -> None:
        """Record that another process responds at the address of `target`.

        The process of `target` can therefore no longer run at this address.
        """
        target.liveness.note_refusal(self._monitor.clock())
        log.info(
            "another process responds at the address of the target",
            extra={"target": target.name, "incarnation": incarnation},
        )

    def on_body(
        self, target: Target, body: ValidBody, plans: Mapping[str, PlanColumns], *, size: int, inflated: int
    ) -> None:
        """Add the rows of one poll response to the batch, and evaluate its events, tensor hashes and steps.

        The read position of the target advances to the last record of the response. `size` is the number of bytes
        received, `inflated` the number of bytes after decompression.
        """
        monitor = self._monitor
        now, key, rank = monitor.clock(), target.attempt_key, target.registration.rank
        tables = {}
        events, hashes = body.rows_of("events"), body.rows_of("hashes")
        if gaps := monitor.losses.of_body(target, body, events):
            tables["events"] = rows_table("events", gaps)
        if (tensors := monitor.versions.of_tensors(target, plans)) is not None:
            tables["tensors"] = tensors
        first_causes, exits = symptoms(events, is_past=target.is_dead), exit_reports(events)
        monitor.stalls.add(key, rank, events, now)
        monitor.replicas.add(hashes, now)
        monitor.stragglers.add(key, rank, body)
        # No exception may occur from here on: rows in the batch must not be polled again, and cursor and batch must
        # agree.
        monitor.batcher.add_body(body, now)
        monitor.batcher.add(tables, now)
        target.cursor, target.last_ts = body.last, body.last_ts
        target.uncommitted.append((body.last, body.rows))
        monitor.poll_budget.learn(records=body.records, rows=body.rows, size=inflated)
        monitor.metrics.count(RECORDS_INGESTED, body.records)
        monitor.metrics.count(BYTES_INGESTED, size)
        monitor.metrics.fired(key[0], rank, firings(events))
        monitor.metrics.ages.happened(key[0], latest_events([*events, *gaps]))
        monitor.runs.stepped(key, rank, body.last_step, now, target.incarnation)
        scalars = body.nested.get("scalars")
        monitor.tails.add(body)
        columns, steps = scalars and scalars.columns, None
        if scalars is not None:
            records = scalars.records
            steps = lambda position: body.columns["step"][int(records[position])].as_py()  # noqa: E731 - called here
        monitor.meter(key).observe(rank, columns, body.last_ts, body.last_step, steps)
        for symptom in first_causes:
            if monitor.incidents.observe(symptom, now) is not None:
                monitor.poll_now(symptom.run, None)
        for reason, error, at, step in exits:
            monitor.runs.exited(key, rank, reason, error, at=at, step=step, incarnation=target.incarnation)
        if exits:
            monitor.batcher.want_flush()
