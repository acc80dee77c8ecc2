"""The way of a record into the service: rows into the batch, facts into the states of runs, stalls and incidents.

Runs on the event loop, once for each poll. Implements the `Sink` of the target loops.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.run_monitor import RunMonitor, attempt_key
from rankscope_ingest.detect.symptoms import firings, last_words, symptoms
from rankscope_ingest.record_channel.admission import PollBudget
from rankscope_ingest.record_channel.decode import decode_one
from rankscope_ingest.record_channel.plans import PlanColumns
from rankscope_ingest.record_channel.validate import ValidBody
from rankscope_ingest.recovery import orphan_runs
from rankscope_ingest.runs.target import Health, Target

log = logging.getLogger(__name__)


class RecordSink:
    """Adds records to what `monitor` knows."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor

    @property
    def poll_budget(self) -> PollBudget:
        """Return the limit on the bytes that all loops together may request."""
        return self._monitor.poll_budget

    def ordinals(self, count: int) -> int:
        """Return the first of `count` new arrival numbers."""
        return self._monitor.ordinals(count)

    @property
    def is_full(self) -> bool:
        """Return whether pulling has to wait for the store."""
        return self._monitor.batcher.is_full

    def on_answer(self, target: Target) -> None:
        """Note a usable answer; a rank that drains waits for a commit, so nothing is held back for it."""
        target.liveness.heard(self._monitor.clock())
        target.gone_at = None
        if not target.is_dead:
            self._monitor.runs.heard(attempt_key(target), target.registration.rank, target.incarnation)
        if target.health is Health.DRAINING and target.committed < target.cursor:
            self._monitor.batcher.want_flush()

    def on_failure(self, target: Target, error: FetchError) -> None:
        """Note a poll that brought nothing."""
        self._monitor.metrics.poll_failed(error.reason)
        if error.reason == "refused":
            target.liveness.refused(self._monitor.clock())
        log.info("poll failed: %s", error, extra={"target": target.name, "reason": error.reason})

    def on_drained(self, target: Target) -> None:
        """Note that a rank ends, or that the spool of a dead one does, with everything committed."""
        target.leave(self._monitor.clock())
        if not target.is_dead:
            self._monitor.runs.closed(attempt_key(target), target.registration.rank, target.incarnation)
            return
        orphan_runs.drained(self._monitor.runs, target, self._monitor.clock(), self._monitor.wall())
        for row in self._monitor.losses.of_drained(target):
            self._monitor.add_event(row)

    def on_replaced(self, target: Target, incarnation: str) -> None:
        """Note that another process answers at the target's address: this one cannot be there any more."""
        target.liveness.refused(self._monitor.clock())
        log.info("another process answers", extra={"target": target.name, "incarnation": incarnation})

    def on_body(
        self, target: Target, body: ValidBody, plans: Mapping[str, PlanColumns], *, size: int, inflated: int
    ) -> None:
        """Take the rows of one body into the batch, move the cursor, and note what the body says."""
        now = self._monitor.clock()
        tables = {}
        if gaps := self._monitor.losses.of_body(target, body):
            tables["events"] = rows_table("events", gaps)
        if (tensors := self._monitor.versions.of_tensors(target, plans)) is not None:
            tables["tensors"] = tensors
        events = decode_one(body, "events")
        first_causes, said = symptoms(events), last_words(events)
        self._monitor.stalls.heard(attempt_key(target), target.registration.rank, events, now)
        self._monitor.replicas.heard(decode_one(body, "hashes"), now)
        # From here on nothing may fail: rows that were taken must not be asked for again, nor the other way round.
        self._monitor.batcher.add_body(body, now)
        self._monitor.batcher.add(tables, now)
        target.cursor, target.last_ts = body.last, body.last_ts
        target.uncommitted.append((body.last, body.rows))
        self._monitor.poll_budget.learn(records=body.records, rows=body.rows, size=inflated)
        self._monitor.metrics.body_taken(body.records, size)
        self._monitor.metrics.fired(target.registration.run, target.registration.rank, firings(events))
        self._follow_run(target, body, now)
        for symptom in first_causes:
            if self._monitor.incidents.observe(symptom, now) is not None:
                self._monitor.poll_now(symptom.run, None)
        for reason, error, at in said:
            self._monitor.runs.exited(
                attempt_key(target), target.registration.rank, reason, error, at=at, incarnation=target.incarnation
            )
        if said:
            self._monitor.batcher.want_flush()

    def _follow_run(self, target: Target, body: ValidBody, now: float) -> None:
        key, rank = attempt_key(target), target.registration.rank
        self._monitor.runs.stepped(key, rank, body.last_step, now, target.incarnation)
        scalars = body.nested.get("scalars")
        self._monitor.meter(key).observe(rank, scalars and scalars.columns, body.last_ts, body.last_step)
